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
from cutlass import Boolean, Int32
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

    `small`: boxes of `side` columns and one row, by column and row. `above`: rows in front of the image.
    """

    large: Any
    small: Any
    rows: int
    wide: int
    side: int
    column: Any
    above: int

    def add(self, mine: Any, tma: Added, shared: cute.Tensor, number: Any) -> None:
        """Starts the copies of shared memory (keys, D) to tile `number`, where this warp is to."""
        _add(mine, self, tma, shared, Int32(number))


@cute.jit
def _add(mine: Boolean, tiles: cutlass.Constexpr, tma: cutlass.Constexpr, shared, number: Int32):
    if mine:
        cute.arch.griddepcontrol_wait()  # for empty memory: keys that no query sees come here without a wait
        row = number * tiles.rows
        if (row >= tiles.above) & (tiles.column >= 0):
            _start(tma.large, shared, tiles.large, (number,))
        else:
            across = tiles.wide // tiles.side
            for i in cutlass.range(tiles.rows * across, unroll=1):
                its, there = row + i // across, i % across
                if (its >= tiles.above) & (tiles.column + there * tiles.side >= 0):
                    part = cute.local_tile(shared, (tiles.side, cute.size(shared, mode=[1])), (i, 0))
                    _start(tma.small, part, tiles.small, (there, its))
        cute.arch.cp_async_bulk_commit_group()


def _start(tma: Any, shared: cute.Tensor, tiles: Any, at: tuple[Any, ...]) -> None:
    """The copy to one box; its last number tells whether it is in a last row that is cut."""
    source, target = partition(tma, shared, tiles)
    if isinstance(tma, CutRows):
        _start_cut(tma, source, target, at)
    else:
        place = (None, *at)  # of its own: in brackets Python 3.10 has no star
        cute.copy(tma, source, target[place])


@cute.jit
def _start_cut(tma: cutlass.Constexpr, source, tiles: cutlass.Constexpr, at: tuple):
    place = (None, *at)
    if at[-1] == tiles.at:
        cute.copy(tma.last, source, tiles.last[place])
    else:
        cute.copy(tma.whole, source, tiles.whole[place])
