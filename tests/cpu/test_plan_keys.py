"""What a kernel is kept by: all that its plan says, but for fields that give the reason why they decide no code."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from composattn.analysis.program import Program
from composattn.analysis.strips import Strips
from composattn.backends.fused.planning.plan import Plan, TiledPlan
from composattn.backends.fused.tiles.scheduler import Scheduler
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.fused.tiles.tiling import Tiling
from composattn.call.problem import StripLayout
from composattn.graph.content import content
from composattn.graph.expr import Expr, index
from composattn.mods import causal
from composattn.mods.dropout import Dropout
from composattn.mods.score import Score
from composattn.mods.sink import Sink
from tests.compared import bare, planted, uncompared
from tests.plan_kinds import PLANS, forward


@pytest.mark.parametrize("name", PLANS)
def test_plans_that_differ_in_one_compared_field_alone_have_two_keys(name: str) -> None:
    for plan in PLANS[name]():
        changed = list(planted(plan))
        assert {path.partition(".")[0] for path, _, _ in changed} == {f.name for f in dataclasses.fields(plan)}
        assert [path for path, other, compared in changed if (other.key != plan.key) is not compared] == []


@pytest.mark.parametrize("name", PLANS)
def test_a_field_that_is_not_compared_says_why(name: str) -> None:
    found = [(kind.__name__, field.name) for plan in PLANS[name]() for kind, field in uncompared(plan)
             if not field.metadata.get("why")]  # fmt: skip
    assert found == []


def test_these_plans_are_of_every_kind_and_have_tilings_of_every_kind() -> None:
    plans = [plan for made in PLANS.values() for plan in made()]
    assert {type(plan) for plan in plans} == set(_kinds(Plan))
    assert {type(plan.tiling) for plan in plans if isinstance(plan, TiledPlan)} == set(_kinds(Tiling))
    for rare in ("strips", "metadata", "cut", "has_segments", "sinks"):
        assert any(getattr(plan, rare, None) for plan in plans), rare


def _kinds(base: type) -> Iterator[type]:
    """The classes that are such, of those that objects are made of."""
    made = [kind for kind in base.__subclasses__() if kind.__module__.startswith("composattn.")]
    yield from (kind for kind in made if not inspect.isabstract(kind) and kind is not TiledPlan)
    for kind in made:
        yield from _kinds(kind)


def test_what_was_told_apart_by_sentences_once_is_by_fields() -> None:
    (plan,) = forward(HOPPER)
    tiling = plan.tiling
    tilings = [dataclasses.replace(tiling, scheduler=scheduler) for scheduler in Scheduler]
    keys = {dataclasses.replace(plan, tiling=other).key for other in tilings}
    keys |= {dataclasses.replace(plan, has_segments=True).key}
    layouts = [StripLayout(of=strips) for strips in (Strips(64, 3), Strips(64, 3, beyond=True))]
    keys |= {dataclasses.replace(plan, layout=layout).key for layout in layouts}
    assert len(keys) == len(tilings) + 3


def test_a_plan_says_what_each_of_its_mods_computes() -> None:
    (plan,) = forward(HOPPER)
    table, kept = torch.zeros(4), Dropout.with_seed(0.1, 5)
    assert kept is not None
    score = Score.of(lambda s, b, h, q, kv: s + table[h]).expr
    programs = [
        Program(),
        Program(score),
        Program(None, causal().expr),
        Program(sink=Sink.of(table).expr),
        Program(keep=kept.expr),
        Program(score, sink=Sink.of(table).expr),
        Program(score, sink=Sink.of(torch.zeros(4)).expr),  # of two tensors, not of one
    ]
    assert len({dataclasses.replace(plan, program=program).key for program in programs}) == len(programs)
    again = Program(Score.of(lambda s, b, h, q, kv: s + table[h]).expr, sink=Sink.of(torch.ones(4)).expr)
    assert dataclasses.replace(plan, program=again).key == dataclasses.replace(plan, program=programs[-1]).key


# --- content ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pair:
    left: Any
    right: Any
    note: str = dataclasses.field(default="", compare=False, metadata={"why": "for people to read"})


def test_graphs_of_a_value_are_told_apart_together() -> None:
    def read(table: torch.Tensor) -> Expr:
        return Score.of(lambda s, b, h, q, kv: s + table[h]).expr

    one, two = torch.zeros(4), torch.zeros(4)
    assert content(Pair(read(one), read(two))) == content(Pair(read(two), read(one)))
    assert content(Pair(read(one), read(one))) != content(Pair(read(one), read(two)))
    assert content(Pair(index("q"), None)) != content(Pair(None, index("q")))


def test_what_has_no_content_is_refused() -> None:
    with pytest.raises(TypeError, match="object has no content"):
        content(Pair(1, object()))
    assert content(Pair(1, 2, "a")) == content(Pair(1, 2, "b"))


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (1, 1.0), (0.0, -0.0), ("1", 1), ((1,), 1), (((1,),), (1,)), (None, "None"), ((), None)],
)
def test_values_that_are_equal_or_look_alike_are_not_the_same(one: Any, other: Any) -> None:
    assert content(Pair(one, 0)) != content(Pair(other, 0))


def test_a_bare_plan_has_nothing_to_read_but_what_is_compared() -> None:
    (plan,) = forward(HOPPER)
    seen = bare(plan)
    assert seen.key == plan.key and seen.tiling.tile_m == plan.tiling.tile_m
    for read in (lambda: seen.order, lambda: seen.target.memory_rate, lambda: seen.layout.max_q_len):
        with pytest.raises(AssertionError, match="is read, which is not compared"):
            read()
