"""The roles of a Hopper backward where dK and dV of 64 keys fill a warpgroup each, and a third one has dQ."""

import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import warpgroup

from ...primitives.pipelines import Copies, Edge, Slot, Warps
from ...primitives.register_chunks import add_part
from ..fused.kernels.dq_semaphore import DqSemaphore
from ..fused.kernels.key_tile import KeyGroup
from ..fused.kernels.registers.groups import ThreadGroup
from .backward_tiling import HopperBackwardTiling
from .backward_wide import GradientSide, HopperBackwardWide, ProbabilitySide, Side
from .dq import DqPart
from .key_tile import HopperBackwardBlock
from .wgmma import WARPGROUP, issue, warps_of


class HopperBackwardApart(HopperBackwardWide):
    """Roles: as `HopperBackwardWide`, and a third warpgroup that computes dQ and adds it to memory.

    These additions take as long as the products of a tile, and hold up who issues them: the two sides never wait for
    them here. Nobody meets in the loop. Edges beside those of `HopperBackward`, of a query tile:

        weights   first side to second     1 stage
        ds        second side to dQ
        added     dQ to the warp that says so, in a fixed order: its fence waits for additions, while another warp
                  waits for the next turn
    """

    groups: "tuple[type, type, type]"

    def __init__(self, plan):
        super().__init__(plan)
        self.own = plan.tiling
        self.threads = (plan.tiling.warpgroups + 2) * WARPGROUP

    def block(self, layouts, counter):
        return ApartBlock(self.tiling, layouts, self.dtype, self.plan.deterministic, counter)

    @cute.jit
    def share_roles(self, call, block, warp):
        tiling = self.tiling
        if warp < 4:
            cute.arch.setmaxregister_decrease(tiling.producer_registers)
            if warp == 0:
                self.produce(call, block)
            if const_expr(tiling.clears):  # noqa: SIM102  known when compiling
                if warp == 3:
                    call.clearing.run(call)
            if const_expr(self.plan.deterministic):
                if warp == 1:
                    DqSemaphore(self, speakers=1).take(call, block)
                if warp == 3:
                    DqSemaphore(self).tell(call, block)
            self.help_producer(call, block, warp)
        elif warp < 8:
            cute.arch.setmaxregister_increase(tiling.consumer_registers)
            self.consume_as(call, block, self.group(block, 0))
        elif warp < 12:
            cute.arch.setmaxregister_increase(tiling.consumer_registers)
            self.consume_as(call, block, self.group(block, 1))
        else:
            cute.arch.setmaxregister_decrease(tiling.dq_registers)
            self.consume_as(call, block, self.group(block, 2))

    def group(self, block, number):
        """The warpgroup of that number: first side, second side, dQ."""
        thread = cute.arch.thread_idx()[0] - (number + 1) * WARPGROUP
        return self.groups[number](self.own, block, thread, number)

    def help_producer(self, call, block, warp):
        """What a further warp of the copying warpgroup does."""


class ApartBlock(HopperBackwardBlock):
    """Shared memory and edges as of `HopperBackwardBlock`, and those to and from the second side."""

    def more_edges(self):
        side = warps_of(1)
        edges = {"ds": Edge(2, side, side), "weights": Edge(1, side, side)}
        return edges | {"added": Edge(2, side, None)} if self.in_order else edges

    def turns(self, tiling):
        """Barriers of turns, one for each stage of dS: who waits looks a query tile ahead."""
        return Edge(2, Copies(0), Warps(1))

    @property
    def weights_edge(self):
        return self.bound["weights"]

    @property
    def added_edge(self):
        return self.bound["added"]


class ApartSide(Side):
    """A side that shares the registers of an SM with three other warpgroups."""

    def products_of(self, columns):
        """No instruction may take more registers than a thread starts with, which are 128."""
        return 2 if columns > 192 else 1


class ApartProbabilitySide(ApartSide, ProbabilitySide):
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


class ApartGradientSide(ApartSide, GradientSide):
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


class DqGroup(ThreadGroup, KeyGroup):
    """dQ of a query tile, one part of its columns after the other through the same registers.

    Two parts at a time leave the sides 8 registers less, and spill beside them.
    """

    tiling: HopperBackwardTiling

    def __init__(self, tiling, block, thread, number):
        super().__init__(block, number, thread)
        self.tiling = tiling
        self.parts = self.made_parts()

    def made_parts(self):
        """The products, one after the other."""
        return [DqPart(self.tiling, self.block, part) for part in range(self.tiling.dq_parts)]

    def wait_for_gradients(self, ds_slot):
        """Until dS is there."""
        self.block.ds_edge.wait(ds_slot)

    def release_gradients(self, ds_slot):
        """All products have read it."""
        self.block.ds_edge.release(ds_slot, self.lane)

    def place(self, part):
        """Where a part lies in dQ."""
        return part

    def begin(self, work):
        self.work = work

    def begin_head(self, mods, head, leaves):
        self.head = head

    def step(self, call, m, tested, turn_slot, q_slot, do_slot, ds_slot):
        block, target = self.block, self.dq_sum(call, m)
        self.wait_for_gradients(ds_slot)
        registers, last = self.parts[0].registers(), len(self.parts) - 1
        for part in range(len(self.parts)):
            self.parts[part].issue(ds_slot.index, registers)
            warpgroup.wait_group(0)
            if const_expr(part == last):
                self.release_gradients(ds_slot)
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


HopperBackwardApart.groups = ApartProbabilitySide, ApartGradientSide, DqGroup
