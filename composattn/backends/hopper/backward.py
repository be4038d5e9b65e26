"""The backward kernel for Hopper: a block keeps a tile of keys, its dK and dV in registers, and walks over queries."""

import dataclasses
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from ...primitives.diagonals import Diagonals
from ...primitives.emit import Leaves
from ...primitives.emit_backward import BackwardMods
from ...primitives.emit_tiles import query_tiles_of
from ...primitives.kv_source import partition
from ...primitives.padded_tiles import PaddedTiles, counter_of, statistics_of
from ...primitives.pieces import Pieces
from ...primitives.pipelines import Slot, start_edges
from ...primitives.q_tiles import ListedQueryRun, QueryRun
from ...primitives.seqlen import Rows, rows_of
from ...primitives.tile_scheduler import TileScheduler
from ...primitives.values import Fixed, narrow, permuted
from ..fused.arguments import MainArguments, PiecesArguments
from ..fused.fake import fake_arguments
from ..fused.kernels.dq_semaphore import DqSemaphore
from ..fused.plan_backward import COUNTER, BackwardPlan
from .backward_tiling import HopperBackwardTiling
from .dq import DqPart
from .key_tile import Block, KeyTile, KeyWarpgroup, Layouts, queries_first
from .wgmma import (
    MN,
    ROWS,
    WARPGROUP,
    issue,
    narrowed,
    product,
    put,
    send,
    store_matrix,
    store_part,
)


class HopperBackward:
    """Roles: warp 0 copies K, V once and Q, dO with their rows' statistics; each further warpgroup owns 64 keys.

    Scores are computed transposed, so that P and dS of a warpgroup's keys are left operands in its registers:

        Sᵀ = K Qᵀ    dPᵀ = V dOᵀ    dV += Pᵀ dO    dK += dSᵀ Q    dQ = dS K

    Only dQ needs the keys of all warpgroups: dS goes through shared memory, and each warpgroup computes a part of dQ
    (`dq_split`) and adds it to fp32 memory straight from its registers, 16 bytes a thread.

    Edges: kv (1 stage, never refilled), q (Q and LSE), do (dO and D). Timeline of a warpgroup for query tile i:

        Sᵀ, dPᵀ issued | P (while dPᵀ runs) | dS | dS written | dV issued | all: dS written | dQ, dK issued |
        dQ to memory (while dK runs)

    For a head group (GQA) the walk goes over the queries of all its heads, so dK and dV are summed without atomics.
    Where tiles are few they are cut into pieces, runs of query tiles, which leave what they have of dK and dV apart, in
    fp32 and in the order of registers; `backward_gather` sums it, in a fixed order too.

    Where shared memory has room a block stays for many tiles (`TileQueue`): the next K, V, Q and dO arrive while dK and
    dV leave.
    """

    def __init__(self, plan: BackwardPlan[HopperBackwardTiling]):
        self.plan, self.tiling = plan, plan.tiling
        self.mods = BackwardMods(plan.program, plan.intervals, plan.limits, plan.captured)
        self.visited = query_tiles_of(self.mods, plan.lists, plan.tiling.tile_m)

    def __repr__(self):
        return "backward"  # becomes part of the kernel's name

    @cute.jit
    def __call__(self, stream, *arguments):
        given, tiling = MainArguments(*arguments), self.tiling
        dtype = self.dtype = given.q.element_type
        queries, keys = rows_of(self.plan.layout, given.q, given.k, given.sequences)
        mQ, mdO = [queries.for_copies(t) for t in (given.q, given.dout)]
        mK, mV = [keys.for_copies(t) for t in (given.k, given.v)]
        layouts = Layouts.of(tiling, dtype)
        row_layout = cute.make_layout((tiling.tile_m,))
        statistics = statistics_of(given.workspace, COUNTER, given.dq_accum, tiling.tile_m)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        first = [0, 1]
        copies = [
            cpasync.make_tiled_tma_atom(load, mQ, cute.select(layouts.q, first), (tiling.tile_m, tiling.d)),
            cpasync.make_tiled_tma_atom(load, mdO, cute.select(layouts.dout, first), (tiling.tile_m, tiling.dv)),
            cpasync.make_tiled_tma_atom(load, mK, layouts.k, (tiling.tile_n, tiling.d)),
            cpasync.make_tiled_tma_atom(load, mV, layouts.v, (tiling.tile_n, tiling.dv)),
            cpasync.make_tiled_tma_atom(load, permuted(statistics, 3, 2, 1, 0), row_layout, (tiling.tile_m,)),
        ]
        rows = ROWS if tiling.persistent else tiling.tile_n
        for tensor, layout, width in ((given.dk, layouts.dk, tiling.d), (given.dv, layouts.dv, tiling.dv)):
            box = cute.select(layout, first)
            copies.append(cpasync.make_tiled_tma_atom(store, keys.for_copies(tensor), box, (rows, width)))
        group = mQ.shape[2] // mK.shape[2]
        order = self.order(given, mK, group)
        pieces = pieces_of(tiling, given.pieces) if tiling.in_pieces else None
        blocks = numbers = order.tiles if pieces is None else pieces.numbers
        if const_expr(tiling.persistent):
            blocks = cutlass.min(blocks, self.plan.target.sms)
        self.kernel(
            Operands(*(c[0] for c in copies)),
            Operands(*(c[1] for c in copies)),
            layouts,
            statistics,
            given.dq_accum,
            given.turns,
            counter_of(given.workspace),
            order,
            pieces,
            numbers,
            given.scale,
            given.captured,
            given.scalars,
            queries,
            keys,
            group,
        ).launch(
            grid=(blocks, 1, 1),
            block=((tiling.warpgroups + 1) * WARPGROUP, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    def order(self, given: MainArguments, mK: cute.Tensor, group) -> TileScheduler:
        """Of the tiles of keys: heads whose queries stay in L2 together."""
        tiling, kv_heads = self.tiling, mK.shape[2]
        # of a head, Q and dO are read and dQ is added to by all blocks; these come back from L2
        q_rows = given.q.shape[2] if self.plan.layout.is_dense else given.q.shape[0]
        q_bytes = Int64(q_rows) * group * ((tiling.d + tiling.dv) * self.dtype.width // 8 + 4 * tiling.d)
        section = (q_bytes, tiling.l2, tiling.heads_together, tiling.section_tiles)
        if given.work is None:
            return TileScheduler.of(mK.shape[0], tiling.tile_n, mK.shape[3], kv_heads, kv_heads, *section)
        return TileScheduler.listed(given.work, kv_heads, kv_heads, *section)

    @cute.kernel
    def kernel(
        self,
        tmas,
        tensors,
        layouts,
        statistics,
        dq_accum,
        turns,
        counter,
        order,
        pieces,
        numbers,
        scale,
        captured,
        scalars,
        queries,
        keys,
        group,
    ):
        tiling = self.tiling
        cute.arch.griddepcontrol_launch_dependents()  # blocks that round dQ start as the last ones of these end
        given = statistics, dq_accum, turns, order, pieces, numbers, scale, captured, scalars, queries, keys, group
        call = Call(tmas, tensors, *given)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for tma in tmas:
                cpasync.prefetch_descriptor(tma)
        block = Block(tiling, layouts, self.dtype, self.plan.deterministic, counter)
        start_edges(block.edges, warp)
        if const_expr(order.table is None or tiling.persistent):
            self.share_roles(call, block, warp)
        else:
            if order.tile(cute.arch.block_idx()[0]).exists:
                self.share_roles(call, block, warp)

    @cute.jit
    def share_roles(self, call, block, warp):
        tiling = self.tiling
        if warp < 4:
            cute.arch.setmaxregister_decrease(tiling.producer_registers)
            if warp == 0:
                self.produce(call, block)
            if const_expr(self.plan.deterministic):  # noqa: SIM102  known when compiling
                if warp == 1:
                    DqSemaphore(self).take(call, block)
        else:
            cute.arch.setmaxregister_increase(tiling.consumer_registers)
            self.consume(call, block)

    def work_tile(self, call, number) -> "KeyTile":
        """Keys of work tile `number`: the first ones first, as a causal mask lets most queries see them, or by a table.

        In a fixed order of dQ the last ones first: a block waits only for blocks that started before it. A table then
        has the tiles of each sequence from the first to the last.
        """
        tile_n = self.tiling.tile_n
        piece = None
        if call.pieces is not None:
            number, piece = call.pieces.split(number)
        work = call.order.tile(number)
        queries, keys = call.queries.sequence(work.b), call.keys.sequence(work.b)
        dense = call.order.table is None  # then numbers come from the last to the first, else as the table says
        count = call.order.blocks if dense else (keys.length + (tile_n - 1)) // tile_n
        n = work.m if dense == self.plan.deterministic else count - 1 - work.m
        padded = PaddedTiles.of(queries, work.b, self.tiling.tile_m)
        return KeyTile(n, count, work.b, work.kv_head, queries, keys, padded, piece)

    def exists(self, call, number):
        """Whether a table has a tile of this number."""
        return True if call.order.table is None else call.order.tile(number).exists

    def leaves(self, call, work, head, n=None) -> Leaves:
        q_len, kv_len = work.queries.length, work.keys.length
        first = (work.n if n is None else n) * self.tiling.tile_n
        last = cutlass.min(first + self.tiling.tile_n, kv_len) - 1
        return Leaves(work.b, head, q_len, kv_len, call.scale, call.captured, call.scalars, first, last)

    def query_tiles(self, call, work, head, n=None) -> list[QueryRun] | list[ListedQueryRun]:
        """The query tiles that work, or a whole tile of keys `n`, visits for one head; all roles ask alike."""
        runs = self.visited.of(self.leaves(call, work, head, n), work.n if n is None else n)
        if work.piece is None or n is not None:
            return runs
        return [run.piece(work.piece.index, work.piece.count) for run in runs]

    # --- producer ------------------------------------------------------------------------------------------

    @cute.jit
    def produce(self, call, block):
        tiling = self.tiling
        slots = (Slot.first(1), Slot.first(tiling.q_stages), Slot.first(tiling.do_stages))
        number = cute.arch.block_idx()[0]
        if const_expr(not tiling.persistent):
            self.produce_tile(call, block, number, *slots)
        else:
            lane = cute.arch.lane_idx()
            next_slot = Slot.first(block.queue.edge.edge.stages)
            while number < call.numbers:
                if self.exists(call, number):
                    slots = self.produce_tile(call, block, number, *slots)
                cute.arch.griddepcontrol_wait()  # for the counter
                number = block.queue.draw(lane)
                block.queue.announce(next_slot, number, lane)
                next_slot = next_slot.next()

    @cute.jit
    def produce_tile(self, call, block, number, kv_slot, q_slot, do_slot):
        tiling = self.tiling
        work = self.work_tile(call, number)
        tmas, tensors = call.tmas, call.tensors
        gK = work.keys.tiles(tensors.k, work.kv_head, (tiling.tile_n, tiling.d))
        gV = work.keys.tiles(tensors.v, work.kv_head, (tiling.tile_n, tiling.dv))
        tKsK, tKgK = partition(tmas.k, block.sK, gK)
        tVsV, tVgV = partition(tmas.v, block.sV, gV)
        bar = block.kv_edge.acquire(kv_slot)
        cute.copy(tmas.k, tKgK[None, work.n], tKsK, tma_bar_ptr=bar)
        cute.copy(tmas.v, tVgV[None, work.n], tVsV, tma_bar_ptr=bar)
        # for the statistics and the empty sum of dQ: consumers add to it once they have seen statistics
        cute.arch.griddepcontrol_wait()
        for member in cutlass.range(call.group, unroll=1):
            head = work.kv_head * call.group + member
            gQ = work.queries.tiles(tensors.q, head, (tiling.tile_m, tiling.d))
            gdO = work.queries.tiles(tensors.dout, head, (tiling.tile_m, tiling.dv))
            gLse, gDelta = [
                cute.local_tile(tensors.rows[None, head, work.padded.b, kind], (tiling.tile_m,), (None,))
                for kind in range(2)
            ]
            tQsQ, tQgQ = partition(tmas.q, block.sQ, gQ)
            tdOsdO, tdOgdO = partition(tmas.dout, block.sdO, gdO)
            tLsLse, tLgLse = partition(tmas.rows, block.sLse, gLse, modes=1)
            tDsDelta, tDgDelta = partition(tmas.rows, block.sDelta, gDelta, modes=1)
            for run in self.query_tiles(call, work, head):
                for i in cutlass.range(run.count, unroll=1):
                    m = run.tile(i)
                    padded = work.padded.first + m
                    bar = block.q_edge.acquire(q_slot)
                    cute.copy(tmas.q, tQgQ[None, m], tQsQ[None, q_slot.index], tma_bar_ptr=bar)
                    cute.copy(tmas.rows, tLgLse[None, padded], tLsLse[None, q_slot.index], tma_bar_ptr=bar)
                    q_slot = q_slot.next()
                    bar = block.do_edge.acquire(do_slot)
                    cute.copy(tmas.dout, tdOgdO[None, m], tdOsdO[None, do_slot.index], tma_bar_ptr=bar)
                    cute.copy(tmas.rows, tDgDelta[None, padded], tDsDelta[None, do_slot.index], tma_bar_ptr=bar)
                    do_slot = do_slot.next()
        return kv_slot.next(), q_slot, do_slot

    # --- consumers -----------------------------------------------------------------------------------------

    @cute.jit
    def consume(self, call, block):
        self.walk(call, block, Consumer(self.tiling, block, cute.arch.thread_idx()[0] - WARPGROUP))

    @cute.jit
    def walk(self, call, block, me):
        """One warpgroup over the tiles of its block."""
        tiling = self.tiling
        slots = tuple(Slot.first(n) for n in (1, tiling.q_stages, tiling.do_stages, tiling.ds_stages, 1))
        number = cute.arch.block_idx()[0]
        if const_expr(not tiling.persistent):
            self.walk_tile(call, block, me, number, *slots)
        else:
            next_slot = Slot.first(block.queue.edge.edge.stages)
            while number < call.numbers:
                if self.exists(call, number):
                    slots = self.walk_tile(call, block, me, number, *slots)
                number = block.queue.hear(next_slot, me.lane)
                next_slot = next_slot.next()
        me.drain_stores()

    @cute.jit
    def walk_tile(self, call, block, me, number, kv_slot, q_slot, do_slot, ds_slot, turn_slot):
        """All query tiles of all heads of the group, or of the tile's part of it."""
        tiling, work = self.tiling, self.work_tile(call, number)
        me.begin(work)
        ragged = (work.n + 1) * tiling.tile_n > work.keys.length
        block.kv_edge.wait(kv_slot)
        for member in cutlass.range(call.group, unroll=1):
            head = work.kv_head * call.group + member
            me.begin_head(self.mods, head, self.leaves(call, work, head))
            for run in self.query_tiles(call, work, head):
                for i in cutlass.range(run.count, unroll=1):
                    me.step(call, run.tile(i), ragged | run.tested(i), q_slot, do_slot, ds_slot, turn_slot)
                    turn_slot = turn_slot.next()
                    q_slot = q_slot.next()
                    do_slot = do_slot.next()
                    ds_slot = ds_slot.next()
        if const_expr(tiling.persistent):
            block.kv_edge.release(kv_slot, me.lane)
        me.finish(call)
        return kv_slot.next(), q_slot, do_slot, ds_slot, turn_slot


class Operands(NamedTuple):
    """Of each tensor that lies in tiles: its bulk copy, or the tensor as that sees it."""

    q: Any
    dout: Any
    k: Any
    v: Any
    rows: Any  # row statistics
    dk: Any
    dv: Any

    @property
    def results(self) -> tuple[Any, Any]:
        return self.dk, self.dv


@dataclasses.dataclass
class Call(Fixed):
    """What the kernel was called with; `numbers`: how many pieces of work there are."""

    tmas: Operands
    tensors: Operands
    statistics: cute.Tensor
    dq_accum: cute.Tensor
    turns: cute.Tensor | None
    order: TileScheduler
    pieces: Pieces | None
    numbers: Int32
    scale: Float32
    captured: tuple
    scalars: tuple
    queries: Rows
    keys: Rows
    group: Int32


class Consumer(KeyWarpgroup):
    """One warpgroup's registers and products: tSrS and tSrdP (keys, queries), tVrdV, tKrdK (keys, d), tQrdQ."""

    def __init__(self, tiling: HopperBackwardTiling, block: Block, thread):
        super().__init__(tiling, block, cute.arch.make_warp_uniform(thread // WARPGROUP), thread % WARPGROUP)
        dtype = block.dtype
        self.mma_dv = product(dtype, tiling.dv, right=MN, left_in_registers=True)
        self.mma_dk = product(dtype, tiling.d, right=MN, left_in_registers=True)
        # descriptors are the same for all threads of a warpgroup: thread 0's view serves
        s, dv, dk = self.mma_s.get_slice(0), self.mma_dv.get_slice(0), self.mma_dk.get_slice(0)
        mine = (self.warpgroup, 0)
        sK, sV = cute.local_tile(block.sK, (ROWS, tiling.d), mine), cute.local_tile(block.sV, (ROWS, tiling.dv), mine)
        self.tSrK, self.tSrV = s.make_fragment_A(s.partition_A(sK)), s.make_fragment_A(s.partition_A(sV))
        self.tSrQ, self.tSrdO = s.make_fragment_B(s.partition_B(block.sQ)), s.make_fragment_B(s.partition_B(block.sdO))
        self.tVrdO = dv.make_fragment_B(dv.partition_B(permuted(block.sdO, 1, 0, 2)))
        self.tKrQ = dk.make_fragment_B(dk.partition_B(permuted(block.sQ, 1, 0, 2)))
        self.tVrdV = cute.make_rmem_tensor(dv.partition_shape_C((ROWS, tiling.dv)), Float32)
        self.tKrdK = cute.make_rmem_tensor(dk.partition_shape_C((ROWS, tiling.d)), Float32)
        self.left_shape = dv.partition_shape_A((ROWS, tiling.tile_m))
        self.dq = DqPart(tiling, block, self.warpgroup)
        self.store_ds = store_matrix(self.mma_s, dtype, self.thread, transposed=True)
        sdSt = permuted(block.sdS, 1, 0, 2)  # (keys, queries, stage)
        self.tSsdS = self.store_ds.partition_D(cute.local_tile(sdSt, (ROWS, tiling.tile_m), (self.warpgroup, 0, None)))
        self.diagonals = None
        if tiling.distances:
            warps = 4 * tiling.warpgroups
            self.diagonals = Diagonals(self.shape, block.sLines, tiling.distances, thread // 32, warps)
        self.row = self.shape.lane_row(self.lane)

    def begin(self, work: KeyTile) -> None:
        super().begin(work)
        self.tVrdV.fill(0.0)
        self.tKrdK.fill(0.0)

    def step(self, call, m, tested, q_slot, do_slot, ds_slot, turn_slot):
        """One query tile: its part of dQ to memory, its parts of dK and dV to registers."""
        block = self.block
        tSrS = cute.make_rmem_tensor(self.scores_shape, Float32)
        tSrdP = cute.make_rmem_tensor(self.scores_shape, Float32)
        # (row, column) is (query, key) above the seam
        scores, gradients = [queries_first(t) for t in (tSrS, tSrdP)]
        at = self.mods.evaluator(self.tile(scores, m))
        self.mods.read_ahead(at)
        block.q_edge.wait(q_slot)
        issue(self.mma_s, tSrS, self.tSrK, self.tSrQ[None, None, None, q_slot.index], False)
        block.do_edge.wait(do_slot)
        issue(self.mma_s, tSrdP, self.tSrV, self.tSrdO[None, None, None, do_slot.index], False)
        lse = self.statistics(block.sLse, q_slot.index)
        delta = self.statistics(block.sDelta, do_slot.index)
        tVrP = self.mma_dv.get_slice(0).make_fragment_A(self.left_shape)
        tKrdS = self.mma_dk.get_slice(0).make_fragment_A(self.left_shape)
        tVrdO = self.tVrdO[None, None, None, do_slot.index]
        p_early = self.tiling.p_early and not self.mods.backward.one_pass
        if const_expr(p_early):
            warpgroup.wait_group(1)
            self.mods.probabilities(at, lse, tested)
            warpgroup.wait_group(0)
            self.mods.score_gradients(at, gradients, delta)
            narrow(tVrP, tSrS)
        else:
            warpgroup.wait_group(0)
            self.mods.both(at, lse, gradients, delta, tested)
            narrow(tVrP, tSrS)
            issue(self.mma_dv, self.tVrdV, tVrP, tVrdO, True)
        add_sums = self.mods.sum_captured(at, gradients, self.diagonals)
        narrow(tKrdS, tSrdP)
        tKrQ = self.tKrQ[None, None, None, q_slot.index]
        stage = ds_slot.index
        copy = self.store_ds
        cute.copy(copy, copy.retile(tKrdS), self.tSsdS[None, None, None, stage])
        if const_expr(p_early):
            issue(self.mma_dv, self.tVrdV, tVrP, tVrdO, True)
        cute.arch.fence_view_async_shared()
        # with two buffers, whoever passes here has read the buffer that will be written next
        self.sync_consumers()
        tQrdQ = self.dq.issue(stage)
        issue(self.mma_dk, self.tKrdK, tKrdS, tKrQ, True)
        add_sums()
        warpgroup.wait_group(1)
        block.do_edge.release(do_slot, self.lane)
        self.add_dq(call, m, tQrdQ, turn_slot)
        warpgroup.wait_group(0)
        block.q_edge.release(q_slot, self.lane)

    def scale_sums(self, call):
        """The factor of dK that is left for the end."""
        for i in range(cute.size(self.tKrdK)):
            self.tKrdK[i] = self.tKrdK[i] * call.scale

    def write_keys(self, call):
        if self.tiling.persistent:
            self.send_keys(call)
        else:
            self.round_keys(call)

    def leave_piece(self, call):
        for target, registers in zip(call.pieces.sums, (self.tKrdK, self.tVrdV), strict=True):
            store_part(target[self.work.piece.slot, None], registers, self.warpgroup, self.thread)
        call.pieces.note(self.work, (self.warpgroup == 0) & (self.thread == 0))

    def send_keys(self, call):
        """Through shared memory of their own, each warpgroup its keys, while the next tile's K and V arrive."""
        block = self.block
        self.drain_stores()  # the last tile's copies have read it
        self.sync_warpgroup()
        shared = [t[None, None, self.warpgroup] for t in (block.sdK, block.sdV)]
        self.put_keys(shared)
        number = self.work.n * self.tiling.warpgroups + self.warpgroup
        send(self.outputs(call, shared, ROWS, number, self.is_first_warp), self.sync_warpgroup)

    def round_keys(self, call):
        """Through the shared memory of K and V, which all warpgroups have read."""
        block, tiling = self.block, self.tiling
        self.sync_consumers()
        shared = (block.sK, tiling.d), (block.sV, tiling.dv)
        self.put_keys([cute.local_tile(t, (ROWS, columns), (self.warpgroup, 0)) for t, columns in shared])

        def is_first():
            return (self.warpgroup == 0) & self.is_first_warp()

        send(self.outputs(call, (block.sK, block.sV), tiling.tile_n, self.work.n, is_first), self.sync_consumers)

    def put_keys(self, shared):
        """dK and dV, rounded, into this warpgroup's rows."""
        products = (self.mma_dk, self.tKrdK), (self.mma_dv, self.tVrdV)
        for (mma, sums), target in zip(products, shared, strict=True):
            put(mma, narrowed(sums, self.block.dtype), target, self.thread)

    def outputs(self, call, shared, rows: int, number, is_first):
        work = self.work
        for i, columns in enumerate((self.tiling.d, self.tiling.dv)):
            tiles = work.keys.tiles(call.tensors.results[i], work.kv_head, (rows, columns))
            yield is_first(), call.tmas.results[i], shared[i], tiles, number


def pieces_of(tiling: HopperBackwardTiling, given: PiecesArguments) -> Pieces:
    """The pieces of a launch, on the host."""
    return Pieces.of(given, tiling.tile_n * tiling.d, tiling.tile_n * tiling.dv)


def kernel(plan: BackwardPlan) -> tuple:
    """(function to compile, arguments to compile it with)."""
    return HopperBackward(plan), fake_arguments(MainArguments.of(plan))
