"""The kernel before a forward of many rows: keys and values of 8 bits made 16-bit numbers in memory."""

from __future__ import annotations

import dataclasses

import torch

from .plan import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class DequantisePlan(Plan):
    """Numbers of `of_keys` and of `of_values` to `dtype`, as they lie in memory that has no gaps.

    `rank`: of the tensors, whose sizes say how many there are.
    """

    step = "dequantise"
    of_keys: torch.dtype
    of_values: torch.dtype
    rank: int
