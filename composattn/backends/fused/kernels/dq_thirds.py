"""dQ of two query tiles of 96 at once, as three products of 64 rows: of one tile two would compute a quarter in vain.

Tiles are counted over all that a block visits; of a pair one is `second`. Pairs have `phase` 0 and 1 in turn. Their dS
lies in 224 rows of shared memory, so that no product's rows lie apart, and none is written over that is still read:

    rows      0 to 63         64 to 95         96 to 191   192 to 223
    phase 0   first, 0 to 63  first, 64 to 95  second
    phase 1   first, 32 to 95                  second      first, 0 to 31

Each tile has an outer product, of 64 of its rows, and half of the middle one, whose rows are the first tile's last and
the second one's first (phase 0), or the other way round. The outer product of the first tile starts when the second one
is computed, both others a tile later. The group of number `phase` has the outer ones, the other one the middle. So
each has three products of four tiles, and of each tile a part of dQ that it sends.
"""

from typing import Any

import cutlass.cute as cute

from ....primitives.lanes import LANES
from ....primitives.register_chunks import load_part, store_part
from ....primitives.swizzled_tiles import swizzled
from ....primitives.values import choose

HALF_ROWS = 32  # of half a product
WARPS = 4  # of a product, with 16 of its rows each: a strip of dQ
HALF = WARPS // 2  # of a product's strips
STRIPS = WARPS + HALF  # of a tile


def from_halves(whole: cute.Tensor, held: int, columns: int, rows: int) -> cute.Tensor:
    """Shared memory with `held` rows as (rows, columns, place): so many from a place on, in half products."""
    wide = swizzled(columns)
    shape = (8, rows // 8), (wide, columns // wide), held // HALF_ROWS
    stride = (wide, 8 * wide), (1, held * wide), HALF_ROWS * wide
    return cute.make_tensor(whole.iterator, cute.make_layout(shape, stride=stride))


def ds_places(second: Any, phase: Any) -> tuple[Any, Any]:
    """Where dS of a tile's first 32 queries is, and of the 64 behind them, in half products."""
    return choose(second != 0, 3, 6 * phase), choose(second != 0, 4, 1 - phase)


def product_place(second: Any, phase: Any, number: Any) -> Any:
    """Where the rows of a group's product begin, in half products, of what starts behind a tile."""
    return second * (4 + phase - 2 * number)


def is_outer(phase: Any, number: Any) -> Any:
    """Whether a group has a pair's outer products."""
    return phase == number


def outer_strip(second: Any, phase: Any) -> Any:
    """Of a tile, with which its outer product begins."""
    return HALF * (second ^ phase)


def middle_half(second: Any, phase: Any) -> tuple[Any, Any]:
    """Which half of the middle product a tile has, and with which of its strips this begins."""
    half = second ^ phase
    return half, WARPS * (half ^ 1)


class WarpStrips:
    """Where a warp's strip lies in fp32 memory: strips of 16 rows of all columns, one behind the other."""

    def __init__(self, number, thread):
        warp, self.lane = cute.arch.make_warp_uniform(thread // LANES), thread % LANES
        self.number = WARPS * number + warp

    def store(self, target: cute.Tensor, registers: cute.Tensor) -> None:
        """What a group's product gave."""
        store_part(target, registers, self.number, self.lane, LANES)

    def load(self, source: cute.Tensor, registers: cute.Tensor) -> None:
        """Of a tile."""
        load_part(source, registers, self.number, self.lane, LANES)
