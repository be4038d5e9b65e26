"""Two blocks that compute a tile together: which a block is, and how they tell each other that something is there."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass._mlir.dialects import nvvm

from .values import Fixed

LEADER = 0  # the block whose warp starts what both compute


def rank() -> Int32:
    """Which block of its pair this is; whoever wants it reads it."""
    return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())


def meet() -> None:
    """All threads of both blocks."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@dataclasses.dataclass(frozen=True)
class PairCopies(Fixed):
    """A warp of each block, whose bulk copies bring `bytes` per stage and complete on the leader's barrier."""

    bytes: int
    arrivals: ClassVar[int] = 1

    def arrive(self, barriers: cute.Pointer, stage: Int32, lane: Any) -> None:
        _expect_if(barriers + stage, 2 * self.bytes, rank() == LEADER)


@dataclasses.dataclass(frozen=True)
class PairWarps:
    """So many warps of each block, which arrive at the leader's barrier."""

    count: int

    @property
    def arrivals(self) -> int:
        return 2 * self.count

    def arrive(self, barriers: cute.Pointer, stage: Int32, lane: Any) -> None:
        _arrive_if(barriers + stage, lane == 0)


@cute.jit
def _expect_if(barrier: cute.Pointer, count: cutlass.Constexpr, condition: Boolean):
    if condition:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, count)


@cute.jit
def _arrive_if(barrier: cute.Pointer, condition: Boolean):
    if condition:
        cute.arch.mbarrier_arrive(barrier, LEADER, scope=nvvm.MemScopeKind.CLUSTER)
