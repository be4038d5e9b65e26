"""Dot products of rows in memory, and their largest numbers: neighbouring lanes share a row, 16 bytes of each load."""

from __future__ import annotations

from operator import add
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from .lanes import neighbours, over_lanes
from .values import Fixed, aligned, choose, larger, move, smaller

ELEMENTS = 8  # of a row, a thread and load: 16 bytes
INFINITY = 0x7F800000  # its bits


class RowLanes(Fixed):
    """The lanes of a row of so many columns, the last of which may have none; each loads `passes` times."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        chunks = -(-columns // ELEMENTS)
        self.lanes = min(32, 1 << (chunks - 1).bit_length())
        self.passes = -(-chunks // self.lanes)

    def share(self, a: cute.Tensor, b: cute.Tensor, row: Int32, inside: Any) -> Float32:
        """What this thread has of the product of a row of `a` and of `b`, each (rows, columns); 0 if not `inside`."""
        product = Float32(0.0)
        for column in self._columns():
            within = inside & (column < self.columns)
            first, second = [_elements(t, row, column, within) for t in (a, b)]
            part = Float32(0.0)
            for e in range(ELEMENTS):
                part = part + first[e].to(Float32) * second[e].to(Float32)
            product = product + choose(within, part, Float32(0.0))
        return product

    def whole(self, share: Float32) -> Float32:
        """The product, of which all its lanes have a share."""
        return over_lanes(add, share, neighbours(self.lanes))

    def largest(self, a: cute.Tensor, row: Int32, inside: Any) -> Int32:
        """`bits_of_size` of the largest number that this thread has of a row; 0 if not `inside`."""
        largest = Int32(0)
        for column in self._columns():
            within = inside & (column < self.columns)
            elements = _elements(a, row, column, within)
            for e in range(ELEMENTS):
                largest = larger(largest, choose(within, bits_of_size(elements[e].to(Float32)), Int32(0)))
        return largest

    def _columns(self) -> list[Any]:
        """Where this thread's elements begin."""
        member = cute.arch.thread_idx()[0] % self.lanes
        return [(chunk * self.lanes + member) * ELEMENTS for chunk in range(self.passes)]


def bits_of_size(x: Float32) -> Int32:
    """The bits of |x|, which are in the order of numbers; of NaN infinity's."""
    return smaller(x.bitcast(Int32) & 0x7FFFFFFF, INFINITY)


def _elements(tensor: cute.Tensor, row: Int32, column: Any, inside: Any) -> cute.Tensor:
    """One thread's elements of a row; any, where not `inside`."""
    # no branch, so that the loads of all rows are under way at once: what lies outside reads the first row
    row, column = choose(inside, row, 0), choose(inside, column, 0)
    registers = cute.make_rmem_tensor(ELEMENTS, tensor.element_type)
    move(cute.make_tensor(aligned(tensor[row, None].iterator + column), cute.make_layout(ELEMENTS)), registers)
    return registers
