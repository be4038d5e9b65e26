"""Work tiles that are no whole rounds of blocks, shared alike by all of them: nobody is idle at the end.

So many tiles that each block has one or more, but fewer than two, are cut along their keys into as many shares as there
are blocks, each of neighbouring tiles (Osama et al., "Stream-K: Work-Centric Parallel Decomposition for Dense
Matrix-Matrix Multiplication on the GPU", 2023). A share begins with its last tile, of which it may have the first keys
alone: their sums it leaves. It ends with its first tile, of which it may have the last keys alone: then it takes what
the share before it left long ago, and the tile is done. So no tile has more than two portions, the same in each run,
and who waits for one waits for a share of a lower number, which others began before.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32

from .values import Bundle, Fixed, choose, larger, smaller


@dataclasses.dataclass
class Portion(Fixed):
    """Tiles of keys [`low`, `high`) of a work tile, which share `number` has.

    `leaves`: its sums are left for the next share; `takes`: those that the share before it left are its own too.
    """

    low: Int32
    high: Int32
    number: Int32
    leaves: Boolean
    takes: Boolean

    def of(self, start: Any, count: Any) -> tuple[Any, Any]:
        """(start, count) of those among `count` tiles from `start` on."""
        return start + self.low, self.high - self.low


class StreamK(Bundle):
    """Numbers below `whole` are tiles, those from there on shares of the `rest`, of `keys` tiles of keys each.

    `left`: fp32 (blocks, numbers), what each share leaves. `flags`: int32 (blocks, warps), zero when the kernel starts
    and when it ends; 1 once a warp has left its part.
    """

    parts = ("whole", "rest", "keys", "blocks", "left", "flags")

    def __init__(self, whole: Any, rest: Any, keys: Any, blocks: Any, left: Any, flags: Any) -> None:
        self.whole, self.rest, self.keys, self.blocks, self.left, self.flags = whole, rest, keys, blocks, left, flags

    @staticmethod
    def of(tiles: Int32, keys: Int32, blocks: int, left: cute.Tensor, counters: cute.Tensor) -> StreamK:
        """On the host, of as many tiles as blocks or more; `counters`: one that is drawn from, and the flags."""
        rest, divisor = tiles % blocks + blocks, cute.fast_divmod_create_divisor_v2
        sums = rows_of(left.iterator, blocks, cute.size(left))
        flags = rows_of(counters.iterator + 1, blocks, cute.size(counters) - 1)
        return StreamK(tiles - rest, rest, divisor(keys), divisor(Int32(blocks)), sums, flags)

    @property
    def numbers(self) -> Int32:
        """How many there are, of tiles and of shares."""
        return self.whole + self.blocks.divisor

    def tiles(self, number: Int32) -> Int32:
        """How many tiles it has keys of."""
        low, high = self._keys_of(number - self.whole)
        (first, _), (last, _) = divmod(low, self.keys), divmod(high - 1, self.keys)
        return choose(number < self.whole, Int32(1), last - first + 1)

    def tile(self, number: Int32, i: Int32) -> tuple[Int32, Portion]:
        """(number of its i-th tile, from the last one on; which of the tile's keys)."""
        share = number - self.whole
        low, high = self._keys_of(share)
        tile = divmod(high - 1, self.keys)[0] - i
        keys, begin = self.keys.divisor, tile * self.keys.divisor
        is_whole = share < 0
        first = choose(is_whole, Int32(0), larger(low - begin, 0))
        stop = choose(is_whole, keys, smaller(high - begin, keys))
        portion = Portion(first, stop, share, stop < keys, first > 0)
        return choose(is_whole, number, self.whole + tile), portion

    def _keys_of(self, share: Int32) -> tuple[Int32, Int32]:
        """[low, high) of a share, in tiles of keys of all the rest, one tile's behind the other's."""
        share, every = larger(share, 0), self.rest * self.keys.divisor
        (low, _), (high, _) = (divmod(every * number, self.blocks) for number in (share, share + 1))
        return low, high


def rows_of(start: cute.Pointer, rows: int, numbers: Any) -> cute.Tensor:
    """(rows, numbers of each)."""
    return cute.make_tensor(start, cute.make_layout((rows, numbers // rows), stride=(numbers // rows, 1)))
