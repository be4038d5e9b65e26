"""How the Blackwell backward cuts the work: stages of shared memory, columns of tensor memory, roles of the warps."""

from __future__ import annotations

import dataclasses

from ...analysis.captured_gradient import Pattern
from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.target import Target
from ..fused.tiling import RowBackwardTiling
from ..fused.traits import padded, reads_pairs, sums_by
from .roles import REGISTERS, WARPGROUP
from .tensor_memory import LANES, BackwardTensorMemory, WideBackwardTensorMemory
from .tiling import ROWS

GROUPS = 2  # warpgroups that compute P and dS
BARRIERS = 512  # bytes: mbarriers and single words
RUN = 16  # scores of a thread that are a chain of sums by distance, see `primitives.lane_diagonals`
# (stages of Q, of dO, columns of dQ that leave together), the first that fit
SMALLER = (2, 2, 32), (2, 1, 32), (2, 1, 16), (1, 2, 32), (1, 1, 32), (1, 1, 16), (1, 1, 8)


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
# a number a row for 64 rows of a thread: with 176 they spilled 38, with 192 still 2
SUMMING_ROWS = BackwardRoles(compute_registers=200, dq_registers=56, other_registers=56)
# products of more addresses: with 64 they spilled 38, with 96 still 37 beside sums by distance; dQ with 80 spilled 37
WIDE = BackwardRoles(compute_registers=144, dq_registers=96, other_registers=128)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlackwellBackwardTiling(RowBackwardTiling):
    """Q with its rows' statistics lies in a ring of `q_stages`, dO in one of `do_stages`.

    `in_halves`: a thread computes half of its queries at a time.
    """

    q_stages: int
    do_stages: int
    in_halves: bool = False
    roles: BackwardRoles

    def __post_init__(self) -> None:
        _ = self.columns  # refuses a map that does not fit

    @property
    def columns(self) -> BackwardTensorMemory | WideBackwardTensorMemory:
        return BackwardTensorMemory.of(self.tile_m, self.d, self.dv)

    @property
    def score_tile(self) -> tuple[int, int]:
        """Rows and columns of dS in shared memory: it is transposed."""
        return self.tile_n, self.tile_m

    def shared_memory(self, element_bytes: int) -> int:
        small = BARRIERS + 4 * 2 * self.tile_m * self.q_stages
        staying = self.tile_n * (self.d + self.dv + self.tile_m)
        moving = self.tile_m * (self.q_stages * self.d + self.do_stages * self.dv)
        return -(-small // 1024) * 1024 + element_bytes * (staying + moving) + self.sums_memory

    @property
    def sums_memory(self) -> int:
        return 4 * (2 * self.tile_m * self.dq_part + self.distances)

    def describe(self) -> dict[str, str]:
        return {
            "roles": f"{self.roles}; stages: {self.q_stages} of Q, {self.do_stages} of dO",
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
    def score_tile(self) -> tuple[int, int]:
        return self.tile_m, self.tile_n


def backward_tiling(problem: Problem, program: Program, target: Target, deterministic: bool) -> BlackwellBackwardTiling:
    """Tiles of the backward kernel; no device has timed them: they fill shared and tensor memory."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    wide = max(d, dv) > LANES
    if wide:
        d, dv = (max(LANES, -(-width // 64) * 64) for width in (d, dv))
    roles = WIDE if wide else _roles(program)
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
        section_tiles=3 * target.sms // 2,  # as on Hopper, where heads alone left multiprocessors idle
        heads_together=problem.schedule.heads_together,
    )
    if sums_by(program, Pattern.DISTANCE):
        along = tiling.tile_n if wide else tiling.tile_m
        tiling = dataclasses.replace(tiling, distances=distances_of(along // GROUPS))
    smaller = (dataclasses.replace(tiling, q_stages=q, do_stages=do, dq_part=part) for q, do, part in SMALLER)
    return next(t for t in smaller if t.shared_memory(2) <= target.shared_memory)


def _roles(program: Program) -> BackwardRoles:
    """Where a thread has a key and half of the queries."""
    if sums_by(program, Pattern.ROW):
        return SUMMING_ROWS
    return READING if reads_pairs(program.score) else ROLES


def distances_of(count: int) -> int:
    """Numbers through which sums by distance pass, of a thread's `count` scores."""
    return GROUPS * WARPGROUP * (count // RUN) * (count + 32)
