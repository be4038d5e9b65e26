"""Where kv tiles come from: rows that lie together, one copy per tile, or pages of a cache, one copy per page.

A producer asks `source.locate(tile)` early, before it waits for room, and then starts the copies of K and later of V
`at` what it got: for pages that is their numbers, which have to come from memory first.

Page numbers of what lies beyond a sequence's end are never used, and the table is never read outside of its row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from .cut_rows import load, partition
from .seqlen import DenseSequence, PackedSequence, PagedRows, PagedSequence, Rows
from .values import Bundle, Fixed, choose, smaller


class Pages(Bundle):
    """A kv tile and the page numbers of it, the i-th in lane i."""

    parts = ("tile", "number")

    def __init__(self, tile: Int32, number: Int32) -> None:
        self.tile, self.number = tile, number


def kv_source(keys: DenseSequence | PackedSequence | PagedSequence, h: Int32, tile_n: int) -> DenseKV | PagedKV:
    """K and V of key/value head `h`, in tiles of `tile_n` rows."""
    return PagedKV(keys, h, tile_n) if isinstance(keys, PagedSequence) else DenseKV(keys, h, tile_n)


@dataclasses.dataclass
class DenseKV(Fixed):
    """Rows that lie together."""

    keys: DenseSequence | PackedSequence
    h: Int32
    tile_n: int

    def locate(self, tile: Int32) -> Int32:
        return Int32(tile)

    def part(self, tma, tensor, shared, columns: int) -> WholeTiles:
        """K or V: tiles of `columns` columns on their way into the stages of `shared`."""
        target, source = partition(tma, shared, self.keys.tiles(tensor, self.h, (self.tile_n, columns)))
        return WholeTiles(tma, source, target)

    def boxes(self, tma, tensor, shared, box: tuple[int, int]) -> BoxesOfTiles:
        """K or V: boxes of some rows and columns of a tile on their way into the stages of `shared`."""
        target, source = partition(tma, shared, self.keys.tiles(tensor, self.h, box, None))
        return BoxesOfTiles(tma, source, target, self.tile_n // box[0])


@dataclasses.dataclass
class WholeTiles(Fixed):
    tma: Any
    source: Any
    target: cute.Tensor

    def start(self, at: Int32, stage: Int32, bar: cute.Pointer) -> None:
        """Starts the copy of a tile into a stage; it completes on `bar`."""
        load(self.tma, self.source, at, self.target, bar, stage)


@dataclasses.dataclass
class BoxesOfTiles(Fixed):
    tma: cute.CopyAtom
    source: cute.Tensor
    target: cute.Tensor
    down: int  # boxes below each other in a tile

    def start(self, at: Int32, row: Any, column: Any, stage: Int32, bar: cute.Pointer) -> None:
        """Starts the copy of a tile's box (row, column) into a stage; it completes on `bar`."""
        cute.copy(self.tma, self.source[None, at * self.down + row, column], self.target[None, stage], tma_bar_ptr=bar)


@dataclasses.dataclass
class PagedKV(Fixed):
    """Rows in pages: a tile has several pages, or a page several tiles."""

    keys: PagedSequence
    h: Int32
    tile_n: int

    def locate(self, tile: Int32) -> Pages:
        """The whole warp: reads the numbers of the tile's pages."""
        keys = self.keys
        page = self.first_page(tile) + cute.arch.lane_idx()
        inside = smaller(page, cute.size(keys.table) - 1)
        return Pages(Int32(tile), choose(page * keys.page_size < keys.length, keys.table[inside], 0))

    def first_page(self, tile: Int32) -> Int32:
        size = self.keys.page_size
        return tile * (self.tile_n // size) if size <= self.tile_n else tile // (size // self.tile_n)

    def first_row(self, tile: Int32) -> Any:
        """The tile's first row within its first page."""
        size = self.keys.page_size
        return 0 if size <= self.tile_n else tile % (size // self.tile_n) * self.tile_n

    def part(self, tma, tensor, shared, columns: int) -> PagedTiles:
        """K or V: tiles of `columns` columns on their way into the stages of `shared`."""
        return PagedTiles(self.boxes(tma, tensor, shared, (self.tile_n, columns)))

    def boxes(self, tma, tensor, shared, box: tuple[int, int]) -> PagedBoxes:
        """K or V: boxes of some rows and columns of a tile on their way into the stages of `shared`."""
        return PagedBoxes(self, tma, tensor[None, None, self.h, None], shared, box)


@dataclasses.dataclass
class PagedBoxes(Fixed):
    pages: PagedKV
    tma: cute.CopyAtom
    source: cute.Tensor
    target: cute.Tensor
    box: tuple[int, int]

    def start(self, at: Pages, row: Any, column: Any, stage: Int32, bar: cute.Pointer) -> None:
        """The whole warp: starts the copies of a tile's box (row, column) into a stage; they complete on `bar`."""
        size, (rows, columns) = self.pages.keys.page_size, self.box
        one = (min(size, rows), columns)
        first_row = self.pages.first_row(at.tile)
        for i in range(rows // one[0]):
            before = row * rows + i * one[0]  # rows of the tile, which begins in the first of its pages
            lane, inside = (before // size, before % size) if size < self.pages.tile_n else (0, before)
            number = cute.arch.shuffle_sync(at.number, lane)
            page = cute.domain_offset((first_row + inside, 0), self.source[None, None, number])
            room = cute.local_tile(self.target[None, None, stage], one, (i, 0))
            target, source = partition(self.tma, room, cute.local_tile(page, one, (0, column)))
            cute.copy(self.tma, source, target, tma_bar_ptr=bar)


@dataclasses.dataclass
class PagedTiles(Fixed):
    whole: PagedBoxes

    def start(self, at: Pages, stage: Int32, bar: cute.Pointer) -> None:
        """The whole warp: starts the copies of a tile into a stage; they complete on `bar`."""
        self.whole.start(at, 0, 0, stage, bar)


def copied_rows(rows: Rows, tile_n: int) -> int:
    """How many rows of a tile one copy brings."""
    return min(rows.page_size, tile_n) if isinstance(rows, PagedRows) else tile_n
