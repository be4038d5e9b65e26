"""The backward kernel for Hopper whose warpgroups share dVᵀ and dKᵀ by rows: more keys per block, for D or Dv > 128."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...primitives.bulk_stores import send
from ...primitives.pipelines import Slot
from ...primitives.register_chunks import store_part
from ...primitives.values import Fixed, narrowed, permuted
from ..fused.kernels.key_tile import KeyTile
from .backward import HopperBackward
from .backward_tiling import DK, DV, HopperBackwardTiling
from .dq import DqColumns
from .key_tile import Block, KeyWarpgroup
from .wgmma import (
    MN,
    ROWS,
    WARPGROUP,
    issue,
    issue_together,
    product,
    put,
    row_column_view,
    store_matrix,
)


class HopperBackwardTransposed(HopperBackward):
    """Roles: warp 0 copies; each warpgroup has the scores of some keys, and of all keys blocks of 64 rows of dVᵀ, dKᵀ.

        S = Q Kᵀ    dP = dO Vᵀ    dVᵀ += dOᵀ P    dKᵀ += Qᵀ dS    dQ = dS K

    What is added to memory for dQ, all of a tile once for every tile of keys, falls with the keys that a block has: of
    D 192, 96 keys where `HopperBackwardWide` has 64. P and dS go through shared memory, as each product but the scores
    takes all keys. Edges as in `HopperBackward`. Timeline of a warpgroup for query tile i, P early:

        S, dP issued | P written | dS written | all: both written | dQ issued | its blocks issued | dQ to memory
    """

    @cute.jit
    def consume(self, call, block):
        thread = cute.arch.thread_idx()[0]
        number = cute.arch.make_warp_uniform(thread // WARPGROUP) - 1
        for n in cutlass.range_constexpr(self.tiling.warpgroups):
            if number == n:
                self.consume_as(call, block, Sharer(self.tiling, block, thread % WARPGROUP, n))


class Sum(Fixed):
    """64 rows of dVᵀ or dKᵀ in registers, over all keys of the block, and what their left operand is."""

    def __init__(self, result: int, number: int, mma: cute.TiledMma, block: Block):
        self.result, self.number = result, number
        (queries, _, _), (_, keys, _) = block.sQ.shape, block.sP.shape
        total, tile = mma.get_slice(0), permuted((block.sQ, block.sdO)[result], 1, 0, 2)
        mine = cute.local_tile(tile, (ROWS, cute.size(queries)), (number, 0, None))
        self.left = total.make_fragment_A(total.partition_A(mine))
        self.registers = cute.make_rmem_tensor(total.partition_shape_C((ROWS, cute.size(keys))), Float32)


class Sharer(KeyWarpgroup):
    """One warpgroup: tSrS and tSrdP (queries, keys of its own), its blocks of dVᵀ and dKᵀ (d, keys), columns of dQ."""

    def __init__(self, tiling: HopperBackwardTiling, block: Block, thread, number: int):
        keys = self.apart = tiling.tile_n // tiling.warpgroups
        super().__init__(tiling, block, number, thread, columns=keys)
        dtype, share = block.dtype, tiling.shares[number]
        self.mma_sum = product(dtype, tiling.tile_n, left=MN, right=MN, written=tiling.written)
        s, total = self.mma_s.get_slice(0), self.mma_sum.get_slice(0)
        sK, sV = [
            cute.local_tile(t, (keys, columns), (number, 0))
            for t, columns in ((block.sK, tiling.d), (block.sV, tiling.dv))
        ]
        self.tSrQ, self.tSrdO = s.make_fragment_A(s.partition_A(block.sQ)), s.make_fragment_A(s.partition_A(block.sdO))
        self.tSrK, self.tSrV = s.make_fragment_B(s.partition_B(sK)), s.make_fragment_B(s.partition_B(sV))
        # by result, dK first
        self.right = [total.make_fragment_B(total.partition_B(permuted(t, 1, 0, 2))) for t in (block.sdS, block.sP)]
        self.sums = [Sum(*which, self.mma_sum, block) for which in share.blocks]
        self.results = [result for result in (DK, DV) if share.of(result)]
        self.dq = DqColumns(share, block, tiling)
        self.store = store_matrix(self.mma_s, dtype, thread)
        self.tSsP, self.tSsdS = [
            self.store.partition_D(cute.local_tile(t, (ROWS, keys), (0, number, None))) for t in (block.sP, block.sdS)
        ]
        self.row = (thread // 32) * self.shape.warp_rows + self.shape.lane_row(self.lane)

    def first_key(self, first):
        """Warps have queries of their own."""
        return first + self.shape.lane_column(self.lane)

    def dq_place(self):
        return self.dq.place

    def statistics(self, shared, stage):
        return [shared[self.row + offset, stage] for offset in self.shape.row_offsets]

    def begin(self, work: KeyTile) -> None:
        super().begin(work)
        for mine in self.sums:
            mine.registers.fill(0.0)

    def step(self, call, m, tested: Boolean, turn_slot, q_slot, do_slot, ds_slot):
        """One query tile: its part of dQ to memory, its parts of dVᵀ and dKᵀ to registers."""
        block, stage = self.block, ds_slot.index
        tSrS = cute.make_rmem_tensor(self.scores_shape, Float32)
        tSrdP = cute.make_rmem_tensor(self.scores_shape, Float32)
        scores, gradients = row_column_view(tSrS), row_column_view(tSrdP)
        at = self.mods.evaluator(self.tile(scores, m))
        self.mods.read_ahead(at)
        block.q_edge.wait(q_slot)
        issue(self.mma_s, tSrS, self.tSrQ[None, None, None, q_slot.index], self.tSrK, False)
        block.do_edge.wait(do_slot)
        issue(self.mma_s, tSrdP, self.tSrdO[None, None, None, do_slot.index], self.tSrV, False)
        lse, delta = self.statistics(block.sLse, q_slot.index), self.statistics(block.sDelta, do_slot.index)
        slots = q_slot, do_slot
        p_early = self.tiling.p_early and not self.mods.backward.one_pass
        if const_expr(p_early):
            warpgroup.wait_group(1)
            self.mods.probabilities(at, lse, tested)
            self.wait_for_room(ds_slot)
            self.write(self.mods.dropped(at, tSrS, row_column_view), self.tSsP, stage)
            warpgroup.wait_group(0)
            self.mods.drop(at, gradients)
            self.mods.score_gradients(at, gradients, delta)
        else:
            warpgroup.wait_group(0)
            self.mods.drop(at, gradients)
            self.mods.both(at, lse, gradients, delta, tested)
            self.mods.drop(at, scores)
            self.wait_for_room(ds_slot)
            self.write(tSrS, self.tSsP, stage)
        self.mods.sum_captured(at, gradients, None)()
        self.write(tSrdP, self.tSsdS, stage)
        cute.arch.fence_view_async_shared()
        if const_expr(self.tiling.has_one_ds):
            cute.arch.sync_warp()
            block.ds_edge.fill(ds_slot, self.lane)
            block.ds_edge.wait(ds_slot)
        else:
            # with two buffers, whoever passes here has read the buffers that will be written next
            self.sync_consumers()
        tQrdQ = self.dq.issue(stage)
        self.add_sums(slots, stage)
        warpgroup.wait_group(len(self.results))
        self.release([r for r in (DK, DV) if r not in self.results], slots)
        if const_expr(self.tiling.dq_in_bulk):
            self.hand_dq(tQrdQ)
        else:
            self.add_dq(call, m, tQrdQ, turn_slot)
        warpgroup.wait_group(0)
        self.release(self.results, slots)
        if const_expr(self.tiling.has_one_ds):
            block.ds_edge.release(ds_slot, self.lane)

    def wait_for_room(self, ds_slot) -> None:
        """Until all have read the P and dS that lie where the next ones will."""
        if const_expr(self.tiling.has_one_ds):
            self.block.ds_edge.wait_empty(ds_slot)

    def hand_dq(self, tQrdQ: cute.Tensor) -> None:
        """Its part of dQ to its sender, a piece after the other through the same place."""
        edge, pieces = self.block.dq_edge, self.tiling.dq_pieces
        count = cute.size(tQrdQ) // pieces
        for piece in range(pieces):
            slot = Slot(1, Int32(self.number), Int32(piece % 2))
            edge.wait_empty(slot)
            part = cute.make_tensor(tQrdQ.iterator + piece * count, cute.make_layout(count))
            store_part(self.block.sdQ, part, self.number, self.thread)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            edge.fill(slot, self.lane)

    def write(self, values: cute.Tensor, places: cute.Tensor, stage) -> None:
        """Scores, rounded, to the operand of all."""
        rounded = narrowed(values, self.block.dtype)
        cute.copy(self.store, self.store.retile(rounded), places[None, None, None, stage])

    def add_sums(self, slots, stage) -> None:
        """Starts the products of its blocks of each result."""
        for result in self.results:
            at = (None, None, None, slots[result].index)
            products = [(mine.registers, mine.left[at]) for mine in self.sums if mine.result == result]
            issue_together(self.mma_sum, products, self.right[result][None, None, None, stage], True)

    def release(self, results: list[int], slots) -> None:
        """Tiles of Q and dO, which go into the sums of dK and dV."""
        for result in results:
            (self.block.q_edge, self.block.do_edge)[result].release(slots[result], self.lane)

    def scale_sums(self, call):
        for mine in self.sums:
            if mine.result == DK:
                for i in range(cute.size(mine.registers)):
                    mine.registers[i] = mine.registers[i] * call.scale

    def leave_piece(self, call):
        work = self.work
        for mine in self.sums:
            store_part(call.pieces.sums[mine.result][work.piece.slot, None], mine.registers, mine.number, self.thread)
        call.pieces.note(work, self.tiling.tile_n, (self.number == 0) & (self.thread == 0))

    def write_keys(self, call):
        """Through the shared memory of K and V, which all warpgroups have read."""
        block, tiling = self.block, self.tiling
        self.sync_consumers()
        for mine in self.sums:
            shared = permuted((block.sK, block.sV)[mine.result], 1, 0)
            rows = cute.local_tile(shared, (ROWS, tiling.tile_n), (mine.number, 0))
            put(self.mma_sum, narrowed(mine.registers, block.dtype), rows, self.thread, transposed=True)
        send(self.outputs(call), self.sync_consumers)

    def outputs(self, call):
        """dV leaves by the first warpgroup, dK by the last one."""
        block, tiling, work = self.block, self.tiling, self.work
        for result, sender, shared, columns in (
            (DV, 0, block.sV, tiling.dv),
            (DK, tiling.warpgroups - 1, block.sK, tiling.d),
        ):
            if self.number == sender:
                tiles = work.keys.tiles(call.tensors.results[result], work.kv_head, (tiling.tile_n, columns))
                yield self.is_first_warp(), call.tmas.results[result], shared, tiles, work.n
