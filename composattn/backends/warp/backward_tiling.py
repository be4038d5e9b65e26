"""What a backward kernel of warps is cut into; `backward_table` says which a call gets."""

from __future__ import annotations

import dataclasses
import math

from ..fused.tiles.tiling import BackwardTiling

ROWS = 16  # of a product


@dataclasses.dataclass(frozen=True)
class Part:
    """A warp's part of a product: `rows`, and every `across`-th 16 columns of all of them."""

    rows: int
    across: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarpBackwardTiling(BackwardTiling):
    """All `warps` copy and compute; Q and dO lie in `stages` each. An SM holds so many `blocks`.

    Of each product a warp has some rows: `score_keys` of scores, `sum_keys` of dK and dV, `dq_rows` of dQ; those that
    have the same rows share its columns, which for scores are queries. `distances`: numbers in shared memory through
    which sums of gradients by distance pass.
    """

    warps: int
    score_keys: int
    sum_keys: int
    dq_rows: int
    stages: int = 1
    blocks: int = 1
    distances: int = 0

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def score_queries(self) -> int:
        """Queries of a warp's scores."""
        return self.tile_m * self.tile_n // (self.warps * self.score_keys)

    @property
    def sums(self) -> Part:
        """A warp's part of dK and dV."""
        return Part(self.sum_keys, self.warps * self.sum_keys // self.tile_n)

    @property
    def dq(self) -> Part:
        """A warp's part of dQ."""
        return Part(self.dq_rows, self.warps * self.dq_rows // self.tile_m)

    @property
    def keeps_weights(self) -> bool:
        """Whether P and dS are operands where they were computed, in registers; else they pass shared memory."""
        return self.sums == Part(self.score_keys, 1) and self.score_queries == self.tile_m

    @property
    def is_whole(self) -> bool:
        """Whether threads copy whole tiles, 16 bytes each of lines of up to 128, and warps have whole parts."""
        tiles = [(rows, columns) for rows in (self.tile_m, self.tile_n) for columns in (self.d, self.dv)]
        copied = all(rows * math.gcd(2 * columns, 128) % (16 * self.threads) == 0 for rows, columns in tiles)
        shared = ((self.dq, self.d), (self.sums, self.d), (self.sums, self.dv))
        parts = all(
            part.across > 0 and columns // ROWS % part.across == 0 and part.across * ROWS <= math.gcd(columns, 64)
            for part, columns in shared
        )
        return copied and parts and self.score_queries >= ROWS and self.threads >= self.tile_m // 2

    def with_distances(self) -> WarpBackwardTiling:
        """With room for sums by distance, of which `Diagonals` puts a line for each of 8 keys of a warp."""
        diagonals = self.score_queries + self.score_keys - 1
        line = max(diagonals + 33, 64 + 32 * ((diagonals - 1) // 32))
        return dataclasses.replace(self, distances=8 * self.warps * -(-line // 8) * 8)

    def shared_memory(self, element_bytes: int) -> int:
        numbers = (self.tile_n + self.stages * self.tile_m) * (self.d + self.dv)
        weights = (1 if self.keeps_weights else 2) * self.tile_m * self.tile_n
        statistics = 2 * self.stages * self.tile_m
        return element_bytes * (numbers + weights) + 4 * (statistics + self.distances) + 1024

    def describe(self) -> dict[str, str]:
        where = "registers" if self.keeps_weights else "shared memory"
        return {
            "stages": f"Q and dO {self.stages}; blocks on an SM: {self.blocks}",
            "roles": f"{self.warps} warps, which copy too, of {self.score_keys} keys and {self.score_queries} queries; "
            f"P and dS in {where}",
            "dQ": f"summed in fp32 in memory, {self.dq_rows} rows of a warp",
        }
