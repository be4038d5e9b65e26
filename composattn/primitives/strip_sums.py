"""Gradients of keys by strips of an image: every other strip writes its own by bulk copies, the others add theirs.

A key is in two strips at most, which are neighbours: one that writes and one that adds, once it is said in device
memory that the neighbour has written. So nobody clears the gradients, and they have the same bits in any order: one sum
of two numbers of 16 bits. Tiles of strips that write come first (`fused/tiles/work.py`), else blocks would wait for
those that have not begun.

Keys of strips begin in front of the image, and copies to memory must not: one whose corner has a negative coordinate is
an illegal instruction on an H200. There, copies bring half of a row each, and of the first strip's first half what is
in the image.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from .cut_rows import CutRows, bulk_copy, partition
from .turns import publish_if, wait_for
from .values import Fixed, choose


class Copies(NamedTuple):
    """Bulk copies that write and that add."""

    write: Any
    add: Any


class SumCopies(NamedTuple):
    """`Copies` of whole tiles of strips and of half a row, and the one that writes what a strip alone has of a row."""

    large: Copies
    half: Copies
    alone: Any


class Shared(NamedTuple):
    """A gradient whose parts several strips have, as these copies see it.

    `written`: int32 (strips, heads, parts of `PART` keys), 1 where a strip that writes has; zero at the kernel's start.
    """

    large: Any
    half: Any
    alone: Any
    written: cute.Tensor


def copies_of_sums(
    image: Any, layout: Any, box: tuple[Any, int], before: int, written: cute.Tensor
) -> tuple[SumCopies, Shared]:
    """On the host, for an `image` as bulk copies see it. `box`: of a tile, whose `layout` is that of shared memory;
    `before`: columns of the first strip's keys in front of the image.
    """
    ops, (rows, width) = (cpasync.CopyBulkTensorTileS2GOp(), cpasync.CopyReduceBulkTensorTileS2GOp()), box
    half = rows[0] // 2  # columns of the image
    of_half = cute.make_composed_layout(layout.inner, 0, cute.composition(layout.outer, (half, width)))
    large = [bulk_copy(op, image, layout, box) for op in ops]
    halves = [bulk_copy(op, image, of_half, ((half, 1), width)) for op in ops]
    alone = None, None
    if before < half:
        of_alone = cute.make_composed_layout(layout.inner, 0, in_a_row(layout.outer, half - before))
        alone = bulk_copy(ops[0], image, of_alone, ((half - before, 1), width))
    copies = SumCopies(Copies(*(tma for tma, _ in large)), Copies(*(tma for tma, _ in halves)), alone[0])
    return copies, Shared(large[0][1], halves[0][1], alone[1], written)


def in_a_row(layout: cute.Layout, columns: int) -> cute.Layout:
    """So many rows of shared memory (keys, D), which lie one behind the other whatever the modes of their layout."""
    step = cute.crd2idx((1, 0), layout)
    return cute.make_layout((columns, layout.shape[1]), stride=(step, layout.stride[1]))


@dataclasses.dataclass
class SumTiles(Fixed):
    """The tiles of strip `strip`, of so many `rows` of the image.

    `half`: boxes of `apart` columns and one row, by column and row. `alone`: those of the columns that the first strip
    alone has, behind `before` that are in front of the image; None where it has none. `above`: rows in front of the
    image. `adds`: not 0 where this strip adds. `written`: int32 (strips, parts of a strip), of which this strip is the
    one at `at`.
    """

    large: Any
    half: Any
    alone: Any
    rows: int
    apart: int
    before: int
    above: int
    strip: Any
    adds: Any
    written: cute.Tensor
    at: Any

    def begin(self, mine: Any, number: Any) -> None:
        """Until this strip may write tile `number` or add to it, for the warp that is to."""
        _begin(mine, self, Int32(number))

    def start(self, mine: Any, tma: SumCopies, shared: cute.Tensor, number: Any) -> None:
        """Starts the copies of shared memory (keys, D) to tile `number`, where this warp is to."""
        _start_tile(mine, self, tma, shared, Int32(number))

    def end(self, mine: Any, number: Any) -> None:
        """Says that tile `number` is written, by the warp that started the copies, once they are done."""
        _end(mine, self, Int32(number))


@cute.jit
def _begin(mine: Boolean, tiles: cutlass.Constexpr, number: Int32):
    if mine:
        cute.arch.griddepcontrol_wait()  # for empty flags: keys that no query sees come here without a wait
        if tiles.adds != 0:
            # a neighbour for every other lane; the first strip has one, and the last one does not add
            before = (cute.arch.lane_idx() % 2 == 0) & (tiles.strip > 0)
            wait_for(tiles.written[tiles.at + choose(before, -1, 1), None].iterator + number, Int32(1))
            cute.arch.sync_warp()


@cute.jit
def _end(mine: Boolean, tiles: cutlass.Constexpr, number: Int32):
    if mine & (tiles.adds == 0):
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        cute.arch.sync_warp()
        publish_if(tiles.written[tiles.at, None].iterator + number, Int32(1), cute.arch.lane_idx() == 0)


@cute.jit
def _start_tile(mine: Boolean, tiles: cutlass.Constexpr, tma: cutlass.Constexpr, shared, number: Int32):
    if mine:
        row = number * tiles.rows
        if (row >= tiles.above) & (tiles.strip > 0):
            _start(tma.large, shared, tiles.large, (number,), tiles.adds)
        else:
            for i in cutlass.range(2 * tiles.rows, unroll=1):
                its = row + i // 2
                if its >= tiles.above:
                    part = cute.local_tile(shared, (tiles.apart, cute.size(shared, mode=[1])), (i, 0))
                    if (i % 2 == 1) | (tiles.strip > 0):
                        _start(tma.half, part, tiles.half, (i % 2, its), tiles.adds)
                    elif const_expr(tiles.alone is not None):
                        start = cute.domain_offset((tiles.before, 0), part).iterator
                        own = cute.make_tensor(start, in_a_row(part.layout, tiles.apart - tiles.before))
                        _start_one(tma.alone, own, tiles.alone, (0, its))
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _start(copies: cutlass.Constexpr, shared, tiles: cutlass.Constexpr, at: tuple, adds: Int32):
    if adds != 0:
        _start_one(copies.add, shared, tiles, at)
    else:
        _start_one(copies.write, shared, tiles, at)


def _start_one(tma: Any, shared: cute.Tensor, tiles: Any, at: tuple[Any, ...]) -> None:
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
