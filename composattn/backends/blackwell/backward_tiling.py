"""How the Blackwell backward cuts the work: stages of shared memory, columns of tensor memory, roles of the warps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from ...analysis.captured_gradient import Pattern
from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.planning.sharing import sharing_of
from ..fused.tiles.target import Target
from ..fused.tiles.tiling import RowBackwardTiling
from ..fused.tiles.traits import padded, reads_pairs, sees_score, sums_by
from .roles import REGISTERS, WARPGROUP
from .tensor_memory import (
    GROUPS,
    LANES,
    STRIP,
    BackwardTensorMemory,
    PairBackwardTensorMemory,
    QueryPairTensorMemory,
    WideBackwardTensorMemory,
    WidePairBackwardTensorMemory,
)
from .tiling import ROWS

BARRIERS = 512  # bytes: mbarriers and single words
# Clocks of the busiest unit for 128 queries and as many keys, by one block and by two, by D and Dv: FlashAttention-4,
# table 3, and benchmarks/model/roofline.py. Of 128 and 192 by two that is the tensor core, of all others shared memory.
CLOCKS = {(128, 128): (3328, 2688), (192, 128): (8576, 3456), (128, 192): (7296, 3072)}
# likewise of wide rows by (D, Dv) on chip, by one block with transposed sums; and, whatever these are, by two blocks
# with half of the queries each, whose unit that multiplies is as busy
WIDE_ALONE = {(256, 256): 11776, (256, 192): 11392, (256, 128): 10240, (192, 256): 10112, (192, 192): 9728,
              (128, 256): 7680}  # fmt: skip
WIDE_PAIRED = 5120
WIDEST = 256
# gradients for whose sums these two have no registers: by head 30 spilled, by column 34
UNPAIRED = Pattern.HEAD, Pattern.ROW, Pattern.COLUMN, Pattern.PAIR
PIECE = 64  # columns, or queries, of Q and dO that come together where they stream
RUN = 16  # scores of a thread that are a chain of sums by distance, see `primitives.lane_diagonals`
# (stages of Q, of dO, columns of dQ that leave together), the first that fit
SMALLER = (2, 2, 32), (2, 1, 32), (2, 1, 16), (1, 2, 32), (1, 1, 32), (1, 1, 16), (1, 1, 8)

AnyTensorMemory = BackwardTensorMemory | PairBackwardTensorMemory | WideBackwardTensorMemory | QueryPairTensorMemory


@dataclasses.dataclass(frozen=True)
class BackwardRoles:
    """Two warpgroups compute P and dS, one takes dQ out; of the last one a warp multiplies, one copies, one waits for
    turns. Registers are those of a thread.
    """

    compute_registers: int
    dq_registers: int
    other_registers: int

    dq = GROUPS * WARPGROUP  # the first warp of each role
    matrix = dq + WARPGROUP
    load = matrix + 1
    turns = matrix + 2
    load_across = matrix + 3  # second operands, where what has to be waited for comes in another order
    threads = (GROUPS + 2) * WARPGROUP * 32

    def __post_init__(self) -> None:
        given = GROUPS * self.compute_registers + self.dq_registers + self.other_registers
        if given > (GROUPS + 2) * REGISTERS // self.threads:
            raise ValueError(f"{given} registers of a thread of each warpgroup, of {4 * REGISTERS // self.threads}")

    def __str__(self) -> str:
        registers = f"{self.compute_registers}/{self.dq_registers}/{self.other_registers}"
        return (
            f"P and dS {GROUPS} x 128 threads, half a row each; dQ 128 threads; a warp each for products, loads, "
            f"turns; registers {registers}"
        )


ROLES = BackwardRoles(compute_registers=176, dq_registers=96, other_registers=64)
# tensors read at (q, kv): relative bias of documents spilled 2, a gradient by pairs 38
READING = BackwardRoles(compute_registers=184, dq_registers=80, other_registers=64)
# sums by row, a number a row for 64 rows of a thread: with 176 they spilled 38, with 192 still 2; by pair of packed
# sequences 2 to 26 with those for reading
SUMMING = BackwardRoles(compute_registers=208, dq_registers=48, other_registers=48)
# by two blocks and in a fixed order: ALiBi spilled 4
TAKING_TURNS = BackwardRoles(compute_registers=192, dq_registers=72, other_registers=56)
# by two blocks and strips of queries: all 96 columns of dQ are in registers at once, as dP waits for them; with 160 for
# P and dS a causal mask spilled 12, with 168 ALiBi 26
STRIPS = BackwardRoles(compute_registers=176, dq_registers=112, other_registers=48)
# tensors read at (q, kv): there a relative bias for sm_103a spilled 26, sums by distance 26
STRIPS_READING = BackwardRoles(compute_registers=184, dq_registers=96, other_registers=48)
# products of more addresses: with 64 they spilled 38, with 96 still 37 beside sums by distance; dQ with 80 spilled 37
WIDE = BackwardRoles(compute_registers=144, dq_registers=96, other_registers=128)
# P and dS at once, where the derivative sees the score: a soft cap in a fixed order spilled 46, a third of them in dQ
WIDE_AT_ONCE = BackwardRoles(compute_registers=136, dq_registers=112, other_registers=128)

# by two blocks, a query and 64 keys each: with 184 a soft cap and a relative bias spilled 6; dQ with 64 and 32 columns
# at once up to 110, with 56 and 16 columns 2 beside sums by distance
WIDE_PAIR = BackwardRoles(compute_registers=192, dq_registers=64, other_registers=64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlackwellBackwardTiling(RowBackwardTiling):
    """Q with its rows' statistics lies in a ring of `q_stages`, dO in one of `do_stages`.

    `in_halves`: a thread computes half of its queries at a time.
    """

    q_stages: int
    do_stages: int
    in_halves: bool = False
    roles: BackwardRoles
    # of a tile of keys
    blocks: str = dataclasses.field(default="", compare=False, metadata={"why": "for people to read"})

    def __post_init__(self) -> None:
        _ = self.columns  # refuses a map that does not fit

    @property
    def columns(self) -> AnyTensorMemory:
        return BackwardTensorMemory.of(self.tile_m, self.d, self.dv)

    @property
    def row_stages(self) -> int:
        """Stages of LSE and D: as many as of Q."""
        return self.q_stages

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

    def place_of(self, name: str) -> str:
        """In whose place it lies: its own."""
        return name

    @property
    def places(self) -> Mapping[str, int]:
        """Numbers of each place in shared memory, as many as the largest has that lies there."""
        found: dict[str, int] = {}
        for name, (rows, columns, stages) in self.tiles.items():
            place = self.place_of(name)
            found[place] = max(found.get(place, 0), rows * columns * (stages or 1))
        return found

    def shared_memory(self, element_bytes: int) -> int:
        small = BARRIERS + 4 * 2 * self.tile_m * self.row_stages
        return -(-small // 1024) * 1024 + element_bytes * sum(self.places.values()) + self.sums_memory

    @property
    def sums_memory(self) -> int:
        return 4 * (self.dq_room + self.distances)

    @property
    def dq_room(self) -> int:
        """Numbers in shared memory through which dQ leaves."""
        return 2 * self.tile_m * self.dq_part

    def describe(self) -> dict[str, str]:
        return {
            "roles": f"{self.roles}; stages: {self.q_stages} of Q, {self.do_stages} of dO",
            "blocks": self.blocks,
            "columns": str(self.columns),
            "dQ": f"summed in fp32 in memory by bulk additions of {self.dq_part} columns",
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideBackwardTiling(BlackwellBackwardTiling):
    """For rows whose dK and dV of 128 keys would fill tensor memory: a thread has a query, and half of the keys."""

    kernel: str = "backward_wide"

    @property
    def columns(self) -> WideBackwardTensorMemory:
        return WideBackwardTensorMemory.of(self.tile_n, self.d, self.dv)

    @property
    def tiles(self) -> Mapping[str, tuple[int, int, int | None]]:
        return {**super().tiles, "ds": (self.tile_m, self.tile_n, None)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlackwellPairBackwardTiling(BlackwellBackwardTiling):
    """Two blocks multiply together, each with half of the keys and of the second operands, and leave half of dQ each.

    Of Q and dO a block has half of the rows (`q`, `do`) and half of the columns (`q_across`, `do_across`), each in one
    stage, of K also half of the columns for the keys of both, and of dS half of the queries.
    """

    kernel: str = "backward_pair"
    sharing: ClassVar[int] = 2

    @property
    def row_stages(self) -> int:
        """The next ones are wanted before Q's columns have been read."""
        return 2

    @property
    def columns(self) -> PairBackwardTensorMemory:
        return PairBackwardTensorMemory.of(self.tile_m, self.d, self.dv)

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

    kernel: str = "backward_wide_pair"
    over: ClassVar[Mapping[str, str]] = {"q": "ds", "do": "q_across"}

    @property
    def strip(self) -> int:
        return STRIP

    @property
    def columns(self) -> WidePairBackwardTensorMemory:
        return WidePairBackwardTensorMemory.of(self.tile_m, self.d, self.dv)

    def place_of(self, name: str) -> str:
        return self.over.get(name, name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryPairTiling(BlackwellBackwardTiling):
    """For wide rows two blocks multiply together: each has half of the queries, and for P, dS, K and V of the keys.

    Q and dO stream through a ring of `stages` that products with them find in the order in which they are issued:
    `PIECE` columns of its queries for S and dP, then `PIECE` queries, half of the columns, for dVᵀ and dKᵀ. Of K a
    block also has the columns that each part of dQ wants from it. dQ is added from registers.
    """

    kernel: str = "backward_query_pair"
    sharing: ClassVar[int] = 2
    stages: int

    @property
    def row_stages(self) -> int:
        """The next ones are wanted when these have been read."""
        return 1

    @property
    def columns(self) -> QueryPairTensorMemory:
        return QueryPairTensorMemory.of(self.tile_n, self.d)

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

    @property
    def by_columns(self) -> tuple[int, int]:
        """Queries and columns of a piece, of those that are summed over columns."""
        return self.tile_m // 2, PIECE

    @property
    def by_queries(self) -> tuple[int, int]:
        """Columns of operands that are summed over queries, which lie together."""
        return PIECE, self.tile_m // 2

    @property
    def dq_room(self) -> int:
        return 0

    def describe(self) -> dict[str, str]:
        return super().describe() | {
            "roles": f"{self.roles}; stages: {self.stages} of Q and dO",
            "dQ": f"summed in fp32 in memory, added from registers, {self.dq_at_once} columns at a time",
        }


def backward_tiling(problem: Problem, program: Program, target: Target, deterministic: bool) -> BlackwellBackwardTiling:
    """Tiles of the backward kernel; no device has timed them: they fill shared and tensor memory."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    wide = max(d, dv) > LANES
    if wide:
        d, dv = (max(LANES, -(-width // 64) * 64) for width in (d, dv))
    roles = _wide_roles(program) if wide else _roles(problem, program)
    tiling = (WideBackwardTiling if wide else BlackwellBackwardTiling)(
        tile_m=ROWS,
        tile_n=ROWS // 2 if wide else ROWS,
        d=d,
        dv=dv,
        q_stages=2,
        do_stages=2,
        dq_at_once=min(d, 64) if roles.dq_registers >= 96 else 32,
        roles=roles,
        in_halves=program.score is not None and roles is ROLES,  # ALiBi by a function spilled 4
        l2=64 << 20,
        heads_together=problem.schedule.heads_together,
    )
    if sums_by(program, Pattern.DISTANCE):
        along = tiling.tile_n if wide else tiling.tile_m
        tiling = dataclasses.replace(tiling, distances=distances_of(along // GROUPS))
    if (d, dv) in WIDE_ALONE:
        most = WIDE_ALONE[d, dv] / WIDE_PAIRED
        sharing = sharing_of(problem, program, (tiling.tile_n, ROWS), (ROWS, 2 * ROWS), most, UNPAIRED)
        tiling = dataclasses.replace(tiling, blocks=str(sharing))
        if sharing.blocks == 2:
            return _by_pairs_of_queries(tiling, program, target)
    if (d, dv) in CLOCKS:
        alone, paired = CLOCKS[d, dv]
        sharing = sharing_of(problem, program, (tiling.tile_n, ROWS), (2 * ROWS, ROWS), alone / paired)
        tiling = dataclasses.replace(tiling, blocks=str(sharing))
        if sharing.blocks == 2:
            return _by_pairs(tiling, program, target, deterministic)
    smaller = (dataclasses.replace(tiling, q_stages=q, do_stages=do, dq_part=part) for q, do, part in SMALLER)
    return next(t for t in smaller if t.shared_memory(2) <= target.shared_memory)


def _by_pairs(
    one: BlackwellBackwardTiling, program: Program, target: Target, deterministic: bool
) -> BlackwellPairBackwardTiling:
    """With what a block alone would have."""
    kept = {f.name: getattr(one, f.name) for f in dataclasses.fields(one)}
    own: dict[str, object] = {
        "tile_n": 2 * ROWS,
        "q_stages": 1,
        "do_stages": 1,
    }
    wide = max(one.d, one.dv) > LANES
    if wide:
        own |= {"roles": STRIPS, "in_halves": True, "dq_at_once": one.d // 2}
        if reads_pairs(program.score):
            own |= {"roles": STRIPS_READING, "dq_at_once": one.d // 4}
        if one.distances:
            own["distances"] = distances_of(STRIP)
    elif deterministic and one.in_halves:
        own["roles"] = TAKING_TURNS
    kind = WidePairBackwardTiling if wide else BlackwellPairBackwardTiling
    own["kernel"] = kind.kernel
    parts = (part for part in (32, 24, 16, 8) if one.d // 2 % part == 0)
    tilings = (kind(**{**kept, **own, "dq_part": part}) for part in parts)
    return next(t for t in tilings if t.shared_memory(2) <= target.shared_memory)


def _by_pairs_of_queries(one: BlackwellBackwardTiling, program: Program, target: Target) -> QueryPairTiling:
    """With what a block alone would have; rows of Q and dO that are narrower are padded."""
    kept = {f.name: getattr(one, f.name) for f in dataclasses.fields(one)}
    own: dict[str, object] = {
        "kernel": QueryPairTiling.kernel,
        "tile_m": 2 * one.tile_m,
        "tile_n": 2 * one.tile_n,
        "d": WIDEST,
        "dv": WIDEST,
        "dq_at_once": 16,
        "dq_part": 16,
        "roles": WIDE_PAIR,
        "in_halves": program.score is not None,
        "distances": distances_of(2 * one.tile_n // GROUPS) if one.distances else 0,
    }
    tilings = (QueryPairTiling(**{**kept, **own, "stages": stages}) for stages in (4, 3))
    return next(t for t in tilings if t.shared_memory(2) <= target.shared_memory)


def _wide_roles(program: Program) -> BackwardRoles:
    return WIDE_AT_ONCE if sees_score(program) else WIDE


def _roles(problem: Problem, program: Program) -> BackwardRoles:
    """Where a thread has a key and half of the queries."""
    if sums_by(program, Pattern.ROW) or (sums_by(program, Pattern.PAIR) and problem.layout.q == "packed"):
        return SUMMING
    return READING if reads_pairs(program.score) else ROLES


def distances_of(count: int) -> int:
    """Numbers through which sums by distance pass, of a thread's `count` scores."""
    return GROUPS * WARPGROUP * (count // RUN) * (count + 32)
