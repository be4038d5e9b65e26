"""Tiles of rows to shared memory by the threads that compute with them: 16 bytes a thread and instruction (cp.async).

Each thread copies 16 bytes of rows that lie anywhere, so no descriptor says where: a sequence does, row by row. A row
that does not exist, and columns beyond a row's end, come as zeros. What a thread started it waits for by groups of such
copies, in the order in which they were started; what others started is there behind a barrier after their wait.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import cutlass.cute as cute
from cutlass import Int32

from .gqa_packing import HeadRows
from .seqlen import DenseSequence, PackedSequence, PagedSequence, Sequence
from .swizzled_tiles import at_column, swizzled
from .values import Fixed, choose, smaller

BYTES = 16  # of a copy
NUMBERS = BYTES // 2


class RowSource(Protocol):
    """Where rows of a tile lie in memory."""

    def row(self, r: Any) -> tuple[cute.Pointer, Any]:
        """The first number of the tile's row `r`, and whether there is such a row."""


@dataclasses.dataclass
class KeySource(Fixed):
    """Rows of key/value head `h` from position `first` on; `tensor` is plain, see `seqlen`."""

    keys: DenseSequence | PackedSequence
    tensor: cute.Tensor
    h: Int32
    first: Int32

    def __post_init__(self) -> None:
        self.head = self.keys.head(self.tensor, self.h)

    def row(self, r: Any) -> tuple[cute.Pointer, Any]:
        position = self.first + r
        return self.head[position, None].iterator, self.keys.has(position)


@dataclasses.dataclass
class PageSource(Fixed):
    """Rows from position `first` on that lie in pages of `tensor` (pages, heads, page size, columns)."""

    keys: PagedSequence
    tensor: cute.Tensor
    h: Int32
    first: Int32

    def row(self, r: Any) -> tuple[cute.Pointer, Any]:
        position, size = self.first + r, self.keys.page_size
        there = self.keys.has(position)
        page = smaller(position // size, cute.size(self.keys.table) - 1)
        number = choose(there, self.keys.table[page], 0)  # what stands behind a sequence's pages may be anything
        return self.tensor[number, self.h, position % size, None].iterator, there


def key_source(keys: Sequence, tensor: cute.Tensor, h: Int32, first: Int32) -> KeySource | PageSource:
    """Rows of K or V of key/value head `h` from position `first` on."""
    return (PageSource if isinstance(keys, PagedSequence) else KeySource)(keys, tensor, h, first)  # type: ignore[arg-type]


@dataclasses.dataclass
class QuerySource(Fixed):
    """Packed rows (see `gqa_packing`) from `first` on of the heads that share them, the `h`-th such."""

    queries: Any
    tensor: cute.Tensor
    heads: HeadRows
    h: Int32
    first: Int32

    def row(self, r: Any) -> tuple[cute.Pointer, Any]:
        q, slot = self.heads.place(self.first + r)
        there = self.queries.has(q)
        if self.heads.heads < self.heads.slots:
            there = there & (slot < self.heads.heads)
            slot = smaller(slot, self.heads.heads - 1)
        head = self.h * self.heads.heads + slot
        return self.queries.head(self.tensor, head)[q, None].iterator, there


@dataclasses.dataclass
class RowCopies(Fixed):
    """Copies of tiles of `rows` by `columns` numbers of 16 bits, by `threads` threads, into `swizzled_tiles`.

    `there`: how many columns a row has in memory.
    """

    thread: Any
    threads: int
    rows: int
    columns: int
    there: int

    def start(self, source: RowSource, address: Any) -> None:
        """Starts this thread's part of a tile whose shared memory begins at `address`, a multiple of 1,024."""
        wide = swizzled(self.columns)
        across = wide // NUMBERS
        down = self.threads // across
        assert self.rows % down == 0, f"{self.threads} threads copy {down} rows at once, of {self.rows}"
        column = self.thread % across * NUMBERS
        first = self.thread // across
        # all of a thread's rows are swizzled alike, as they are whole patterns of 1,024 bytes apart
        target = address + at_column(first, column, self.rows, self.columns)
        for i in range(self.rows // down):
            start, exists = source.row(first + i * down)
            for block in range(self.columns // wide):
                inside = exists
                if (block + 1) * wide > self.there:
                    inside = inside & (column + block * wide < self.there)
                place = target + (i * down + block * self.rows) * (wide * 2)
                copy_line(place, start + (column + block * wide), choose(inside, BYTES, 0))


def copy_line(target: Any, source: cute.Pointer, size: Any) -> None:
    """16 bytes, of which so many are read, and the others zeros."""
    cute.arch.inline_ptx(
        f"cp.async.cg.shared.global [{{$r0}}], [{{$r1}}], {BYTES}, {{$r2}};",
        read_only_args=[Int32(target), source, Int32(size)],
    )
