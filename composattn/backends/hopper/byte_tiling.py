"""Tiles of the Hopper forward where K and V come as bytes: what they take of shared memory and of registers more."""

from __future__ import annotations

import dataclasses
import math

from .tiling import EVEN_STAGES, HopperTiling, Registers, registers_for

OF_BYTES = "_of_bytes"
OF_KEYS, OF_VALUES = 4, 3  # warps that make 16-bit numbers of bytes: a warpgroup more, and those that copy nothing
LARGEST = 65504.0  # of fp16
CONVERTERS = 3  # of each warpgroup, where D is above 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByteTiling(HopperTiling):
    """K and V come as 8-bit numbers, each into a ring of its own of `byte_stages`; `parts` of them make a tile of keys.

    `scales_queries`: queries of bf16 are made fp16, and all that is multiplied is, see `scaled_queries`.
    """

    byte_stages: int
    parts: int = 1  # type: ignore[misc]
    scales_queries: bool = False

    @property
    def offset(self) -> float:
        """P is as large as fp16 holds where its maximum may lag: bf16 has smaller numbers."""
        return float(math.floor(math.log2(LARGEST) - self.threshold.most)) if self.scales_queries else 0.0

    @property
    def step(self) -> str:
        return self.kernel + OF_BYTES

    def registers(self, paged: bool) -> Registers:
        return registers_for(self.warpgroups, self.blocks, paged, converts=True)

    @property
    def reads_far_ahead(self) -> bool:
        return self.byte_stages > EVEN_STAGES * self.parts

    def _bytes(self, q_stages: int, element_bytes: int) -> int:
        return super()._bytes(q_stages, element_bytes) + self.byte_stages * self.key_box[0] * (self.d + self.dv)
