"""Gradients of keys by strips of an image, added to those of the image by bulk copies.

A key is in two strips at most. What each has of its gradient has 16 bits, and is added to memory that was cleared: one
sum of two numbers, the same bits in any order. Keys of strips begin in front of the image, and copies to memory must
not: one whose corner has a negative coordinate is an illegal instruction on an H200. There, copies bring a few columns
of one row each, of which those outside of the image are left out.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from .cut_rows import CutRows, bulk_copy, partition
from .values import Fixed


class Added(NamedTuple):
    """Copies that add tiles of strips to a tensor, or the tensor as they see it: of whole tiles, and of few columns."""

    large: Any
    small: Any


def copies_that_add(image: Any, layout: Any, box: tuple[Any, int], side: int) -> tuple[Added, Added]:
    """On the host, for an `image` as bulk copies see it. `box`: of a tile, whose `layout` is that of shared memory;
    `side`: columns of the image in small ones.
    """
    op, width = cpasync.CopyReduceBulkTensorTileS2GOp(), box[1]
    few = cute.make_composed_layout(layout.inner, 0, cute.composition(layout.outer, (side, width)))
    large, small = bulk_copy(op, image, layout, box), bulk_copy(op, image, few, ((side, 1), width))
    return Added(large[0], small[0]), Added(large[1], small[1])


@dataclasses.dataclass
class SumTiles(Fixed):
    """The tiles of a strip, of so many `rows` of `wide` columns of the image, the first of which is `column`.

    `small`: boxes of `side` columns and one row, by column and row. `above`: rows in front of the image. `last`: the
    strip's row that is cut; None: none is.
    """

    large: Any
    small: Any
    rows: int
    wide: int
    side: int
    column: Any
    above: int
    last: int | None

    def add(self, mine: Any, tma: Added, shared: cute.Tensor, number: Any) -> None:
        """Starts the copies of shared memory (keys, D) to tile `number`, where this warp is to."""
        _add(mine, self, tma, shared, Int32(number))


@cute.jit
def _add(mine: Boolean, tiles: cutlass.Constexpr, tma: cutlass.Constexpr, shared, number: Int32):
    if mine:
        cute.arch.griddepcontrol_wait()  # for empty memory: keys that no query sees come here without a wait
        row = number * tiles.rows
        if (row >= tiles.above) & (tiles.column >= 0):
            _start(tma.large, shared, tiles.large, (number,), row == (-1 if tiles.last is None else tiles.last))
        else:
            across = tiles.wide // tiles.side
            for i in cutlass.range(tiles.rows * across, unroll=1):
                its, there = row + i // across, i % across
                if (its >= tiles.above) & (tiles.column + there * tiles.side >= 0):
                    part = cute.local_tile(shared, (tiles.side, cute.size(shared, mode=[1])), (i, 0))
                    is_last = its == (-1 if tiles.last is None else tiles.last)
                    _start(tma.small, part, tiles.small, (there, its), is_last)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _start(tma: cutlass.Constexpr, shared, tiles: cutlass.Constexpr, at: tuple, is_last: Boolean):
    """The copy to one box."""
    place = (None, *at)
    if const_expr(isinstance(tma, CutRows)):
        if is_last:
            source, target = partition(tma.last, shared, tiles.last)
            cute.copy(tma.last, source, target[place])
        else:
            source, target = partition(tma.whole, shared, tiles.whole)
            cute.copy(tma.whole, source, target[place])
    else:
        source, target = partition(tma, shared, tiles)
        cute.copy(tma, source, target[place])
