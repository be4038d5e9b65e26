"""Rings of shared-memory stages between a copying warp and computing warps, and turns between warpgroups.

An edge has a "full" and an "empty" mbarrier a stage. Arrive counts follow from who takes part, so they are
written once, here.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .values import Fixed, choose


class Slot:
    """Position in a ring: which stage, and the parity of the lap."""

    def __init__(self, stages: int, index: Int32, phase: Int32):
        self.stages = stages
        self.index = index
        self.phase = phase

    @staticmethod
    def first(stages: int) -> "Slot":
        return Slot(stages, Int32(0), Int32(0))

    def next(self) -> "Slot":
        if self.stages == 1:
            return Slot(1, self.index, self.phase ^ 1)
        if self.stages == 2:
            return Slot(2, self.index ^ 1, self.phase ^ self.index)
        step = self.index + 1
        wrapped = step == self.stages
        return Slot(self.stages, choose(wrapped, 0, step), choose(wrapped, self.phase ^ 1, self.phase))

    def __extract_mlir_values__(self):
        return [self.index.ir_value(), self.phase.ir_value()]

    def __new_from_mlir_values__(self, values):
        return Slot(self.stages, Int32(values[0]), Int32(values[1]))


@dataclasses.dataclass(frozen=True)
class Edge:
    """A ring filled by bulk tensor copies of `bytes` each and drained by `consumers` warps.

    The producer is one warp, of which one thread issues; each consuming warp arrives once when it has read a stage.
    """

    stages: int
    bytes: int
    consumers: int

    @property
    def barriers(self) -> int:
        return 2 * self.stages

    def at(self, barriers: cute.Pointer) -> "BoundEdge":
        return BoundEdge(self, barriers)


class BoundEdge(Fixed):
    """An edge with its mbarriers: full ones first, then empty ones."""

    def __init__(self, edge: Edge, barriers: cute.Pointer):
        self.edge = edge
        self.full = barriers
        self.empty = barriers + edge.stages

    def init(self) -> None:
        """Called by one thread, before the barrier of the block."""
        for stage in range(self.edge.stages):
            cute.arch.mbarrier_init(self.full + stage, 1)
            cute.arch.mbarrier_init(self.empty + stage, self.edge.consumers)

    def acquire(self, slot: Slot) -> cute.Pointer:
        """Producer warp: wait until the stage is free; gives the mbarrier that the copies complete on."""
        cute.arch.mbarrier_wait(self.empty + slot.index, slot.phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + slot.index, self.edge.bytes)
        return self.full + slot.index

    def wait_empty(self, slot: Slot) -> None:
        """Producer: wait until the stage before `slot` in a ring of one has been read."""
        cute.arch.mbarrier_wait(self.empty + slot.index, slot.phase ^ 1)

    def wait(self, slot: Slot) -> None:
        """Consumer: wait until the stage holds its data."""
        cute.arch.mbarrier_wait(self.full + slot.index, slot.phase)

    def release(self, slot: Slot, lane) -> None:
        """Consumer warp: the stage has been read."""
        # predicated by lane, not elect: the lane number is at hand and no warp vote is needed
        _arrive_if(self.empty + slot.index, lane == 0)


@cute.jit
def _arrive_if(barrier: cute.Pointer, condition: cutlass.Boolean):
    if condition:
        cute.arch.mbarrier_arrive(barrier)


@dataclasses.dataclass(frozen=True)
class Turns(Fixed):
    """Consumer warpgroups take turns at the matrix unit, so one's softmax runs under another's products.

    One named barrier a warpgroup, of two warpgroups' threads: its owner waits on it, the one before arrives.
    """

    warpgroups: int
    first_barrier: int

    def start(self, warpgroup) -> None:
        """The last warpgroup lets the first one begin."""
        if self.warpgroups > 1:
            _arrive_named_if(warpgroup == self.warpgroups - 1, self.first_barrier, 256)

    def take(self, warpgroup) -> None:
        if self.warpgroups > 1:
            cute.arch.barrier(barrier_id=self.first_barrier + warpgroup, number_of_threads=256)

    def give(self, warpgroup) -> None:
        if self.warpgroups > 1:
            after = (
                self.first_barrier + 1 - warpgroup
                if self.warpgroups == 2
                else self.first_barrier + choose(warpgroup == self.warpgroups - 1, Int32(0), warpgroup + 1)
            )
            cute.arch.barrier_arrive(barrier_id=after, number_of_threads=256)


@cute.jit
def _arrive_named_if(condition: cutlass.Boolean, barrier: cutlass.Constexpr, threads: cutlass.Constexpr):
    if condition:
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=threads)
