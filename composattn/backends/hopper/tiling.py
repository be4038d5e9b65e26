"""Tiles of the Hopper forward, of keys and values of 16 bits or 8."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from ..fused.planning.tables import first, tables_of
from ..fused.tiles.target import HOPPER
from ..fused.tiles.tiling import ForwardTiling
from ..fused.tiles.written import Written

ROWS = 64  # of one warpgroup's product
L2 = 32 << 20  # bytes of K and V of the heads that are worked on together
# Stages of K and V in each of several blocks of few queries: with more, an SM's only block is far ahead of
# two of another one, and all wait for these (D 128 4 to 9 % of 136 to 192 tiles up to 4k keys, D 64 to 6)
EVEN_STAGES = 2
GUESSING = "forward_guessing"  # probabilities by the maximum before their tile
SUMS = 8  # columns of the output there that are sums: the least by which a product can be wider
OF_BYTES = "_of_bytes"
OF_KEYS, OF_VALUES = 4, 3  # warps that make 16-bit numbers of bytes: a warpgroup more, and those that copy nothing
FILE = Path(__file__).with_name("forward.json")
TABLES = tables_of(FILE)


class Registers(NamedTuple):
    """Registers of a thread, by what it does."""

    computing: int
    copying: int


def registers_for(warpgroups: int, blocks: int, paged: bool, others: str) -> Registers:
    """What `others` leave to threads that compute, of what a block is launched with; `paged`: page numbers take some.

    Others copy; where they are "converting", two warpgroups copy and make 16-bit numbers of bytes; see "copying".
    """
    copying = first(TABLES["copying"], None, warpgroups=warpgroups, blocks=blocks, paged=paged, others=others)
    groups = warpgroups + 1 + (others == "converting")
    left = launched_registers(groups - 1, blocks) * groups - (groups - warpgroups) * copying
    return Registers(min(240, left // warpgroups // 8 * 8), copying)


def launched_registers(warpgroups: int, blocks: int) -> int:
    """Registers of a thread, where so many warpgroups compute, one copies, and `blocks` run on an SM."""
    return min(HOPPER.registers // (128 * (warpgroups + 1) * blocks), 255) // 8 * 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperTiling(ForwardTiling):
    """K and V lie in a ring of `stages` each; each of the warpgroups has 64 of the query rows.

    `resident`: so many columns of Q wait in registers for all tiles of keys, so that the tensor core reads only the
    other ones from shared memory. `output_wait`: behind which of a thread's exponentials the output's product is waited
    for, the first one or half of them; None: wherever the compiler likes, which may be before any. `written`: how
    products are, see `fused/tiles/written.py`. `eight_rows`: only the first eight rows are queries, and half of the
    softmax, and of what mods do, is left out: 8 % of short calls, 0 to 2 where memory is the limit.
    """

    l2: ClassVar[int] = L2
    others: ClassVar[str] = "copying"  # what threads do that compute nothing

    stages: int
    resident: int = 0
    output_wait: Literal["first", "half"] | None = None
    written: Written = "whole"
    eight_rows: bool = False
    spared: int = 0  # type: ignore[misc]

    def __post_init__(self) -> None:
        if self.guesses and self.threshold.most:
            raise ValueError("rows that guess begin with their largest score so far: none may lag behind it")

    @property
    def guesses(self) -> bool:
        """Whether probabilities are by the maximum before their tile, and a product sums them."""
        return self.kernel == GUESSING

    @property
    def warpgroups(self) -> int:
        """That compute, each of 64 rows."""
        return self.tile_m // ROWS

    def registers(self, paged: bool) -> Registers:
        """Registers of a thread; `paged`: keys lie in pages."""
        return registers_for(self.warpgroups, self.blocks, paged, self.others)

    @property
    def pingpong(self) -> bool:
        """Whether warpgroups take turns at the tensor core; of D 256 tiles are too small to gain."""
        return self.warpgroups > 1 and max(self.d, self.dv) <= 192

    @property
    def most_rows(self) -> int:
        return 8 if self.eight_rows else super().most_rows

    @property
    def reads_far_ahead(self) -> bool:
        return self.stages > EVEN_STAGES

    @property
    def sum_columns(self) -> int:
        return self.dv + SUMS * self.guesses

    @property
    def in_segments(self) -> bool:
        return self.kernel == "forward" and self.packed_heads == 1

    @property
    def output_direct(self) -> bool:
        """Whether O is stored from registers, so that Q's place is the next tile's once scores are done.

        With all of Q in registers 192/128 gains 1 to 4 % from 8k on; without, D 256 3 to 4 of 2k, and D 192 loses.
        """
        return self.scheduler.draws and (self.resident == self.d > self.dv or self.d == self.dv == 256)

    @property
    def separate_o(self) -> bool:
        """Whether the output has shared memory of its own instead of Q's, which may be the next tile's by then."""
        return self.persistent and not self.output_direct

    @property
    def q_stages(self) -> int:
        """Places of Q: two, if they fit beside a block's neighbours, where the next tile's comes under this one."""
        two = self.persistent and not self.output_direct
        room = HOPPER.shared_memory // self.blocks - 1024 * (self.blocks > 1)
        return 2 if two and self._bytes(2) <= room else 1

    @property
    def frees_queries(self) -> bool:
        """Whether Q's place is free once registers have it, so that the next tile's comes under all of this one."""
        return self.output_direct and self.resident == self.d

    @property
    def ones(self) -> int:
        """Columns of ones beside each V in shared memory: as many as lie together, of which 8 are multiplied."""
        return math.gcd(self.dv, 64) * self.guesses

    @property
    def shared_memory(self) -> int:
        return self._bytes(self.q_stages)

    def _bytes(self, q_stages: int) -> int:
        rows = q_stages * self.d + self.output_columns if self.separate_o else q_stages * max(self.d, self.dv)
        columns = self.d + self.dv + self.ones
        return 2 * (self.tile_m * rows + self.stages * self.tile_n * columns) + 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByteTiling(HopperTiling):
    """K and V come as 8-bit numbers, each into a ring of its own of `byte_stages`; `parts` of them are a tile."""

    of: ClassVar[str] = OF_BYTES
    others: ClassVar[str] = "converting"

    byte_stages: int  # type: ignore[misc]
    parts: int = 1  # type: ignore[misc]
    scales_queries: bool = False  # type: ignore[misc]

    @property
    def reads_far_ahead(self) -> bool:
        return self.byte_stages > EVEN_STAGES * self.parts

    def _bytes(self, q_stages: int) -> int:
        return super()._bytes(q_stages) + self.byte_stages * self.key_box[0] * (self.d + self.dv)
