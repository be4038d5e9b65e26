"""The backward kernel for Blackwell by pairs of blocks, of rows over 128 wide: columns are few, so more waits."""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from ...primitives.block_pair import PairWarps
from ...primitives.dynamic_scheduler import DynamicScheduler
from ...primitives.pipelines import BoundEdge, Edge, Slot
from ..fused.kernels.unit_memory.pair_rows import StripPairRows
from .backward_pair import BlackwellBackwardPair, BlackwellPairBlock, PairProducts
from .roles import WARPGROUP
from .tcgen05 import after_wait


class WidePairBlock(BlackwellPairBlock):
    """Edges, beside those of `BlackwellPairBlock`, as products come where scores and dP were, and copies where others
    were:

        scores_read     compute to products     Sᵀ has been read
        gradients_read  compute to products     the first strips of dPᵀ have
        q               products to loads       empty: dQ has read dS, over which the next Q but one comes
        do, q_across    products to loads       empty: the other one may come there
        scores          products to compute     also: dS may come where Q was

    Behind the last scores `scores` says once more that nobody reads there.
    """

    scores_read: BoundEdge
    gradients_read: BoundEdge

    def made_edges(self) -> dict[str, Edge]:
        compute = PairWarps(self.tiling.groups * WARPGROUP)
        return {
            **super().made_edges(),
            "scores_read": Edge(1, compute, None),
            "gradients_read": Edge(1, compute, None),
        }

    def wait_for_room(self, name: str, slot: Slot) -> None:
        if name == "do":  # after the columns of Q of the tile before
            self.q_across.wait_empty(slot)
        elif name == "q_across":  # after dO of this tile
            self.do_edge.wait_empty(slot.next())
        else:
            super().wait_for_room(name, slot)


class WidePairProducts(PairProducts):
    """Issued in this order for query tiles 0, 1, ..., where a product waits for what stands in brackets:

        S0 [Q] | dV0a [P0] | dP0 [dO] | dV0b | S1 [Q, dP0 read in part] | dK0 [dS0] | dQ0 [S1 read, dS0 exchanged]
          | dV1a [P1] | dP1 [dO, dQ0 read] | dV1b | S2 [Q, dP1 read in part] ...

    P1 is computed under dK0 and dQ0, dS1 under dV1b and S2. dQ0 is read under dV1a (queries of one group), dP1 under
    dV1b. Where the derivative sees the score P1 wants dP1, which then comes before all of dV1.
    """

    block: WidePairBlock

    def begin(self, at: Slot) -> None:
        self.scores(at)
        self.block.q_edge.release(at, None)
        self.block.scores_read.wait(at)
        self.sums_of_values(at)

    def go_on(self, at: Slot, following: Slot) -> None:
        block = self.block
        block.gradients_read.wait(at)
        self.scores(following)
        self.add_dk(at)
        block.scores_read.wait(following)
        self.product_dq(at)
        block.q_edge.release(following, None)
        self.sums_of_values(following)

    def end(self, at: Slot) -> None:
        self.block.scores.fill(at.next())  # no other Q comes
        self.add_dk(at)
        self.product_dq(at)

    def sums_of_values(self, at: Slot) -> None:
        """dP, and dV += Pᵀ dO."""
        block = self.block
        early = 0 if self.kernel.mods.one_pass else 1  # groups whose P is multiplied before dP
        if const_expr(early > 0):
            self.add_part_of_dv(at, 0, early)
        block.dq.wait_empty(at)
        self.gradients(at)
        self.add_part_of_dv(at, early, self.tiling.groups)
        block.do_across.release(at, None)

    def add_part_of_dv(self, at: Slot, first: int, stop: int) -> None:
        """The product for dV of the groups [first, stop)."""
        block = self.block
        if first == 0 or self.kernel.mods.one_pass:
            block.probabilities.wait(at)
            block.do_across.wait(at)
        after_wait()
        self.issue_onto(self.map.dv, self.map.scores, block.across["do_across"], 0, (first, stop))

    def scores(self, at: Slot) -> None:
        """Without release of Q: the next one comes when dS, which comes over it, has been read."""
        block = self.block
        block.q_edge.wait(at)
        after_wait()
        self.issue(self.map.scores, block.operands["k"], 0, block.operands["q"], 0)
        block.scores.fill(at)


class BlackwellBackwardWidePair(BlackwellBackwardPair):
    """`BlackwellBackwardPair` of wide rows. Timeline: `WidePairProducts`; columns: `WidePairBackwardTensorMemory`."""

    products = WidePairProducts
    rows = StripPairRows
    moved = "q", "do"

    def block(self, layouts, counter):
        return WidePairBlock(self.tiling, self.dtype, self.plan.deterministic)

    @cute.jit
    def produce_across(self, call, block):
        """Second operands: each waits for another product than the first ones."""
        self.walk(call, block, lambda *work: self.copy_across(block, *work), DynamicScheduler.hear, Slot.first(1))

    @cute.jit
    def copy_across(self, block, call, work, slot):
        cute.arch.griddepcontrol_wait()
        begin, stop = self.members(call, work)
        for member in cutlass.range(begin, stop, unroll=1):
            head = work.kv_head * call.group + member
            moving = [self.moving(block, call, name, work.queries, head) for name in ("do_across", "q_across")]
            for run in self.query_tiles(call, work, head):
                for i in cutlass.range(run.count, unroll=1):
                    for each in moving:
                        each.start(run.tile(i), slot)
                    slot = slot.next()
        return slot
