"""`doctor --full`: what it runs on a GPU, what it says where there is none, and what of the GPU tests it leaves out."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_report
from benchmarks.cases import select
from benchmarks.gpu_report import Check, steps
from benchmarks.run import parser as of_benchmarks
from composattn import doctor
from composattn.__main__ import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=[(10, 0), (8, 6)], ids=["blackwell", "warp"])
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """There seems to be such a GPU, and all that its kernels need; reports go aside."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.chdir(tmp_path)


def prints(text: str, status: int = 0) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import sys, os; print({text!r}, os.getcwd()); sys.exit({status})")


@pytest.mark.parametrize("status", [0, 1])
def test_all_that_is_said_is_kept_and_what_failed_is_named(
    gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, status: int
) -> None:
    tried = [Check("doctor.txt", prints("versions")), Check("tests.txt", prints("tested", status))]
    monkeypatch.setattr(gpu_report, "steps", lambda report, has_backward: tried)
    assert main(["doctor", "--full"]) == status
    said = capsys.readouterr().out
    (archive,) = tmp_path.glob("composattn-report-*.tar.gz")
    assert f"please send back {archive}" in said
    assert ("to look at: tests.txt" if status else "all passed") in said
    with tarfile.open(archive) as packed:
        texts = {Path(n).name: packed.extractfile(n).read() for n in packed.getnames() if n.endswith(".txt")}  # type: ignore[union-attr]
    summary = texts.pop("summary.txt").decode().splitlines()
    ended = "to look at" if status else "passed"
    assert [line.rpartition(",")[0] for line in summary] == ["doctor.txt: passed", f"tests.txt: {ended}"]
    assert texts == {"doctor.txt": f"versions {ROOT}\n".encode(), "tests.txt": f"tested {ROOT}\n".encode()}
    assert "--- 1 of 2, after 0 s: " in said and "--- 2 of 2, after " in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_with_no_gpu_it_says_what_it_would_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--full"]) == 2
    said = capsys.readouterr().out
    assert "no GPU here that kernels are generated for, so nothing was tried" in said
    assert "10.0 (B200)" in said and "pytest tests/gpu" in said and "benchmarks/run.py" in said
    assert list(tmp_path.iterdir()) == []


def test_an_installed_package_says_what_to_clone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    assert main(["doctor", "--full"]) == 2
    assert "live in the source tree, not in the installed package: clone composattn" in capsys.readouterr().out


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pytest" else SimpleNamespace())
    assert main(["doctor", "--full"]) == 2
    assert "not installed: pytest (extra: test); pip install -e '.[gpu,test]'" in capsys.readouterr().out


@pytest.mark.parametrize("learns", [True, False])
def test_the_benchmarks_that_it_runs_are_there_and_have_gradients_where_these_are(learns: bool) -> None:
    *_, speed = steps(Path("report"), learns)
    options = of_benchmarks().parse_args(list(speed.command[2:]))
    directions = {case.direction for case in select(options.sets, options.only)}
    assert directions == ({"forward", "backward"} if learns else {"forward"})
    assert options.out == Path("report/speed.json")


FAKED = """
import dataclasses, sys, torch
from composattn.backends.fused.tiles.architecture import ARCHITECTURES
ARCHITECTURES["blackwell"] = dataclasses.replace(ARCHITECTURES["blackwell"], max_gradient_dim=0)
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda device=None: (10, 0)
import pytest
sys.exit(pytest.main(["tests/gpu", "-n", "0", "-q", "-p", "no:cacheprovider", "-m", "", *sys.argv[1:]]))
"""


def test_the_tests_of_a_gpu_are_found_and_those_of_gradients_left_out_by_name_where_there_is_no_backward() -> None:
    picked = "test_backward or test_captured_gradient or random_gradients and Generated"
    command = [sys.executable, "-c", FAKED, "-k", picked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" not in done.stdout and "failed" not in done.stdout
    assert 'backend "blackwell" has no backward yet' in done.stdout
