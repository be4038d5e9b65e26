"""Tiles of the forward of warps, as data."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from ..fused.tiles.tiling import ForwardTiling

L2 = 24 << 20  # bytes of K and V of the heads that are worked on together


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarpTiling(ForwardTiling):
    """Each warp has `warp_rows` of the query rows; K and V lie in `stages` each, and all threads copy.

    `resident`: Q waits in registers for all tiles of keys.
    """

    l2: ClassVar[int] = L2

    warp_rows: int
    stages: int
    resident: bool = False

    @property
    def warps(self) -> int:
        return self.tile_m // self.warp_rows

    @property
    def output_direct(self) -> bool:
        """Rows leave from registers: no copy of these GPUs takes a tile from shared memory to a tensor."""
        return True

    @property
    def reads_far_ahead(self) -> bool:
        return self.stages > 1

    @property
    def copies_are_whole(self) -> bool:
        """Whether no tile has fewer rows than all threads copy at once, 16 bytes each of lines of up to 128."""
        tiles = ((self.tile_m, self.d), (self.tile_n, self.d), (self.tile_n, self.dv))
        copied = 32 * self.warps * 16
        return all(rows * math.gcd(2 * columns, 128) % copied == 0 for rows, columns in tiles)

    def shared_memory(self, element_bytes: int) -> int:
        numbers = self.tile_m * self.d + self.stages * self.tile_n * (self.d + self.dv)
        return element_bytes * numbers + 1024

    def describe(self) -> dict[str, str]:
        stays = ", Q in registers" if self.resident else ""
        return {
            "roles": f"{self.warps} warps of {self.warp_rows} rows, which copy too, {self.stages} stages{stays}; "
            f"blocks on an SM: {self.blocks}",
            "overlap": f"K and V come under products; rescale after the softmax {self.threshold}",
        }
