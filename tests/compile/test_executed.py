"""Most of what a call on another architecture executes is code that both share, counted line by line."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")

from tests.executed import CALLS, PACKAGE, by_room, executed_by, shared
from tests.rooms import ROOT


def share_of(*names: str) -> float:
    """The executed share of these calls for Blackwell, in a process that has seen no other."""
    command = [sys.executable, "-m", "tests.executed", "blackwell", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = re.search(r"([\d.]+)% of them shared", done.stdout)
    assert found is not None, done.stdout + done.stderr
    return float(found.group(1)) / 100


@pytest.mark.parametrize("call", ["plain", pytest.param("packed_documents", marks=pytest.mark.slow)])
def test_four_fifths_of_the_lines_that_a_call_executes_are_shared(call: str) -> None:
    assert share_of(call) >= 0.8


@pytest.mark.slow
def test_four_fifths_of_the_lines_that_calls_of_every_layout_execute_are_shared() -> None:
    assert share_of(*CALLS) >= 0.8


def test_lines_are_those_of_functions_that_ran_by_room() -> None:
    from composattn.call import schedule

    lines = executed_by(lambda: schedule.Schedule(split_kv=2))
    assert by_room(lines) == {"call": len(lines)}
    assert {name for name, _ in lines} == {schedule.__file__}
    assert len(lines) < 20, "bodies of modules and classes are not counted"
    own = {(f"{PACKAGE}/backends/blackwell/tiling.py", n) for n in range(len(lines))}
    assert shared(lines | own) == 0.5
