"""How tiles of a forward of warps come to shared memory: by 16 bytes a thread, or in bulk where a GPU can.

Both know which of a work tile's kv tiles is asked for by a step, which the rows carry from one to the next.
"""

import abc
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.memory import SmemAllocator

from ...primitives.cut_rows import load, partition
from ...primitives.kv_source import kv_source
from ...primitives.pipelines import BoundEdge, Copies, Edge, Slot, Warps, start_edges
from ...primitives.row_copies import QuerySource, RowCopies, key_source
from ...primitives.swizzled_tiles import tile_layout
from ...primitives.values import Bundle, Fixed, permuted
from ..fused.kernels.forward import prefetch
from ..fused.kernels.forward_call import ForwardOperands, HostRows, Operands, bulk_operands, plain_output
from ..fused.planning.arguments import ForwardArguments
from ..fused.planning.plan import ForwardPlan
from .steps import Step
from .tiling import WarpTiling

WIDEST_IN_BULK = 128  # of D 192 and 256 seven of 48 kernels spilled 29 to 36 in bulk, none of five of these by lines


class WarpBlock(Fixed):
    """Shared memory of one block: where Q, K and V lie."""

    rings: tuple[BoundEdge, ...] = ()

    def __init__(self, tiling: WarpTiling, dtype: Any) -> None:
        self.dtype = dtype
        smem = SmemAllocator()
        self.sQ = self.tiles(smem, tile_layout(tiling.tile_m, tiling.d))
        self.sK = self.tiles(smem, tile_layout(tiling.tile_n, tiling.d, tiling.stages))
        self.sV = self.tiles(smem, tile_layout(tiling.tile_n, tiling.dv, tiling.stages))
        self.more_memory(smem, tiling)

    def tiles(self, smem: SmemAllocator, layout: Any) -> cute.Tensor:
        return smem.allocate_tensor(self.dtype, layout.outer, 1024, swizzle=layout.inner)

    def more_memory(self, smem: SmemAllocator, tiling: WarpTiling) -> None:
        """What lies behind them."""

    def start(self, call: Any) -> None:
        """All threads of the block, before anything comes."""


class TileCopies(Fixed, abc.ABC):
    """A work tile's Q, K and V on their way to a block, and how its warps hear of them."""

    block: ClassVar[type[WarpBlock]] = WarpBlock

    @staticmethod
    @abc.abstractmethod
    def operands(kernel: Any, given: ForwardArguments, host: HostRows) -> Operands:
        """How the kernel's copies see the tensors."""

    @abc.abstractmethod
    def begin(self, slots: Any) -> Any:
        """Q, and as many tiles as there are stages; of the last one K alone, see `keys_there`. Gives the first step."""

    @abc.abstractmethod
    def keys_there(self, step: Any) -> None:
        """Until K of a step is there; V of the last step whose stage is free then starts."""

    @abc.abstractmethod
    def values_there(self, step: Any) -> None:
        """Until V of a step is there, whose K has been multiplied, so that another K starts in its stage."""

    def values_read(self, step: Any) -> None:
        """V of a step has been multiplied."""

    def end(self, step: Any, slots: Any) -> Any:
        """Q has been read; what the next work tile of a block that stays begins with, behind the last step."""
        return slots


class LineCopies(TileCopies):
    """By all threads of a block, 16 bytes each, in groups: K0 with Q, V0, K1, V1, ...

    Where all meet, each has waited for its own copies, so all of them are there; and all have read the stage into which
    the next copies go.
    """

    def __init__(self, role: Any, work: Any, tiles: Any) -> None:
        self.work, self.tiles, self.memory = work, tiles, role.block
        self.tensors, self.tiling, self.plan = role.call.tensors, role.tiling, role.plan
        self.heads, self.threads = role.kernel.heads, role.kernel.threads

    @staticmethod
    def operands(kernel: Any, given: ForwardArguments, host: HostRows) -> Operands:
        layout = kernel.plan.layout
        q = given.q if layout.q == "dense" else permuted(given.q, 1, 0, 2)
        k, v = (permuted(t, 1, 0, 2) if layout.kv == "packed" else t for t in (given.k, given.v))
        none = ForwardOperands(None, None, None, None)
        return none, ForwardOperands(q, k, v, plain_output(kernel.plan, given))

    def part(self, rows: int, columns: int, there: int) -> RowCopies:
        return RowCopies(cute.arch.thread_idx()[0], self.threads, rows, columns, there)

    def begin(self, slots: Any) -> Step:
        tiling, work, first = self.tiling, self.work, Step.first(self.tiling.stages)
        if tiling.persistent:
            cute.arch.sync_threads()  # all have read the tile before
        source = QuerySource(work.queries, self.tensors.q, self.heads, work.h, work.m * tiling.tile_m)
        self.part(tiling.tile_m, tiling.d, self.plan.head_dim).start(source, _address(self.memory.sQ))
        step = first
        for n in range(tiling.stages):
            self.start_keys(step)
            if n + 1 < tiling.stages:
                self.start_values(step)
                step = step.next()
        return first

    def keys_there(self, step: Step) -> None:
        self.meet()
        self.start_values(step.after(self.tiling.stages - 1))

    def values_there(self, step: Step) -> None:
        self.meet()
        self.start_keys(step.after(self.tiling.stages))

    def meet(self) -> None:
        cute.arch.cp_async_wait_group(2 * (self.tiling.stages - 1))
        cute.arch.sync_threads()

    def start_keys(self, step: Step) -> None:
        self.start(step, self.tensors.k, self.memory.sK, self.tiling.d, self.plan.head_dim)

    def start_values(self, step: Step) -> None:
        self.start(step, self.tensors.v, self.memory.sV, self.tiling.dv, self.plan.head_dim_v)

    @cute.jit
    def start(self, step, tensor, shared, columns: cutlass.Constexpr[int], there: cutlass.Constexpr[int]):
        """A group of copies; an empty one behind the last tile."""
        if step.number < self.tiles.count:
            first = self.work.keys.from_start(self.tiles.tile(step.number) * self.tiling.tile_n)
            source = key_source(self.work.keys, tensor, self.work.kv_head, first)
            self.part(self.tiling.tile_n, columns, there).start(source, _address(shared[None, None, step.stage]))
        cute.arch.cp_async_commit_group()


def _address(shared: cute.Tensor) -> Any:
    return shared.iterator.toint()


class BulkBlock(WarpBlock):
    """A block whose warps hear of bulk copies by edges of Q, K and V, and say by them what they have read."""

    def more_memory(self, smem: SmemAllocator, tiling: WarpTiling) -> None:
        wide, readers = self.dtype.width // 8, Warps(tiling.warps)
        self.q_edge, self.k_edge, self.v_edge = self.edges = Edge.allocate(
            smem,
            [
                Edge(1, Copies(tiling.tile_m * tiling.d * wide), readers),
                Edge(tiling.stages, Copies(tiling.tile_n * tiling.d * wide), readers),
                Edge(tiling.stages, Copies(tiling.tile_n * tiling.dv * wide), readers),
            ],
        )
        self.rings = self.q_edge, self.k_edge

    def start(self, call: Any) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        prefetch(call, warp == 0)
        start_edges(self.edges, warp)


class BulkStep(Bundle):
    """A step, and where K and V of it lie in their rings."""

    parts = ("number", "slot")

    def __init__(self, number: Any, slot: Slot) -> None:
        self.number, self.slot = number, slot

    @property
    def stage(self) -> Any:
        return self.slot.index if self.slot.stages > 1 else 0

    def next(self) -> "BulkStep":
        return self.after(1)

    def after(self, count: int) -> "BulkStep":
        return BulkStep(self.number + count, self.slot.after(count))


class BulkCopies(TileCopies):
    """In bulk, by the first warp, which computes too. It alone waits until all have read a stage.

    A copying warp more would leave registers for one block on an SM where there are two.
    """

    block = BulkBlock

    def __init__(self, role: Any, work: Any, tiles: Any) -> None:
        self.work, self.tiles, self.memory, self.tiling = work, tiles, role.block, role.tiling
        tmas, tensors, tiling = role.call.tmas, role.call.tensors, role.tiling
        self.tma_q = tmas.q
        self.gQ = work.queries.tiles(tensors.q, work.h, (role.kernel.heads.box(tiling.tile_m), tiling.d))
        source = kv_source(work.keys, work.kv_head, tiling.tile_n)
        self.keys = source.part(tmas.k, tensors.k, self.memory.sK, tiling.d)
        self.values = source.part(tmas.v, tensors.v, self.memory.sV, tiling.dv)
        self.warp, self.lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()

    @staticmethod
    def operands(kernel: Any, given: ForwardArguments, host: HostRows) -> Operands:
        return bulk_operands(kernel.plan, given, kernel.heads, kernel.tiling.tile_m, kernel.key_layout, host)

    def begin(self, slots: Any) -> "BulkStep":
        (q_slot, slot), tiling = slots, self.tiling
        first = step = BulkStep(Int32(0), slot)
        self.start_queries(q_slot)
        for n in range(tiling.stages):
            self.start(step, self.keys, self.memory.k_edge)
            if n + 1 < tiling.stages:
                self.start(step, self.values, self.memory.v_edge)
                step = step.next()
        self.memory.q_edge.wait(q_slot)
        return first

    def keys_there(self, step: BulkStep) -> None:
        self.memory.k_edge.wait(step.slot)
        self.start(step.after(self.tiling.stages - 1), self.values, self.memory.v_edge)

    def values_there(self, step: BulkStep) -> None:
        self.memory.k_edge.release(step.slot, self.lane)
        self.start(step.after(self.tiling.stages), self.keys, self.memory.k_edge)
        self.memory.v_edge.wait(step.slot)

    def values_read(self, step: BulkStep) -> None:
        self.memory.v_edge.release(step.slot, self.lane)

    def end(self, step: BulkStep, slots: Any) -> Any:
        q_slot, _ = slots
        if self.tiling.persistent:
            self.memory.q_edge.release(q_slot, self.lane)
        return q_slot.next(), step.slot

    @cute.jit
    def start_queries(self, slot):
        if self.warp == 0:
            bar = self.memory.q_edge.acquire(slot)
            tQsQ, tQgQ = partition(self.tma_q, self.memory.sQ, self.gQ)
            load(self.tma_q, tQgQ, self.work.m, tQsQ, bar)

    @cute.jit
    def start(self, step, part: cutlass.Constexpr, edge: cutlass.Constexpr):
        """A copy, where there is such a tile."""
        if (self.warp == 0) & (step.number < self.tiles.count):
            bar = edge.acquire(step.slot)
            part.start(self.tiles.tile(step.number), step.slot.index, bar)


def copies_of(plan: ForwardPlan[WarpTiling]) -> type[TileCopies]:
    """In bulk where the GPU can; a page is filled up with zeros, which no bulk copy does."""
    fits = max(plan.tiling.d, plan.tiling.dv) <= WIDEST_IN_BULK and plan.layout.kv != "paged"
    return BulkCopies if plan.target.copies_in_bulk and fits else LineCopies
