"""How the Hopper forward for head dimensions above 256 cuts the work."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ..fused.tiles.tiling import ForwardTiling
from .tiling import CONVERTERS, L2, OF_BYTES, ROWS, Registers, registers_for

GROUPS = 2  # warpgroups that share the rows: what the output of 64 rows and 512 columns takes of registers
SLICE = 64  # columns of K in a slice: the widest swizzle of 16-bit numbers
STAGE = 64 * SLICE  # numbers that a stage has room for: 64 keys of K, or 16 of V in 256 columns
REST = 4 * ROWS * GROUPS + 1024  # bytes: a number of each row and warpgroup, barriers, alignment


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideTiling(ForwardTiling):
    """Both warpgroups have all rows: each has the scores of half of a tile's keys, and half of the output's columns.

    So the probabilities of a tile pass through shared memory, and K and V come in slices, `stages` of them in a ring of
    each warpgroup's own.
    """

    l2: ClassVar[int] = L2

    stages: int

    def registers(self, paged: bool) -> Registers:
        """Registers of a thread; `paged`: keys lie in pages."""
        return registers_for(GROUPS, self.blocks, paged)

    @property
    def key_box(self) -> tuple[int, int]:
        """A slice of the keys of a warpgroup."""
        return self.tile_n // GROUPS, SLICE

    @property
    def value_box(self) -> tuple[int, int]:
        """A slice of the columns of a warpgroup: as many keys, a power of two, as a slice of K has room for."""
        columns = self.output_columns
        keys = STAGE // columns
        return min(self.tile_n, 1 << keys.bit_length() - 1), columns

    @property
    def output_columns(self) -> int:
        return self.dv // GROUPS

    def shared_memory(self, element_bytes: int) -> int:
        tiles = self.tile_m * (max(self.d, self.dv) + self.tile_n) + GROUPS * self.stages * STAGE
        return element_bytes * tiles + REST


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideByteTiling(WideTiling):
    """K and V come as 8-bit numbers: behind each ring is one of `byte_rounds` slices for each converting warp."""

    byte_rounds: int

    @property
    def step(self) -> str:
        return self.kernel + OF_BYTES

    def registers(self, paged: bool) -> Registers:
        return Registers(216, 40)  # four warpgroups, two of which copy and convert

    def shared_memory(self, element_bytes: int) -> int:
        return super().shared_memory(element_bytes) + GROUPS * CONVERTERS * self.byte_rounds * STAGE
