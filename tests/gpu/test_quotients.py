"""Divisions and remainders that decide what is visible, on a GPU: the bits of its division are no emulator's."""

from __future__ import annotations

import pytest
import torch

from tests.quotients import (
    hold_blocks,
    hold_blocks_by_negative_numbers,
    hold_formulas,
    hold_whole_quotients,
    hold_windows_of_heads,
)
from tests.support import gpu_backend


def test_quotients_and_remainders_are_those_of_torch() -> None:
    hold_formulas(gpu_backend(), "cuda")


def test_blocks_by_true_division_are_those_of_integers(generator: torch.Generator) -> None:
    hold_blocks(gpu_backend(), generator, "cuda")


def test_blocks_by_negative_numbers_begin_behind_multiples_of_them() -> None:
    hold_blocks_by_negative_numbers(gpu_backend(), "cuda")


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_quotients_of_whole_numbers_below_0_are_rounded_down(d: int, generator: torch.Generator) -> None:
    hold_whole_quotients(gpu_backend(), d, "cuda")
    hold_windows_of_heads(gpu_backend(), d, generator, "cuda")
