"""Where the rows of a sequence lie: in an entry of its own of a dense tensor, or among others in a packed one.

Kernels ask `rows.sequence(b)` and get the same answers for both: `length`, `start` (rows before it in the tensor),
`tiles(...)` of a tensor that bulk copies reach, and `head(...)`, a head's rows of a plain tensor.

A bulk copy leaves out what is outside of its tensor: loads give zeros, stores are dropped. For a packed tensor that
must also hold at the end of each sequence, with no branch and one descriptor for all. So the copies see the tensor
(total, D, H) with one mode more, of total + 1 entries at the rows' stride, from an address moved back by `total` rows:

    row coordinate r in [0, total), entry e in [0, total]  ->  row r + e - total of the tensor

A sequence of `length` rows from `start` is entry start + length, seen from row coordinate total - length on: its row i
is row start + i of the tensor while i < length, and from there on outside. No coordinate reaches what lies before the
tensor unless one says so: rows of a negative i are never asked for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from .values import Bundle, Fixed


class DenseRows(Bundle):
    """Rows of tensors (B, H, S, ...): sequence b is entry b, and all are of one length."""

    parts = ("length",)

    def __init__(self, length: Int32) -> None:
        self.length = length

    @staticmethod
    def for_copies(tensor: cute.Tensor) -> cute.Tensor:
        """(B, H, S, D) as (S, D, H, B): what a bulk copy's descriptor is made from."""
        return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [2, 3, 1, 0]))

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
    def for_copies(tensor: cute.Tensor) -> cute.Tensor:
        """(total, H, D) as (total, D, H, total + 1), see above: what a bulk copy's descriptor is made from."""
        (total, heads, columns), (row, head, column) = tensor.shape, tensor.stride
        dtype = tensor.element_type
        address = tensor.iterator.toint() - Int64(total) * row * (dtype.width // 8)
        moved = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
        layout = cute.make_layout((total, columns, heads, total + 1), stride=(row, column, head, row))
        return cute.make_tensor(moved, layout)

    def sequence(self, b: Int32) -> PackedSequence:
        start = self.starts[b]
        return PackedSequence(start, self.starts[b + 1] - start if self.used is None else self.used[b])


@dataclasses.dataclass
class DenseSequence(Fixed):
    """Entry `b` of dense tensors."""

    b: Int32
    length: Int32
    start: int = 0

    def tiles(self, tensor: cute.Tensor, h: Int32, tile: tuple[int, int]) -> cute.Tensor:
        """(rows, columns, number of the tile) of a tensor made by `for_copies` and a copy's descriptor."""
        return cute.local_tile(tensor[None, None, h, self.b], tile, (None, 0))

    def head(self, tensor: cute.Tensor, h: Int32) -> cute.Tensor:
        """(S, ...) of a plain tensor (B, H, S, ...)."""
        return tensor[(self.b, h, *(None,) * (cute.rank(tensor) - 2))]


@dataclasses.dataclass
class PackedSequence(Fixed):
    """`length` rows from row `start` of packed tensors."""

    start: Int32
    length: Int32

    def tiles(self, tensor: cute.Tensor, h: Int32, tile: tuple[int, int]) -> cute.Tensor:
        """(rows, columns, number of the tile) of a tensor made by `for_copies` and a copy's descriptor."""
        rows = tensor[None, None, h, self.start + self.length]
        first = cute.size(tensor, mode=[0]) - self.length
        return cute.local_tile(cute.domain_offset((first, 0), rows), tile, (None, 0))

    def head(self, tensor: cute.Tensor, h: Int32) -> cute.Tensor:
        """(total - start, ...) of a plain tensor (H, total, ...)."""
        rest = (0,) * (cute.rank(tensor) - 2)
        return cute.domain_offset((self.start, *rest), tensor[(h, *(None,) * (cute.rank(tensor) - 1))])


Rows = DenseRows | PackedRows
Sequence = DenseSequence | PackedSequence


def rows_of(layout: Any, q: cute.Tensor, k: cute.Tensor, sequences: Any) -> tuple[Rows, Rows]:
    """Where the rows of queries and of keys lie, on the host.

    `layout` is the problem's; `sequences` are those of cu_q, cu_k, used_q, used_k that it has, in this order.
    """
    given = iter(sequences or ())
    cu_q = next(given) if layout.q == "packed" else None
    cu_k = next(given) if layout.kv == "packed" else None
    used_q = next(given) if layout.used_q else None
    used_k = next(given) if layout.used_kv else None
    queries = DenseRows(Int32(q.shape[2])) if cu_q is None else PackedRows(cu_q, used_q)
    keys = DenseRows(Int32(k.shape[2])) if cu_k is None else PackedRows(cu_k, used_k)
    return queries, keys
