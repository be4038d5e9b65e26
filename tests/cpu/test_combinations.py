"""The page of combinations says what is true: some of its cells are run again here, all of them nightly."""

from __future__ import annotations

import os
import random
from types import ModuleType

import pytest
import torch

import composattn as ca
from tests import combinations
from tests.combinations import OK, Cell, cells, outcome
from tests.support import docs_script

BACKENDS = ("reference", "streaming")
SAMPLE = 12


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return docs_script("make_combinations")


def sample(backend: str) -> list[Cell]:
    return random.Random(f"{os.environ['COMPOSATTN_TEST_SEED']}:{backend}").sample(cells(), SAMPLE)


def test_the_page_is_made_of_what_is_recorded(maker: ModuleType) -> None:
    assert maker.PAGE.read_text() == maker.page(maker.recorded()), "run docs/make_combinations.py"


def test_every_cell_is_recorded_where_no_gpu_is_needed(maker: ModuleType) -> None:
    for backend in (*BACKENDS, "hopper-emulated", "blackwell-emulated"):
        assert set(maker.recorded()[backend]) == {str(cell) for cell in cells()}


def test_every_refusal_has_a_name(maker: ModuleType) -> None:
    for outcomes in maker.recorded().values():
        for said in set(outcomes.values()) - {OK}:
            name, message = said.split(": ", 1)
            assert issubclass(getattr(ca.errors, name), ca.ComposattnError) and len(message) > 30


@pytest.mark.parametrize("backend", BACKENDS)
def test_sampled_cells_give_what_the_page_says(maker: ModuleType, backend: str) -> None:
    outcomes = maker.recorded()[backend]
    for cell in sample(backend):
        assert outcome(cell, backend) == outcomes[str(cell)], cell


@pytest.mark.nightly
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_cells_give_what_the_page_says(maker: ModuleType, backend: str) -> None:
    outcomes = maker.recorded()[backend]
    for cell in cells():
        assert outcome(cell, backend) == outcomes[str(cell)], cell


def test_a_cell_that_is_wrong_is_no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(q: torch.Tensor, *tensors: torch.Tensor, **options: object) -> object:
        return ca.attention(1.01 * q, *tensors, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(combinations, "attention", wrong)
    with pytest.raises(AssertionError, match="is off"):
        outcome(Cell("none", "dense", "band", "MHA", "forward"), "streaming")


def test_a_cell_that_differs_between_two_runs_is_no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter(range(100))

    def unsteady(*tensors: torch.Tensor, **options: object) -> object:
        out, lse = ca.attention(*tensors, **options)  # type: ignore[misc]
        return out, lse + 1e-6 * next(runs)

    monkeypatch.setattr(combinations, "attention", unsteady)
    with pytest.raises(AssertionError, match="differ between two runs"):
        outcome(Cell("none", "dense", "band", "MHA", "deterministic"), "streaming")
