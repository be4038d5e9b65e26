"""The table of the Hopper forward's forms: its rows, their evidence, what it gives away on shapes it was fitted to."""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from composattn.analysis.program import Program
from composattn.backends.fused.planning.facts import BANDS, FORWARD, MASKS, MODS, WORK, Facts
from composattn.backends.fused.planning.tables import Pattern, row_of
from composattn.backends.fused.running.call import FusedCall
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.hopper.forward_choice import choose_forward, serves
from composattn.backends.hopper.tiling import TABLES
from composattn.call.problem import Layout, Problem

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TABLE = TABLES["forms"]
WIDTHS = (32, 64, 96, 128, 160, 192, 224, 256, 512)


DOMAINS: dict[str, tuple[Any, ...]] = {
    "order": ("any", "fixed", "batch-invariant"), "layout": ("dense", "packed", "paged", "mixed"),
    "sectors": (False, True), "mods": (*MODS,), "mask": (*MASKS,), "packs": (False, True), "work": (*WORK,),
    "head_dim": (64, 80, 96), "fills": (False, True),
    "square": (False, True), "thirds": (0.75, 1.0, 1.2, 1.5),
    "length": BANDS, "seen": BANDS, "widest": WIDTHS,
}  # fmt: skip


def some_class(generator: random.Random, pattern: Pattern) -> Facts:
    """Any that the pattern names; another row may come before."""
    assert pattern.keys() <= DOMAINS.keys()
    allowed = {name: [v for v in domain if name not in pattern or pattern[name](v)] for name, domain in DOMAINS.items()}
    call = {name: generator.choice(values) for name, values in allowed.items()}
    widest, square = call.pop("widest"), call.pop("square")
    call["seen"] = generator.choice([n for n in allowed["seen"] if n <= call["length"]] or [call["length"]])
    dv = widest if square else generator.choice([n for n in (*WIDTHS, 8) if n < widest])
    return Facts(FORWARD, d=widest, dv=dv, **call)


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
        assert serves(row_of(TABLE, call).says, call), str(call)


def test_tiles_of_all_head_dimensions_have_64_keys_and_fit() -> None:
    for d, dv in itertools.product(range(32, 257, 32), repeat=2):
        for length in (200, 1000, 8192):
            problem = Problem(4, 64, 64, length, length, d, dv, torch.bfloat16, torch.device("cpu"))
            tiling = choose_forward(problem, Program(), HOPPER).tiling
            assert tiling.tile_n >= 64 and tiling.shared_memory * getattr(tiling, "blocks", 1) <= 232448


def test_evidence_is_of_results_that_are_here() -> None:
    named = {row.results for row in TABLE if row.shapes}
    assert named and all((RESULTS / name).is_file() for name in named)
    assert all(row.why for row in TABLE if not row.shapes)


def test_a_plan_says_its_class_and_whether_its_form_was_measured() -> None:
    problem = Problem(4, 64, 64, 1000, 1000, 64, 64, torch.bfloat16, torch.device("cpu"))
    words = choose_forward(problem, Program(), HOPPER).words
    assert "no mask, many rounds, a row sees up to 1,152 of up to 1,152 keys" in words
    assert "form: large, guesses, stays; measured on 23 shapes" in words
    paged = dataclasses.replace(problem, layout=Layout(kv="paged", page_size=16, used_kv=True))
    assert "form: large; no sweep timed it: as it was" in choose_forward(paged, Program(), HOPPER).words
    assert words in FusedCall(problem, Program(), 0.125, HOPPER).plan
