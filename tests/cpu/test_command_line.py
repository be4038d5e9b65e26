"""python -m composattn: what it prints, and that its refusals are messages instead of tracebacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from composattn.__main__ import main
from tests.support import has_kernel_toolchain


def test_doctor_says_what_serves_and_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "backend reference: yes" in said
    assert "backend streaming: yes" in said
    assert "backend blackwell: no: backend 'blackwell' can't serve this call" in said


def test_explain_takes_ready_mods(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--shape", "1,4,2,512,512,64", "--device", "cpu"]
    assert main(["explain", "--mask", "causal() & sliding_window(64)", "--score", "softcap(30.0)", *shape]) == 0
    assert "FLOP" in capsys.readouterr().out


def test_explain_refuses_with_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "--mask", "softcap(30.0)", "--shape", "1,4,2,512,512,64", "--device", "cpu"]
    assert main(arguments) == 1
    assert "WrongComposition" in capsys.readouterr().err


def test_a_shape_of_the_wrong_length_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--shape", "1,4,512,64"])
    assert "wanted B,Hq,Hkv,Sq,Skv,D" in capsys.readouterr().err


def test_bench_lists_the_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--set", "core", "--list"]) == 0
    assert "forward D128 S16384 causal" in capsys.readouterr().out


@pytest.mark.skipif(not has_kernel_toolchain(), reason="nvidia-cutlass-dsl is not installed (extra: gpu)")
def test_compile_prints_plan_and_resources(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["compile", "--mask", "causal()", "--shape", "1,2,2,256,256,64", "--out", str(tmp_path)]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "HGMMA" in said
    assert "0 of them spills" in said
    assert len(list(tmp_path.rglob("*.cubin"))) == 1
