"""A fragment of scores as rows and columns with their logical coordinates: the seam between graph and kernels.

Each backend delivers one thread's part of S = Q Kᵀ in registers; what lies above (score mods, masks, softmax
statistics) sees only this view. How rows and columns lie over lanes is data (`FragmentShape`).
"""

import dataclasses
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from .values import Fixed, smaller


@dataclasses.dataclass(frozen=True)
class FragmentShape:
    """How one thread's registers spread over a score tile.

    `row_offsets` and `column_offsets` are added to the thread's first query and column; `lanes_per_row` neighbouring
    lanes share a row. `head_offsets` are added to the thread's first head where rows are of several heads (see
    `gqa_packing`), elsewhere there are none. Positions whose offsets have the same quotient by `block` lie in one block
    of so many, counted from 0; 1 promises nothing.
    """

    row_offsets: tuple[int, ...]
    column_offsets: tuple[int, ...]
    lanes_per_row: int
    head_offsets: tuple[int, ...] = ()
    block: int = 1

    @property
    def rows(self) -> int:
        return len(self.row_offsets)

    @property
    def columns(self) -> int:
        return len(self.column_offsets)

    def first_row(self, r: int) -> int:
        """The first row in the block of row `r`."""
        return _first_of_block(self.row_offsets, r, self.block)

    def first_column(self, c: int) -> int:
        """The first column in the block of column `c`."""
        return _first_of_block(self.column_offsets, c, self.block)

    @property
    def of_one_head(self) -> bool:
        """Whether all rows of a thread are of one query head."""
        return not any(self.head_offsets)

    def columns_before(self, x: Any) -> Any:
        """How many of the thread's columns lie before its first one + `x`, for `x` from 0; beyond the last: all."""
        return _count_before(self.column_offsets, x)

    def rows_before(self, x: Any) -> Any:
        """How many of the thread's rows lie before its first one + `x`, likewise."""
        return _count_before(self.row_offsets, x)


def _count_before(offsets: tuple[int, ...], x: Any) -> Any:
    """Of offsets that are runs of neighbours at even distances."""
    run = next((n for n, offset in enumerate(offsets) if offset != n), len(offsets))
    if run == len(offsets):
        return x
    period = offsets[run]
    return x // period * run + smaller(x % period, run)


def _first_of_block(offsets: tuple[int, ...], i: int, block: int) -> int:
    return next(n for n, offset in enumerate(offsets) if offset // block == offsets[i] // block)


@dataclasses.dataclass
class ScoreTile(Fixed):
    """One thread's scores of one (q tile, kv tile).

    `values[r, c]` is fp32 in registers. `b` and `h` are the batch entry and the query head (of the first row, see
    `head_index`); `q_index(r)` and `kv_index(c)` are positions inside the sequence (Int32), also beyond its end on a
    partial tile.
    """

    shape: FragmentShape
    values: cute.Tensor
    b: Int32
    h: Int32
    first_q: Int32
    first_kv: Int32

    @property
    def rows(self) -> int:
        return self.shape.rows

    @property
    def columns(self) -> int:
        return self.shape.columns

    def q_index(self, r: int) -> Int32:
        return self.first_q + self.shape.row_offsets[r]

    def head_index(self, r: int) -> Int32:
        return self.h if self.shape.of_one_head else self.h + self.shape.head_offsets[r]

    def kv_index(self, c: int) -> Int32:
        return self.first_kv + self.shape.column_offsets[c]
