"""How kernels of warps cut the work, forward and backward: of a table the first row that fits."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.planning.facts import BACKWARD, FORWARD, Facts
from ..fused.planning.tables import rows_of, tables_of
from ..fused.tiles.few_queries import packed_heads
from ..fused.tiles.scheduler import Scheduler
from ..fused.tiles.target import Target
from ..fused.tiles.tiling import BackwardTiling, Chosen, ForwardTiling

ROWS = 16  # of a product
FEW = 64  # rows of the smallest tile
TABLES = tables_of(Path(__file__).with_name("tables.json"))  # fields of the tiling


def copied(tiling: WarpTiling | WarpBackwardTiling) -> bool:
    """Whether no tile has fewer rows than all threads copy at once, 16 bytes each of lines of up to 128."""
    tiles = itertools.product((tiling.tile_m, tiling.tile_n), (tiling.d, tiling.dv))
    return all(rows * math.gcd(2 * columns, 128) % (16 * 32 * tiling.warps) == 0 for rows, columns in tiles)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarpTiling(ForwardTiling):
    """Each warp has `warp_rows` of the query rows; K and V lie in `stages` each, and all threads copy."""

    l2: ClassVar[int] = 24 << 20  # bytes of K and V of the heads that are worked on together
    warp_rows: int
    stages: int
    anew: bool = False  # for each tile of keys lanes find anew where they read; else up to 12 registers keep addresses
    named_cutlass: bool = False

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
    def shared_memory(self) -> int:
        return 2 * (self.tile_m * self.d + self.stages * self.tile_n * (self.d + self.dv)) + 1024

    def fits(self, target: Target) -> bool:
        return copied(self) and super().fits(target)


@dataclasses.dataclass(frozen=True)
class Part:
    """A warp's part of a product: `rows`, and every `across`-th 16 columns of all of them."""

    rows: int
    across: int

    def serves(self, columns: int, pieces: int = 1) -> bool:
        """Whether warps have whole columns, that lie together in lines, in each of so many pieces, lines or parts."""
        line, piece = math.gcd(columns, 64), columns // pieces
        lies = 0 < self.across * ROWS <= line and math.gcd(line, piece) in (line, piece)
        return lies and columns // ROWS % (self.across * pieces) == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarpBackwardTiling(BackwardTiling):
    """All `warps` copy and compute; Q and dO lie in `stages` each. An SM holds so many `blocks`.

    Of each product a warp has some rows: `score_keys` of scores, `sum_keys` of dK and dV, `dq_rows` of dQ; those that
    have the same rows share its columns, which for scores are queries. `distances`: numbers in shared memory through
    which sums of gradients by distance pass. `dq_pieces`: a warp's part of dQ leaves in so many, by a loop. `held`: so
    many columns of K, then of V, are left operands of scores in registers, read once for all queries; at most all.
    """

    l2: ClassVar[int] = 16 << 20  # bytes of what the heads read and add to that run together

    warps: int
    score_keys: int
    sum_keys: int
    dq_rows: int
    stages: int = 1
    blocks: int = 1
    dq_pieces: int = 1
    held: int = 0
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

    def fits(self, target: Target) -> bool:
        """Whether threads copy whole tiles, and warps have whole parts."""
        parts = all((self.dq.serves(self.d, self.dq_pieces), self.sums.serves(self.d), self.sums.serves(self.dv)))
        whole = parts and self.score_queries >= ROWS and self.threads >= self.tile_m // 2 and copied(self)
        return whole and super().fits(target)

    def with_distances(self) -> WarpBackwardTiling:
        """With room for sums by distance, of which `Diagonals` puts a line for each of 8 keys of a warp."""
        diagonals = self.score_queries + self.score_keys - 1
        line = max(diagonals + 33, 64 + 32 * ((diagonals - 1) // 32))
        return dataclasses.replace(self, distances=8 * self.warps * -(-line // 8) * 8)

    @property
    def shared_memory(self) -> int:
        numbers = (self.tile_n + self.stages * self.tile_m) * (self.d + self.dv)
        weights = (2 - self.keeps_weights) * self.tile_m * self.tile_n
        return 2 * (numbers + weights) + 4 * (2 * self.stages * self.tile_m + self.distances)


def choose_forward(problem: Problem, program: Program, target: Target) -> Chosen:
    """Tiles of the forward kernel."""
    call = Facts(FORWARD, problem, program, target, rows=FEW, heads=packed_heads(problem, program, FEW))
    return _chosen(call, lambda said: forward_of(said, call))


def choose_backward(problem: Problem, program: Program, target: Target, deterministic: bool) -> Chosen:
    """Tiles of the backward kernel."""
    call = Facts(BACKWARD, problem, program, target, rows=FEW, deterministic=deterministic)
    return _chosen(call, lambda said: backward_of(said, call))


def _chosen(call: Facts, made: Callable[[Any], Any]) -> Chosen:
    """By the first row that is of such calls and fits."""
    found = (Chosen(made(row.says), f"{call}; {row.evidence}") for row in rows_of(TABLES[call.direction], call))
    return next(chosen for chosen in found if chosen.tiling.fits(call.target))


def forward_of(said: dict[str, Any], call: Facts) -> WarpTiling:
    """A tiling with these fields; a call may ask for its scheduler."""
    asked = Scheduler.asked(call.persistent)
    scheduler = Scheduler(said.get("scheduler", asked)) if call.persistent is None else asked
    fields = said | {"d": call.d, "dv": call.dv, "scheduler": scheduler}
    return WarpTiling(**fields, packed_heads=call.heads, heads_together=call.heads_together)


def backward_of(said: dict[str, Any], call: Facts) -> WarpBackwardTiling:
    """A tiling with these fields."""
    tiling = WarpBackwardTiling(**said, d=call.d, dv=call.dv, heads_together=call.heads_together)
    return tiling.with_distances() if call.by_distance else tiling
