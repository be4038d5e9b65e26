"""How the Blackwell backward cuts the work: stages of shared memory, columns of tensor memory, roles of the warps."""

from __future__ import annotations

import dataclasses

from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.target import Target
from ..fused.tiling import RowBackwardTiling
from ..fused.traits import padded, reads_pairs, sums_by_distance
from .roles import REGISTERS, WARPGROUP
from .tensor_memory import BackwardTensorMemory
from .tiling import ROWS

GROUPS = 2  # warpgroups that compute P and dS
BARRIERS = 512  # bytes: mbarriers and single words
LINES = 4  # of sums by distance, that a warp has


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
            f"P and dS {GROUPS} x 128 threads, half a row of queries each; dQ 128 threads; a warp each for products, "
            f"loads, turns; registers {registers}"
        )


ROLES = BackwardRoles(compute_registers=176, dq_registers=96, other_registers=64)
# tensors read at (q, kv): relative bias of documents spilled 2, a gradient by pairs 38
READING = BackwardRoles(compute_registers=184, dq_registers=80, other_registers=64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlackwellBackwardTiling(RowBackwardTiling):
    """Q with its rows' statistics lies in a ring of `q_stages`, dO in one of `do_stages`."""

    q_stages: int
    do_stages: int
    roles: BackwardRoles

    def __post_init__(self) -> None:
        _ = self.columns  # refuses a map that does not fit

    @property
    def columns(self) -> BackwardTensorMemory:
        return BackwardTensorMemory.of(self.tile_m, self.d, self.dv)

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
            "roles": f"{self.roles}; {self.q_stages} stages of Q, {self.do_stages} of dO",
            "columns": str(self.columns),
            "dQ": f"summed in fp32 in memory by bulk additions of {self.dq_part} columns",
        }


def backward_tiling(problem: Problem, program: Program, target: Target, deterministic: bool) -> BlackwellBackwardTiling:
    """Tiles of the backward kernel; no device has timed them: they fill shared and tensor memory."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    reads = reads_pairs(program.score)
    tiling = BlackwellBackwardTiling(
        tile_m=ROWS,
        tile_n=ROWS,
        d=d,
        dv=dv,
        q_stages=2,
        do_stages=2,
        dq_at_once=32 if reads else min(d, 64),
        roles=READING if reads else ROLES,
        l2=64 << 20,
        section_tiles=3 * target.sms // 2,  # as on Hopper, where heads alone left multiprocessors idle
        heads_together=problem.schedule.heads_together,
    )
    if sums_by_distance(program):
        tiling = dataclasses.replace(tiling, distances=GROUPS * WARPGROUP * LINES * (tiling.queries + 32))
    smaller = tiling, dataclasses.replace(tiling, do_stages=1), dataclasses.replace(tiling, do_stages=1, dq_part=16)
    return next(t for t in smaller if t.shared_memory(2) <= target.shared_memory)
