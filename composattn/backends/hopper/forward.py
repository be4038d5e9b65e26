"""The forward kernel for Hopper: warp-specialised, fed by bulk tensor copies, products on the warpgroup unit."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from ...primitives.arithmetic import IN_ORDER, ONE_BY_ONE, Arithmetic
from ...primitives.barriers import Barriers
from ...primitives.kv_source import partition
from ...primitives.pipelines import Copies, Edge, start_edges
from ...primitives.values import Fixed, narrow, permuted
from ..fused.kernels.forward import Forward, KeyCopies, Role, prefetch
from ..fused.plan import ForwardPlan
from .output_rows import OutputRows
from .ping_pong import PingPong
from .tiling import HopperTiling
from .wgmma import (
    MN,
    ROWS,
    WARPGROUP,
    Warpgroup,
    fragment_shape,
    issue,
    product,
    row_column_view,
    tile_layout,
    warps_of,
)


class HopperForward(Forward[HopperTiling]):
    """Roles: warp 0 copies Q, K, V (one thread); each further warpgroup owns 64 rows of queries.

    Edges: q (1 stage), k and v (`stages` each). Timeline of a consumer for kv tiles 0, 1, 2, ...:

        S0 = Q K0ᵀ | softmax 0 | S1 = Q K1ᵀ, O += P0 V0 | softmax 1 (while P0 V0 runs) | S2, O += P1 V1 | ...

    and with two or more warpgroups and D <= 128 their turns interleave (one's products, the other's softmax).
    """

    rows = ROWS
    arithmetic: Arithmetic = ONE_BY_ONE

    def __init__(self, plan: ForwardPlan[HopperTiling]):
        super().__init__(plan, fragment_shape(plan.tiling.tile_n))
        self.threads, self.blocks = (plan.tiling.warpgroups + 1) * WARPGROUP, plan.tiling.blocks

    def tile_layout(self, rows, columns):
        return tile_layout(self.dtype, rows, columns)

    @cute.jit
    def roles(self, call):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        prefetch(call, warp == 0)
        block = Block(self.tiling, self.dtype)
        start_edges(block.edges, warp)
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.tiling.producer_registers)
            if warp == 0:
                Load(self, call, block).run()
        else:
            cute.arch.setmaxregister_increase(self.tiling.consumer_registers)
            self.consume(call, block)

    @cute.jit
    def consume(self, call, block):
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        scale_log2 = self.mods.softmax_scale_log2(call.scale)
        me = Consumer(self, block, thread, scale_log2)
        me.turns.start(me.number)
        Consume(self, call, me).run()
        me.drain_stores()


class HopperForwardInOrder(HopperForward):
    """The same with sums that round alike wherever a row's keys begin: see `Schedule.batch_invariant`."""

    arithmetic = IN_ORDER


class Load(Role):
    """The copying warp: Q once per work tile, after the first K."""

    @cute.jit
    def visit(self, work, slots):
        q_slot, k_slot, v_slot = slots
        tiling, block, call = self.tiling, self.block, self.call
        tiles = self.kernel.kv_tiles(call, work)
        gQ = work.queries.tiles(call.tensors.q, work.h, (self.kernel.heads.box(ROWS), tiling.d))
        copies = KeyCopies(self, work, block.k_edge, block.v_edge)
        if tiles.count > 0:
            before = copies.source.locate(tiles.first)
            copies.start_keys(before, k_slot)
            bar = block.q_edge.acquire(q_slot)
            for w in cutlass.range_constexpr(tiling.warpgroups):
                tQsQ, tQgQ = partition(call.tmas.q, block.sQ[None, None, w], gQ)
                cute.copy(call.tmas.q, tQgQ[None, work.m * tiling.warpgroups + w], tQsQ, tma_bar_ptr=bar)
            q_slot = q_slot.next()
            k_slot = k_slot.next()
            for run in tiles.runs:
                for i in cutlass.range(run.count, unroll=1):
                    at = copies.source.locate(run.tile(i))
                    k_slot, v_slot = copies.follow(at, before, k_slot, v_slot)
                    before = at
            copies.start_values(before, v_slot)
            v_slot = v_slot.next()
        return q_slot, k_slot, v_slot


class Consume(Role):
    """A warpgroup's rows of each work tile: `me`."""

    def __init__(self, kernel, call, me):
        super().__init__(kernel, call, me.block)
        self.me = me

    @cute.jit
    def visit(self, work, slots):
        q_slot, k_slot, v_slot = slots
        me, call, kernel = self.me, self.call, self.kernel
        tiles = kernel.kv_tiles(call, work)
        rows = WarpgroupRows(me, kernel.mods, work, call.leaves(work, self.tiling.queries))
        if tiles.count > 0:
            me.block.q_edge.wait(q_slot)
            rows.first_scores(tiles.first, k_slot)
            if const_expr(self.plan.layout.kv == "paged"):
                me.clear_values(tiles.first, work.keys.length, v_slot)
            k_slot = k_slot.next()
            for run in tiles.runs:
                for segment in run.segments():
                    for test, count in rows.tests(segment):
                        for i in cutlass.range(count, unroll=1):
                            rows.step(segment.tile(i), test, k_slot, v_slot)
                            k_slot = k_slot.next()
                            v_slot = v_slot.next()
            me.block.q_edge.release(q_slot, me.lane)
            q_slot = q_slot.next()
            rows.last_product(v_slot)
            v_slot = v_slot.next()
        rows.finish(call)
        return q_slot, k_slot, v_slot


class Block(Fixed):
    """Shared memory of one block: where Q (later O), K and V lie, and the edges between the roles."""

    def __init__(self, tiling, dtype):
        self.tiling, self.dtype = tiling, dtype
        q_layout, o_layout = tile_layout(dtype, ROWS, tiling.d), tile_layout(dtype, ROWS, tiling.dv)
        k_layout = tile_layout(dtype, tiling.tile_n, tiling.d, tiling.stages)
        v_layout = tile_layout(dtype, tiling.tile_n, tiling.dv, tiling.stages)
        wide = dtype.width // 8
        consumers = warps_of(tiling.warpgroups)
        edges = (
            Edge(1, Copies(tiling.tile_m * tiling.d * wide), consumers),
            Edge(tiling.stages, Copies(tiling.tile_n * tiling.d * wide), consumers),
            Edge(tiling.stages, Copies(tiling.tile_n * tiling.dv * wide), consumers),
        )
        smem = SmemAllocator()
        self.edges = self.q_edge, self.k_edge, self.v_edge = Edge.allocate(smem, edges)
        barriers = Barriers()
        # a fourth one nobody asks for: numbers are those of the kernels that were timed
        self.turns = barriers.row(4, 2 * WARPGROUP)
        self.of_warpgroup = barriers.row(3, WARPGROUP)
        self.of_consumers = barriers.one(tiling.warpgroups * WARPGROUP)
        # each warpgroup has a region of its own: it may write O over its Q while another still reads its Q
        region = ROWS * (tiling.d if tiling.separate_o else max(tiling.d, tiling.dv))
        start = smem.allocate_array(dtype, tiling.warpgroups * region, byte_alignment=1024)
        self.sQ = self._regions(start, q_layout, region)  # (64, D, warpgroup)
        if tiling.separate_o:
            region = ROWS * tiling.dv
            start = smem.allocate_array(dtype, tiling.warpgroups * region, byte_alignment=1024)
        self.sO = self._regions(start, o_layout, region)  # (64, Dv, warpgroup)
        self.sK = smem.allocate_tensor(dtype, k_layout.outer, 1024, swizzle=k_layout.inner)
        self.sV = smem.allocate_tensor(dtype, v_layout.outer, 1024, swizzle=v_layout.inner)

    def _regions(self, start, layout, region: int) -> cute.Tensor:
        outer = cute.append(layout.outer, cute.make_layout(self.tiling.warpgroups, stride=region))
        return cute.make_tensor(cute.recast_ptr(start, layout.inner, dtype=self.dtype), outer)


class Products(Fixed):
    """S = Q Kᵀ and O += P V of one warpgroup: issued, not waited for."""

    def __init__(self, tiling, block, number):
        self.qk = product(block.dtype, tiling.tile_n)
        self.pv = product(block.dtype, tiling.dv, right=MN, left_in_registers=True)
        # descriptors are the same for all threads of a warpgroup: thread 0's view serves
        qk, pv = self.qk.get_slice(0), self.pv.get_slice(0)
        sVt = permuted(block.sV, 1, 0, 2)
        self.tSrQ = qk.make_fragment_A(qk.partition_A(block.sQ[None, None, number]))
        self.tSrK = qk.make_fragment_B(qk.partition_B(block.sK))
        self.tOrV = pv.make_fragment_B(pv.partition_B(sVt))
        self.scores_shape = qk.partition_shape_C((ROWS, tiling.tile_n))
        self.probabilities_shape = pv.partition_shape_A((ROWS, tiling.tile_n))
        self.output_shape = pv.partition_shape_C((ROWS, tiling.dv))

    def probabilities(self) -> cute.Tensor:
        """Registers for them, as the left operand of the output's product."""
        return self.pv.get_slice(0).make_fragment_A(self.probabilities_shape)

    def issue_scores(self, slot) -> cute.Tensor:
        tSrS = cute.make_rmem_tensor(self.scores_shape, Float32)
        issue(self.qk, tSrS, self.tSrQ, self.tSrK[None, None, None, slot.index], False)
        return tSrS

    def issue_output(self, tOrO, tOrP, slot) -> None:
        issue(self.pv, tOrO, tOrP, self.tOrV[None, None, None, slot.index], True)


class Consumer(Warpgroup):
    """One warpgroup, which stays for all work tiles of its block."""

    def __init__(self, kernel, block, thread, scale_log2):
        super().__init__(block, cute.arch.make_warp_uniform(thread // WARPGROUP), thread % WARPGROUP)
        plan = kernel.plan
        self.plan, self.tiling, self.heads, self.shape = plan, plan.tiling, kernel.heads, kernel.fragment
        self.arithmetic = kernel.arithmetic
        self.turns = PingPong(plan.tiling.warpgroups if plan.tiling.pingpong else 1, block.turns)
        self.products = Products(plan.tiling, block, self.number)
        self.scale_log2 = scale_log2
        # row and column of this thread's first element in its warpgroup's tile
        self.row = (self.thread // 32) * self.shape.warp_rows + self.shape.lane_row(self.lane)
        self.column = self.shape.lane_column(self.lane)

    @cute.jit
    def clear_values(self, n, kv_len, v_slot):
        """V of kv tile `n` beyond the last key to zeros: a page holds anything there, and 0 * NaN is NaN."""
        self.block.v_edge.wait(v_slot)
        sV = self.block.sV[None, None, v_slot.index]
        first, groups = kv_len - n * self.tiling.tile_n, self.tiling.warpgroups
        for row in cutlass.range(first + self.number, self.tiling.tile_n, groups, unroll=1):
            if self.thread < self.tiling.dv // 2:
                for column in cutlass.range_constexpr(2):
                    sV[row, self.thread * 2 + column] = self.block.dtype(0.0)
        cute.arch.fence_view_async_shared()
        self.sync_consumers()


class WarpgroupRows(OutputRows[HopperTiling]):
    """A warpgroup's rows of one work tile, in registers: probabilities tOrP, output, the softmax's statistics."""

    def __init__(self, me: Consumer, mods, work, leaves):
        super().__init__(me, mods, work, leaves, work.m * me.tiling.tile_m + me.number * ROWS + me.row)
        self.tOrO.fill(0.0)

    def probabilities(self, tSrS, n, ahead, test, first):
        """Scores of kv tile `n` to probabilities, in fp32, in place; `test` hides what is not visible."""
        tile = self.tile(row_column_view(tSrS), n)
        self.mods.apply_score(tile, ahead)
        if test is not None:
            test(tile)
        self.softmax.step(tile, self.rescale, first, self.tiling.rescale_threshold)
        self.mods.drop(tile)

    def first_scores(self, n, k_slot):
        ahead = self.mods.read_ahead(self.tile(None, n))
        self.block.k_edge.wait(k_slot)
        tSrS = self.products.issue_scores(k_slot)
        warpgroup.wait_group(0)
        self.block.k_edge.release(k_slot, self.me.lane)
        self.probabilities(tSrS, n, ahead, self.mods.apply_either, first=True)
        narrow(self.tOrP, tSrS)  # registers in order: an accumulator's is that of the next product's left operand

    def step(self, n, test, k_slot, v_slot):
        """Scores of kv tile `n` while the output of the tile before it accumulates."""
        early = self.tiling.rescale_early
        ahead = self.mods.read_ahead(self.tile(None, n))
        self.block.k_edge.wait(k_slot)
        self.me.turns.take(self.me.number)
        tSrS = self.products.issue_scores(k_slot)
        if early:
            self.rescale_output()
        self.block.v_edge.wait(v_slot)
        self.products.issue_output(self.tOrO, self.tOrP, v_slot)
        self.me.turns.give(self.me.number)
        warpgroup.wait_group(1)
        self.block.k_edge.release(k_slot, self.me.lane)
        self.probabilities(tSrS, n, ahead, test, first=False)
        warpgroup.wait_group(0)
        self.block.v_edge.release(v_slot, self.me.lane)
        narrow(self.tOrP, tSrS)
        if not early:
            self.rescale_output()

    def last_product(self, v_slot):
        if self.tiling.rescale_early:
            self.rescale_output()
        self.block.v_edge.wait(v_slot)
        self.products.issue_output(self.tOrO, self.tOrP, v_slot)
        warpgroup.wait_group(0)
        self.block.v_edge.release(v_slot, self.me.lane)

    def row_tile(self):
        return self.work.m * self.tiling.warpgroups + self.me.number

    def finish(self, call):
        """O, its rows normalised, and what is asked for of LSE and the largest scores to their tensors."""
        row_lse = self.store(call)
        self.store_statistics(call, self.softmax, row_lse, self.me.lane)
