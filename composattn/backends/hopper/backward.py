"""The backward kernel for Hopper: a block keeps a tile of keys, its dK and dV in registers, and walks over queries."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from ...primitives.bulk_stores import send
from ...primitives.diagonals import Diagonals
from ...primitives.pipelines import Slot
from ...primitives.register_chunks import add_chunks_if, first_number, store_part
from ...primitives.swizzled_tiles import tile_layout
from ...primitives.values import narrow, narrowed, permuted
from ..fused.kernels.backward import Backward
from ..fused.kernels.dq_semaphore import DqSemaphore
from ..fused.kernels.key_tile import KeyTile
from ..fused.kernels.registers.dq_sender import DqSender
from ..fused.planning.plan_backward import BackwardPlan
from .backward_tiling import HopperBackwardTiling
from .dq import DqPart, dq_box
from .key_tile import HopperBackwardBlock, HopperLayouts, KeyWarpgroup, queries_first
from .wgmma import MN, ROWS, STEP, WARPGROUP, get, in_steps, issue, issue_in_parts, product, put, store_matrix


class HopperBackward(Backward[HopperBackwardTiling]):
    """Roles: warp 0 copies K, V once and Q, dO with their rows' statistics; each further warpgroup owns 64 keys.

    Scores are computed transposed, so that P and dS of a warpgroup's keys are left operands in its registers:

        Sᵀ = K Qᵀ    dPᵀ = V dOᵀ    dV += Pᵀ dO    dK += dSᵀ Q    dQ = dS K

    Only dQ needs the keys of all warpgroups: dS goes through shared memory, and each warpgroup computes a part of dQ
    (`dq_split`) and adds it to fp32 memory straight from its registers, 16 bytes per thread, or `dq_in_bulk`.

    Edges: kv (1 stage, never refilled), q (Q and LSE), do (dO and D). Timeline of a warpgroup for query tile i:

        Sᵀ, dPᵀ issued | P (while dPᵀ runs) | dS | dS written | dV issued | all: dS written | dQ, dK issued |
        dQ to memory (while dK runs)

    `dq_later` it is dQ of tile i - 1, whose dS the others have long written (edge ds). So warpgroups meet nowhere in
    the loop, and drift apart until one has its exponentials under the other's products.
    """

    def __init__(self, plan: BackwardPlan[HopperBackwardTiling]):
        super().__init__(plan)
        self.mods.near = plan.tiling.bends_early
        self.threads = (plan.tiling.warpgroups + 1) * WARPGROUP
        self.stored_rows = ROWS if plan.tiling.persistent else plan.tiling.tile_n

    def layouts(self):
        return HopperLayouts.of(self.tiling)

    def finished(self, dq):
        box = dq_box(self.tiling)
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), dq, tile_layout(*box), box)

    def part_of_dq(self, m, number):
        by_rows = self.tiling.dq_split == "rows"
        return dq_box(self.tiling), *((m * self.tiling.warpgroups + number, 0) if by_rows else (m, number))

    def block(self, layouts, counter):
        waits = self.plan.layout.shares_keys
        return HopperBackwardBlock(self.tiling, layouts, self.dtype, self.plan.deterministic, counter, waits)

    @cute.jit
    def produce_or_clear(self, call, block, warp):
        """Warp 0 brings what a block reads, warp 3 clears dQ beside tiles where the plan has it so."""
        if warp == 0:
            self.produce(call, block)
        if const_expr(self.tiling.clears):  # noqa: SIM102  known when compiling
            if warp == 3:
                call.clearing.run(call)

    @cute.jit
    def share_roles(self, call, block, warp):
        tiling = self.tiling
        if warp < 4:
            cute.arch.setmaxregister_decrease(tiling.registers.copying)
            self.produce_or_clear(call, block, warp)
            if const_expr(self.plan.deterministic):
                speakers = tiling.warpgroups if tiling.dq_in_bulk else 0
                if warp == 1 + speakers:
                    DqSemaphore(self, speakers).take(call, block)
            if const_expr(tiling.dq_in_bulk):  # noqa: SIM102  known when compiling
                if (warp > 0) & (warp <= tiling.warpgroups):
                    DqSender(self, block, warp - 1).run(call)
        else:
            cute.arch.setmaxregister_increase(tiling.registers.computing)
            self.consume(call, block)

    @cute.jit
    def consume(self, call, block):
        self.consume_as(call, block, KeyConsumer(self.plan, block, cute.arch.thread_idx()[0] - WARPGROUP))

    @cute.jit
    def consume_as(self, call, block, me):
        """One warpgroup over the tiles of its block."""
        tiling = self.tiling
        stages = 1, tiling.q_stages, tiling.do_stages, tiling.ds_stages  # turns or dq, q, do, ds
        self.visit(call, block, me, me.starts(tuple(map(Slot.first, stages))))
        me.drain_stores()


class KeyConsumer(KeyWarpgroup):
    """One warpgroup's registers and products: tSrS and tSrdP (keys, queries), tVrdV, tKrdK (keys, d), tQrdQ."""

    def __init__(self, plan: BackwardPlan[HopperBackwardTiling], block: HopperBackwardBlock, thread):
        tiling = plan.tiling
        super().__init__(tiling, block, cute.arch.make_warp_uniform(thread // WARPGROUP), thread % WARPGROUP)
        dtype, self.dims = block.dtype, (plan.head_dim, plan.head_dim_v)
        self.mma_dv = product(dtype, tiling.dv, right=MN, left_in_registers=True, written=tiling.written)
        self.mma_dk = product(dtype, tiling.d, right=MN, left_in_registers=True, written=tiling.written)
        self.tVrdV = cute.make_rmem_tensor(self.mma_dv.get_slice(0).partition_shape_C((ROWS, tiling.dv)), Float32)
        self.tKrdK = cute.make_rmem_tensor(self.mma_dk.get_slice(0).partition_shape_C((ROWS, tiling.d)), Float32)
        self.mma_resident = product(dtype, tiling.tile_m, left_in_registers=True, written=tiling.written)
        resident = self.mma_resident.get_slice(0)
        self.resident_k, self.resident_v = [
            resident.make_fragment_A(resident.partition_shape_A((ROWS, columns))) if columns else None
            for columns in (tiling.resident_k, tiling.resident_v)
        ]
        self.lay_operands()
        self.dq = DqPart(tiling, block, self.number)
        self.diagonals = None
        if tiling.distances:
            warps = 4 * tiling.warpgroups
            self.diagonals = Diagonals(self.shape, block.sLines, tiling.distances, thread // 32, warps)
        self.row = self.shape.lane_row(self.lane)

    def lay_operands(self) -> None:
        """Products read these, from shared memory."""
        tiling, block = self.tiling, self.block
        # descriptors are the same for all threads of a warpgroup: thread 0's view serves
        s, dv, dk = self.mma_s.get_slice(0), self.mma_dv.get_slice(0), self.mma_dk.get_slice(0)
        mine = (self.number, 0)
        sK = cute.local_tile(block.sK, (ROWS, tiling.d), (*mine, *(None for _ in range(cute.rank(block.sK) - 2))))
        sV = cute.local_tile(block.sV, (ROWS, tiling.dv), mine)
        self.sK, self.sV = sK, sV
        self.tSrK, self.tSrV = s.make_fragment_A(s.partition_A(sK)), s.make_fragment_A(s.partition_A(sV))
        self.tSrQ, self.tSrdO = [s.make_fragment_B(s.partition_B(moving)) for moving in (block.sQ, block.sdO)]
        self.tVrdO = dv.make_fragment_B(dv.partition_B(permuted(block.sdO, 1, 0, 2)))
        self.tKrQ = dk.make_fragment_B(dk.partition_B(permuted(block.sQ, 1, 0, 2)))
        self.left_shape = dv.partition_shape_A((ROWS, tiling.tile_m))
        self.store_ds = store_matrix(self.mma_s, block.dtype, self.thread, transposed=True)
        sdSt = permuted(block.sdS, 1, 0, 2)  # (keys, queries, stage)
        self.tSsdS = self.store_ds.partition_D(cute.local_tile(sdSt, (ROWS, tiling.tile_m), (self.number, 0, None)))

    def wait_for_keys(self, kv_slot) -> None:
        super().wait_for_keys(kv_slot)
        self.kv_slot = kv_slot
        if self.resident_v is not None:
            self.wait_for_values()
        for resident, shared in ((self.resident_k, self.in_stage(self.sK, 2)), (self.resident_v, self.sV)):
            if resident is not None:
                get(self.mma_resident, resident, shared, self.thread)

    def wait_for_values(self) -> None:
        """Until V is there, if it does not come with K."""
        if self.block.v_edge is not None:
            self.block.v_edge.wait(self.block.value_slot(self.kv_slot))

    def in_stage(self, keys: cute.Tensor, modes: int) -> cute.Tensor:
        """K, or operands of it, of so many `modes`, of this tile where there are several stages."""
        if self.tiling.k_stages == 1:
            return keys
        place = *(None for _ in range(modes)), self.kv_slot.index
        return keys[place]

    def issue_scores(self, accumulator, resident, a, b, columns: int) -> None:
        """The product of keys, some columns of which are `resident` in registers, and of queries, over so many."""
        every = in_steps(columns) // STEP
        steps = 0 if resident is None else min(every, cute.size(resident, mode=[2]))
        parts = (self.mma_resident, resident, range(steps)), (self.mma_s, a, range(steps, every))
        issue_in_parts(accumulator, [part for part in parts if part[2]], b)

    def begin(self, work: KeyTile) -> None:
        super().begin(work)
        self.tVrdV.fill(0.0)
        self.tKrdK.fill(0.0)

    def step(self, call, m, tested, dq_slot, q_slot, do_slot, ds_slot, last=None):
        """One query tile: its part of dQ to memory, or that of the `last` one, its parts of dK and dV to registers."""
        block, self.scale = self.block, call.scale
        tSrS = cute.make_rmem_tensor(self.scores_shape, Float32)
        tSrdP = cute.make_rmem_tensor(self.scores_shape, Float32)
        # (row, column) is (query, key) above the seam
        scores, gradients = [queries_first(t) for t in (tSrS, tSrdP)]
        at = self.mods.evaluator(self.tile(scores, m))
        self.mods.read_ahead(at)
        block.q_edge.wait(q_slot)
        tSrK = self.in_stage(self.tSrK, 3)
        self.issue_scores(tSrS, self.resident_k, tSrK, self.tSrQ[None, None, None, q_slot.index], self.dims[0])
        lse = self.statistics(block.sLse, q_slot.index)
        block.do_edge.wait(do_slot)
        self.wait_for_values()
        self.issue_scores(tSrdP, self.resident_v, self.tSrV, self.tSrdO[None, None, None, do_slot.index], self.dims[1])
        delta = self.statistics(block.sDelta, do_slot.index)
        tVrP = self.mma_dv.get_slice(0).make_fragment_A(self.left_shape)
        tKrdS = self.mma_dk.get_slice(0).make_fragment_A(self.left_shape)
        tVrdO = self.tVrdO[None, None, None, do_slot.index]
        one_pass = self.mods.backward.one_pass
        p_early = self.tiling.bends_early or not one_pass
        if const_expr(p_early and one_pass):
            weights = cute.make_rmem_tensor(self.scores_shape, Float32)
            warpgroup.wait_group(1)
            self.mods.weights(at, lse, queries_first(weights), tested)
            self.mods.drop(at, scores)
            narrow(tVrP, tSrS)
            warpgroup.wait_group(0)
            self.mods.drop(at, gradients)
            self.mods.weighted(gradients, queries_first(weights), delta)
        elif const_expr(p_early):
            warpgroup.wait_group(1)
            self.mods.probabilities(at, lse, tested)
            warpgroup.wait_group(0)
            self.mods.drop(at, gradients)
            self.mods.score_gradients(at, gradients, delta)
            self.mods.drop(at, scores)
            narrow(tVrP, tSrS)
        else:
            warpgroup.wait_group(0)
            self.mods.drop(at, gradients)
            self.mods.both(at, lse, gradients, delta, tested)
            self.mods.drop(at, scores)
            narrow(tVrP, tSrS)
            issue(self.mma_dv, self.tVrdV, tVrP, tVrdO, True)
        add_sums = self.mods.sum_captured(at, gradients, self.diagonals)
        narrow(tKrdS, tSrdP)
        tKrQ = self.tKrQ[None, None, None, q_slot.index]
        if const_expr(self.tiling.dq_later):
            block.ds_edge.wait_empty(ds_slot)
        cute.copy(self.store_ds, self.store_ds.retile(tKrdS), self.tSsdS[None, None, None, ds_slot.index])
        if const_expr(p_early):
            issue(self.mma_dv, self.tVrdV, tVrP, tVrdO, True)
        cute.arch.fence_view_async_shared()

        def start_dk():
            issue(self.mma_dk, self.tKrdK, tKrdS, tKrQ, True)
            add_sums()

        if const_expr(self.tiling.dq_later):
            cute.arch.sync_warp()
            block.ds_edge.fill(ds_slot, self.lane)
            _dk_and_last_dq(self, start_dk, q_slot, do_slot, last, dq_slot.before(), ds_slot.before())
        else:
            # with two buffers, whoever passes here has read the buffer that will be written next
            self.sync_consumers()
            tQrdQ = self.dq.issue(ds_slot.index)
            self.run_dk(start_dk, q_slot, do_slot, lambda: self.add_dq(call, m, tQrdQ, dq_slot))

    def run_dk(self, start_dk, q_slot, do_slot, meanwhile=lambda: None):
        """The product for dK behind those that run; `meanwhile`: what is done while it runs alone."""
        start_dk()
        warpgroup.wait_group(1)
        self.block.do_edge.release(do_slot, self.lane)
        meanwhile()
        warpgroup.wait_group(0)
        self.block.q_edge.release(q_slot, self.lane)

    def start_dq(self, ds_slot) -> cute.Tensor:
        """The product for dQ of a tile, once all have written its dS."""
        self.block.ds_edge.wait(ds_slot)
        return self.dq.issue(ds_slot.index, k_stage=self.kv_slot.index)

    def leave_dq(self, last: "LastDq", tQrdQ, dq_slot, ds_slot) -> None:
        """What the product gave, to memory."""
        edge = self.block.dq_edge
        if const_expr(edge is None):
            add_chunks_if(last.exists, last.address, tQrdQ)
        else:
            mine = Slot(1, self.number, dq_slot.phase)
            edge.wait_empty(mine)
            if const_expr(self.tiling.finishes_dq):
                self.put_dq(tQrdQ)
            else:
                store_part(self.block.sdQ, tQrdQ, self.number, self.thread)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            edge.fill(mine, self.lane)
        # here, as a branch of one lane that the compiler makes of two releases moves additions behind the next wait
        self.block.ds_edge.release(ds_slot, self.lane)

    def put_dq(self, tQrdQ) -> None:
        """This warpgroup's part of dQ as it is returned, for the warp that sends it."""
        for i in range(cute.size(tQrdQ)):
            tQrdQ[i] = tQrdQ[i] * self.scale
        self.dq.put(self.rounded(tQrdQ), self.block.finished_over_dq(self.number), self.thread)

    def starts(self, slots):
        return (*slots, LastDq.none()) if self.tiling.dq_later else slots

    def following(self, call, m, carried):
        if const_expr(not self.tiling.dq_later):
            return super().following(call, m, carried)
        start = self.dq_sum(call, m).iterator + first_number(self.dq.count, self.dq_place(), self.thread)
        return *super().following(call, m, carried[:-1]), LastDq(start.toint(), Int32(1))

    def end(self, carried):
        self.wait_for_values()  # where no query came
        if const_expr(self.block.v_edge is not None):
            self.block.v_edge.release(self.block.value_slot(self.kv_slot), self.lane)
        if const_expr(not self.tiling.dq_later):
            return carried
        dq_slot, _, _, ds_slot, last = carried
        self.dq_slot = Slot(1, self.number, dq_slot.phase)  # of what follows the last dQ on its way out
        self.ds_slot = ds_slot.next()  # empty once all have read K for the last dQ
        _only_last_dq(self, last, dq_slot.before(), ds_slot.before())
        if self.tiling.k_stages > 1:  # dV alone takes a lap
            dq_slot = dq_slot.next()
        return dq_slot, *carried[1:-1], LastDq.none()

    def scale_sums(self, call):
        """The factor of dK that is left for the end."""
        for i in range(cute.size(self.tKrdK)):
            self.tKrdK[i] = self.tKrdK[i] * call.scale

    def write_keys(self, call):
        if self.tiling.persistent:
            (self.hand_keys if self.tiling.dq_in_bulk else self.send_keys)(call)
        else:
            self.round_keys(call)

    def release_keys(self, kv_slot) -> None:
        if self.tiling.k_stages == 1:  # else who sends dK from there does
            super().release_keys(kv_slot)

    def leave_piece(self, call):
        for target, registers in zip(call.pieces.sums, (self.tKrdK, self.tVrdV), strict=True):
            store_part(target[self.work.piece.slot, None], registers, self.number, self.thread)
        call.pieces.note(self.work, self.tiling.tile_n, (self.number == 0) & (self.thread == 0))
        if self.tiling.k_stages > 1:
            self.block.dq_edge.wait_empty(self.dq_slot)
            self.hand(self.dq_slot)

    def hand_keys(self, call):
        """To who sends dQ, who sends them too: dV through this warpgroup's part of dQ's shared memory.

        Then dK through the same, or both at once: dK in the place of K where the next K has another.
        """
        block, slot = self.block, self.dq_slot
        beside = self.tiling.k_stages > 1
        if beside:
            block.ds_edge.wait_empty(self.ds_slot)
            put(self.mma_dk, self.rounded(self.tKrdK), block.dk_over_keys(self.number, self.kv_slot), self.thread)
        block.dq_edge.wait_empty(slot)
        put(self.mma_dv, self.rounded(self.tVrdV), block.result_over_dq(1, self.number), self.thread)
        self.hand(slot)
        if not beside:
            slot = Slot(1, self.number, slot.phase ^ 1)
            block.dq_edge.wait_empty(slot)
            put(self.mma_dk, self.rounded(self.tKrdK), block.result_over_dq(0, self.number), self.thread)
            self.hand(slot)

    def rounded(self, sums) -> cute.Tensor:
        return narrowed(sums, self.block.dtype)

    def hand(self, slot) -> None:
        """What is in shared memory, to the warp that sends it."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        self.block.dq_edge.fill(slot, self.lane)

    def send_keys(self, call):
        """Through shared memory of their own, each warpgroup its keys, while the next tile's K and V arrive."""
        block = self.block
        self.drain_stores()  # the last tile's copies have read it
        self.sync_group()
        shared = [t[None, None, self.number] for t in (block.sdK, block.sdV)]
        self.put_keys(shared)
        number = self.work.n * self.tiling.warpgroups + self.number
        send(self.outputs(call, shared, ROWS, number, self.is_first_warp), self.sync_group)

    def round_keys(self, call):
        """Through the shared memory of K and V, which all warpgroups have read."""
        block, tiling = self.block, self.tiling
        self.sync_consumers()
        shared = (block.sK, tiling.d), (block.sV, tiling.dv)
        self.put_keys([cute.local_tile(t, (ROWS, columns), (self.number, 0)) for t, columns in shared])

        def is_first():
            return (self.number == 0) & self.is_first_warp()

        send(self.outputs(call, (block.sK, block.sV), tiling.tile_n, self.work.n, is_first), self.sync_consumers)

    def put_keys(self, shared):
        """dK and dV, rounded, into this warpgroup's rows."""
        products = (self.mma_dk, self.tKrdK), (self.mma_dv, self.tVrdV)
        for (mma, sums), target in zip(products, shared, strict=True):
            put(mma, narrowed(sums, self.block.dtype), target, self.thread)

    def outputs(self, call, shared, rows: int, number, is_first):
        work = self.work
        for i, columns in enumerate((self.tiling.d, self.tiling.dv)):
            output = work.keys.stored(call.tensors.results[i], work.kv_head, (rows, columns), number)
            yield is_first(), call.tmas.results[i], shared[i], *output


class LastDq:
    """dQ of the query tile before, still to be computed: where this thread adds to it, and whether there is one.

    `exists`, 0 or 1, is a number of its own, of which the compiler sees that all threads have the same.
    """

    def __init__(self, address: Int64, exists: Int32):
        self.address, self.exists = address, exists

    @staticmethod
    def none() -> "LastDq":
        return LastDq(Int64(0), Int32(0))

    def __extract_mlir_values__(self):
        return [self.address.ir_value(), self.exists.ir_value()]

    def __new_from_mlir_values__(self, values):
        return LastDq(Int64(values[0]), Int32(values[1]))


@cute.jit
def _dk_and_last_dq(
    me: cutlass.Constexpr,
    start_dk: cutlass.Constexpr,
    q_slot: Slot,
    do_slot: Slot,
    last: LastDq,
    dq_slot: Slot,
    ds_slot: Slot,
):
    """dK of a query tile, and dQ of the `last` one, if there is one. No product may run on where branches meet."""
    if last.exists != 0:
        tQrdQ = me.start_dq(ds_slot)
        me.run_dk(start_dk, q_slot, do_slot, lambda: me.leave_dq(last, tQrdQ, dq_slot, ds_slot))
    else:
        me.run_dk(start_dk, q_slot, do_slot)


@cute.jit
def _only_last_dq(me: cutlass.Constexpr, last: LastDq, dq_slot: Slot, ds_slot: Slot):
    if last.exists != 0:
        tQrdQ = me.start_dq(ds_slot)
        warpgroup.wait_group(0)
        me.leave_dq(last, tQrdQ, dq_slot, ds_slot)
