"""Every recipe runs as it stands; the training one with few steps here, whole in the slow tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("[0-9]*.py"))


def run(name: str, *arguments: str) -> str:
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


@pytest.mark.parametrize("name", RECIPES)
def test_runs(name: str) -> None:
    assert run(name).strip()


def test_training_agrees_with_the_reference() -> None:
    assert "largest relative difference" in run("train_byte_lm.py", "--steps", "6", "--bytes", "50000")


@pytest.mark.slow
def test_training_learns() -> None:
    run("train_byte_lm.py")
