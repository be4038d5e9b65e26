"""Work tiles that several blocks share, each a piece of one: how pieces are numbered and where their sums lie.

Numbers below `whole` are tiles; those from there on are pieces of the tiles that follow, `count` of each, next to each
other.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from .branches import when
from .values import Bundle, Fixed, choose


@dataclasses.dataclass
class Piece(Fixed):
    """The `index`-th of the `count` pieces of a tile, a whole tile being the only one; its sums lie at `slot`."""

    index: Int32
    count: Int32
    slot: Int32
    is_whole: Boolean


class Pieces(Bundle):
    """`dk`, `dv`: fp32 (slots, numbers of a tile), piece after piece of tile after tile.

    `places`: int32 (cut tiles, 4), whose they are: (b, head, number of the tile, nothing), or of one that begins with a
    segment (b, head, its first row, the row behind the segment). Sequence -1: nobody's.
    """

    parts = ("dk", "dv", "places", "whole", "count", "numbers")

    def __init__(self, dk: Any, dv: Any, places: Any, whole: Any, count: Any, numbers: Any) -> None:
        self.dk, self.dv, self.places, self.whole, self.count, self.numbers = dk, dv, places, whole, count, numbers

    @staticmethod
    def of(given: tuple[cute.Tensor, Int32, Int32, Int32], d: int, dv: int) -> Pieces:
        """On the host, of a workspace (cut * pieces * (d + dv) + 4 * cut,) fp32, whole tiles, cut ones, pieces of each.

        `d`, `dv`: numbers of a tile of dK and of dV.
        """
        workspace, whole, cut, count = given
        slots = cut * count
        sums = []
        start = workspace.iterator
        for numbers in (d, dv):
            sums.append(cute.make_tensor(start, cute.make_layout((slots, numbers), stride=(Int64(numbers), 1))))
            start = start + Int64(slots) * numbers
        places = cute.make_tensor(cute.recast_ptr(start, dtype=Int32), cute.make_layout((cut, 4), stride=(4, 1)))
        return Pieces(sums[0], sums[1], places, whole, cute.fast_divmod_create_divisor_v2(count), whole + slots)

    @property
    def sums(self) -> tuple[cute.Tensor, cute.Tensor]:
        return self.dk, self.dv

    def split(self, number: Int32) -> tuple[Int32, Piece]:
        """(number of the tile, which piece of it)."""
        slot = number - self.whole
        tile, index = divmod(choose(slot < 0, Int32(0), slot), self.count)
        is_whole = slot < 0
        of_tile = choose(is_whole, number, self.whole + tile)
        count = choose(is_whole, Int32(1), self.count.divisor)
        return Int32(of_tile), Piece(choose(is_whole, Int32(0), Int32(index)), count, slot, is_whole)

    def note(self, work: Any, tile_n: int, condition: Boolean) -> None:
        """Whose pieces they are, once per tile of so many keys, where the condition holds."""
        tile, _ = divmod(work.piece.slot, self.count)
        where = (work.n,) if work.keys.segment is None else (work.keys.from_start(work.n * tile_n), work.keys.end)
        self._note(tile, (work.b, work.kv_head, *where), condition & (work.piece.index == 0))

    def note_absent(self, number: Int32, condition: Boolean) -> None:
        """That a piece of this number is nobody's."""
        tile, index = divmod(number - self.whole, self.count)
        self._note(tile, (Int32(-1),), condition & (index == 0))

    def _note(self, tile: Int32, place: tuple[Int32, ...], condition: Boolean) -> None:
        def note() -> None:
            for i, number in enumerate(place):
                self.places[tile, i] = number

        when(condition, note)
