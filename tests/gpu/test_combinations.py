"""Combinations on a GPU's generated kernels: some cells of docs/combinations.md in every run, all of them nightly."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from tests.combinations import Cell, cells, outcome
from tests.support import gpu_backend

RECORD = Path(__file__).parents[2] / "docs" / "combinations.json"
SAMPLE = 12


def held_to_the_page(cell: Cell) -> None:
    """Right or refused by name, as the page says where it says something."""
    said = outcome(cell, gpu_backend(), "cuda")
    assert said == json.loads(RECORD.read_text()).get(gpu_backend(), {}).get(str(cell), said), cell


def test_sampled_cells_give_what_the_page_says() -> None:
    for cell in random.Random(f"{os.environ['COMPOSATTN_TEST_SEED']}:combinations").sample(cells(), SAMPLE):
        held_to_the_page(cell)


@pytest.mark.nightly
@pytest.mark.parametrize("cell", cells(), ids=str)
def test_every_cell_gives_what_the_page_says(cell: Cell) -> None:
    held_to_the_page(cell)
