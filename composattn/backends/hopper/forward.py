"""The forward kernel for Hopper: warp-specialised, fed by bulk tensor copies, products on the warpgroup unit."""

import abc
import dataclasses
from typing import Any, TypeVar

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from ...primitives.arithmetic import IN_ORDER, ONE_BY_ONE, Arithmetic
from ...primitives.barriers import Barriers
from ...primitives.dynamic_scheduler import DynamicScheduler
from ...primitives.emit_tiles import BandTiles
from ...primitives.pipelines import Copies, Edge, Warps, start_edges
from ...primitives.swizzled_tiles import put_words, tensor_of, tile_layout
from ...primitives.values import Fixed, choose, permuted
from ..fused.kernels.forward import Forward, prefetch
from ..fused.kernels.forward_call import ForwardCall
from ..fused.kernels.registers.group_rows import ConsumeApart, GroupRows, RowConsume, RowConsumer, RowLoad
from ..fused.kernels.registers.guessing_rows import GuessingRows
from ..fused.planning.plan import ForwardPlan
from .tiling import OF_KEYS, OF_VALUES, SUMS, HopperTiling
from .wgmma import (
    MN,
    ROWS,
    STEP,
    WARPGROUP,
    WarpgroupProducts,
    first_rows_shape,
    fragment_shape,
    get,
    in_steps,
    issue,
    issue_in_parts,
    product,
    warps_of,
)
from .wide_tiling import WideTiling

AnyTiling = TypeVar("AnyTiling", HopperTiling, WideTiling)


class WarpgroupForward(Forward[AnyTiling]):
    """Some of the first `copying` warps copy; each warpgroup behind them has rows of queries, and most registers."""

    rows = ROWS
    copying = 4  # warps

    @property
    def arithmetic(self) -> Arithmetic:
        """Where rows know of no others, sums round alike wherever a row's keys begin."""
        return IN_ORDER if self.plan.batch_invariant else ONE_BY_ONE

    @abc.abstractmethod
    def block(self, call: ForwardCall) -> Any:
        """Shared memory and edges of a block."""

    @abc.abstractmethod
    def products(self, block: Any, number: Any) -> WarpgroupProducts:
        """The products of a warpgroup."""

    @abc.abstractmethod
    def copy(self, call: ForwardCall, block: Any, warp: Any) -> None:
        """What one of the first warps does."""

    @abc.abstractmethod
    def consume(self, call: ForwardCall, block: Any, thread: Any, scale_log2: Float32) -> None:
        """What a thread of the others does."""

    @cute.jit
    def roles(self, call):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        prefetch(call, warp == 0)
        block = self.block(call)
        start_edges(block.edges, warp)
        registers = self.tiling.registers(self.plan.layout.kv == "paged")
        if warp < self.copying:
            cute.arch.setmaxregister_decrease(registers.copying)
            self.copy(call, block, warp)
        else:
            cute.arch.setmaxregister_increase(registers.computing)
            thread = cute.arch.thread_idx()[0] - self.copying * 32
            self.consume(call, block, thread, self.mods.softmax_scale_log2(call.scale))


class HopperForward(WarpgroupForward[HopperTiling]):
    """Roles: warp 0 copies Q, K, V (one thread); each further warpgroup owns 64 rows of queries.

    Edges: q (`q_stages`), k and v (`stages` each). Timeline of a consumer for kv tiles 0, 1, 2, ...:

        S0 = Q K0ᵀ | softmax 0 | S1 = Q K1ᵀ, O += P0 V0 | softmax 1 (while P0 V0 runs) | S2, O += P1 V1 | ...

    and with two or more warpgroups and D <= 192 their turns interleave (one's products, the other's softmax).
    """

    consumes = RowConsume
    group_rows = GroupRows

    def __init__(self, plan: ForwardPlan[HopperTiling]):
        shape = first_rows_shape if plan.tiling.eight_rows else fragment_shape
        super().__init__(plan, shape(plan.tiling.tile_n))
        self.threads, self.blocks = (plan.tiling.warpgroups + 1) * WARPGROUP, plan.tiling.blocks

    def block(self, call):
        return HopperForwardBlock(self.tiling, self.dtype, self.out_dtype, call)

    def products(self, block, number):
        return HopperForwardProducts(self.plan, block, number)

    @cute.jit
    def copy(self, call, block, warp):
        if warp == 0:
            RowLoad(self, call, block).run()

    @cute.jit
    def consume(self, call, block, thread, scale_log2):
        block.prepare(thread)
        me = RowConsumer(self, block, thread, scale_log2)
        me.turns.start(me.number)
        self.consumes(self, call, me).run()
        me.drain_stores()


class HopperForwardApart(HopperForward):
    """`HopperForward` whose warpgroups, of masks with one interval, pass by kv tiles that only others' rows see."""

    @property
    def passes(self) -> bool:
        """Whether they do so in this plan."""
        return True

    def __init__(self, plan: ForwardPlan[HopperTiling]):
        super().__init__(plan)
        # where heads share a tile, a warpgroup's rows are fewer queries, and there is no mask
        one_head = not plan.is_split and plan.tiling.slots == 1
        self.apart = self.passes and one_head and isinstance(self.visited, BandTiles)
        if self.apart:
            self.consumes = ConsumeApart

    def kv_tiles(self, call, work):
        """The kv tiles that any of a block's rows sees."""
        if not self.apart:
            return super().kv_tiles(call, work)
        leaves = [self.leaves_of(call, work, w) for w in range(self.tiling.warpgroups)]
        return self.visited.of_all(leaves, work.some)

    def own_tiles(self, call, work, tiles, warpgroup):
        """The kv tiles that a warpgroup's rows see, and how many of `tiles` come before and behind them."""
        assert isinstance(self.visited, BandTiles), "lists say nothing of a warpgroup's rows"
        own = self.visited.of(self.leaves_of(call, work, warpgroup), work.m, work.some)
        (start, stop), (own_start, own_stop) = tiles.spans[0], own.spans[0]
        sees = own.count > 0
        return own, choose(sees, stop - own_stop, tiles.count), choose(sees, own_start - start, 0)

    def leaves_of(self, call, work, warpgroup):
        """For the bands of its rows; one whose rows are beyond the last query sees no keys."""
        m = work.m * self.tiling.warpgroups + warpgroup
        leaves = call.leaves(dataclasses.replace(work, m=m), ROWS)
        return dataclasses.replace(leaves, kv_len=choose(leaves.first < work.queries.end, leaves.kv_len, 0))


class HopperForwardGuessing(HopperForwardApart):
    """`HopperForwardApart` with probabilities by a speculative maximum, summed by V's columns of ones."""

    group_rows = GuessingRows

    def block(self, call):
        return BlockWithOnes(self.tiling, self.dtype, self.out_dtype, call)

    def products(self, block, number):
        return ProductsWithSums(self.plan, block, number)


class HopperForwardBlock(Fixed):
    """Shared memory of one block: where Q (later O), K and V lie, and the edges between the roles."""

    listeners = 0  # warps beside the consumers that hear of drawn tiles

    def __init__(self, tiling, dtype, out_dtype, call):
        self.tiling, self.dtype, self.groups = tiling, dtype, tiling.warpgroups
        wide = dtype.width // 8
        q_layout, o_layout = tile_layout(ROWS, tiling.d, element_bytes=wide), tile_layout(ROWS, tiling.output_columns)
        k_layout = tile_layout(tiling.tile_n, tiling.d, tiling.stages, element_bytes=wide)
        consumers = warps_of(tiling.warpgroups)
        edges = [
            Edge(tiling.q_stages, Copies(tiling.tile_m * tiling.d * wide), consumers),
            Edge(tiling.stages, self.filled(tiling.d, OF_KEYS), consumers),
            Edge(tiling.stages, self.filled(tiling.dv, OF_VALUES), consumers),
        ]
        if tiling.scheduler.draws:  # numbers of the tiles that follow
            edges.append(Edge(2, Warps(1), Warps(consumers.count + self.listeners)))
        edges += self.more_edges()
        smem = SmemAllocator()
        self.edges = Edge.allocate(smem, edges)
        self.rings = self.q_edge, self.k_edge, self.v_edge = self.edges[:3]
        self.queue = None
        if tiling.scheduler.draws:
            self.queue = DynamicScheduler(self.edges[3], smem.allocate_array(Int32, 2), call.counter, call.tiles)
        self.memory_of_numbers(smem)
        barriers = Barriers()
        # a fourth one nobody asks for: numbers are those of the kernels that were timed
        self.turns = barriers.row(4, 2 * WARPGROUP)
        self.of_groups = barriers.row(3, WARPGROUP)
        self.of_consumers = barriers.one(tiling.warpgroups * WARPGROUP)
        # each warpgroup has a region of its own: it may write O over its Q while another still reads its Q
        region = ROWS * (tiling.d if tiling.separate_o else max(tiling.d, tiling.dv))
        stages, every = tiling.q_stages, tiling.warpgroups * region
        start = smem.allocate_array(dtype, stages * every, byte_alignment=1024)
        # (64, D, warpgroup, stage)
        self.sQ = tensor_of(start, q_layout, dtype, (self.groups, region), (stages, every))
        if tiling.separate_o:
            region = ROWS * tiling.output_columns
            start = smem.allocate_array(out_dtype, tiling.warpgroups * region, byte_alignment=1024)
        self.sO = tensor_of(start, o_layout, out_dtype, (self.groups, region))  # (64, Dv, warpgroup)
        self.sK = smem.allocate_tensor(dtype, k_layout.outer, 1024, swizzle=k_layout.inner)
        self.sV = self.values(smem)
        self.more_memory(smem)

    def filled(self, columns, warps):
        """How a stage of K or V, with so many columns, comes; `warps` would make it of bytes."""
        return Copies(self.tiling.tile_n * columns * (self.dtype.width // 8))

    def more_edges(self):
        return []

    def memory_of_numbers(self, smem):
        """A few numbers beside the barriers, which take little of what lies before the first aligned tile."""

    def more_memory(self, smem):
        """What lies behind all else."""

    def prepare(self, thread):
        """What consumers do before they read anything."""

    def queries(self, group, slot) -> cute.Tensor:
        """(64, D) of a group."""
        return self.sQ[None, None, group, _stage(slot, self.tiling.q_stages)]

    def values(self, smem):
        """A ring of tiles of V."""
        layout = tile_layout(self.tiling.tile_n, self.tiling.dv, self.tiling.stages)
        return smem.allocate_tensor(self.dtype, layout.outer, 1024, swizzle=layout.inner)


def _stage(slot, stages):
    """Where Q lies, of so many stages."""
    return slot.index if stages > 1 else 0


class BlockWithOnes(HopperForwardBlock):
    """A block's shared memory with columns of ones beside each V."""

    def values(self, smem):
        tiling = self.tiling
        layout = tile_layout(tiling.tile_n, tiling.dv + tiling.ones, tiling.stages, together=tiling.dv)
        self.sVOnes = smem.allocate_tensor(self.dtype, layout.outer, 1024, swizzle=layout.inner)
        return cute.local_tile(self.sVOnes, (tiling.tile_n, tiling.dv), (0, 0, None))

    @cute.jit
    def prepare(self, thread):
        """The ones, by all consumers; copies of V leave them there."""
        tiling = self.tiling
        words = cute.make_rmem_tensor(4, Int32)
        words.fill(Int32(0x3F803F80 if const_expr(self.dtype is BFloat16) else 0x3C003C00))
        wide, row = tiling.dv + tiling.ones, tiling.tile_n * 2
        start = self.sVOnes.iterator.toint() + row * tiling.dv
        for stage in cutlass.range_constexpr(tiling.stages):
            for i in cutlass.range(thread, row * tiling.ones // 16, tiling.warpgroups * WARPGROUP, unroll=1):
                put_words(start + stage * row * wide + i * 16, words)
        cute.arch.fence_view_async_shared()
        self.of_consumers.meet()


class HopperForwardProducts(WarpgroupProducts):
    """S = Q Kᵀ and O += P V of one warpgroup: issued, not waited for.

    What registers hold of Q, its first columns, the tensor core need not read from shared memory for each tile of keys.
    Columns behind D and Dv that fill up blocks of memory are not multiplied.
    """

    def __init__(self, plan, block, number):
        tiling = plan.tiling
        self.q_stages = tiling.q_stages
        self.qk = product(block.dtype, tiling.tile_n, written=tiling.written)
        self.resident_qk = product(block.dtype, tiling.tile_n, left_in_registers=True, written=tiling.written)
        self.pv, whole = (
            product(block.dtype, columns, right=MN, left_in_registers=True, written=tiling.written)
            for columns in (self.columns_of(plan), tiling.dv)
        )
        # descriptors are the same for all threads of a warpgroup: thread 0's view serves
        qk, pv = self.qk.get_slice(0), whole.get_slice(0)
        sVt = permuted(block.sV, 1, 0, 2)
        self.sQ = block.sQ[None, None, number, None]
        self.tSrQ = qk.make_fragment_A(qk.partition_A(self.sQ))
        self.tSrK = qk.make_fragment_B(qk.partition_B(block.sK))
        self.tOrV = pv.make_fragment_B(pv.partition_B(sVt))
        self.scores_shape = qk.partition_shape_C((ROWS, tiling.tile_n))
        self.probabilities_shape = pv.partition_shape_A((ROWS, tiling.tile_n))
        self.output_shape = self.pv.get_slice(0).partition_shape_C((ROWS, self.columns_of(plan)))
        self.resident, self.steps = tiling.resident, in_steps(plan.head_dim) // STEP

    def columns_of(self, plan) -> int:
        """Columns of the output that are multiplied."""
        return in_steps(plan.head_dim_v)

    def probabilities(self) -> cute.Tensor:
        """Registers for them, as the left operand of the output's product."""
        return self.pv.get_slice(0).make_fragment_A(self.probabilities_shape)

    def resident_queries(self) -> cute.Tensor | None:
        """Registers for columns of Q, as the left operand of the scores' product; None where there are none."""
        if not self.resident:
            return None
        resident_qk = self.resident_qk.get_slice(0)
        return resident_qk.make_fragment_A(resident_qk.partition_shape_A((ROWS, self.resident)))

    def get_queries(self, resident: cute.Tensor | None, slot, thread) -> None:
        """Fills them."""
        if resident is not None:
            get(self.resident_qk, resident, self.stage_of_queries(slot), thread)

    def stage_of_queries(self, slot) -> cute.Tensor:
        """(64, D) of them in shared memory."""
        return self.sQ[None, None, _stage(slot, self.q_stages)]

    def issue_scores(self, q_slot, k_slot, resident: cute.Tensor | None) -> cute.Tensor:
        tSrS = cute.make_rmem_tensor(self.scores_shape, Float32)
        tSrQ = self.tSrQ[None, None, None, _stage(q_slot, self.q_stages)]
        steps = 0 if resident is None else min(self.steps, cute.size(resident, mode=[2]))
        parts = (self.resident_qk, resident, range(steps)), (self.qk, tSrQ, range(steps, self.steps))
        issue_in_parts(tSrS, [part for part in parts if part[2]], self.tSrK[None, None, None, k_slot.index])
        return tSrS

    def issue_output(self, tOrO, tOrP, slot) -> None:
        issue(self.pv, tOrO, tOrP, self.tOrV[None, None, None, slot.index], True)


class ProductsWithSums(HopperForwardProducts):
    """Products whose output has `SUMS` columns more, each with the sums of the rows' rounded probabilities."""

    def __init__(self, plan, block, number):
        super().__init__(plan, block, number)
        tiling = plan.tiling
        written = tiling.written
        self.pv_sums = product(block.dtype, tiling.dv + SUMS, right=MN, left_in_registers=True, written=written)
        # of so many columns that the memory's layout divides them; fewer are multiplied
        wide = product(block.dtype, tiling.dv + tiling.ones, right=MN, left_in_registers=True).get_slice(0)
        self.tOrV = wide.make_fragment_B(wide.partition_B(permuted(block.sVOnes, 1, 0, 2)))
        self.stored_shape = self.output_shape
        self.output_shape = self.pv_sums.get_slice(0).partition_shape_C((ROWS, tiling.dv + SUMS))

    def issue_output(self, tOrO, tOrP, slot) -> None:
        issue(self.pv_sums, tOrO, tOrP, self.tOrV[None, None, None, slot.index], True)

    def columns_of(self, plan) -> int:
        """All, as the ones lie behind them."""
        return plan.tiling.dv

    def without_sums(self, tOrO) -> cute.Tensor:
        """The registers of the output's own columns."""
        return cute.make_tensor(tOrO.iterator, cute.make_layout(self.stored_shape))
