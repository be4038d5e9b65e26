"""The backward kernel for Blackwell of rows over 128 wide, and its warp that multiplies."""

from typing import Any

from ...primitives.emit_backward import BackwardMods
from ...primitives.pipelines import Slot
from ..fused.kernels.unit_memory.query_lanes import QueryLanes
from ..fused.planning.plan_backward import BackwardPlan
from .backward import BlackwellBackward
from .backward_products import BlackwellBackwardProducts, ProductSlots
from .backward_tiling import BlackwellBackwardTiling
from .tcgen05 import Operand, after_wait, fragment_shape
from .tensor_memory import Columns


class WideProducts(BlackwellBackwardProducts):
    """Issued in this order for query tiles 0, 1, ..., where a product waits for what stands in brackets:

        S0 [Q] | dP0 [dO] | dV0 [P0] | dK0 [dS0] | dQ0a | S1 [Q] | dQ0b [dQ0a read] | dP1 [dO] | dV1 [P1] | dK1 ...

    P1 is computed under dQ0b and dP1, and dS1 under dV1. P1 takes the place of dS0 in shared memory, which dQ0b is the
    last to read. Where dQ comes at once there is no dQ0b.
    """

    def go_on(self, at: ProductSlots, following: ProductSlots) -> None:
        self.add_dk(at)
        self.scores(following)
        self.rest_of_dq(at)
        self.gradients(following)
        self.add_dv(following)

    def end(self, at: ProductSlots) -> None:
        self.add_dk(at)
        self.rest_of_dq(at)

    def of_rows(self, target: Columns, keys: str, queries: str, slot: Slot) -> None:
        """Queries are lanes. The place of scores was read before dS was there."""
        self.issue(target, self.block.operands[queries], slot.index, self.block.operands[keys], 0)

    def add_dv(self, at: ProductSlots) -> None:
        """dVᵀ += dOᵀ P."""
        block = self.block
        block.probabilities.wait(at.step)
        after_wait()
        self.add_transposed(self.map.dv, block.across["do"], at.do.index)
        block.do_edge.release(at.do, None)
        block.room.fill(at.step)

    def add_dk(self, at: ProductSlots) -> None:
        """dKᵀ += Qᵀ dS, and the first part of dQ."""
        block = self.block
        block.scores_done.wait(at.step)
        after_wait()
        self.add_transposed(self.map.dk, block.across["q"], at.q.index)
        block.q_edge.release(at.q, None)
        # what is there is the last part of the tile before
        block.dq.wait_empty(at.step.at(len(self.map.dq_parts) - 1))
        self.part_of_dq(at, 0)

    def rest_of_dq(self, at: ProductSlots) -> None:
        """Its other parts, each when the one before has been read; then nobody reads dS any more."""
        for n in range(1, len(self.map.dq_parts)):
            self.block.dq.wait_empty(at.step.next().at(n - 1))
            self.part_of_dq(at, n)
        self.block.room.release(at.step, None)

    def part_of_dq(self, at: ProductSlots, number: int) -> None:
        """dQ = dS K, some columns."""
        block, part = self.block, self.map.dq_parts[number]
        after_wait()
        first = sum(p.count for p in self.map.dq_parts[:number])
        self.issue(part, block.operands["ds"], 0, block.across["k"].beside(first), 0)
        block.dq.fill(at.step.at(number))

    def add_transposed(self, target: Columns, left: Operand, stage: Any) -> None:
        """Columns of `left` become lanes, 128 a product; the right operand is what the threads have left."""
        keys = self.tiling.tile_n
        for n, (first, _) in enumerate(self.map.lane_columns(left.columns)):
            columns = Columns(target.first + n * keys, keys)
            self.issue(columns, left.beside(first), stage, self.block.across["ds"], 0, onto=True)


class BlackwellBackwardWide(BlackwellBackward):
    """`BlackwellBackward` with a query a thread, as 64 keys alone leave tensor memory for sums of wide rows:

        S = Q Kᵀ    dP = dO Vᵀ    dVᵀ += dOᵀ P    dKᵀ += Qᵀ dS    dQ = dS K

    Timeline: see `WideProducts`.
    """

    products = WideProducts

    def __init__(self, plan: BackwardPlan[BlackwellBackwardTiling]):
        super().__init__(plan)
        # limits are of the queries that a key sees: one query of a thread is tested as fast by the mask itself
        self.mods = BackwardMods(plan.program, plan.intervals, None, plan.captured, self.arithmetic)

    def group(self, block: Any, lane: Any, thread: Any) -> QueryLanes:
        return QueryLanes(self, block, lane, thread, fragment_shape(self.tiling.keys))
