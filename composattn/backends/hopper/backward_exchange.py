"""The backward kernel for Hopper by pairs of blocks that exchange dS: each adds half of the columns of dQ to memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from ...primitives.block_pair import BothWarps, PairWarps, copy_across, meet, other, rank
from ...primitives.cut_rows import bulk_copy, load, partition
from ...primitives.dynamic_scheduler import DynamicScheduler
from ...primitives.pair_scheduler import PairScheduler
from ...primitives.pipelines import Copies, Edge, Slot, Warps
from ...primitives.register_chunks import add_part
from ...primitives.swizzled_tiles import tile_layout
from ...primitives.values import choose, narrow, permuted
from ..fused.kernels.dq_semaphore import DqSemaphore
from ..fused.kernels.key_tile import KeyGroup
from ..fused.kernels.registers.groups import ThreadGroup
from .backward_tiling import ExchangeBackwardTiling, HopperBackwardTiling
from .backward_wide import GradientSide, HopperBackwardWide, ProbabilitySide, Side
from .dq import DqPart, dq_columns
from .key_tile import HopperBackwardBlock, HopperLayouts, queries_first
from .wgmma import WARPGROUP, issue, warps_of


class HopperBackwardExchange(HopperBackwardWide):
    """Two blocks have half of the keys of a tile each, and visit the same queries.

    Roles: as `HopperBackwardWide`, and a third warpgroup that computes dQ and adds it to memory. These additions take
    as long as the products of a tile, and hold up who issues them: the two sides never wait for them here. A warp sends
    dS to the other block, and each computes half of the columns of dQ from the keys of both: what is added to memory
    falls to a half. Nobody meets in the loop. Edges beside those of `HopperBackward`, of a query tile:

        weights   first side to second     1 stage
        ds        second side to dQ; empty when both blocks have read it: what is sent next finds room in the other
        ds there  dS of the other block's keys
        added     dQ to the warp that says so, in a fixed order: its fence waits for additions, while another warp
                  waits for the next turn

    `dv_later` the product for dV of a query tile starts behind that for the scores of the next one, whose exponentials
    are computed under it.
    """

    def __init__(self, plan):
        super().__init__(plan)
        self.own = plan.tiling.of_block
        self.threads = (plan.tiling.warpgroups + 2) * WARPGROUP
        self.stored_rows = self.own.tile_n
        first = LaterProbabilitySide if self.own.dv_later else ExchangeProbabilitySide
        self.groups = first, ExchangeGradientSide, DqGroup

    def layouts(self):
        return HopperLayouts.of(self.own)

    def block(self, layouts, counter):
        return ExchangeBlock(self.plan.tiling, layouts, self.dtype, self.plan.deterministic, counter)

    @cute.jit
    def share_roles(self, call, block, warp):
        tiling = self.tiling
        meet()  # barriers of both blocks are there
        if warp < 4:
            cute.arch.setmaxregister_decrease(tiling.registers.copying)
            self.produce_or_clear(call, block, warp)
            if const_expr(self.plan.deterministic):
                if warp == 1:
                    DqSemaphore(self, speakers=1).take(call, block)
                if warp == 3:
                    DqSemaphore(self).tell(call, block)
            if warp == 2:
                slot = block.ds_there.first
                self.walk(call, block, lambda *work: self.send_gradients(block, *work), DynamicScheduler.hear, slot)
        elif warp < 8:
            cute.arch.setmaxregister_increase(tiling.registers.computing)
            self.consume_as(call, block, self.group(block, 0))
        elif warp < 12:
            cute.arch.setmaxregister_increase(tiling.registers.computing)
            self.consume_as(call, block, self.group(block, 1))
        else:
            copying, computing = tiling.registers.copying, tiling.registers.computing
            cute.arch.setmaxregister_decrease(512 - copying - 2 * computing)  # what the others leave
            self.consume_as(call, block, self.group(block, 2))
        meet()  # neither leaves while the other may reach into its memory

    def group(self, block, number):
        """The warpgroup of that number: first side, second side, dQ."""
        thread = cute.arch.thread_idx()[0] - (number + 1) * WARPGROUP
        return self.groups[number](self.own, block, thread, number)

    # --- copies -----------------------------------------------------------------------------------------------

    @property
    def across_box(self):
        return self.own.tile_n, self.tiling.d // 2

    def loads_across(self, mQ, mdO, mK):
        """Columns of K, of the other block's keys."""
        return [bulk_copy(cpasync.CopyBulkTensorTileG2SOp(), mK, across_layout(self.tiling), self.across_box)]

    def load_keys(self, call, block, work, kv_slot):
        bar = block.kv_edge.acquire(kv_slot)
        tmas, tensors, tiling, rows = call.tmas, call.tensors, self.tiling, self.stored_rows
        for tma, tensor, box, column, shared, of in (
            (tmas.k, tensors.k, (rows, tiling.d), 0, block.sK, rank()),
            (tmas.v, tensors.v, (rows, tiling.dv), 0, block.sV, rank()),
            (tmas.across[0], tensors.across[0], self.across_box, rank(), block.sKthere, other()),
        ):
            target, source = partition(tma, shared, work.keys.tiles(tensor, work.kv_head, box, column))
            load(tma, source, 2 * work.n + of, target, bar)

    @cute.jit
    def send_gradients(self, block, call, work, slot):
        """dS of this block's keys to the other block, as soon as it is there."""
        begin, stop = self.members(call, work)
        for member in cutlass.range(begin, stop, unroll=1):
            head = work.kv_head * call.group + member
            for run in self.query_tiles(call, work, head):
                for _ in cutlass.range(run.count, unroll=1):
                    block.ds_there.acquire(slot)
                    block.ds_edge.wait(slot)
                    start = slot.index * block.ds_bytes
                    source, target = block.sdS.iterator.toint() + start, block.sdSthere.iterator.toint() + start
                    copy_across(source, target, block.ds_there.full + slot.index, block.ds_bytes)
                    slot = slot.next()
        return slot


def across_layout(tiling):
    """Half of the columns of the other block's keys."""
    return tile_layout(tiling.block_keys, tiling.d // 2, together=dq_columns(tiling))


class ExchangeBlock(HopperBackwardBlock):
    """Shared memory and edges as of `HopperBackwardBlock`, those of the three groups, and what comes from the other."""

    scheduler = PairScheduler

    def __init__(self, tiling: ExchangeBackwardTiling, layouts, dtype, deterministic, counter):
        self.pair = tiling
        super().__init__(tiling.of_block, layouts, dtype, deterministic, counter)
        self.weights_edge, self.added_edge, self.ds_there = map(self.bound.get, ("weights", "added", "ds there"))
        self.sdSthere = self.tiles(layouts.ds)
        self.sKthere = self.tiles(across_layout(tiling))

    def more_edges(self):
        pair, wide = self.pair, self.dtype.width // 8
        side, stages = warps_of(1), pair.ds_stages
        self.ds_bytes = pair.tile_m * pair.block_keys * wide
        keys = Copies(pair.block_keys * (pair.d + pair.dv + pair.d // 2) * wide)
        added = {"added": Edge(2, side, None)} if self.in_order else {}
        # the groups, who copies, who sends dS, and in a fixed order who waits for turns and who tells them
        hears = warps_of(pair.warpgroups + 1).count + 2 + 2 * self.in_order
        queue = {"queue": Edge(2, Warps(1), PairWarps(hears))} if pair.persistent else {}
        return {
            "kv": Edge(1, keys, warps_of(pair.warpgroups + pair.persistent)),
            "ds": Edge(stages, side, BothWarps(WARPGROUP // 32)),
            "weights": Edge(1, side, side),
            **added,
            **queue,
            "ds there": Edge(stages, Copies(self.ds_bytes), side),
        }

    def turns(self, tiling):
        """Barriers of turns, one for each stage of dS: who waits looks a query tile ahead."""
        return Edge(2, Copies(0), Warps(1))


class ExchangeSide(Side):
    """A side of a block that has half of the keys of a tile."""

    def products_of(self, columns):
        """No instruction may take more registers than a thread starts with, which are 128."""
        return 2 if columns > 192 else 1

    def begin(self, work):
        super().begin(work)
        self.first_kv = self.first_key(self.stored_tile() * self.tiling.tile_n)

    def stored_tile(self):
        return 2 * self.work.n + rank()

    def part(self):
        return rank()


class ExchangeProbabilitySide(ExchangeSide, ProbabilitySide):
    """S, P and dV."""

    def step(self, call, m, tested, turn_slot, q_slot, do_slot, ds_slot):
        block = self.block
        at, tSrS, weights = self.probabilities(m, tested, turn_slot, q_slot)
        self.hand_over(weights, turn_slot)
        self.start_sum(at, tSrS, do_slot)
        block.q_edge.release(q_slot, self.lane)
        warpgroup.wait_group(0)
        block.do_edge.release(do_slot, self.lane)

    def hand_over(self, weights, turn_slot):
        """To the other side, as soon as it has read those before."""
        edge, slot = self.block.weights_edge, Slot(1, turn_slot.index, turn_slot.phase)
        edge.wait_empty(slot)
        self.leave_weights(weights)
        cute.arch.sync_warp()
        edge.fill(slot, self.lane)


class LaterProbabilitySide(ExchangeProbabilitySide):
    """S and P of a query tile, and dV of the tile before, whose P waits in registers; of the first one it is zero."""

    def starts(self, slots):
        return *slots, Int32(0)

    def begin(self, work):
        super().begin(work)
        self.tTrP = self.mma_sum.get_slice(0).make_fragment_A(self.left_shape)
        self.tTrP.fill(0.0)

    def step(self, call, m, tested, turn_slot, q_slot, do_slot, ds_slot, later=None):
        """`later`: 1 where there is a tile before, else 0. The dO of the first one serves twice."""
        block, last, is_later = self.block, do_slot.before(), later != 0
        phase = choose(is_later, last.phase, do_slot.phase)
        of_dv = Slot(do_slot.stages, choose(is_later, last.index, do_slot.index), phase)
        at, tSrS, weights = self.probabilities(m, tested, turn_slot, q_slot, lambda: self.add_dv(of_dv))
        self.hand_over(weights, turn_slot)
        block.q_edge.release(q_slot, self.lane)
        warpgroup.wait_group(0)
        block.do_edge.release(last, choose(is_later, self.lane, 1))
        self.mods.drop(at, queries_first(tSrS))
        narrow(self.tTrP, tSrS)

    def add_dv(self, do_slot):
        """Starts one product."""
        self.block.do_edge.wait(do_slot)
        issue(self.mma_sum, self.total, self.tTrP, self.tTrb[None, None, None, do_slot.index], True)
        return 1

    def following(self, call, m, carried):
        return *super().following(call, m, carried[:-1]), Int32(1)

    def end(self, carried):
        *slots, later = carried
        _last_dv(self, later, slots[2].before())
        return *slots, Int32(0)


class ExchangeGradientSide(ExchangeSide, GradientSide):
    """dP, dS and dK, and the sums of captured gradients, which come from dS."""

    def step(self, call, m, tested, turn_slot, q_slot, do_slot, ds_slot):
        block, weights_slot = self.block, Slot(1, turn_slot.index, turn_slot.phase)
        tSrdP = self.less_delta(m, turn_slot, q_slot, do_slot)
        block.weights_edge.wait(weights_slot)
        self.weigh(tSrdP)
        self.sum_captured(tSrdP, m)
        cute.arch.sync_warp()
        block.weights_edge.release(weights_slot, self.lane)
        tTrdS = self.left(tSrdP)
        block.ds_edge.wait_empty(ds_slot)
        copy, place = self.dS_store()
        cute.copy(copy, copy.retile(tTrdS), place[None, None, None, ds_slot.index])
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        block.ds_edge.fill(ds_slot, self.lane)
        issue(self.mma_sum, self.total, tTrdS, self.tTrb[None, None, None, q_slot.index], True)
        warpgroup.wait_group(0)
        block.q_edge.release(q_slot, self.lane)


class DqPartOfBoth(DqPart):
    """A part of dQ, of this block's keys and those of the other one."""

    def __init__(self, tiling, block, number, here):
        super().__init__(tiling, block, number)
        dq, (columns, keys) = self.mma.get_slice(0), (tiling.part_columns, tiling.tile_n)
        there = cute.local_tile(permuted(block.sKthere, 1, 0), (columns, keys), (here, 0))
        self.left, self.right = (
            dq.make_fragment_A(dq.partition_A(block.sdSthere)),
            dq.make_fragment_B(dq.partition_B(there)),
        )

    def issue(self, stage, tQrdQ=None, k_stage=None):
        tQrdQ = super().issue(stage, tQrdQ, k_stage)
        issue(self.mma, tQrdQ, self.left[None, None, None, stage], self.right, True)
        return tQrdQ


class DqGroup(ThreadGroup, KeyGroup):
    """Half of the columns of dQ of a query tile, one part after the other through the same registers.

    Two parts at a time leave the sides 8 registers less, and spill beside them.
    """

    tiling: HopperBackwardTiling

    def __init__(self, tiling, block, thread, number):
        super().__init__(block, number, thread)
        self.tiling = tiling
        self.parts = [DqPartOfBoth(tiling, block, self.place(part), part) for part in range(tiling.dq_parts // 2)]

    def place(self, part):
        """Where a part lies in dQ."""
        return rank() * (self.tiling.dq_parts // 2) + part

    def begin(self, work):
        self.work = work

    def begin_head(self, mods, head, leaves):
        self.head = head

    def step(self, call, m, tested, turn_slot, q_slot, do_slot, ds_slot):
        block, target = self.block, self.dq_sum(call, m)
        block.ds_edge.wait(ds_slot)
        block.ds_there.wait(ds_slot)
        registers, last = self.parts[0].registers(), len(self.parts) - 1
        for part in range(len(self.parts)):
            self.parts[part].issue(ds_slot.index, registers)
            warpgroup.wait_group(0)
            if const_expr(part == last):  # all products have read dS
                block.ds_edge.release(ds_slot, self.lane)
                block.ds_there.release(ds_slot, self.lane)
            if const_expr(part == 0 and block.in_order):
                block.turn_edge.wait(ds_slot)
            add_part(target, registers, self.place(part), self.thread)
        if const_expr(block.in_order):
            cute.arch.sync_warp()
            block.added_edge.fill(ds_slot, self.lane)

    def write_keys(self, call):
        """K has been read."""
        self.sync_consumers()

    def leave_piece(self, call):
        """Nothing: it has none of it."""

    def drain_stores(self):
        """None."""


@cute.jit
def _last_dv(me: cutlass.Constexpr, later: Int32, do_slot: Slot):
    if later != 0:
        me.add_dv(do_slot)
        warpgroup.wait_group(0)
        me.block.do_edge.release(do_slot, me.lane)
