"""Divisions and remainders that decide what is visible, on a GPU: the bits of its division are no emulator's."""

from __future__ import annotations

import torch

from tests.compile.test_quotients_emulated import hold_blocks, hold_formulas
from tests.support import gpu_backend


def test_quotients_and_remainders_are_those_of_torch() -> None:
    hold_formulas(gpu_backend(), "cuda")


def test_blocks_by_true_division_are_those_of_integers(generator: torch.Generator) -> None:
    hold_blocks(gpu_backend(), generator, "cuda")
