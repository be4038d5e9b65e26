"""Blocks of 16 x 16 numbers of a swizzled tile to registers, as operands of a warp's products (ldmatrix).

A lane asks for a row of one of the four 8 x 8 matrices of a block. Its address is computed once for a tile: blocks
below each other are a constant apart, and those beside each other differ in the bits that the swizzle changes, by a
constant too. Left to the layouts of the kernel language, every block has an address of its own, which waits in a
register (D 128, 64 keys, two products of 16 rows a warp: 123 spilled, with one address 50).
"""

from __future__ import annotations

import enum
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from .swizzled_tiles import at_column, swizzled
from .values import Fixed

SIDE = 16  # of a block


class Operand(enum.Enum):
    """What a block is to a product, and in which order it wants the four matrices.

    The fields: whether the second one lies below the first or beside it, and whether they are turned.
    """

    LEFT = True, False  # rows by what is summed
    LEFT_COLUMNS = False, True  # its columns are the product's rows
    RIGHT_ROWS = False, False  # its rows are the product's columns, as keys are
    RIGHT_COLUMNS = True, True  # its columns are, as those of values are

    @property
    def goes_down(self) -> bool:
        return self.value[0]

    @property
    def is_turned(self) -> bool:
        return self.value[1]


class MatrixTile(Fixed):
    """A tile of `rows` by `columns` from `start` on, a multiple of 1,024, of 16-bit numbers, as such operands.

    Blocks are counted from `first_row` and `first_column` on, multiples of 16. As bits of an address are changed,
    not added to, columns that are read beside each other lie where no number is carried: 2, 4, ... blocks from a
    multiple of as many, or some every 2, 4, ... blocks. `behind`: so many bytes from `start` on the tile begins, a
    multiple of 1,024; tiles behind one start whose blocks lie alike share a lane's address.
    """

    def __init__(
        self,
        start: Any,
        rows: int,
        columns: int,
        operand: Operand,
        first_row: Any = None,
        first_column: Any = None,
        behind: int = 0,
    ) -> None:
        lane = cute.arch.lane_idx()
        near, far = lane % 8 + lane // 8 % 2 * 8, lane // 16 * 8
        row, column = near, far
        if not operand.goes_down:
            row, column = lane % 8 + far, lane // 8 % 2 * 8
        row, column = (a if b is None else a + b for a, b in ((row, first_row), (column, first_column)))
        self.rows, self.wide, self.behind = rows, swizzled(columns), behind
        self.place = start + at_column(row, column, rows, columns)
        self.is_turned = operand.is_turned

    def block(self, down: int, beside: int) -> tuple[int, int]:
        """Where block (`down`, `beside`) lies: its column of blocks, and so many bytes behind that column's address."""
        block, column = divmod(beside, self.wide // SIDE)
        return column, self.behind + (down * SIDE + block * self.rows) * self.wide * 2

    def address(self, column: int, before: Any = 0) -> Any:
        """This lane's in a column of blocks; `before`: bytes before the tile, a multiple of 1,024."""
        place = self.place if isinstance(before, int) and before == 0 else self.place + before
        return place if column == 0 else place ^ (column * SIDE * 2)

    def spell(self, words: str, address: str, behind: int) -> str:
        """The instruction that loads a block to registers that are called `words`."""
        return _spelled(4, self.is_turned, words, f"{address} + {behind}")


def load_matrices(address: Any, count: int = 4, turned: bool = False, behind: int | None = None) -> list[Int32]:
    """A word of each of 1, 2 or 4 matrices of 8 rows by 16 bytes, of which each lane has the `address` of a row.

    It has two neighbouring numbers of 16 bits of a row, or `turned` one of each of two rows. `behind`: so many bytes
    behind the address.
    """
    names = ", ".join(f"{{$w{n}}}" for n in range(count))
    place = "{$r0}" if behind is None else f"{{$r0}} + {behind}"
    text = _spelled(count, turned, f"{{{names}}}", place)
    return list(cute.arch.inline_ptx(text, write_only_types=[Int32] * count, read_only_args=[address]))


def _spelled(count: int, turned: bool, words: str, place: str) -> str:
    return f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' * turned}.shared.b16 {words}, [{place}];"
