"""Combinations on the emulated kernels: some cells of the page run again, all of them nightly."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from tests.combinations import Cell, cells, outcome

RECORD = Path(__file__).parents[2] / "docs" / "combinations.json"
BACKENDS = ("hopper-emulated", "blackwell-emulated")
SAMPLE = 2  # other cells for each backend, 2 to 10 s each: a kernel or three are compiled for a cell


def recorded(backend: str) -> dict[str, str]:
    return json.loads(RECORD.read_text()).get(backend, {})


def held_to_the_page(cell: Cell, backend: str) -> None:
    """Right or refused by name, as the page says where it says something."""
    said = outcome(cell, backend)
    assert said == recorded(backend).get(str(cell), said), cell


@pytest.mark.parametrize("backend", BACKENDS)
def test_sampled_cells_give_what_the_page_says(backend: str) -> None:
    draw = random.Random(f"{os.environ['COMPOSATTN_TEST_SEED']}:combinations:{backend}")
    for cell in draw.sample([cell for cell in cells() if cell.way == "forward"], SAMPLE):
        held_to_the_page(cell, backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_sampled_gradients_give_what_the_page_says(backend: str) -> None:
    draw = random.Random(f"{os.environ['COMPOSATTN_TEST_SEED']}:gradients:{backend}")
    for cell in draw.sample([cell for cell in cells() if cell.way != "forward"], SAMPLE):
        held_to_the_page(cell, backend)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cell", cells(), ids=str)
def test_every_cell_gives_what_the_page_says(cell: Cell, backend: str) -> None:
    held_to_the_page(cell, backend)
