"""Query heads that share a key/value head as rows of one tile: few queries fill it, and K and V are read once for all.

Row r of packed rows is query r // slots, head r % slots, with `slots` the number of heads rounded up to a power of two;
rows of heads that are not there are padding (copies fill them with zeros and leave them out). Where a thread owns rows
r and r + 8, with up to 8 slots those are two queries of one head, so that a score mod finds its head as it does without
packing; with more they are one query and two heads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass.cute as cute

from .score_tile import FragmentShape
from .values import Fixed


@dataclasses.dataclass(frozen=True)
class HeadRows(Fixed):
    """`heads` neighbouring query heads as rows of a tile, which has as many at least; 1: each has tiles of its own."""

    heads: int
    slots: int

    def view(self, tensor: cute.Tensor) -> cute.Tensor:
        """(S, D, H, ...) as ((heads, S), D, H / heads, ...)."""
        if self.heads == 1:
            return tensor
        rows, columns, heads, *others = tensor.shape
        row, column, head, *other = tensor.stride
        shape = ((self.heads, rows), columns, heads // self.heads, *others)
        stride = ((head, row), column, head * self.heads, *other)
        return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))

    def box(self, rows: int) -> Any:
        """The shape of `rows` packed rows of a `view`."""
        return rows if self.heads == 1 else (self.slots, rows // self.slots)

    def place(self, row: Any) -> tuple[Any, Any]:
        """(query, which of the heads) of a packed row."""
        return (row, 0) if self.heads == 1 else (row // self.slots, row % self.slots)

    def fragment(self, shape: FragmentShape) -> FragmentShape:
        """What a thread owns in queries and heads, `shape` being the same in rows."""
        places = [self.place(offset) for offset in shape.row_offsets]
        queries, heads = tuple(q for q, _ in places), tuple(h for _, h in places)
        return dataclasses.replace(shape, row_offsets=queries, head_offsets=heads, packed=self.heads > 1)
