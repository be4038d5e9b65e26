"""Two blocks that compute a tile together: which a block is, and how they tell each other that something is there."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import nvvm

from .branches import when
from .pipelines import BoundEdge, Slot
from .register_chunks import load_part, store_part
from .values import Fixed

_COPY = """{
    .reg .b32 there, told;
    mapa.shared::cluster.u32 there, {$r0}, {$r3};
    mapa.shared::cluster.u32 told, {$r2}, {$r3};
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [{$r1}], SIZE, [told];
}"""
LEADER = 0  # the block whose warp starts what both compute


def rank() -> Int32:
    """Which block of its pair this is; whoever wants it reads it."""
    return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())


def other() -> Int32:
    """Which block of the pair the other one is."""
    return 1 - rank()


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
        barrier = barriers + stage

        def expect() -> None:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, 2 * self.bytes)

        when(rank() == LEADER, expect)


@dataclasses.dataclass(frozen=True)
class PairWarps:
    """`count` warps of each block, which arrive at the leader's barrier."""

    count: int

    @property
    def arrivals(self) -> int:
        return 2 * self.count

    def arrive(self, barriers: cute.Pointer, stage: Int32, lane: Any) -> None:
        arrive_at(barriers + stage, LEADER, lane)


@dataclasses.dataclass(frozen=True)
class OtherWarps:
    """`count` warps of the other block: each arrives at that block's barrier."""

    count: int

    @property
    def arrivals(self) -> int:
        return self.count

    def arrive(self, barriers: cute.Pointer, stage: Int32, lane: Any) -> None:
        arrive_at(barriers + stage, other(), lane)


@dataclasses.dataclass(frozen=True)
class BothWarps:
    """`count` warps of each block, which arrive at the barriers of both."""

    count: int

    @property
    def arrivals(self) -> int:
        return 2 * self.count

    def arrive(self, barriers: cute.Pointer, stage: Int32, lane: Any) -> None:
        barrier, there = barriers + stage, other()

        def arrive_in_both() -> None:
            cute.arch.mbarrier_arrive(barrier)
            cute.arch.mbarrier_arrive(barrier, there)

        when(lane == 0, arrive_in_both)


def copy_across(source: Int32, target: Int32, barrier: cute.Pointer, size: int) -> None:
    """Starts a copy from this block's shared memory to the other's, which completes on `barrier` there; one warp."""
    block = other()
    with cute.arch.elect_one():
        cute.arch.inline_ptx(_COPY.replace("SIZE", str(size)), read_only_args=[target, source, barrier, block])


class PairSums(Fixed):
    """Sums of which two blocks have a part each: what a thread has is added to by the one of its number in the other.

    As a + b is b + a, both then have the same bits. `edge` has `OtherWarps` at both ends; `room` (numbers,) of shared
    memory is for the other's, in the order of `register_chunks`.
    """

    def __init__(self, edge: BoundEdge, room: cute.Tensor, thread: Any, lane: Any) -> None:
        self.edge, self.room, self.thread, self.lane = edge, room, thread, lane

    def add(self, registers: cute.Tensor, slot: Slot) -> None:
        """The other block's registers to these."""
        self.edge.wait_empty(slot)
        there = cute.make_tensor(cute.arch.map_dsmem_ptr(self.room.iterator, other()), self.room.layout)
        store_part(there, registers, 0, self.thread)
        cute.arch.sync_warp()
        self.edge.fill(slot, self.lane)
        self.edge.wait(slot)
        found = cute.make_rmem_tensor_like(registers)
        load_part(self.room, found, 0, self.thread)
        cute.arch.sync_warp()
        self.edge.release(slot, self.lane)
        for i in range(cute.size(registers)):
            registers[i] = registers[i] + found[i]


def arrive_at(barrier: cute.Pointer, block: Any, lane: Any) -> None:
    """At a barrier of a block of the pair, which then sees what this thread wrote."""
    when(lane == 0, lambda: cute.arch.mbarrier_arrive(barrier, block, scope=nvvm.MemScopeKind.CLUSTER))
