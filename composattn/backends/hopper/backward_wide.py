"""The backward kernel for Hopper where dK and dV of 64 keys fill a warpgroup each: D or Dv above 128."""

import abc
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...primitives.bulk_stores import send
from ...primitives.diagonals import Diagonals
from ...primitives.register_chunks import store_part
from ...primitives.values import narrow, narrowed, permuted
from ..fused.kernels.key_tile import KeyTile
from .backward import HopperBackward
from .backward_tiling import HopperBackwardTiling
from .dq import DqPart
from .key_tile import HopperBackwardBlock, KeyWarpgroup, queries_first
from .wgmma import MN, ROWS, WARPGROUP, issue, product, put, store_matrix


class HopperBackwardWide(HopperBackward):
    """Roles: warp 0 copies; one warpgroup has P and dV of all keys of the block, the other one dS and dK.

    Edges as in `HopperBackward`, and weights (P m'(s), fp32, registers of the one for registers of the other) and dS
    through shared memory. Timeline for query tile i:

        first:   Sᵀ issued | P, weights written | dV issued |         all: dS written | dQ issued | dQ to memory
        second:  dPᵀ issued |        | dS from weights, written |                     | dQ, dK issued | dQ to memory

    Each computes half of the columns of dQ.

    D comes with Q (`delta_with_q`). An arrival does not wait for reads before it, and beside products these take long:
    with one stage of dO, freed when dP was there, the next D came before some rows of this one were read (errors of
    1e-2 in dQ and dK). What orders reads by threads before a copy is a proxy fence on the way from the one to the
    other: the second side, whose weights the first has made of LSE, makes dS of D and these, fences it, and then is
    done with Q.
    """

    delta_with_q = True

    @property
    def sides(self) -> "tuple[type[Side], type[Side]]":
        """The sides of the two warpgroups."""
        return ProbabilitySide, GradientSide

    @cute.jit
    def consume(self, call, block):
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        first, second = self.sides
        if cute.arch.make_warp_uniform(thread // WARPGROUP) == 0:
            self.consume_as(call, block, first(self.tiling, block, thread, 0))
        else:
            self.consume_as(call, block, second(self.tiling, block, thread - WARPGROUP, 1))


class Side(KeyWarpgroup):
    """One warpgroup: a score product of `stationary` and `moving`, and a sum over queries of what comes of it."""

    apart = 0  # both have all keys of the block
    ahead: int | None = None  # rows whose statistics are read under a product of scores: all
    result: int  # of dK, dV

    def __init__(self, tiling: HopperBackwardTiling, block: HopperBackwardBlock, thread, number: int):
        super().__init__(tiling, block, number, thread)
        stationary, moving, partner, columns = self.operands()
        wide = columns // self.products_of(columns)
        self.mma_sum = product(block.dtype, wide, right=MN, left_in_registers=True, written=tiling.written)
        s, total = self.mma_s.get_slice(0), self.mma_sum.get_slice(0)
        self.tSra = s.make_fragment_A(s.partition_A(stationary))
        self.tSrb = s.make_fragment_B(s.partition_B(moving))
        self.tTrb = total.make_fragment_B(total.partition_B(permuted(partner, 1, 0, 2)))
        self.left_shape = total.partition_shape_A((ROWS, tiling.tile_m))
        self.total = cute.make_rmem_tensor(total.partition_shape_C((ROWS, columns)), Float32)
        self.dq = DqPart(tiling, block, number)
        self.diagonals = Diagonals(self.shape, block.sW, tiling.tile_m * tiling.tile_n, thread // 32, 4)
        self.row = self.shape.lane_row(self.lane)

    def begin(self, work: KeyTile) -> None:
        super().begin(work)
        self.total.fill(0.0)

    def products_of(self, columns: int) -> int:
        """How many products a step of the sum is."""
        return 1

    @abc.abstractmethod
    def operands(self) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor, int]:
        """`stationary`, `moving`, what is multiplied with the scores into the sum, and its columns."""

    def left(self, values: cute.Tensor) -> cute.Tensor:
        """Scores as left operand of the sum."""
        operand = self.mma_sum.get_slice(0).make_fragment_A(self.left_shape)
        narrow(operand, values)
        return operand

    def complete(self, scores: cute.Tensor, slot) -> None:
        """A score product, whatever part of its columns this block has."""

    def weights(self) -> list[cute.Tensor]:
        """Shared memory of this thread's weights, four at a time."""
        start = self.block.sW + self.thread * 4
        count = self.tiling.tile_m * ROWS // (4 * WARPGROUP)
        return [cute.make_tensor((start + j * 4 * WARPGROUP).align(16), cute.make_layout(4)) for j in range(count)]

    def part(self):
        """Which part of the columns of dK and dV this block has."""
        return 0

    def release_keys(self, kv_slot):
        """Later, as dK and dV leave through the place of K and V."""
        self.kv_slot = kv_slot

    def finish(self, call):
        super().finish(call)
        if const_expr(self.tiling.persistent):
            self.drain_stores()
            self.block.kv_edge.release(self.kv_slot, self.lane)

    def leave_piece(self, call):
        store_part(call.pieces.sums[self.result][self.work.piece.slot, None], self.total, self.part(), self.thread)
        call.pieces.note(self.work, self.tiling.tile_n, (self.result == 0) & (self.thread == 0))

    def write_keys(self, call):
        block, tiling = self.block, self.tiling
        shared, columns = ((block.sK, tiling.d), (block.sV, tiling.dv))[self.result]
        self.sync_consumers()  # K has been read by all products
        put(self.mma_sum, narrowed(self.total, block.dtype), shared, self.thread)
        send(self.outputs(call, shared, columns), self.sync_group)

    def outputs(self, call, shared, columns: int):
        work = self.work
        tiles = work.keys.tiles(call.tensors.results[self.result], work.kv_head, (self.tiling.tile_n, columns))
        yield self.is_first_warp(), call.tmas.results[self.result], shared, tiles, self.stored_tile()

    def stored_tile(self):
        """Which tile of dK and dV is stored, in tiles of this block's keys."""
        return self.work.n


class ProbabilitySide(Side):
    """S, P and dV."""

    result = 1

    def operands(self):
        block = self.block
        return block.sK, block.sQ, block.sdO, self.tiling.dv

    def step(self, call, m, tested: Boolean, turn_slot, q_slot, do_slot, ds_slot):
        block = self.block
        at, tSrS, weights = self.probabilities(m, tested, turn_slot, q_slot)
        self.leave_weights(weights)
        block.of_weights.arrive()
        self.start_sum(at, tSrS, do_slot)
        block.q_edge.release(q_slot, self.lane)
        self.sync_consumers()
        tQrdQ = self.dq.issue(ds_slot.index)
        warpgroup.wait_group(1)
        block.do_edge.release(do_slot, self.lane)
        warpgroup.wait_group(0)
        self.add_dq(call, m, tQrdQ, turn_slot)

    def probabilities(self, m, tested: Boolean, turn_slot, q_slot, issue_behind=lambda: 0):
        """(where they stand, P, dS for dP - D = 1) of a query tile.

        `issue_behind` the product of scores starts further ones, and says how many: they run on.
        """
        block = self.block
        tSrS = cute.make_rmem_tensor(self.scores_shape, Float32)
        at = self.mods.evaluator(self.tile(queries_first(tSrS), m))
        self.mods.read_ahead(at)
        block.q_edge.wait(q_slot)
        lse = self.statistics(block.sLse, q_slot.index).read_ahead(self.ahead)
        issue(self.mma_s, tSrS, self.tSra, self.tSrb[None, None, None, q_slot.index], False)
        warpgroup.wait_group(issue_behind())
        self.complete(tSrS, turn_slot)
        weights = tSrS
        if const_expr(self.mods.backward.slope is not None):
            weights = cute.make_rmem_tensor(self.scores_shape, Float32)
            self.mods.weights(at, lse, queries_first(weights), tested)
        else:
            self.mods.probabilities(at, lse, tested)
        return at, tSrS, weights

    def leave_weights(self, weights: cute.Tensor) -> None:
        """To shared memory, for the other side."""
        for j, place in enumerate(self.weights()):
            cute.autovec_copy(cute.make_tensor(weights.iterator + 4 * j, cute.make_layout(4)), place)

    def start_sum(self, at: Any, tSrS: cute.Tensor, do_slot) -> None:
        """dV += Pᵀ dO."""
        self.mods.drop(at, queries_first(tSrS))
        tTrP = self.left(tSrS)
        self.block.do_edge.wait(do_slot)
        issue(self.mma_sum, self.total, tTrP, self.tTrb[None, None, None, do_slot.index], True)


class GradientSide(Side):
    """dP, dS and dK, and the sums of captured gradients, which come from dS."""

    result = 0

    def operands(self):
        block = self.block
        return block.sV, block.sdO, block.sQ, self.tiling.d

    def step(self, call, m, tested: Boolean, turn_slot, q_slot, do_slot, ds_slot):
        block, stage = self.block, ds_slot.index
        tSrdP = self.less_delta(m, turn_slot, q_slot, do_slot)
        block.of_weights.meet()
        self.weigh(tSrdP)
        # the weights have been read, and the next ones are written after the barrier below
        self.sum_captured(tSrdP, m)
        tTrdS = self.left(tSrdP)
        copy, place = self.dS_store()
        cute.copy(copy, copy.retile(tTrdS), place[None, None, None, stage])
        cute.arch.fence_view_async_shared()
        self.sync_consumers()
        tQrdQ = self.dq.issue(stage)
        issue(self.mma_sum, self.total, tTrdS, self.tTrb[None, None, None, q_slot.index], True)
        warpgroup.wait_group(1)
        self.add_dq(call, m, tQrdQ, turn_slot)
        warpgroup.wait_group(0)
        block.q_edge.release(q_slot, self.lane)

    def less_delta(self, m, turn_slot, q_slot, do_slot) -> cute.Tensor:
        """dP - D of a query tile; dO has been read."""
        block = self.block
        tSrdP = cute.make_rmem_tensor(self.scores_shape, Float32)
        block.q_edge.wait(q_slot)
        delta = self.statistics(block.sDelta, q_slot.index).read_ahead(self.ahead)
        block.do_edge.wait(do_slot)
        issue(self.mma_s, tSrdP, self.tSra, self.tSrb[None, None, None, do_slot.index], False)
        warpgroup.wait_group(0)
        block.do_edge.release(do_slot, self.lane)
        self.complete(tSrdP, turn_slot)
        gradients = queries_first(tSrdP)
        self.mods.drop(self.mods.evaluator(self.tile(tSrdP, m)), gradients)
        for r in range(self.shape.rows):
            for c in range(self.shape.columns):
                gradients[r, c] = gradients[r, c] - delta[r]
        return tSrdP

    def weigh(self, tSrdP: cute.Tensor) -> None:
        """dP - D to dS, by what the other side has left."""
        for j, place in enumerate(self.weights()):
            four = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(place, four)
            for e in range(4):
                tSrdP[4 * j + e] = tSrdP[4 * j + e] * four[e]

    def sum_captured(self, tSrdP: cute.Tensor, m) -> None:
        """What dS gives to captured tensors."""
        at = self.mods.evaluator(self.tile(tSrdP, m))
        self.mods.sum_captured(at, queries_first(tSrdP), self.diagonals)()

    def dS_store(self):
        copy = store_matrix(self.mma_s, self.block.dtype, self.thread, transposed=True)
        return copy, copy.partition_D(permuted(self.block.sdS, 1, 0, 2))  # (keys, queries, stage)

    def scale_sums(self, call):
        for i in range(cute.size(self.total)):
            self.total[i] = self.total[i] * call.scale
