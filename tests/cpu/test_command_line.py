"""python -m composattn: what it prints, and that its refusals are messages instead of tracebacks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import composattn as ca
from composattn.__main__ import machine_words, main
from composattn.backends.fused.compiling import disk_cache, inspect
from tests.support import has_kernel_toolchain

ROOT = Path(__file__).parents[2]


def test_alone_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(command in said for command in ("explain", "compile", "doctor", "bench"))


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"composattn {ca.__version__}\n"


def test_cache_removes_what_was_not_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path))
    for name, place, days in (("a", tmp_path, 40), ("b", tmp_path, 2), ("c", tmp_path / "offline", 40)):
        place.mkdir(exist_ok=True)
        path = disk_cache.put(place, name * 32, ".so", name.encode() * 1000)
        os.utime(path, (time.time() - days * 86400,) * 2)
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["cache"]) == 0 and "3 kernels, 0.0 MB" in capsys.readouterr().out
    assert main(["cache", "--unused", "30"]) == 0 and "removed 2" in capsys.readouterr().out
    assert disk_cache.get(tmp_path, "a" * 32, ".so") is None
    used = disk_cache.get(tmp_path, "b" * 32, ".so")
    assert used is not None and time.time() - used.stat().st_mtime < 86400  # a use counts
    assert main(["cache", "--unused", "1"]) == 0 and "removed 0" in capsys.readouterr().out
    assert main(["cache", "--unused", "0"]) == 0 and "removed 1" in capsys.readouterr().out
    assert (tmp_path / "notes.txt").exists()
    with pytest.raises(SystemExit):
        main(["cache", "--unused", "soon"])


@pytest.mark.parametrize("command", ["explain", "compile", "tune", "cache", "doctor"])
def test_each_command_says_what_it_does_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert f"composattn {command} --" in said.partition("example: ")[2]
    if command in ("explain", "compile", "tune"):
        assert "default: 1,8,8,4096,4096,128" in said


def test_doctor_says_what_serves_and_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert f"composattn {ca.__version__}" in said
    assert "backend reference: yes" in said
    assert "backend streaming: yes" in said
    assert f"calls on {'cuda' if torch.cuda.is_available() else 'cpu'} that name no backend take " in said
    assert "backend blackwell: no: " in said and "can't serve" not in said


def test_explain_takes_ready_mods(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--shape", "1,4,2,512,512,64", "--device", "cpu"]
    assert main(["explain", "--mask", "causal() & sliding_window(64)", "--score", "softcap(30.0)", *shape]) == 0
    assert "FLOP" in capsys.readouterr().out


def test_explain_refuses_with_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "--mask", "softcap(30.0)", "--shape", "1,4,2,512,512,64", "--device", "cpu"]
    assert main(arguments) == 1
    assert "WrongComposition" in capsys.readouterr().err


SMALL = ["--shape", "1,4,2,512,512,64"]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["explain", "--mask", "foo"], "--mask 'foo' gives no mod: NameError: name 'foo' is not defined"),
        (["compile", "--mask", "1+"], "--mask '1+' gives no mod: SyntaxError"),
        (["explain", "--score", "softcap("], "--score 'softcap(' gives no mod: SyntaxError"),
        (["explain", "--score", "1/0"], "ZeroDivisionError"),
        (["explain", "--mask", "no_such_module:mask"], "No module named 'no_such_module'"),
        (["explain", "--mask", "math:mask"], "module 'math' has no attribute 'mask'"),
        (["explain", "--mask", "causal"], "WrongComposition"),
        (["explain", "--mask", "3"], "expected a callable"),
        (["explain", "--mask", "causal('x')"], "InvalidModArgument"),
        (["explain", "--shape", "1,4,2,-5,512,64"], "no tensors of --shape"),
        (["explain", "--shape", "1,4,2,99999999999,99999999999,64"], "no tensors of --shape"),
        (["explain", "--device", "nonsense"], "no tensors of --shape"),
        (["explain", "--device", "meta"], "BackendUnavailable: q lies on meta"),
        (["compile", "--dtype", "fp32"], "UnsupportedDType"),
        (["compile", "--target", "sm_103a", "--backend", "hopper"], 'takes kernels of backend="blackwell"'),
        (["compile", "--shape", "1,1,1,64,64,640"], "UnsupportedHeadDim"),
    ],
)
def test_bad_arguments_are_refused_by_name(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    command, *rest = arguments
    assert main([command, "--device", "cpu", *SMALL, *rest]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["a,b", "1,2", "1,4,2,512,512,64,64,64", "1,8,8,a,512,64", ""])
def test_a_shape_that_is_none_says_its_form(capsys: pytest.CaptureFixture[str], shape: str) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--shape", shape])
    assert "--shape: wanted the numbers B,Hq,Hkv,Sq,Skv,D" in capsys.readouterr().err


def test_a_reader_that_stops_reading_is_no_error() -> None:
    command = f"{sys.executable} -m composattn explain {' '.join(SMALL)} --device cpu | head -c 10"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("call      ", "")


def test_a_shape_of_the_wrong_length_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--shape", "1,4,512,64"])
    assert "wanted the numbers B,Hq,Hkv,Sq,Skv,D" in capsys.readouterr().err


def test_bench_lists_the_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--set", "core", "--list"]) == 0
    assert "forward D128 S16384 causal" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_of_another_gpus_kernels_wants_one_that_is_newer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--as", "sm_80", "--set", "core"]) == 2
    assert "BackendUnavailable: --as sm_80 times kernels, and there is no GPU here" in capsys.readouterr().err


@pytest.mark.skipif(not has_kernel_toolchain(), reason="nvidia-cutlass-dsl is not installed (extra: gpu)")
@pytest.mark.parametrize(
    ("arch", "copies", "never"), [("sm_80", "LDGSTS", "UTMALDG"), ("sm_120a", "UTMALDG", "LDGSTS")]
)
def test_compile_makes_kernels_for_gpus_that_people_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arch: str, copies: str, never: str
) -> None:
    arguments = ["compile", "--target", arch, "--shape", "1,2,2,256,256,64", "--out", str(tmp_path)]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert f"forward on warp ({arch})" in said and " HMMA, " in said and f" {copies}, " in said
    assert "0 of them spills" in said and never not in said


@pytest.mark.skipif(not has_kernel_toolchain(), reason="nvidia-cutlass-dsl is not installed (extra: gpu)")
def test_compile_prints_plan_and_resources(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["compile", "--mask", "causal()", "--shape", "1,2,2,256,256,64", "--out", str(tmp_path)]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "HGMMA" in said
    assert "0 of them spills" in said
    assert len(list(tmp_path.rglob("*.cubin"))) == 1


@pytest.mark.skipif(not has_kernel_toolchain(), reason="nvidia-cutlass-dsl is not installed (extra: gpu)")
def test_compile_says_what_it_does_not_know(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "_binary_tool", lambda name: None)
    arguments = ["compile", "--shape", "1,2,2,256,256,64", "--out", str(tmp_path)]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "registers unknown (pip install nvidia-cuda-cuobjdump)" in said
    assert "spills unknown (pip install nvidia-cuda-nvdisasm)" in said
    assert "None" not in said.partition("resources")[2]


def test_machine_code_that_was_not_read_has_unknown_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "_binary_tool", lambda name: None)
    made = inspect.Artifact(None, Path(), Path())  # type: ignore[arg-type]
    assert made.spills is None
    assert machine_words(made) == "instructions and spills unknown (pip install nvidia-cuda-nvdisasm)"
