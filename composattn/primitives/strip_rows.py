"""Strips of an image's columns as sequences: their rows lie in memory in two steps, along a row of the image and below.

Bulk copies see the rows of a tensor as (columns, image rows), and bring boxes of some columns of some image rows, which
come to lie in shared memory as rows of a tile do. Keys of neighbouring strips overlap; those of the first and the last
one reach beyond the image, where copies find zeros.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from ..analysis.strips import KEYS, QUERIES, Strips
from .seqlen import WholeSequence
from .values import Bundle


class StripRows(Bundle):
    """Rows of tensors (B, H, S, ...): sequence b is strip b % count of entry b // count.

    `wide`: so many columns; `before`: so many of them left of those that give the strip its number.
    """

    parts = ("length",)

    def __init__(self, strips: Strips, length: Int32, wide: int, before: int) -> None:
        """On the host; `length`: positions of the image."""
        self.strips, self.wide, self.before = strips, wide, before
        self.length = length // strips.columns * wide

    def for_copies(self, tensor: cute.Tensor) -> cute.Tensor:
        """(B, H, S, D) as ((columns, image rows), D, H, B): what a bulk copy's descriptor is made from."""
        (batch, heads, length, columns), (entry, head, row, column) = tensor.shape, tensor.stride
        wide = self.strips.columns
        shape = ((wide, length // wide), columns, heads, batch)
        stride = ((row, row * wide), column, head, entry)
        return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))

    for_loads = for_copies

    def sequence(self, b: Int32) -> StripSequence:
        return StripSequence(self, b // self.strips.count, b % self.strips.count, self.length)


@dataclasses.dataclass
class StripSequence(WholeSequence):
    """Strip `strip` of entry `b`, of `length` rows."""

    of: StripRows
    b: Int32
    strip: Int32
    length: Int32
    start: int = 0

    def tiles(self, tensor: cute.Tensor, h: Int32, tile: tuple[int, int], column: Any = 0) -> cute.Tensor:
        """As of a `DenseSequence`."""
        first = self.strip * QUERIES - self.of.before
        rows = cute.domain_offset(((first, 0), 0), tensor[None, None, h, self.b])
        return cute.local_tile(rows, in_copies(self.of, *tile), ((0, None), column))

    def stored(
        self, tensor: cute.Tensor, h: Int32, tile: tuple[int, int], number: Any, column: Any = 0
    ) -> tuple[cute.Tensor, Any]:
        """As of a `DenseSequence`."""
        return self.tiles(tensor, h, tile, column), number

    def head(self, tensor: cute.Tensor, h: Int32) -> cute.Tensor:
        """((columns, image rows),) of a plain tensor (B, H, S) of numbers for each query."""
        rows, columns = tensor[self.b, h, None], self.of.strips.columns
        (row,) = rows.stride
        shape, stride = ((self.of.wide, rows.shape[0] // columns),), ((row, row * columns),)
        strip = cute.make_tensor(rows.iterator, cute.make_layout(shape, stride=stride))
        return cute.domain_offset(((self.strip * QUERIES, 0),), strip)


def strip_rows(strips: Strips, q: cute.Tensor, k: cute.Tensor) -> tuple[StripRows, StripRows]:
    """Where the rows of queries and of keys lie, on the host."""
    queries = StripRows(strips, Int32(q.shape[2]), QUERIES, 0)
    return queries, StripRows(strips, Int32(k.shape[2]), KEYS, strips.before)


def in_copies(rows: Any, count: Any, columns: int) -> tuple[Any, int]:
    """The shape of so many `rows`, of any kind, and columns in what `for_copies` makes."""
    return ((rows.wide, count // rows.wide) if isinstance(rows, StripRows) else count), columns
