"""Large negative scores on a GPU: its assembler joins products and sums that the emulator rounds apart."""

from __future__ import annotations

import pytest
import torch

from tests.hostile_mods import hold_chosen
from tests.least_score import HIDING, hold
from tests.support import gpu_backend


@pytest.mark.parametrize("as_bias", [False, True], ids=["chosen", "added"])
@pytest.mark.parametrize("number", HIDING)
def test_large_negative_scores_hide(number: float, as_bias: bool, generator: torch.Generator) -> None:
    hold(gpu_backend(), number, as_bias, generator, "cuda")


def test_tables_read_where_the_score_says_get_their_gradients(generator: torch.Generator) -> None:
    hold_chosen(gpu_backend(), generator, torch.float16, "cuda")
