"""The backward kernel for Hopper: a block keeps a tile of keys, its dK and dV in registers, and walks over queries."""

import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...primitives.bulk_stores import send
from ...primitives.diagonals import Diagonals
from ...primitives.pipelines import Slot
from ...primitives.register_chunks import store_part
from ...primitives.values import narrow, narrowed, permuted
from ..fused.kernels.backward import Backward
from ..fused.kernels.dq_semaphore import DqSemaphore
from ..fused.kernels.key_tile import KeyTile
from ..fused.plan_backward import BackwardPlan
from .backward_tiling import HopperBackwardTiling
from .dq import DqPart
from .key_tile import Block, KeyWarpgroup, Layouts, queries_first
from .wgmma import MN, ROWS, WARPGROUP, issue, product, put, store_matrix


class HopperBackward(Backward[HopperBackwardTiling]):
    """Roles: warp 0 copies K, V once and Q, dO with their rows' statistics; each further warpgroup owns 64 keys.

    Scores are computed transposed, so that P and dS of a warpgroup's keys are left operands in its registers:

        Sᵀ = K Qᵀ    dPᵀ = V dOᵀ    dV += Pᵀ dO    dK += dSᵀ Q    dQ = dS K

    Only dQ needs the keys of all warpgroups: dS goes through shared memory, and each warpgroup computes a part of dQ
    (`dq_split`) and adds it to fp32 memory straight from its registers, 16 bytes per thread.

    Edges: kv (1 stage, never refilled), q (Q and LSE), do (dO and D). Timeline of a warpgroup for query tile i:

        Sᵀ, dPᵀ issued | P (while dPᵀ runs) | dS | dS written | dV issued | all: dS written | dQ, dK issued |
        dQ to memory (while dK runs)
    """

    def __init__(self, plan: BackwardPlan[HopperBackwardTiling]):
        super().__init__(plan)
        self.threads = (plan.tiling.warpgroups + 1) * WARPGROUP
        self.stored_rows = ROWS if plan.tiling.persistent else plan.tiling.tile_n

    def layouts(self):
        return Layouts.of(self.tiling, self.dtype)

    def block(self, layouts, counter):
        return Block(self.tiling, layouts, self.dtype, self.plan.deterministic, counter)

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

    @cute.jit
    def consume(self, call, block):
        self.consume_as(call, block, Consumer(self.tiling, block, cute.arch.thread_idx()[0] - WARPGROUP))

    @cute.jit
    def consume_as(self, call, block, me):
        """One warpgroup over the tiles of its block."""
        tiling = self.tiling
        stages = 1, tiling.q_stages, tiling.do_stages, tiling.ds_stages  # turns, q, do, ds
        self.visit(call, block, me, tuple(map(Slot.first, stages)))
        me.drain_stores()


class Consumer(KeyWarpgroup):
    """One warpgroup's registers and products: tSrS and tSrdP (keys, queries), tVrdV, tKrdK (keys, d), tQrdQ."""

    def __init__(self, tiling: HopperBackwardTiling, block: Block, thread):
        super().__init__(tiling, block, cute.arch.make_warp_uniform(thread // WARPGROUP), thread % WARPGROUP)
        dtype = block.dtype
        self.mma_dv = product(dtype, tiling.dv, right=MN, left_in_registers=True)
        self.mma_dk = product(dtype, tiling.d, right=MN, left_in_registers=True)
        # descriptors are the same for all threads of a warpgroup: thread 0's view serves
        s, dv, dk = self.mma_s.get_slice(0), self.mma_dv.get_slice(0), self.mma_dk.get_slice(0)
        mine = (self.number, 0)
        sK, sV = cute.local_tile(block.sK, (ROWS, tiling.d), mine), cute.local_tile(block.sV, (ROWS, tiling.dv), mine)
        self.tSrK, self.tSrV = s.make_fragment_A(s.partition_A(sK)), s.make_fragment_A(s.partition_A(sV))
        self.tSrQ, self.tSrdO = s.make_fragment_B(s.partition_B(block.sQ)), s.make_fragment_B(s.partition_B(block.sdO))
        self.tVrdO = dv.make_fragment_B(dv.partition_B(permuted(block.sdO, 1, 0, 2)))
        self.tKrQ = dk.make_fragment_B(dk.partition_B(permuted(block.sQ, 1, 0, 2)))
        self.tVrdV = cute.make_rmem_tensor(dv.partition_shape_C((ROWS, tiling.dv)), Float32)
        self.tKrdK = cute.make_rmem_tensor(dk.partition_shape_C((ROWS, tiling.d)), Float32)
        self.left_shape = dv.partition_shape_A((ROWS, tiling.tile_m))
        self.dq = DqPart(tiling, block, self.number)
        self.store_ds = store_matrix(self.mma_s, dtype, self.thread, transposed=True)
        sdSt = permuted(block.sdS, 1, 0, 2)  # (keys, queries, stage)
        self.tSsdS = self.store_ds.partition_D(cute.local_tile(sdSt, (ROWS, tiling.tile_m), (self.number, 0, None)))
        self.diagonals = None
        if tiling.distances:
            warps = 4 * tiling.warpgroups
            self.diagonals = Diagonals(self.shape, block.sLines, tiling.distances, thread // 32, warps)
        self.row = self.shape.lane_row(self.lane)

    def begin(self, work: KeyTile) -> None:
        super().begin(work)
        self.tVrdV.fill(0.0)
        self.tKrdK.fill(0.0)

    def step(self, call, m, tested, turn_slot, q_slot, do_slot, ds_slot):
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
            store_part(target[self.work.piece.slot, None], registers, self.number, self.thread)
        call.pieces.note(self.work, (self.number == 0) & (self.thread == 0))

    def send_keys(self, call):
        """Through shared memory of their own, each warpgroup its keys, while the next tile's K and V arrive."""
        block = self.block
        self.drain_stores()  # the last tile's copies have read it
        self.sync_warpgroup()
        shared = [t[None, None, self.number] for t in (block.sdK, block.sdV)]
        self.put_keys(shared)
        number = self.work.n * self.tiling.warpgroups + self.number
        send(self.outputs(call, shared, ROWS, number, self.is_first_warp), self.sync_warpgroup)

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
            tiles = work.keys.tiles(call.tensors.results[i], work.kv_head, (rows, columns))
            yield is_first(), call.tmas.results[i], shared[i], tiles, number
