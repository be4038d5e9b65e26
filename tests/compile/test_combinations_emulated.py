"""Combinations on the emulated Hopper kernels: some cells of the page run again, all of them nightly."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from tests.combinations import Cell, cells, outcome

RECORD = Path(__file__).parents[2] / "docs" / "combinations.json"
BACKEND = "hopper-emulated"
SAMPLE = 3  # about 10 s each: a kernel or three are compiled for a cell


def recorded() -> dict[str, str]:
    return json.loads(RECORD.read_text()).get(BACKEND, {})


def held_to_the_page(cell: Cell) -> None:
    """Right or refused by name, as the page says where it says something."""
    said = outcome(cell, BACKEND)
    assert said == recorded().get(str(cell), said), cell


def test_sampled_cells_give_what_the_page_says() -> None:
    draw = random.Random(f"{os.environ['COMPOSATTN_TEST_SEED']}:combinations")
    for cell in draw.sample([cell for cell in cells() if cell.way == "forward"], SAMPLE):
        held_to_the_page(cell)


@pytest.mark.slow
def test_sampled_gradients_give_what_the_page_says() -> None:
    draw = random.Random(f"{os.environ['COMPOSATTN_TEST_SEED']}:gradients")
    for cell in draw.sample([cell for cell in cells() if cell.way != "forward"], SAMPLE):
        held_to_the_page(cell)


@pytest.mark.nightly
@pytest.mark.parametrize("cell", cells(), ids=str)
def test_every_cell_gives_what_the_page_says(cell: Cell) -> None:
    held_to_the_page(cell)
