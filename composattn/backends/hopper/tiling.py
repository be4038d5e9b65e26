"""Tiles of the Hopper forward, as data."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ...primitives.lag import Lag
from ..fused.tiles.target import HOPPER
from ..fused.tiles.tiling import STATISTICS, ForwardTiling
from ..fused.tiles.written import Written

ROWS = 64  # of one warpgroup's product
# Stages of K and V in each of several blocks of few queries: with more, a multiprocessor's only block is far ahead of
# two of another one, and all wait for these (D 128 4 to 9 % of 136 to 192 tiles up to 4k keys, D 64 to 6)
EVEN_STAGES = 2
GUESSING = "forward_guessing"  # probabilities by the maximum before their tile
SUMS = 8  # columns of the output there that are sums: the least by which a product can be wider
EIGHT_ROWS = "forward_eight_rows"  # of a tile of few queries: 8 % of short calls, 0 to 2 % where memory is the limit
# warpgroups pass by kv tiles that only others' rows see, and tiles begin where the first key is that the block's see
FROM_FIRST = "forward_from_first"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperTiling(ForwardTiling):
    """K and V lie in a ring of `stages` each; each of the `warpgroups` has 64 of the query rows.

    `producer_registers`: of a thread that copies. `rescale_early`: the output is rescaled while scores are
    computed, not after it was accumulated (where rows guess, in tiles that look for their maximum). `lag`: how far a
    row's maximum may be below its largest score. `q_stages`: Q lies in a ring of so many; with two, in blocks that
    stay, the next work tile's is copied while this one is computed. `held`: so many columns of Q wait in registers for
    all tiles of keys, so that the matrix unit reads only the other ones from shared memory. `output_wait`: behind which
    of a thread's exponentials the output's product is waited for, the first one or half of them; None: wherever the
    compiler likes, which may be before any. `written`: how products are, see `fused/tiles/written.py`.
    """

    stages: int
    producer_registers: int
    rescale_early: bool = False
    lag: Lag
    q_stages: int = 1
    held: int = 0
    written: Written = "whole"
    output_wait: Literal["first", "half"] | None = None

    def __post_init__(self) -> None:
        if self.output_direct and (self.q_stages > 1 or not self.drawn):
            raise ValueError("output_direct is of blocks that draw their tiles, whose one place of Q is Q's alone")
        if self.kernel == GUESSING and self.lag.most:
            raise ValueError("rows that guess begin with their largest score so far: none may lag behind it")
        if self.shares and not (self.drawn if self.shares == "last" else self.persistent and not self.drawn):
            raise ValueError("the last tiles are shared by blocks that draw them, all by others that stay")

    @property
    def warpgroups(self) -> int:
        """That compute, each of 64 rows."""
        return self.tile_m // ROWS

    @property
    def consumer_registers(self) -> int:
        """Registers of a thread that computes: what copying ones leave of those that a block is launched with."""
        left = launched_registers(self.warpgroups, self.blocks) * (self.warpgroups + 1) - self.producer_registers
        return min(240, left // self.warpgroups // 8 * 8)

    @property
    def pingpong(self) -> bool:
        """Whether warpgroups take turns at the matrix unit; of D 256 tiles are too small to gain."""
        return self.warpgroups > 1 and max(self.d, self.dv) <= 192

    @property
    def dealt(self) -> str:
        return super().dealt + ", O from registers" * self.output_direct

    @property
    def most_rows(self) -> int:
        return 8 if self.kernel == EIGHT_ROWS else super().most_rows

    @property
    def reads_far_ahead(self) -> bool:
        return self.stages > EVEN_STAGES

    @property
    def computing_warps(self) -> int:
        return self.tile_m // 16

    @property
    def left_numbers(self) -> int:
        columns = self.dv + (SUMS if self.kernel == GUESSING else 0)
        rows = self.tile_m // 2 if self.kernel == EIGHT_ROWS else self.tile_m  # of a thread's two rows one
        of_tile = rows * (columns + 4 * STATISTICS)  # each row is four lanes'
        return of_tile if self.shares == "last" else 2 * of_tile  # of the tile it begins in, and ends in

    @property
    def in_stretches(self) -> bool:
        return self.kernel == FROM_FIRST

    @property
    def separate_o(self) -> bool:
        """Whether the output has shared memory of its own instead of Q's, which may be the next tile's by then."""
        return self.persistent and not (self.output_direct or self.shares == "all")

    @property
    def frees_queries(self) -> bool:
        """Whether Q's place is free once registers have it, so that the next tile's comes under all of this one."""
        return self.output_direct and self.held == self.d

    @property
    def ones(self) -> int:
        """Columns of ones beside each V in shared memory: as many as lie together, of which 8 are multiplied."""
        return next(wide for wide in (64, 32, 16) if self.dv % wide == 0) if self.kernel == GUESSING else 0

    def shared_memory(self, element_bytes: int) -> int:
        rows = self.q_stages * self.d + self.dv if self.separate_o else self.q_stages * max(self.d, self.dv)
        columns = self.d + self.dv + self.ones
        return element_bytes * (self.tile_m * rows + self.stages * self.tile_n * columns) + 1024

    def describe(self) -> dict[str, str]:
        order = "ping-pong" if self.pingpong else "warpgroups at will"
        rescale = "under the next scores" if self.rescale_early else "after the product"
        apart = "; each passes by kv tiles that only others' rows see, which begin at the first key seen"
        apart = apart if self.kernel == FROM_FIRST else ""
        of_q = f", {self.q_stages} of Q" if self.q_stages > 1 else ""
        guess = "; of most tiles with no test, probabilities by the maximum before" if self.kernel == GUESSING else ""
        held = f"; {self.held} columns of Q in registers" if self.held else ""
        wait = "the first exponential" if self.output_wait == "first" else "half of the exponentials"
        held += f"; waits for O behind {wait}" if self.output_wait else ""
        return {
            "roles": f"1 copying warp, {self.stages} stages{of_q}; {self.warpgroups} warpgroups of {ROWS} rows; "
            f"registers {self.consumer_registers}/{self.producer_registers}; blocks on a multiprocessor: {self.blocks}",
            "overlap": f"{order}, rescale {rescale} {self.lag}{apart}{guess}{held}",
        }


def launched_registers(warpgroups: int, blocks: int) -> int:
    """Registers of a thread, where so many warpgroups compute, one copies, and `blocks` run on an SM."""
    return min(HOPPER.registers // (128 * (warpgroups + 1) * blocks), 255) // 8 * 8


def in_equal_shares(tiling: HopperTiling) -> HopperTiling:
    """A tiling of few rows as persistent blocks that share all keys alike, with the next tile's Q beside this one's."""
    return dataclasses.replace(tiling, persistent=True, shares="all", q_stages=2)
