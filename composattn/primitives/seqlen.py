"""Where the rows of a sequence lie: in an entry of its own of a dense tensor, or among others in a packed one.

Kernels ask `rows.sequence(b)` and get the same answers for both: `length`, `start` (rows before it in the tensor),
`tiles(...)` of a tensor that bulk copies reach, and `head(...)`, a head's rows of a plain tensor.

A bulk copy leaves out what is outside of its tensor: loads give zeros, stores are dropped. For a packed tensor that
must also hold at the end of each sequence, with no branch and one descriptor for all. So the copies see the tensor
(total, D, H) with two modes more: `entry`, at the rows' stride, and `back`, where only the last entry is used:

    row coordinate r in [0, FAR), entry e in [0, total], back FAR  ->  row r + e - FAR of the tensor

A sequence of `length` rows from `start` is entry start + length, seen from row coordinate FAR - length on: its row i is
row start + i of the tensor while i < length, and from there on outside. The stride of `back` is 2^34 bytes less a row:
FAR = 2^30 of them are 2^64, which is nothing to an address, less FAR rows. Moving the address in the descriptor back
instead needs a mode less, but then copies fault on an H200 where nothing is mapped there.

Pages of a cache are copied whole; what the last one holds beyond the sequence's end comes along, and whoever multiplies
it has to clear it first.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import cutlass.cute as cute
from cutlass import Int32, Int64

from .values import Bundle, Fixed, smaller

FAR = 1 << 30  # rows; a copy's coordinates have 31 bits


class DenseRows(Bundle):
    """Rows of tensors (B, H, S, ...): sequence b is entry b, and all are of one length."""

    parts = ("length",)

    def __init__(self, length: Int32) -> None:
        self.length = length

    @staticmethod
    def for_copies(tensor: cute.Tensor) -> cute.Tensor:
        """(B, H, S, D) as (S, D, H, B): what a bulk copy's descriptor is made from."""
        return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [2, 3, 1, 0]))

    for_loads = for_copies  # an entry ends where its tensor does

    @staticmethod
    def for_stores(tensor: cute.Tensor, box: int) -> cute.Tensor:
        """(B, H, S, D) as (box, D, H, B, S - box + 1), for stores of so many rows that may end with a segment.

        The last mode says at which row the others begin. A box with n rows before the segment's end begins at row
        box - n of those that end there, so that the copy leaves out what is behind it.
        """
        (batch, heads, length, columns), (entry, head, row, column) = tensor.shape, tensor.stride
        shape, stride = (box, columns, heads, batch, length - box + 1), (row, column, head, entry, row)
        return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))

    def sequence(self, b: Int32) -> DenseSequence:
        return DenseSequence(b, self.length)


class PackedRows(Bundle):
    """Rows of tensors (total, H, ...): sequence b is `starts[b]` up to the next start, or its first `used[b]` rows.

    `starts` is int32 (B + 1,), `used` int32 (B,) or None.
    """

    def __init__(self, starts: cute.Tensor, used: cute.Tensor | None = None) -> None:
        self.starts, self.used = starts, used
        self.parts = ("starts",) if used is None else ("starts", "used")

    @staticmethod
    def for_loads(tensor: cute.Tensor) -> cute.Tensor:
        """(total, H, D) as (total, D, H): for loads that may bring rows of the next sequence along."""
        return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [0, 2, 1]))

    @staticmethod
    def for_copies(tensor: cute.Tensor) -> cute.Tensor:
        """(total, H, D) as (FAR, D, H, total + 1, FAR + 1), see above: what a bulk copy's descriptor is made from."""
        (total, heads, columns), (row, head, column) = tensor.shape, tensor.stride
        back = Int64((1 << 64) // FAR // (tensor.element_type.width // 8)) - row
        shape = (FAR, columns, heads, total + 1, FAR + 1)
        return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=(row, column, head, row, back)))

    def sequence(self, b: Int32) -> PackedSequence:
        start = self.starts[b]
        return PackedSequence(start, self.starts[b + 1] - start if self.used is None else self.used[b])


class PagedRows(Bundle):
    """Rows of tensors (pages, H, page_size, ...): position i of sequence b is row i % page_size of page
    `table[b, i // page_size]`. `table` is int32 (B, pages of a sequence), `used` int32 (B,): rows of each sequence.
    """

    parts = ("table", "used")

    def __init__(self, table: cute.Tensor, used: cute.Tensor, page_size: int) -> None:
        self.table, self.used, self.page_size = table, used, page_size

    for_copies = staticmethod(DenseRows.for_copies)  # pages lie as entries do: (page_size, D, H, pages)

    def sequence(self, b: Int32) -> PagedSequence:
        return PagedSequence(self.table[b, None], self.used[b], self.page_size)


@dataclasses.dataclass
class DenseSequence(Fixed):
    """Entry `b` of dense tensors. `origin`: the row from which tiles are counted, see `counted_from`.

    `segment`: the part of the entry that is meant, with `start`, `stop` and a `number`; None: all.
    """

    b: Int32
    length: Int32
    start: int = 0
    origin: Int32 | int = 0
    segment: Any = None

    @property
    def end(self) -> Int32:
        """The row behind the last one."""
        return self.length if self.segment is None else self.segment.stop

    @property
    def rows(self) -> Int32:
        """How many rows are meant, from `origin` to the `end`."""
        return self.length if self.segment is None else self.segment.stop - self.segment.start

    def has(self, row: Any) -> Any:
        """Whether there is such a row, of those that are not before the first one."""
        return row < self.end

    def from_start(self, row: Any) -> Any:
        """The row that is the `row`-th of the tiles."""
        return row if isinstance(self.origin, int) and self.origin == 0 else self.origin + row

    def within(self, segment: Any) -> DenseSequence:
        """Its rows of a segment, from the first of which tiles are counted; None: all."""
        return self if segment is None else dataclasses.replace(self, origin=segment.start, segment=segment)

    def tiles(self, tensor: cute.Tensor, h: Int32, tile: tuple[int, int], column: Any = 0) -> cute.Tensor:
        """(rows, columns, number of the tile) of a tensor made by `for_copies` and a copy's descriptor.

        `column`: which of the tiles beside each other; None: all, as one mode more.
        """
        rows = tensor[None, None, h, self.b]
        if not (isinstance(self.origin, int) and self.origin == 0):
            rows = cute.domain_offset((self.origin, 0), rows)
        return cute.local_tile(rows, tile, (_along(tile, None), column))

    def stored(self, tensor: cute.Tensor, h: Int32, tile: tuple[int, int], number: Any, column: Any = 0) -> Stored:
        """The `number`-th of such `tiles`, and which one of those that are given with it."""
        if cute.rank(tensor) == 4:
            return self.tiles(tensor, h, tile, column), number
        box = tile[0]
        first = self.from_start(number * box)
        there = smaller(self.end - first, box)
        rows = cute.domain_offset((box - there, 0), tensor[None, None, h, self.b, first + there - box])
        return cute.local_tile(rows, tile, (None, column)), 0

    def head(self, tensor: cute.Tensor, h: Int32) -> cute.Tensor:
        """(S, ...) of a plain tensor (B, H, S, ...)."""
        of_head = (self.b, h, *(None,) * (cute.rank(tensor) - 2))
        return tensor[of_head]


class WholeSequence(Fixed):
    """One that has `length` rows and no segments."""

    length: Int32
    origin: ClassVar[int] = 0
    segment: ClassVar[None] = None

    @property
    def end(self) -> Int32:
        """The row behind the last one."""
        return self.length

    @property
    def rows(self) -> Int32:
        return self.length

    def has(self, row: Any) -> Any:
        """Whether there is such a row."""
        return row < self.end

    def from_start(self, row: Any) -> Any:
        return row

    def within(self, segment: Any) -> Any:
        return self


@dataclasses.dataclass
class PackedSequence(WholeSequence):
    """`length` rows from row `start` of packed tensors."""

    start: Int32
    length: Int32

    def stored(self, tensor: cute.Tensor, h: Int32, tile: tuple[int, int], number: Any, column: Any = 0) -> Stored:
        """The `number`-th of `tiles` of a tensor, and its number there, see `DenseSequence.stored`."""
        return self.tiles(tensor, h, tile, column), number

    def tiles(self, tensor: cute.Tensor, h: Int32, tile: tuple[int, int], column: Any = 0) -> cute.Tensor:
        """(rows, columns, number of the tile) of a tensor made by `for_copies` or `for_loads` and a descriptor.

        `column` as of a `DenseSequence`.
        """
        if cute.rank(tensor) == 3:
            rows, first = tensor[None, None, h], self.start
        else:
            rows, first = tensor[None, None, h, self.start + self.length, FAR], FAR - self.length
        return cute.local_tile(cute.domain_offset((_along(tile, first), 0), rows), tile, (_along(tile, None), column))

    def head(self, tensor: cute.Tensor, h: Int32) -> cute.Tensor:
        """(total - start, ...) of a plain tensor (H, total, ...)."""
        rest = (0,) * (cute.rank(tensor) - 2)
        of_head = (h, *(None,) * (cute.rank(tensor) - 1))
        return cute.domain_offset((self.start, *rest), tensor[of_head])


@dataclasses.dataclass
class PagedSequence(WholeSequence):
    """`length` rows in the pages of `table` (pages of a sequence,)."""

    table: cute.Tensor
    length: Int32
    page_size: int


def _along(tile, x):
    """Coordinate `x` along the rows of `tile`, which are heads and queries where heads are packed (`gqa_packing`)."""
    return (0, x) if isinstance(tile[0], tuple) else x


Stored = tuple[cute.Tensor, Any]
Rows = DenseRows | PackedRows | PagedRows
Sequence = DenseSequence | PackedSequence | PagedSequence


def most_rows(rows: Rows, tensor: cute.Tensor) -> Int32:
    """How many rows a head can have in `tensor`, as it was given: those of all sequences where they are packed."""
    if isinstance(rows, PagedRows):
        return cute.size(rows.table, mode=[1]) * rows.page_size
    return tensor.shape[0 if isinstance(rows, PackedRows) else 2]


def rows_of(layout: Any, q: cute.Tensor, k: cute.Tensor, sequences: Any) -> tuple[Rows, Rows]:
    """Where the rows of queries and of keys lie, on the host.

    `layout` is the problem's; `sequences` are the call's, None of a dense one.
    """
    if sequences is None:
        return DenseRows(Int32(q.shape[2])), DenseRows(Int32(k.shape[2]))
    cu_q, cu_k, used_q, used_k, page_table = sequences
    queries = DenseRows(Int32(q.shape[2])) if cu_q is None else PackedRows(cu_q, used_q)
    if page_table is not None:
        return queries, PagedRows(page_table, used_k, layout.page_size)
    keys = DenseRows(Int32(k.shape[2])) if cu_k is None else PackedRows(cu_k, used_k)
    return queries, keys
