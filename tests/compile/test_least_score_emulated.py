"""Large negative scores in kernels, and tables read at a place that the score decides, in the emulator."""

from __future__ import annotations

import pytest
import torch

from tests.hostile_mods import hold_chosen
from tests.least_score import hold

pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

BACKENDS = ["hopper-emulated", "blackwell-emulated"]


@pytest.mark.parametrize("number", [pytest.param(-1e9, marks=pytest.mark.slow), torch.finfo(torch.float32).min])
@pytest.mark.parametrize("backend", BACKENDS)
def test_large_negative_scores_hide(backend: str, number: float, generator: torch.Generator) -> None:
    hold(backend, number, False, generator)


def test_added_ones_too_beside_a_sink(generator: torch.Generator) -> None:
    hold("hopper-emulated", -1e9, True, generator, sinks=torch.full((2,), -torch.inf))


@pytest.mark.parametrize("backend", BACKENDS)
def test_tables_read_where_the_score_says_get_their_gradients(backend: str, generator: torch.Generator) -> None:
    hold_chosen(backend, generator, torch.float16)
