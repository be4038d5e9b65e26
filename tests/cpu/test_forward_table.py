"""The table of the Hopper forward's forms: its rows, their evidence, what it gives away on shapes it was fitted to."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch

from benchmarks.candidates import class_of_case
from benchmarks.shapes import drawn
from benchmarks.sweep import of_forms
from composattn.analysis.program import Program
from composattn.backends.fused.planning.call_class import (
    BANDS,
    BEYOND,
    CallClass,
    LayoutKind,
    MaskKind,
    ModsKind,
    Order,
    Rounds,
)
from composattn.backends.fused.planning.tables import Pattern, Row, row_of
from composattn.backends.fused.running.call import FusedCall
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.hopper.forward_choice import forward_tiling, forward_words
from composattn.backends.hopper.forward_table import TABLE, ForwardForm, serves
from composattn.call.problem import Layout, Problem
from tests.evidence import check_evidence

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
WIDTHS = (32, 64, 96, 128, 160, 192, 224, 256, 512)


DOMAINS: dict[str, tuple[Any, ...]] = {
    "order": get_args(Order), "layout": get_args(LayoutKind), "sectors": (False, True), "mods": tuple(ModsKind),
    "mask": tuple(MaskKind), "packs": (False, True), "work": tuple(Rounds), "fills": (False, True),
    "square": (False, True),
    "length": (*BANDS, BEYOND), "seen": (*BANDS, BEYOND), "widest": WIDTHS,
}  # fmt: skip


def some_class(generator: random.Random, pattern: Pattern) -> CallClass:
    """Any that the pattern names; another row may come before."""
    assert pattern.keys() <= DOMAINS.keys()
    allowed = {name: [v for v in domain if v in pattern.get(name, domain)] for name, domain in DOMAINS.items()}
    call = {name: generator.choice(values) for name, values in allowed.items()}
    widest, square = call.pop("widest"), call.pop("square")
    call["seen"] = generator.choice([n for n in allowed["seen"] if n <= call["length"]] or [call["length"]])
    dv = widest if square else generator.choice([n for n in (*WIDTHS, 8) if n < widest])
    return CallClass(direction="forward", d=widest, dv=dv, **call)


@pytest.mark.parametrize("number", range(len(TABLE)))
def test_every_row_is_some_calls(number: int) -> None:
    generator, row = random.Random(number), TABLE[number]
    assert any(row_of(TABLE, some_class(generator, row.pattern)) is row for _ in range(3000)), (
        f"others come before {row}"
    )


def test_whatever_a_row_names_can_cut_all_calls_that_it_gets() -> None:
    generator = random.Random(0)
    for _ in range(5000):
        call = some_class(generator, {})
        assert serves(row_of(TABLE, call).says, call), call


def test_tiles_of_all_head_dimensions_have_64_keys_and_fit() -> None:
    for d, dv in itertools.product(range(32, 257, 32), repeat=2):
        for length in (200, 1000, 8192):
            problem = Problem(4, 64, 64, length, length, d, dv, torch.bfloat16, torch.device("cpu"))
            tiling = forward_tiling(problem, Program(), HOPPER)
            assert tiling.tile_n >= 64 and tiling.shared_memory(2) * getattr(tiling, "blocks", 1) <= 232448


def test_evidence_is_of_results_that_are_here() -> None:
    named = {row.evidence.results for row in TABLE if row.evidence.shapes}
    assert named and all((RESULTS / name).is_file() for name in named)
    assert all(row.evidence.why for row in TABLE if not row.evidence.shapes)


@functools.cache
def timed(part: Literal["fit", "held-out"] = "fit") -> dict[str, tuple[Row[ForwardForm], dict[str, float]]]:
    """For each shape the row of the table that serves it, and what each form took, in ms."""
    took = of_forms(json.loads((RESULTS / "sweeps" / f"h200-forward-{part}.json").read_text())["rows"])
    cases = [case for case in drawn("forward", part) if case.name in took]
    return {case.name: (row_of(TABLE, class_of_case(case)), took[case.name]) for case in cases}


@pytest.mark.parametrize(("part", "shapes"), [("fit", 200), ("held-out", 188)])
def test_what_the_table_takes_is_near_the_best_form_of_each_shape(
    part: Literal["fit", "held-out"], shapes: int
) -> None:
    regrets = [took[str(row.says)] / min(took.values()) - 1 for row, took in timed(part).values()]
    assert len(regrets) == shapes
    assert statistics.fmean(regrets) <= 0.005 and max(regrets) <= 0.10


def test_a_row_says_how_many_shapes_it_was_measured_on_and_its_gain() -> None:
    gains: dict[int, list[float]] = {}
    for row, took in timed().values():
        other = min(ms for form, ms in took.items() if form != str(row.says))
        gains.setdefault(TABLE.index(row), []).append(other / took[str(row.says)])
    for number, row in enumerate(TABLE):
        check_evidence(row, gains.get(number, []))


def test_a_plan_says_its_class_and_whether_its_form_was_measured() -> None:
    problem = Problem(4, 64, 64, 1000, 1000, 64, 64, torch.bfloat16, torch.device("cpu"))
    words = forward_words(problem, Program(), HOPPER)
    assert "no mask, many rounds, a row sees up to 1,152 of up to 1,152 keys" in words
    assert "form: large, guesses, stays; measured on 23 shapes" in words
    paged = dataclasses.replace(problem, layout=Layout(kv="paged", page_size=16, used_kv=True))
    assert "form: large; not measured: as it was" in forward_words(paged, Program(), HOPPER)
    assert words in FusedCall(problem, Program(), 0.125, HOPPER).plan
