"""Kernels that are no attention: units of sums before a backward, 8 bits made 16, and those of `ca.quantize`."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import torch

from .plan import Plan

MOST_THREADS = 512  # of a block
NUMBERS = 32  # of a row or several, in a thread's registers: all that it quantises, from the first look to the last
MOST_CHANNELS = 512  # a row's lanes are of one warp


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantisePlan(Plan):
    """Rows of q, k and v to `to`, 8 bits, by a scale of each "head", each "block" of `rows`, or each row, a "token".

    `finds_largest`: only the largest number of each head is found, which a second kernel reads. `hadamard`: q and k are
    rotated. `center`: a mean is taken from k. `power_of_two`: what scales are.
    """

    step = "quantise"
    head_dim_v: int
    head_dim: int
    to: torch.dtype
    scale: Literal["head", "block", "token"]
    rows: int  # of a block of threads
    hadamard: bool
    center: bool
    power_of_two: bool
    finds_largest: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block, which have `NUMBERS` each."""
        channels = max(RowLanes.of(d).channels for d in (self.head_dim, self.head_dim_v))
        return max(64, self.rows * channels // NUMBERS)

    @property
    def resident(self) -> int:
        """Blocks on an SM at once, whose loads hide each other's arithmetic: as many as registers allow."""
        return max(1, (1280 if self.finds_largest else 1024) // self.threads)


class RowLanes(NamedTuple):
    """The neighbouring lanes that have a row, `elements` side by side each; the last of them may have none."""

    lanes: int
    elements: int

    @property
    def channels(self) -> int:
        """Channels that they have room for."""
        return self.lanes * self.elements

    @staticmethod
    def of(head_dim: int) -> RowLanes:
        elements = 8 if head_dim % 16 else 16
        return RowLanes(1 << (-(-head_dim // elements) - 1).bit_length(), elements)


def rows_at_once(head_dim: int, head_dim_v: int) -> int:
    """The most rows, a power of two, that fit into the registers of a block; 0 where there is no kernel."""
    if head_dim % 8 or head_dim_v % 8 or max(head_dim, head_dim_v) > MOST_CHANNELS:
        return 0
    return MOST_THREADS * NUMBERS // max(RowLanes.of(d).channels for d in (head_dim, head_dim_v))


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitsPlan(Plan):
    """Units for so many `sums`, from all rows of dO and V; `used_q`, `used_kv`: of packed ones some may be unused."""

    step = "units"
    head_dim_v: int
    is_dense: bool
    used_q: bool
    used_kv: bool
    has_dlse: bool
    sums: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DequantisePlan(Plan):
    """Numbers of `of_keys` and of `of_values` to `dtype`, as they lie in memory that has no gaps.

    `rank`: of the tensors, whose sizes say how many there are.
    """

    step = "dequantise"
    of_keys: torch.dtype
    of_values: torch.dtype
    rank: int
