"""Dot products of rows in memory: neighbouring lanes share a row, 16 bytes of each load."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from .lanes import add, neighbours, over_lanes
from .values import Fixed, aligned, choose, move

ELEMENTS = 8  # of a row, a thread and load: 16 bytes


class RowLanes(Fixed):
    """The lanes of a row of so many columns, the last of which may have none; each loads `passes` times."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        chunks = -(-columns // ELEMENTS)
        self.lanes = min(32, 1 << (chunks - 1).bit_length())
        self.passes = -(-chunks // self.lanes)

    def share(self, a: cute.Tensor, b: cute.Tensor, row: Int32, inside: Any) -> Float32:
        """What this thread has of the product of a row of `a` and of `b`, each (rows, columns); 0 if not `inside`."""
        member = cute.arch.thread_idx()[0] % self.lanes
        product = Float32(0.0)
        for chunk in range(self.passes):
            column = (chunk * self.lanes + member) * ELEMENTS
            product = product + _of_elements(a, b, row, column, inside & (column < self.columns))
        return product

    def whole(self, share: Float32) -> Float32:
        """The product, of which all its lanes have a share."""
        return over_lanes(add, share, neighbours(self.lanes))


def _of_elements(a: cute.Tensor, b: cute.Tensor, row: Int32, column: Int32, inside: Any) -> Float32:
    """Products of one thread's elements of a row, summed; 0 where not `inside`."""
    # no branch, so that the loads of all rows are under way at once: what lies outside reads the first row
    row, column = choose(inside, row, 0), choose(inside, column, 0)
    parts = []
    for tensor in (a, b):
        start = aligned(tensor[row, None].iterator + column)
        registers = cute.make_rmem_tensor(ELEMENTS, tensor.element_type)
        move(cute.make_tensor(start, cute.make_layout(ELEMENTS)), registers)
        parts.append(registers)
    product = Float32(0.0)
    for e in range(ELEMENTS):
        product = product + parts[0][e].to(Float32) * parts[1][e].to(Float32)
    return choose(inside, product, Float32(0.0))


__all__ = ["RowLanes"]
