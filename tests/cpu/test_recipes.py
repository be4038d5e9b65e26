"""Every recipe runs as it stands; the training one with few steps here, whole in the slow tests."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("[0-9]*.py"))
ALONE = ("01_quickstart.py", "12_context_parallel.py")  # as users run it; starts processes itself


def run(name: str, *arguments: str) -> str:
    """What a recipe prints in a process of its own."""
    # One thread: the workers of the test run share the cores.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(ROOT / "recipes" / name), *arguments],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_they_are_found() -> None:
    assert RECIPES[0] == "01_quickstart.py"
    assert len(RECIPES) >= 7


# the second takes 15 s: three imports of torch, and what it shows tests/cpu/test_parallel.py shows too
@pytest.mark.parametrize("name", [ALONE[0], pytest.param(ALONE[1], marks=pytest.mark.slow)])
def test_runs_in_a_process_of_its_own(name: str) -> None:
    assert run(name).strip()


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ALONE])
def test_runs(name: str, one_thread: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, as its main module: an import of torch per recipe would be three seconds of CPU each."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        runpy.run_path(str(ROOT / "recipes" / name), run_name="__main__")
    except SystemExit as left:
        assert not left.code
    assert capsys.readouterr().out.strip()


def test_training_agrees_with_the_reference() -> None:
    assert "largest relative difference" in run("train_byte_lm.py", "--steps", "6", "--bytes", "50000")


@pytest.mark.slow
def test_training_learns() -> None:
    run("train_byte_lm.py")
