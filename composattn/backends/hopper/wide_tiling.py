"""How the Hopper forward for head dimensions above 256 cuts the work."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ..fused.tiles.tiling import ForwardTiling
from .tiling import L2, OF_BYTES, ROWS, Registers, registers_for

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
    stage: ClassVar[int] = GROUPS * 2 * STAGE  # bytes of a stage of both rings

    stages: int

    def registers(self, paged: bool) -> Registers:
        """Registers of a thread; `paged`: keys lie in pages."""
        return registers_for(GROUPS, self.blocks, paged, "copying")

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

    @property
    def shared_memory(self) -> int:
        tiles = self.tile_m * (max(self.d, self.dv) + self.tile_n)
        return 2 * tiles + self.stages * self.stage + REST


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideByteTiling(WideTiling):
    """K and V come as 8-bit numbers, as many in a slice; the first `rows` of the tile, 16, 32 or 64, are multiplied."""

    of: ClassVar[str] = OF_BYTES
    stage: ClassVar[int] = GROUPS * STAGE

    rows: int
    scales_queries: bool = False  # type: ignore[misc]

    @property
    def most_rows(self) -> int:
        return self.rows

    @property
    def shared_memory(self) -> int:
        # each warpgroup turns 64 numbers of each row there, and says a factor of each
        return super().shared_memory + GROUPS * 4 * ROWS * (self.rows + 1)
