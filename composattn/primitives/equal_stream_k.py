"""All work tiles in equal shares, by keys: each block has one, of neighbouring tiles, however many tiles there are.

A tile has as many portions as shares have keys of it. Each leaves its sums, and who comes last adds up all of them, in
the order of the keys: so bits are the same in each run, and nobody waits for anybody.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from .stream_k import Portion, bounds, rows_of
from .values import Bundle, larger, smaller


@dataclasses.dataclass
class MetPortion(Portion):
    """`first`: the share that the tile begins in; `count`: how many have keys of it."""

    first: Int32
    count: Int32


class EqualStreamK(Bundle):
    """Numbers are shares, as many as `blocks`, of `every` tile of keys there is; a work tile has `keys` of these.

    `left`: fp32 (2 * blocks, numbers), what a share leaves of the tile it ends in, and of the one it begins in.
    `arrived`: int32 (blocks, warps), zero when the kernel starts and when it ends: how many portions of the tile that
    begins in a share and ends in another one are there.
    """

    parts = ("keys", "blocks", "every", "left", "arrived")

    def __init__(self, keys: Any, blocks: Any, every: Any, left: Any, arrived: Any) -> None:
        self.keys, self.blocks, self.every, self.left, self.arrived = keys, blocks, every, left, arrived

    @staticmethod
    def of(tiles: Int32, keys: Int32, most: int, left: cute.Tensor, counters: cute.Tensor) -> EqualStreamK:
        """On the host, for `most` blocks at most, none of which has nothing; `counters`: behind the first one."""
        divisor, every = cute.fast_divmod_create_divisor_v2, tiles * keys
        sums = rows_of(left.iterator, 2 * most, cute.size(left))
        arrived = rows_of(counters.iterator + 1, most, cute.size(counters) - 1)
        return EqualStreamK(divisor(keys), divisor(smaller(every, Int32(most))), divisor(every), sums, arrived)

    @property
    def numbers(self) -> Int32:
        """How many there are."""
        return self.blocks.divisor

    def tiles(self, number: Int32) -> Int32:
        """How many tiles it has keys of."""
        low, high = self._keys_of(number)
        return divmod(high - 1, self.keys)[0] - divmod(low, self.keys)[0] + 1

    def tile(self, number: Int32, i: Int32) -> tuple[Int32, MetPortion]:
        """(number of its i-th tile, from the last one on; which of the tile's keys)."""
        low, high = self._keys_of(number)
        tile = divmod(high - 1, self.keys)[0] - i
        keys, begin = self.keys.divisor, tile * self.keys.divisor
        first, last = self._with(begin), self._with(begin + keys - 1)
        return tile, MetPortion(larger(low - begin, 0), smaller(high - begin, keys), number, first, last - first + 1)

    def place(self, first: Int32, i: Any) -> Any:
        """Where in `left` the i-th portion is of a tile that begins in share `first`."""
        return 2 * (first + i) + smaller(i, 1)

    def _keys_of(self, share: Int32) -> tuple[Int32, Int32]:
        """[low, high) of a share, in tiles of keys of all work tiles, one's behind the other's."""
        return bounds(share, self.every.divisor, self.blocks)

    def _with(self, tile: Int32) -> Int32:
        """The share that has this tile of keys."""
        return divmod((tile + 1) * self.blocks.divisor - 1, self.every)[0]
