"""Strips of an image's columns as sequences: their rows lie in memory in two steps, along a row of the image and below.

Bulk copies see the rows of a tensor as (columns, image rows). They bring boxes, some columns of some image rows each,
which come to lie in shared memory as rows of a tile do. Keys of neighbouring strips overlap; those of the first and the
last one reach beyond the image, where copies find zeros. Their gradients are sums of two (`strip_sums`).

A last row that is cut has a descriptor of its own, which ends where the row does; a tile begins with it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from .cut_rows import CutRows, TilesOfCut
from .seqlen import DenseRows, PackedRows, PagedRows, WholeSequence
from .seqlen import rows_of as unstripped
from .strip_sums import Shared, SumTiles
from .values import Bundle, aligned


class StripRows(Bundle):
    """Rows of tensors (B, H, S, ...), positions of an image with so many `columns`: sequence b is a strip of an entry.

    Strips begin `apart` columns apart, the first one `before` the image, and `above` rows above it; each is `wide`
    columns wide. `last`: where the last row is, if it is cut.
    """

    parts = ("length",)

    def __init__(self, strips: Any, rows: Any, wide: int, before: int = 0, above: int = 0, last: Any = None) -> None:
        """On the host: `strips` of an image (`analysis.strips`) with so many whole `rows`."""
        self.columns, self.apart, self.wide, self.before, self.above = strips.columns, strips.apart, wide, before, above
        self.cut, self.last, self.adds = strips.cut, last, strips.adds
        self.rows = above, last  # of a strip: the first one of the image, and the one that is cut
        more = above if last is None else last + 1 - strips.cut.at
        self.length = (rows + more) * wide  # no constant, by which the compiler would divide in a form it does not know

    @property
    def count(self) -> int:
        """Strips of an image, of which the last one may have columns beyond it."""
        return -(-self.columns // self.apart)

    def for_copies(self, tensor: cute.Tensor) -> Any:
        """(B, H, S, D) as ((columns, image rows), D, H, B): what a bulk copy's descriptor is made from."""
        (batch, heads, length, columns), (entry, head, row, column) = tensor.shape, tensor.stride
        stride = ((row, row * self.columns), column, head, entry)

        def image(start: Any, wide: Any, rows: Any) -> cute.Tensor:
            return cute.make_tensor(start, cute.make_layout(((wide, rows), columns, heads, batch), stride=stride))

        rows = length // self.columns
        whole = image(tensor.iterator, self.columns, rows)
        if self.cut is None:
            return whole
        start = aligned(tensor.iterator + rows * self.columns * row)
        return CutRows(whole, image(start, length - rows * self.columns, Int32(1)))

    for_loads = for_copies

    def sequence(self, b: Int32) -> StripSequence:
        return StripSequence(self, b // self.count, b % self.count, self.length)


@dataclasses.dataclass
class StripSequence(WholeSequence):
    """Strip `strip` of entry `b`, of `length` rows."""

    of: StripRows
    b: Int32
    strip: Int32
    length: Int32
    start: int = 0

    def has(self, row: Any) -> Any:
        """Whether there is such a row of the strip, in the image."""
        of, inside = self.of, row < self.length
        if of.columns % of.apart == 0 and of.cut is None:
            return inside
        column = self.strip * of.apart - of.before + row % of.wide
        if of.columns % of.apart:
            inside = inside & (column < of.columns)
        if of.cut is not None:
            is_last = (row >= of.last * of.wide) & (column < of.cut.columns)
            inside = inside & ((row < of.cut.at * of.wide) | is_last)
        return inside

    def tiles(self, tensor: Any, h: Int32, tile: tuple[int, int], column: Any = 0) -> Any:
        """(rows, columns, number of the tile) of a tensor made by `for_copies`, or the `SumTiles` of one that is
        `Shared`.
        """
        if not isinstance(tensor, Shared):
            return self._boxes(tensor, h, in_copies(self.of, *tile), (0, None), column)
        of, each = self.of, (None, None)
        large = self.tiles(tensor.large, h, tile, column)
        half = self._boxes(tensor.half, h, ((of.apart, 1), tile[1]), each, column)
        alone = None
        if tensor.alone is not None:
            alone = self._boxes(tensor.alone, h, ((of.apart - of.before, 1), tile[1]), each, column, of.before)
        written, at = tensor.written[None, h, None], self.b * of.count + self.strip
        where = tile[0] // of.wide, of.apart, of.before, of.above, self.strip, of.adds(self.strip)
        return SumTiles(large, half, alone, *where, written, at)

    def _boxes(
        self, tensor: Any, h: Int32, box: tuple[Any, int], which: tuple[Any, Any], column: Any, behind: int = 0
    ) -> Any:
        """Boxes of the image from the strip's first row on, and from its first column but `behind`, `which` of them. A
        last row that is cut is its tensor's only one, and has the number there that it has in the strip.
        """
        which = which, column
        if isinstance(tensor, CutRows):
            whole, last = (
                self._box(t, h, (behind, row), box, which) for t, row in zip(tensor, self.of.rows, strict=True)
            )
            return TilesOfCut(whole, last, self.of.last // box[0][1])
        return self._box(tensor, h, (behind, self.of.above), box, which)

    def _box(self, tensor: cute.Tensor, h: Int32, at: tuple[int, int], box: tuple[Any, int], which: Any) -> cute.Tensor:
        """`at`: which column of the strip the first box has first, and which row of the strip is the tensor's first."""
        first = self.strip * self.of.apart - self.of.before + at[0], -at[1]
        return cute.local_tile(cute.domain_offset((first, 0), tensor[None, None, h, self.b]), box, which)

    def stored(
        self, tensor: cute.Tensor, h: Int32, tile: tuple[int, int], number: Any, column: Any = 0
    ) -> tuple[cute.Tensor, Any]:
        """The `number`-th of `tiles` of a tensor, and its number there, see `DenseSequence.stored`."""
        return self.tiles(tensor, h, tile, column), number

    def head(self, tensor: cute.Tensor, h: Int32) -> cute.Tensor:
        """((columns, image rows), ...) of a plain tensor (B, H, S, ...) of what each query has."""
        beside = (None,) * (cute.rank(tensor) - 3)
        index, columns = (self.b, h, None, *beside), self.of.columns
        rows = tensor[index]
        (row, *strides), (length, *sizes) = rows.stride, rows.shape
        shape, stride = ((self.of.wide, length // columns), *sizes), ((row, row * columns), *strides)
        if self.of.cut is not None:  # the row behind all that are before the last one, by a step of its own
            in_rows = (row * columns, row * columns * self.of.cut.at)
            shape, stride = ((self.of.wide, (self.of.last, 2)), *sizes), ((row, in_rows), *strides)
        strip = cute.make_tensor(rows.iterator, cute.make_layout(shape, stride=stride))
        return cute.domain_offset(((self.strip * self.of.apart, 0), *(0 for _ in beside)), strip)


def in_copies(rows: Any, count: Any, columns: int) -> tuple[Any, int]:
    """The shape of so many `rows`, of any kind, and columns in what `for_copies` makes."""
    return ((rows.wide, count // rows.wide) if isinstance(rows, StripRows) else count), columns


Rows = DenseRows | PackedRows | PagedRows | StripRows


def rows_of(layout: Any, q: cute.Tensor, k: cute.Tensor, sequences: Any) -> tuple[Any, Any]:
    """Where the rows of queries and of keys lie, on the host, as `seqlen.rows_of` says, or in strips of an image."""
    strips = layout.strips
    if strips is None:
        return unstripped(layout, q, k, sequences)
    q_rows, kv_rows = [Int32(t.shape[2]) // strips.columns for t in (q, k)]
    q_last, kv_last = (None, None) if strips.cut is None else (strips.cut.q_row, strips.cut.kv_row)
    queries = StripRows(strips, q_rows, strips.apart, last=q_last)
    return queries, StripRows(strips, kv_rows, strips.wide, strips.before, strips.above, kv_last)
