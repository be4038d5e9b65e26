"""Work tiles left over of whole rounds of blocks, cut by keys: what multiprocessors that would idle take from them.

Numbers below `whole` are tiles. Of each of the `cut` tiles that follow two blocks have something: those that are
numbered next its first keys, all but the last of `parts` parts, those behind them that part. What both leave is added
up by a kernel of its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from .values import Bundle, Fixed, choose


@dataclasses.dataclass
class Piece(Fixed):
    """`split`: which keys it has (see `kv_tiles.WHOLE`); `slot`: its place among the pieces, below 0 if it is whole."""

    split: tuple[Any, Any, Any]
    slot: Int32

    @property
    def is_whole(self) -> Any:
        return self.slot < 0


class Remainder(Bundle):
    """`sums`: fp32 (2 * cut, numbers of a tile); `lse`: fp32 (2 * cut, rows); `places`: int32 (cut, 4), whose they are:
    (b, head, number of the tile, nothing). Pieces with the first keys lie before all others.
    """

    parts = ("sums", "lse", "places", "whole", "cut", "of")

    def __init__(self, sums: Any, lse: Any, places: Any, whole: Any, cut: Any, of: Any) -> None:
        self.sums, self.lse, self.places, self.whole, self.cut, self.of = sums, lse, places, whole, cut, of

    @staticmethod
    def made(workspace: cute.Tensor, whole: Any, cut: Any, parts: Any, rows: int, columns: int) -> Remainder:
        """On the host, of a workspace (2 * cut * rows * (columns + 1) + 4 * cut,) fp32."""
        start, slots, numbers = workspace.iterator, 2 * cut, rows * columns
        sums = cute.make_tensor(start, cute.make_layout((slots, numbers), stride=(numbers, 1)))
        start = start + Int64(slots) * numbers
        lse = cute.make_tensor(start, cute.make_layout((slots, rows), stride=(rows, 1)))
        start = start + Int64(slots) * rows
        places = cute.make_tensor(cute.recast_ptr(start, dtype=Int32), cute.make_layout((cut, 4), stride=(4, 1)))
        return Remainder(sums, lse, places, Int32(whole), Int32(cut), Int32(parts))

    @property
    def numbers(self) -> Int32:
        return self.whole + 2 * self.cut

    def find(self, number: Int32) -> tuple[Int32, Piece]:
        """(number of the tile, which piece of it)."""
        slot = number - self.whole
        is_second = slot >= self.cut
        first = choose(is_second, self.of - 1, Int32(0))
        last = choose((slot < 0) | is_second, self.of, self.of - 1)
        return Int32(choose(is_second, number - self.cut, number)), Piece((first, last, self.of), slot)

    def note(self, piece: Piece, place: tuple[Any, Any, Any], condition: Boolean) -> None:
        """Whose pieces they are, once per tile, where the condition holds."""
        _note_if(self.places, piece.slot, place, condition & (piece.slot >= 0) & (piece.slot < self.cut))


@cute.jit
def _note_if(places: cute.Tensor, slot: Int32, place: cutlass.Constexpr, condition: Boolean):
    if condition:
        for i in cutlass.range_constexpr(3):
            places[slot, i] = place[i]


__all__ = ["Piece", "Remainder"]
