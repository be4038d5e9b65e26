"""Plans of drawn calls before and after a change: the same calls in every run, and what differs is told."""

from __future__ import annotations

import collections

import pytest

from benchmarks.cases import Direction
from benchmarks.plan_changes import Said, compared, drawn, of_drawn
from benchmarks.shapes import COUNTS, SEEDS, SHORT
from benchmarks.shapes import drawn as shapes


def test_drawn_calls_are_the_same_in_every_run_and_reach_all_kinds() -> None:
    found, again = of_drawn(300, 1), of_drawn(300, 1)
    assert found == again
    kinds = collections.Counter((call.direction, call.target, call.problem.layout.q) for call in drawn(300, 1))
    assert len(kinds) == 16 and min(kinds.values()) > 1
    assert sum(bool(said["words"]) for said in found.values()) > 0.8 * len(found)


def test_a_plan_that_differs_is_told_with_its_class(capsys: pytest.CaptureFixture[str]) -> None:
    before: dict[str, Said] = {"a": {"plan": ["1", "2"], "words": ["of a class"]}, "b": {"plan": ["3"], "words": []}}
    now = {**before, "a": {"plan": ["1", "4"], "words": ["of a class"]}}
    assert compared(before, now, 1) == 1 and compared(before, before, 1) == 0
    said = capsys.readouterr().out
    assert "    1 of a class" in said and "- 2\n        + 4" in said


@pytest.mark.parametrize("direction", COUNTS)
def test_no_shape_is_in_two_parts_of_a_sweep(direction: Direction) -> None:
    parts = [{case.name for case in shapes(direction, part)} for part in SEEDS]
    few = {"short": SHORT, **{part: len(shapes(direction, part)) for part in ("near", "named")}}
    counts = [few.get(part, COUNTS[direction]) for part in SEEDS]
    assert [len(part) for part in parts] == counts
    assert len(set.union(*parts)) == sum(counts)
