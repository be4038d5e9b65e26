"""Rings of shared-memory stages between roles of a kernel: who fills a stage, who drains it.

An edge has a "full" and an "empty" mbarrier per stage. How many arrivals each waits for follows from the roles at the
edge's ends, never from a number beside them. `cutlass.pipeline` has rings too; its counts are handed in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from .branches import when
from .values import Fixed, choose


class Slot:
    """Position in a ring: which stage, and the parity of the lap."""

    def __init__(self, stages: int, index: Int32, phase: Int32):
        self.stages = stages
        self.index = index
        self.phase = phase

    @staticmethod
    def first(stages: int) -> Slot:
        return Slot(stages, Int32(0), Int32(0))

    def at(self, stage: int) -> Slot:
        """That stage in the same lap."""
        return Slot(self.stages, Int32(stage), self.phase)

    def next(self) -> Slot:
        if self.stages == 1:
            return Slot(1, self.index, self.phase ^ 1)
        if self.stages == 2:
            return Slot(2, self.index ^ 1, self.phase ^ self.index)
        step = self.index + 1
        wrapped = step == self.stages
        return Slot(self.stages, choose(wrapped, 0, step), choose(wrapped, self.phase ^ 1, self.phase))

    def after(self, count: int) -> Slot:
        """The slot that `count` times `next` gives."""
        laps, further = divmod(count, self.stages)
        if further == 0:
            return Slot(self.stages, self.index, self.phase ^ (laps & 1))
        step = self.index + further
        wrapped = step >= self.stages
        phase = self.phase ^ (laps & 1)
        return Slot(self.stages, choose(wrapped, step - self.stages, step), choose(wrapped, phase ^ 1, phase))

    def before(self) -> Slot:
        """The slot whose `next` is this one."""
        assert self.stages <= 2, "rings of more stages are only walked forward"
        if self.stages == 1:
            return self.next()
        return Slot(2, self.index ^ 1, self.phase ^ self.index ^ 1)

    def __extract_mlir_values__(self):
        return [self.index.ir_value(), self.phase.ir_value()]

    def __new_from_mlir_values__(self, values):
        return Slot(self.stages, Int32(values[0]), Int32(values[1]))


class EdgeEnd(Protocol):
    """Who takes part at one end of an edge: how many arrivals end a phase of its barrier, and how each is made.

    An end of another kind (a tensor core that commits, a block of the cluster) is one more class with these two.
    """

    @property
    def arrivals(self) -> int: ...

    def arrive(self, barriers: cute.Pointer, stage: Int32, lane: Any) -> None: ...


@dataclasses.dataclass(frozen=True)
class Copies:
    """One warp whose bulk copies bring `bytes` per stage: the barrier counts these beside the warp's own arrival.

    With no bytes a stage holds no data, only that it is its turn.
    """

    bytes: int
    arrivals: ClassVar[int] = 1

    def arrive(self, barriers: cute.Pointer, stage: Int32, lane: Any) -> None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barriers + stage, self.bytes)


@dataclasses.dataclass(frozen=True)
class Warps:
    """`count` warps, each of which arrives once when it is done with a stage."""

    count: int

    @property
    def arrivals(self) -> int:
        return self.count

    def arrive(self, barriers: cute.Pointer, stage: Int32, lane: Any) -> None:
        # predicated by lane, not elect: the lane number is at hand and no warp vote is needed
        barrier = barriers + stage
        when(lane == 0, lambda: cute.arch.mbarrier_arrive(barrier))


@dataclasses.dataclass(frozen=True)
class Edge:
    """A ring of stages that `producer` fills and `consumers` drain.

    Consumers None: another edge, which they fill, says when a stage is free again. `tries_first`: a wait looks once
    before its loop, as ptxas makes it of all waits of a kernel, or of none, in whose way the loop's instructions stand.
    """

    stages: int
    producer: EdgeEnd
    consumers: EdgeEnd | None
    tries_first: bool = False

    @property
    def barriers(self) -> int:
        return self.stages if self.consumers is None else 2 * self.stages

    @staticmethod
    def allocate(smem: SmemAllocator, edges: Sequence[Edge]) -> list[BoundEdge]:
        """The edges with mbarriers in shared memory, next to each other."""
        barriers = smem.allocate_array(Int64, sum(e.barriers for e in edges))
        bound = []
        for edge in edges:
            bound.append(BoundEdge(edge, barriers))
            barriers = barriers + edge.barriers
        return bound


_WAIT = """{
    .reg .pred there;
    mbarrier.try_wait.parity.shared.b64 there, [{$r0}], {$r1};
    @there bra.uni DONE;
AGAIN:
    mbarrier.try_wait.parity.shared.b64 there, [{$r0}], {$r1}, 10000000;
    @there bra.uni DONE;
    bra.uni AGAIN;
DONE:
}"""


class BoundEdge(Fixed):
    """An edge with its mbarriers: full ones first, then empty ones."""

    def __init__(self, edge: Edge, barriers: cute.Pointer) -> None:
        self.edge = edge
        self.full = barriers
        self.empty = barriers + edge.stages

    @property
    def first(self) -> Slot:
        return Slot.first(self.edge.stages)

    def init(self) -> None:
        """Called by one thread; see `start_edges`."""
        for stage in range(self.edge.stages):
            cute.arch.mbarrier_init(self.full + stage, self.edge.producer.arrivals)
            if self.edge.consumers is not None:
                cute.arch.mbarrier_init(self.empty + stage, self.edge.consumers.arrivals)

    def acquire(self, slot: Slot) -> cute.Pointer:
        """Producer warp: wait until the stage is free, and arrive; gives the mbarrier that copies complete on."""
        self.wait_empty(slot)
        self.fill(slot)
        return self.full + slot.index

    def fill(self, slot: Slot, lane: Any = None) -> None:
        """Producer: arrives at a stage that it knows to be free."""
        self.edge.producer.arrive(self.full, slot.index, lane)

    def wait_empty(self, slot: Slot) -> None:
        """Producer: wait until what the stage held before has been read."""
        assert self.edge.consumers is not None, "no barrier of this edge says so: it would be the neighbour's"
        self._wait(self.empty + slot.index, slot.phase ^ 1)

    def wait(self, slot: Slot) -> None:
        """Consumer: wait until the stage holds its data."""
        self._wait(self.full + slot.index, slot.phase)

    def _wait(self, barrier: cute.Pointer, parity: Int32) -> None:
        if self.edge.tries_first:
            cute.arch.inline_ptx(_WAIT, read_only_args=[barrier, parity])
        else:
            cute.arch.mbarrier_wait(barrier, parity)

    def release(self, slot: Slot, lane: Any) -> None:
        """Consumer: the stage has been read."""
        assert self.edge.consumers is not None, "another edge says that this one's stages are free"
        self.edge.consumers.arrive(self.empty, slot.index, lane)


@cute.jit
def start_edges(edges: cutlass.Constexpr, warp: Int32):
    """All threads of the block: its edges are there from now on."""
    if warp == 0:
        with cute.arch.elect_one():
            for edge in edges:
                edge.init()
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
