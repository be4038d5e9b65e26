"""Strips of an image's columns as sequences: their rows lie in memory in two steps, along a row of the image and below.

Bulk copies see the rows of a tensor as (columns, image rows), and bring boxes of some columns of some image rows, which
come to lie in shared memory as rows of a tile do. Keys of neighbouring strips overlap; those of the first and the last
one reach beyond the image, where copies find zeros. Of their gradients each strip has a part, in an entry of its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from .seqlen import DenseRows, PackedRows, PagedRows, WholeSequence
from .seqlen import rows_of as unstripped
from .values import Bundle


class StripRows(Bundle):
    """Rows of tensors (B, H, S, ...), positions of an image with so many `columns`: sequence b is a strip of an entry.

    Strips begin `apart` columns apart, the first one `before` the image, and `above` rows above it; each is `wide`
    columns wide.
    """

    parts = ("length",)

    def __init__(self, positions: Int32, columns: int, apart: int, wide: int, before: int = 0, above: int = 0) -> None:
        """On the host; `positions` of the image."""
        self.columns, self.apart, self.wide, self.before, self.above = columns, apart, wide, before, above
        self.length = (positions // columns + above) * wide

    @property
    def count(self) -> int:
        """Strips of an image, of which the last one may have columns beyond it."""
        return -(-self.columns // self.apart)

    def for_copies(self, tensor: cute.Tensor) -> cute.Tensor:
        """(B, H, S, D) as ((columns, image rows), D, H, B): what a bulk copy's descriptor is made from."""
        (batch, heads, length, columns), (entry, head, row, column) = tensor.shape, tensor.stride
        shape = ((self.columns, length // self.columns), columns, heads, batch)
        stride = ((row, row * self.columns), column, head, entry)
        return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))

    for_loads = for_copies
    for_parts = staticmethod(DenseRows.for_copies)  # (B * count, H, rows, D), which each strip has an entry of

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
        inside = row < self.length
        if self.of.columns % self.of.apart:
            inside = inside & (self.strip * self.of.apart - self.of.before + row % self.of.wide < self.of.columns)
        return inside

    def tiles(self, tensor: cute.Tensor, h: Int32, tile: tuple[int, int], column: Any = 0) -> cute.Tensor:
        """(rows, columns, number of the tile) of a tensor made by `for_copies`, or by `for_parts`."""
        if not isinstance(tensor.shape[0], tuple):
            entry = self.b * self.of.count + self.strip
            return cute.local_tile(tensor[None, None, h, entry], tile, (None, column))
        first = self.strip * self.of.apart - self.of.before
        rows = cute.domain_offset(((first, -self.of.above), 0), tensor[None, None, h, self.b])
        return cute.local_tile(rows, in_copies(self.of, *tile), ((0, None), column))

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
    queries = StripRows(Int32(q.shape[2]), strips.columns, strips.apart, strips.apart)
    return queries, StripRows(Int32(k.shape[2]), strips.columns, strips.apart, strips.wide, strips.before, strips.above)
