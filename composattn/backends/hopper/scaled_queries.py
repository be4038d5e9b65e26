"""Queries of bf16 as fp16, each row times a power of two of its own, for products with keys that were 8-bit numbers.

Two numbers of e4m3 are made fp16 by one instruction, and bf16 by four, of the units that few queries wait for. The
largest number of a row is brought to 2^14 or more, below 2^15: those down to 2^-31 of it stay as they are, and others
lose less than 2^-39 of it, far below what fp32 sums of the product do. Scores are divided by the power again, exactly.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float16, Float32, Int32
from cutlass.cute import math as cm

from ...primitives.arithmetic import tree
from ...primitives.lanes import over_lanes
from ...primitives.remembered import Remembered
from ...primitives.swizzled_tiles import at_column, get_words, put_words
from ...primitives.values import larger, narrow, smaller
from ..fused.planning.plan import ForwardPlan
from .part_products import PartProducts
from .tiling import ByteTiling
from .wgmma import ROWS

PIECE = 8  # numbers that a lane reads at a time
SHARING = 4  # lanes that have a row, as in a product's sums
TOP = 127 + 14  # the exponent of a row's largest number, as fp32 has it


class ScaledProducts(PartProducts):
    """`PartProducts` whose first left operand is made fp16 where it lies.

    Scores of a row are its `scales` times the sums: the softmax's factor, or where mods see scores a product.
    """

    def __init__(self, plan: ForwardPlan[ByteTiling], block: Any, number: Any, rows: int, seen: bool) -> None:
        super().__init__(plan, block, number)
        self.tiling, self.meeting = plan.tiling, block.of_groups[number]
        self.scales = cute.make_rmem_tensor(rows, Float32)
        self.scales.fill(1.0)  # of rows with no keys, which nobody scales
        self.row_scales = None if seen else self.scales

    def get_queries(self, resident: cute.Tensor | None, slot: Any, thread: Any) -> None:
        start = self.stage_of_queries(slot).iterator.toint()
        for r in range(cute.size(self.scales)):
            self.scales[r] = self._scaled(start, thread // 32 * 16 + thread % 32 // SHARING + 8 * r, thread % SHARING)
        cute.arch.fence_view_async_shared()  # products read what these wrote
        self.meeting.meet()
        super().get_queries(resident, slot, thread)

    def _scaled(self, start: Int32, row: Any, lane: Any) -> Float32:
        """A row to fp16, in place; gives what its scores are multiplied by."""
        pieces = self.tiling.d // PIECE
        places = []
        for first in range(0, pieces, SHARING):
            piece = smaller(first + lane, pieces - 1)  # some lanes have the last one together
            places.append(start + at_column(row, piece * PIECE, ROWS, self.tiling.d))
        numbers = [numbers_of(get_words(place)) for place in places]
        factor, scale = power_of([x for piece in numbers for x in piece], (1, 2))
        cute.arch.sync_warp()
        for place, piece in zip(places, numbers, strict=True):
            put_words(place, in_fp16(piece, factor))
        return scale

    def remembered(self, sums: cute.Tensor) -> Remembered:
        scores = super().remembered(sums)
        return times_scales(scores, self.scales, cute.size(sums)) if self.row_scales is None else scores


def times_scales(scores: Remembered, scales: cute.Tensor, count: int) -> Remembered:
    """Scores, of `count` registers, times their rows' scales, in place."""
    for r in range(cute.size(scales)):
        for c in range(count // 2):
            scores[r, c] = scores[r, c] * scales[r]
    return scores


def power_of(numbers: list[Float32], lanes: tuple[int, ...]) -> tuple[Float32, Float32]:
    """What a row with these numbers, and those of the other `lanes`, is multiplied by, and what takes that back."""
    largest = over_lanes(cute.arch.fmax, tree(cute.arch.fmax, [cm.abs(x) for x in numbers]), lanes)
    exponent = larger(largest.bitcast(Int32) >> 23, TOP - 126)  # neither power is below the least normal number
    return (TOP + 127 - exponent << 23).bitcast(Float32), (exponent - (TOP - 127) << 23).bitcast(Float32)


def in_fp16(numbers: list[Float32], factor: Float32) -> cute.Tensor:
    """Eight numbers times `factor`, in four words."""
    wide, rounded = (cute.make_rmem_tensor(PIECE, kind) for kind in (Float32, Float16))
    for i, number in enumerate(numbers):
        wide[i] = number * factor
    narrow(rounded, wide)
    return cute.recast_tensor(rounded, Int32)


def numbers_of(words: cute.Tensor) -> list[Float32]:
    """Eight numbers of bf16 in four words, as fp32."""
    halves = [half for i in range(4) for half in (words[i] << 16, words[i] & -(1 << 16))]
    return [half.bitcast(Float32) for half in halves]
