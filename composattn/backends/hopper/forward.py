"""The forward kernel for Hopper: warp-specialised, fed by bulk tensor copies, products on the warpgroup unit."""

import math

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils import LayoutEnum

from composattn.primitives.kv_tiles import band_sequence
from composattn.primitives.online_softmax import OnlineSoftmax, rescale_rows
from composattn.primitives.pipelines import Edge, Slot, Turns
from composattn.primitives.score_tile import FragmentShape, ScoreTile
from composattn.primitives.tile_scheduler import WorkOrder
from composattn.primitives.values import Fixed, narrow

ROWS = 64  # query rows of one warpgroup's product
WARPGROUP = 128
LOG2_E = math.log2(math.e)


def fragment_shape(columns: int) -> FragmentShape:
    """One thread of a 64-row accumulator: rows r and r + 8, pairs of columns every 8, four lanes a row."""
    return FragmentShape((0, 8), tuple(8 * (c // 2) + c % 2 for c in range(columns // 4)), 4)


def row_column_view(accumulator: cute.Tensor) -> cute.Tensor:
    """The registers of a 64-row accumulator ((2, 2, n/8), 1, 1) as (row, column)."""
    pairs = cute.size(accumulator) // 4
    layout = cute.make_layout((2, (2, pairs)), stride=(2, (1, 4)))
    return cute.make_tensor(accumulator.iterator, layout)


def tile_layout(dtype, rows: int, columns: int, stages: int | None = None):
    """Shared-memory layout of row-major tiles with the widest swizzle that the columns take."""
    kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, columns)
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    shape = (rows, columns) if stages is None else (rows, columns, stages)
    return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))


class HopperForward:
    """Roles: warp 0 copies Q, K, V (one thread); each further warpgroup owns 64 rows of queries.

    Edges: q (1 stage), k and v (`stages` each). Timeline of a consumer for kv tiles 0, 1, 2, ...:

        S0 = Q K0ᵀ | softmax 0 | S1 = Q K1ᵀ, O += P0 V0 | softmax 1 (while P0 V0 runs) | S2, O += P1 V1 | ...

    and with two or more warpgroups and D <= 128 their turns interleave (one's products, the other's softmax).
    """

    def __init__(self, plan, mods):
        self.plan = plan
        self.mods = mods

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (B, Hq, Sq, D)
        k: cute.Tensor,  # (B, Hkv, Skv, D)
        v: cute.Tensor,  # (B, Hkv, Skv, Dv)
        o: cute.Tensor,  # (B, Hq, Sq, Dv)
        lse: cute.Tensor | None,  # (B, Hq, Sq) fp32
        scale: Float32,
        captured,  # tuple of tensors that the mods read
        scalars,  # tuple of run-time numbers that the mods read
        stream,
    ):
        plan = self.plan
        dtype = self.dtype = q.element_type
        # (S, D, H, B), so that a tile is the first two modes
        mQ, mK, mV, mO = [_permuted(t, (2, 3, 1, 0)) for t in (q, k, v, o)]
        q_layout = tile_layout(dtype, ROWS, plan.d)
        k_layout = tile_layout(dtype, plan.tile_n, plan.d, plan.stages)
        v_layout = tile_layout(dtype, plan.tile_n, plan.dv, plan.stages)
        o_layout = tile_layout(dtype, ROWS, plan.dv)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma_q, tQ = cpasync.make_tiled_tma_atom(load, mQ, q_layout, (ROWS, plan.d))
        tma_k, tK = cpasync.make_tiled_tma_atom(
            load, mK, cute.select(k_layout, [0, 1]), (plan.tile_n, plan.d)
        )
        tma_v, tV = cpasync.make_tiled_tma_atom(
            load, mV, cute.select(v_layout, [0, 1]), (plan.tile_n, plan.dv)
        )
        tma_o, tO = cpasync.make_tiled_tma_atom(store, mO, o_layout, (ROWS, plan.dv))
        q_len, kv_len = mQ.shape[0], mK.shape[0]
        kv_bytes = Int64(kv_len) * ((plan.d + plan.dv) * dtype.width // 8)
        order = WorkOrder.of(
            q_len, plan.tile_m, mQ.shape[3], mQ.shape[2], mK.shape[2], kv_bytes, plan.target.l2
        )
        blocks = order.tiles
        if const_expr(plan.persistent):
            blocks = cutlass.min(order.tiles, plan.target.sms)
        self.kernel(
            (tma_q, tma_k, tma_v, tma_o),
            (tQ, tK, tV, tO),
            lse,
            (q_layout, k_layout, v_layout, o_layout),
            order,
            scale,
            captured,
            scalars,
            q_len,
            kv_len,
        ).launch(
            grid=(blocks, 1, 1),
            block=((plan.warpgroups + 1) * WARPGROUP, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, tmas, tensors, lse, layouts, order, scale, captured, scalars, q_len, kv_len):
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for tma in tmas:
                cpasync.prefetch_descriptor(tma)
        block = Block(plan, layouts, self.dtype)
        if warp == 0:
            with cute.arch.elect_one():
                for edge in (block.q_edge, block.k_edge, block.v_edge):
                    edge.init()
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp < 4:
            cute.arch.setmaxregister_decrease(plan.producer_registers)
            if warp == 0:
                self.produce(block, tmas, tensors, order, captured, scalars, q_len, kv_len)
        else:
            cute.arch.setmaxregister_increase(plan.consumer_registers)
            self.consume(block, tmas[3], tensors[3], lse, order, scale, captured, scalars, q_len, kv_len)

    def sequence(self, work, captured, scalars, q_len, kv_len):
        """The kv tiles of a work tile; producer and consumers ask alike."""
        plan = self.plan
        q_first = work.m * plan.tile_m
        q_last = cutlass.min(q_first + plan.tile_m, q_len) - 1
        lo, hi, exact = self.mods.band(work.b, work.h, q_len, kv_len, captured, scalars)
        return band_sequence(q_first, q_last, kv_len, plan.tile_n, lo, hi, exact)

    # --- producer ------------------------------------------------------------------------------------------

    @cute.jit
    def produce(self, block, tmas, tensors, order, captured, scalars, q_len, kv_len):
        plan = self.plan
        number = cute.arch.block_idx()[0]
        q_slot, k_slot, v_slot = Slot.first(1), Slot.first(plan.stages), Slot.first(plan.stages)
        if const_expr(plan.persistent):
            step = cute.arch.grid_dim()[0]
            while number < order.tiles:
                q_slot, k_slot, v_slot = self.produce_tile(
                    block, tmas, tensors, order.tile(number), captured, scalars, q_len, kv_len,
                    q_slot, k_slot, v_slot,
                )  # fmt: skip
                number += step
        else:
            self.produce_tile(
                block, tmas, tensors, order.tile(number), captured, scalars, q_len, kv_len,
                q_slot, k_slot, v_slot,
            )  # fmt: skip

    @cute.jit
    def produce_tile(
        self, block, tmas, tensors, work, captured, scalars, q_len, kv_len, q_slot, k_slot, v_slot
    ):
        plan = self.plan
        tiles = self.sequence(work, captured, scalars, q_len, kv_len)
        gQ = cute.local_tile(tensors[0][None, None, work.h, work.b], (ROWS, plan.d), (None, 0))
        gK = cute.local_tile(tensors[1][None, None, work.kv_head, work.b], (plan.tile_n, plan.d), (None, 0))
        gV = cute.local_tile(tensors[2][None, None, work.kv_head, work.b], (plan.tile_n, plan.dv), (None, 0))
        tKsK, tKgK = _partition(tmas[1], block.sK, gK)
        tVsV, tVgV = _partition(tmas[2], block.sV, gV)
        if tiles.count > 0:
            bar = block.k_edge.acquire(k_slot)
            cute.copy(tmas[1], tKgK[None, tiles.first], tKsK[None, k_slot.index], tma_bar_ptr=bar)
            bar = block.q_edge.acquire(q_slot)
            for w in cutlass.range_constexpr(plan.warpgroups):
                tQsQ, tQgQ = _partition(tmas[0], block.sQ[None, None, w], gQ)
                cute.copy(tmas[0], tQgQ[None, work.m * plan.warpgroups + w], tQsQ, tma_bar_ptr=bar)
            q_slot = q_slot.next()
            k_slot = k_slot.next()
            for i in cutlass.range(1, tiles.count, unroll=1):
                bar = block.k_edge.acquire(k_slot)
                cute.copy(tmas[1], tKgK[None, tiles.tile(i)], tKsK[None, k_slot.index], tma_bar_ptr=bar)
                k_slot = k_slot.next()
                bar = block.v_edge.acquire(v_slot)
                cute.copy(tmas[2], tVgV[None, tiles.tile(i - 1)], tVsV[None, v_slot.index], tma_bar_ptr=bar)
                v_slot = v_slot.next()
            bar = block.v_edge.acquire(v_slot)
            last = tiles.tile(tiles.count - 1)
            cute.copy(tmas[2], tVgV[None, last], tVsV[None, v_slot.index], tma_bar_ptr=bar)
            v_slot = v_slot.next()
        return q_slot, k_slot, v_slot

    # --- consumers -----------------------------------------------------------------------------------------

    @cute.jit
    def consume(self, block, tma_o, tO, lse, order, scale, captured, scalars, q_len, kv_len):
        plan = self.plan
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        me = Consumer(plan, block, thread, self.mods.softmax_scale_log2(scale))
        me.turns.start(me.warpgroup)
        number = cute.arch.block_idx()[0]
        q_slot, k_slot, v_slot = Slot.first(1), Slot.first(plan.stages), Slot.first(plan.stages)
        if const_expr(plan.persistent):
            step = cute.arch.grid_dim()[0]
            while number < order.tiles:
                q_slot, k_slot, v_slot = self.consume_tile(
                    me, tma_o, tO, lse, order.tile(number), scale, captured, scalars, q_len, kv_len,
                    q_slot, k_slot, v_slot,
                )  # fmt: skip
                number += step
        else:
            self.consume_tile(
                me, tma_o, tO, lse, order.tile(number), scale, captured, scalars, q_len, kv_len,
                q_slot, k_slot, v_slot,
            )  # fmt: skip
        me.drain_stores()

    @cute.jit
    def consume_tile(
        self, me, tma_o, tO, lse, work, scale, captured, scalars, q_len, kv_len, q_slot, k_slot, v_slot
    ):
        tiles = self.sequence(work, captured, scalars, q_len, kv_len)
        me.begin(self.mods, work, scale, captured, scalars, q_len, kv_len)
        if tiles.count > 0:
            me.block.q_edge.wait(q_slot)
            me.first_scores(tiles.first, k_slot)
            k_slot = k_slot.next()
            for segment in tiles.segments:
                for i in cutlass.range(segment.count, unroll=1):
                    me.step(segment.first - i, segment.tested, k_slot, v_slot)
                    k_slot = k_slot.next()
                    v_slot = v_slot.next()
            me.block.q_edge.release(q_slot, me.lane)
            q_slot = q_slot.next()
            me.last_product(v_slot)
            v_slot = v_slot.next()
        me.finish(tma_o, tO, lse, work, q_len)
        return q_slot, k_slot, v_slot


def _partition(tma, shared, tiles):
    """(copy, stage or nothing) of shared memory and (copy, tile) of the tensor."""
    return cpasync.tma_partition(
        tma, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
    )


class Block(Fixed):
    """Shared memory of one block: where Q (later O), K and V lie, and the edges between the roles."""

    def __init__(self, plan, layouts, dtype):
        self.plan = plan
        self.q_layout, self.k_layout, self.v_layout, self.o_layout = layouts
        self.dtype = dtype
        wide = dtype.width // 8
        warps = plan.warpgroups * 4
        edges = (
            Edge(1, plan.tile_m * plan.d * wide, warps),
            Edge(plan.stages, plan.tile_n * plan.d * wide, warps),
            Edge(plan.stages, plan.tile_n * plan.dv * wide, warps),
        )
        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, sum(e.barriers for e in edges))
        bound = []
        for edge in edges:
            bound.append(edge.at(barriers))
            barriers = barriers + edge.barriers
        self.q_edge, self.k_edge, self.v_edge = bound
        # each warpgroup has a region of its own: it may write O over its Q while another still reads its Q
        region = ROWS * (plan.d if plan.separate_o else max(plan.d, plan.dv))
        start = smem.allocate_array(dtype, plan.warpgroups * region, byte_alignment=1024)
        self.sQ = self._regions(start, self.q_layout, region)  # (64, D, warpgroup)
        if plan.separate_o:
            region = ROWS * plan.dv
            start = smem.allocate_array(dtype, plan.warpgroups * region, byte_alignment=1024)
        self.sO = self._regions(start, self.o_layout, region)  # (64, Dv, warpgroup)
        self.sK = smem.allocate_tensor(dtype, self.k_layout.outer, 1024, swizzle=self.k_layout.inner)
        self.sV = smem.allocate_tensor(dtype, self.v_layout.outer, 1024, swizzle=self.v_layout.inner)

    def _regions(self, start, layout, region: int) -> cute.Tensor:
        outer = cute.append(layout.outer, cute.make_layout(self.plan.warpgroups, stride=region))
        return cute.make_tensor(cute.recast_ptr(start, layout.inner, dtype=self.dtype), outer)


class Consumer(Fixed):
    """One warpgroup's registers and products: scores tSrS, probabilities tOrP, output tOrO."""

    def __init__(self, plan, block, thread, scale_log2):
        self.plan, self.block = plan, block
        self.warpgroup = cute.arch.make_warp_uniform(thread // WARPGROUP)
        self.thread = thread % WARPGROUP
        self.lane = cute.arch.lane_idx()
        self.turns = Turns(plan.warpgroups if plan.pingpong else 1, first_barrier=1)
        dtype = block.dtype
        k_major, mn_major = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.OperandMajorMode.MN
        self.mma_qk = hopper.make_trivial_tiled_mma(
            dtype, dtype, k_major, k_major, Float32, (1, 1, 1), (ROWS, plan.tile_n)
        )
        self.mma_pv = hopper.make_trivial_tiled_mma(
            dtype, dtype, k_major, mn_major, Float32, (1, 1, 1), (ROWS, plan.dv),
            a_source=warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        # descriptors are the same for all threads of a warpgroup: thread 0's view serves
        qk, pv = self.mma_qk.get_slice(0), self.mma_pv.get_slice(0)
        sVt = _permuted(block.sV, (1, 0, 2))
        self.tSrQ = qk.make_fragment_A(qk.partition_A(block.sQ[None, None, self.warpgroup]))
        self.tSrK = qk.make_fragment_B(qk.partition_B(block.sK))
        self.tOrV = pv.make_fragment_B(pv.partition_B(sVt))
        self.scores_shape = qk.partition_shape_C((ROWS, plan.tile_n))
        self.probabilities_shape = pv.partition_shape_A((ROWS, plan.tile_n))
        self.output_shape = pv.partition_shape_C((ROWS, plan.dv))
        self.shape = fragment_shape(plan.tile_n)
        self.scale_log2 = scale_log2
        # row and column of this thread's first element in its warpgroup's tile
        self.row = (self.thread // 32) * 16 + self.lane // 4
        self.column = (self.lane % 4) * 2

    def begin(self, mods, work, scale, captured, scalars, q_len, kv_len):
        plan = self.plan
        self.work = work
        self.first_q = work.m * plan.tile_m + self.warpgroup * ROWS + self.row
        self.scores = None
        self.mods = mods.at(self.tile(Int32(0)), scale, captured, scalars, q_len, kv_len)
        # fresh registers for each work tile: values carried from tile to tile would make ptxas wait for every
        # product (its warning C7510)
        self.tOrO = cute.make_rmem_tensor(self.output_shape, Float32)
        self.tOrP = self.mma_pv.get_slice(0).make_fragment_A(self.probabilities_shape)
        self.output = row_column_view(self.tOrO)
        self.softmax = OnlineSoftmax(2, self.scale_log2, lanes_per_row=4)
        self.rescale = cute.make_rmem_tensor(2, Float32)
        self.softmax.reset()
        self.rescale.fill(1.0)
        self.tOrO.fill(0.0)

    def tile(self, n) -> ScoreTile:
        work = self.work
        first_kv = n * self.plan.tile_n + self.column
        return ScoreTile(self.shape, self.scores, work.b, work.h, self.first_q, first_kv)

    # products: issued, not waited for

    def issue_scores(self, slot):
        self.tSrS = cute.make_rmem_tensor(self.scores_shape, Float32)
        self.scores = row_column_view(self.tSrS)
        _issue(self.mma_qk, self.tSrS, self.tSrQ, self.tSrK[None, None, None, slot.index], False)

    def issue_output(self, slot):
        _issue(self.mma_pv, self.tOrO, self.tOrP, self.tOrV[None, None, None, slot.index], True)

    def probabilities(self, n, tested, first):
        """Scores of kv tile `n` to probabilities, in fp32, in place."""
        tile = self.tile(n)
        self.mods.apply_score(tile)
        if tested:
            self.mods.apply_mask(tile)
        self.softmax.step(tile, self.rescale, first)

    def store_probabilities(self):
        """The accumulator's register order is that of the next product's left operand, pair for pair."""
        narrow(self.tOrP, self.tSrS)

    def first_scores(self, n, k_slot):
        self.block.k_edge.wait(k_slot)
        self.issue_scores(k_slot)
        warpgroup.wait_group(0)
        self.block.k_edge.release(k_slot, self.lane)
        self.probabilities(n, tested=True, first=True)
        self.store_probabilities()

    def step(self, n, tested, k_slot, v_slot):
        """Scores of kv tile `n` while the output of the tile before it accumulates."""
        early = self.plan.rescale_early
        self.block.k_edge.wait(k_slot)
        self.turns.take(self.warpgroup)
        self.issue_scores(k_slot)
        if early:
            rescale_rows(self.output, self.rescale)
        self.block.v_edge.wait(v_slot)
        self.issue_output(v_slot)
        self.turns.give(self.warpgroup)
        warpgroup.wait_group(1)
        self.block.k_edge.release(k_slot, self.lane)
        self.probabilities(n, tested, first=False)
        warpgroup.wait_group(0)
        self.block.v_edge.release(v_slot, self.lane)
        self.store_probabilities()
        if not early:
            rescale_rows(self.output, self.rescale)

    def last_product(self, v_slot):
        if self.plan.rescale_early:
            rescale_rows(self.output, self.rescale)
        self.block.v_edge.wait(v_slot)
        self.issue_output(v_slot)
        warpgroup.wait_group(0)
        self.block.v_edge.release(v_slot, self.lane)

    # epilogue

    def finish(self, tma_o, tO, lse, work, q_len):
        plan, block = self.plan, self.block
        normalizer = cute.make_rmem_tensor(2, Float32)
        row_lse = cute.make_rmem_tensor(2, Float32)
        self.softmax.finish(normalizer, row_lse)
        rescale_rows(self.output, normalizer)
        sO = block.sO[None, None, self.warpgroup]
        rounded = cute.make_rmem_tensor_like(self.tOrO, block.dtype)
        narrow(rounded, self.tOrO)
        to_shared = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(False, 4), block.dtype)
        copy = cute.make_tiled_copy_C(to_shared, self.mma_pv).get_slice(self.thread)
        self.wait_store_read()
        cute.copy(copy, copy.retile(rounded), copy.partition_D(sO))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=self.warpgroup + 5, number_of_threads=WARPGROUP)
        gO = cute.local_tile(tO[None, None, work.h, work.b], (ROWS, plan.dv), (None, 0))
        tOsO, tOgO = _partition(tma_o, sO, gO)
        _store_tile(tma_o, tOsO, tOgO[None, work.m * plan.warpgroups + self.warpgroup], self.thread // 32)
        if lse is not None:
            for r in range(2):
                _store_lse(lse, work, self.first_q + 8 * r, q_len, row_lse[r], self.lane % 4 == 0)

    def wait_store_read(self):
        """Before O's shared memory is written again: the last tile's store has read it."""
        if self.plan.persistent:
            _wait_store(self.thread // 32)
            cute.arch.barrier(barrier_id=self.warpgroup + 5, number_of_threads=WARPGROUP)

    def drain_stores(self):
        _wait_store(self.thread // 32)


@cute.jit
def _wait_store(warp: Int32):
    if warp == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def _store_tile(tma_o, source, target, warp: Int32):
    if warp == 0:
        cute.copy(tma_o, source, target)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _store_lse(lse, work, q: Int32, q_len: Int32, value: Float32, mine: Boolean):
    if mine and q < q_len:
        lse[work.b, work.h, q] = value


def _issue(mma, accumulator, a, b, accumulate: bool):
    warpgroup.fence()
    # an atom of its own: its accumulate flag changes along the way
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for step in range(cute.size(a, mode=[2])):
        cute.gemm(atom, accumulator, a[None, None, step], b[None, None, step], accumulator)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def _permuted(tensor: cute.Tensor, modes: tuple[int, ...]) -> cute.Tensor:
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, list(modes)))
