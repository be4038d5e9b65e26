"""The tables of the Hopper backward's forms: their rows, their evidence, what they give away on timed shapes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from composattn.analysis.program import Program
from composattn.backends.fused.planning.facts import BANDS, MASKS, MODS, WORK, Facts
from composattn.backends.fused.planning.tables import Row, first, row_of, rows_of
from composattn.backends.fused.running.call import FusedCall
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.hopper.backward_choice import FINDERS, choose_backward, serves
from composattn.backends.hopper.backward_tiling import TABLES
from composattn.call.problem import Problem

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TILES, BLOCKS = TABLES["tiles"], TABLES["blocks"]
ROWS: list[Row] = [*TILES, *BLOCKS]
STEADY = 0.05  # times that spread by more are of calls that end before the host has issued the next
WIDTHS = (32, 64, 96, 128, 160, 192, 224, 256, 512)
VALUES: dict[str, list[Any]] = {
    "order": ["any", "fixed"], "layout": ["dense", "packed", "mixed"], "d": list(WIDTHS), "dv": list(WIDTHS),
    "sectors": [True, False], "mods": [*MODS], "mask": [*MASKS], "work": [*WORK],
    "seen": [*BANDS],
    "length": [*BANDS], "fills": [True, False], "thirds": [0.8, 0.9, 1.0, 1.1], "group": [1, 2, 4, 5, 6, 8],
    "ratio": [0, 1, 4, 8, 50], "key_tiles": [1, 2, 4, 8, 30],
    "pairs": [True, False], "seen_by_all": [True, False],
}  # fmt: skip


def some_class(generator: random.Random, row: Row | None = None) -> Facts | None:
    """Any, of the values that a row names, as far as registers say; None where these are at odds."""
    wanted = {} if row is None else row.pattern
    fields = {n: generator.choice([v for v in found if n not in wanted or wanted[n](v)]) for n, found in VALUES.items()}
    if "square" in wanted and wanted["square"](True):
        fields["dv"] = fields["d"]
    widest = max(fields["d"], fields["dv"])
    tall = 80 if fields["d"] == 128 else 64
    largest = generator.choice((64, 128) if widest > 128 or widest <= 64 else (64, tall))
    call = Facts(FINDERS, largest=largest, **fields)
    return call if row is None or any(rows_of([row], call)) else None


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_every_row_is_some_calls(number: int) -> None:
    generator, row = random.Random(number), ROWS[number]
    calls = (some_class(generator, row) for _ in range(20000))
    found = ((row_of(TILES, call), row_of(BLOCKS, call)) for call in calls if call is not None)
    assert any(row in rows for rows in found), f"others come before {row}"


def test_what_calls_get_can_cut_them() -> None:
    generator = random.Random(0)
    for _ in range(5000):
        call = some_class(generator)
        assert call is not None
        # dQ leaves in bulk in a fixed order whatever the form says
        assert call.order == "fixed" or serves(f"{first(TILES, call)}, {first(BLOCKS, call)}", call), str(call)


def test_evidence_is_of_results_that_are_here() -> None:
    named = {row.results for row in ROWS if row.shapes}
    assert named and all((RESULTS / name).is_file() for name in named)
    assert all(row.why for row in ROWS if not row.shapes)


def test_a_plan_says_its_class_and_whether_its_form_was_measured() -> None:
    problem = Problem(4, 64, 64, 2000, 2000, 64, 64, torch.bfloat16, torch.device("cpu"))
    words = choose_backward(problem, Program(), HOPPER, False).words
    assert "no mask, many rounds, a key is seen by up to 2,304 of up to 2,304 queries" in words
    assert "tiles: 128 queries; measured on 20 shapes" in words and "blocks: blocks stay; measured on" in words
    assert "no sweep timed it: single timings" in choose_backward(problem, Program(), HOPPER, True).words
    assert words in FusedCall(problem, Program(), 0.125, HOPPER).plan
