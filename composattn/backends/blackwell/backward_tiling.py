"""How the Blackwell backward cuts the work: stages of shared memory, columns of tensor memory, roles of the warps.

Tables say by a call's class what it gets. No device timed them; ptxas found the spills. Two blocks share a tile of keys
where that takes fewer clocks of the busiest unit: for 128 queries and as many keys, by FlashAttention-4, table 3, and
benchmarks/model/roofline.py, one block of D 128 takes 3,328 and two 2,688; wider rows 7,296 to 11,776 and 3,072 to
5,120. So larger tiles pay if they visit at most 1.24 times the area, wide ones nearly always.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.planning.facts import BACKWARD, Facts
from ..fused.planning.tables import first
from ..fused.tiles.target import Target
from ..fused.tiles.tiling import BackwardTiling, Chosen, fitting
from .roles import WARPGROUP, BackwardRoles
from .tensor_memory import (
    GROUPS,
    STRIP,
    BackwardTensorMemory,
    PairBackwardTensorMemory,
    QueryPairTensorMemory,
    WideBackwardTensorMemory,
    WidePairBackwardTensorMemory,
)
from .tiling import ROWS, TABLES, UNTIMED

BARRIERS = 512  # bytes: mbarriers and single words
PIECE = 64  # columns, or queries, of Q and dO that come together where they stream
RUN = 16  # scores of a thread that are a chain of sums by distance, see `primitives.lane_diagonals`


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlackwellBackwardTiling(BackwardTiling):
    """Products lie in memory of the tensor core, a row a thread: `groups` of threads share the queries of a tile.

    Q lies in a ring of `q_stages`, dO in one of `do_stages`, statistics of their rows in one of `row_stages`.
    `in_halves`: a thread computes half of its queries at a time. `dq_at_once`: columns of a row of dQ that a thread has
    in registers, which leave in parts of `dq_part` through `dq_buffers`. `distances`: numbers in shared memory through
    which sums of gradients by distance pass. `scores`: of a thread in a row. `widths`: of rows on chip. `over`: tiles
    that come in the place of others.
    """

    l2: ClassVar[int] = 64 << 20
    memory: ClassVar[Any] = BackwardTensorMemory
    groups: ClassVar[int] = GROUPS
    dq_buffers: ClassVar[int] = 2
    scores: ClassVar[int] = ROWS // GROUPS
    widths: ClassVar[Sequence[int]] = range(32, 129, 32)
    over: ClassVar[Mapping[str, str]] = {}

    tile_m: int = ROWS
    tile_n: int = ROWS
    q_stages: int
    do_stages: int
    row_stages: int
    in_halves: bool = False
    dq_at_once: int
    dq_part: int = 32
    distances: int = 0
    roles: BackwardRoles

    def __post_init__(self) -> None:
        _ = self.columns  # refuses a map that does not fit

    @property
    def columns(self) -> Any:
        """Where scores, gradients, dv, dk and dq lie in the unit's `memory`."""
        return self.memory.of(self)

    @property
    def queries(self) -> int:
        """Queries of a tile that a thread with a key has."""
        return self.tile_m // self.groups

    @property
    def strip(self) -> int:
        """How many of these queries lie side by side; groups of threads have such strips in turns."""
        return self.queries

    @property
    def keys(self) -> int:
        """Keys of a tile that a thread with a query has."""
        return self.tile_n // self.groups

    @property
    def tiles(self) -> Mapping[str, tuple[int, int, int | None]]:
        """In shared memory: rows, columns, stages. dS is transposed."""
        return {
            "k": (self.tile_n, self.d, None),
            "v": (self.tile_n, self.dv, None),
            "q": (self.tile_m, self.d, self.q_stages),
            "do": (self.tile_m, self.dv, self.do_stages),
            "ds": (self.tile_n, self.tile_m, None),
        }

    @property
    def places(self) -> Mapping[str, int]:
        """Numbers of each place in shared memory, as many as the largest has that lies there."""
        found: dict[str, int] = {}
        for name, (rows, columns, stages) in self.tiles.items():
            place = self.over.get(name, name)
            found[place] = max(found.get(place, 0), rows * columns * (stages or 1))
        return found

    @property
    def dq_room(self) -> int:
        """Numbers in shared memory through which dQ leaves."""
        return self.dq_buffers * self.tile_m * self.dq_part

    def describe(self) -> dict[str, str]:
        return super().describe() | {"columns": str(self.columns)}

    @property
    def shared_memory(self) -> int:
        small, sums = BARRIERS + 4 * 2 * self.tile_m * self.row_stages, 4 * (self.dq_room + self.distances)
        return -(-small // 1024) * 1024 + 2 * sum(self.places.values()) + sums

    def fits(self, target: Target) -> bool:
        """Whether it has room, and a thread's columns of dQ leave in whole parts."""
        return self.d // self.sharing % self.dq_part == 0 and super().fits(target)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideBackwardTiling(BlackwellBackwardTiling):
    """For rows whose dK and dV of 128 keys would fill tensor memory: a thread has a query, and half of the keys."""

    memory: ClassVar[Any] = WideBackwardTensorMemory
    scores: ClassVar[int] = ROWS // 2 // GROUPS
    widths: ClassVar[Sequence[int]] = range(128, 257, 64)

    kernel: str = "backward_wide"
    tile_n: int = ROWS // 2

    @property
    def tiles(self) -> Mapping[str, tuple[int, int, int | None]]:
        return {**super().tiles, "ds": (self.tile_m, self.tile_n, None)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlackwellPairBackwardTiling(BlackwellBackwardTiling):
    """Two blocks multiply together, each with half of the keys and of the second operands, and leave half of dQ each.

    Of Q and dO a block has half of the rows (`q`, `do`) and half of the columns (`q_across`, `do_across`), each in one
    stage, of K also half of the columns for the keys of both, and of dS half of the queries. The next statistics are
    wanted before Q's columns have been read.
    """

    memory: ClassVar[Any] = PairBackwardTensorMemory
    sharing: ClassVar[int] = 2

    kernel: str = "backward_pair"
    tile_n: int = 2 * ROWS

    @property
    def tiles(self) -> Mapping[str, tuple[int, int, int | None]]:
        return {
            "k": (self.block_keys, self.d, None),
            "v": (self.block_keys, self.dv, None),
            "k_across": (self.tile_n, self.d // 2, None),
            "q": (self.tile_m // 2, self.d, None),
            "do": (self.tile_m // 2, self.dv, None),
            "q_across": (self.tile_m, self.d // 2, None),
            "do_across": (self.tile_m, self.dv // 2, None),
            "ds": (self.tile_n, self.tile_m // 2, None),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class WidePairBackwardTiling(BlackwellPairBackwardTiling):
    """Tiling of rows whose dK and dV leave few columns: a thread has two strips of queries, one of each block's.

    What doesn't fit beside each other comes after each other: Q of the next tile over dS, when dQ has read that, and dO
    over the columns of Q.
    """

    memory: ClassVar[Any] = WidePairBackwardTensorMemory
    scores: ClassVar[int] = STRIP
    widths: ClassVar[Sequence[int]] = (128, 192)
    over: ClassVar[Mapping[str, str]] = {"q": "ds", "do": "q_across"}

    kernel: str = "backward_wide_pair"

    @property
    def strip(self) -> int:
        return STRIP


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryPairTiling(BlackwellBackwardTiling):
    """For wide rows two blocks multiply together: each has half of the queries, and for P, dS, K and V of the keys.

    Q and dO stream through a ring of `stages` that products with them find in the order in which they are issued:
    `PIECE` columns of its queries for S and dP, summed over columns (`by_columns`: queries, columns of a piece), then
    `PIECE` queries, half of the columns, for dVᵀ and dKᵀ (`by_queries`: columns, which lie together, and queries). Of K
    a block also has the columns that each part of dQ wants from it. dQ is added from registers.
    """

    memory: ClassVar[Any] = QueryPairTensorMemory
    sharing: ClassVar[int] = 2
    dq_buffers: ClassVar[int] = 0
    widths: ClassVar[Sequence[int]] = (256,)
    by_columns: ClassVar[tuple[int, int]] = ROWS, PIECE
    by_queries: ClassVar[tuple[int, int]] = PIECE, ROWS

    kernel: str = "backward_query_pair"
    tile_m: int = 2 * ROWS
    stages: int

    @property
    def tiles(self) -> Mapping[str, tuple[int, int, int | None]]:
        return {
            "k": (self.block_keys, self.d, None),
            "v": (self.block_keys, self.dv, None),
            "k_across": (self.tile_n, PIECE, self.d // self.tile_n),
            "p": (self.tile_m, self.block_keys, None),
            "ds": (self.tile_m, self.block_keys, None),
            "pieces": (*self.by_columns, self.stages),
        }


KINDS: dict[str, type[BlackwellBackwardTiling]] = {
    "one": BlackwellBackwardTiling,
    "wide": WideBackwardTiling,
    "pair": BlackwellPairBackwardTiling,
    "wide pair": WidePairBackwardTiling,
    "query pair": QueryPairTiling,
}


def choose_backward(problem: Problem, program: Program, target: Target, deterministic: bool) -> Chosen:
    """Tiles of the backward kernel: they fill shared and tensor memory."""
    call = Facts(BACKWARD, problem, program, target, rows=ROWS, deterministic=deterministic)
    kind = kind_of(call)
    d, dv = (kind.widths[bisect.bisect_left(kind.widths, columns)] for columns in call.dims)
    said = first(TABLES["registers"], call, kernel=kind.kernel)  # and what a thread has at once
    fields = said | {
        "roles": BackwardRoles(*said["roles"]),
        "d": d,
        "dv": dv,
        "dq_at_once": min(said["dq_at_once"], d // kind.sharing),
        "distances": GROUPS * WARPGROUP * (kind.scores // RUN) * (kind.scores + 32) * call.by_distance,
        "heads_together": call.heads_together,
    }
    tilings = (kind(**fields | stages) for stages in first(TABLES["stages"], call, kernel=kind.kernel))
    return Chosen(fitting(tilings, target), f"{call}\n    {kind.kernel}; {UNTIMED}")


def kind_of(call: Facts) -> type[BlackwellBackwardTiling]:
    """The kernel of one block for a tile of keys, or of two."""
    return KINDS[first(TABLES["kinds"], call)]
