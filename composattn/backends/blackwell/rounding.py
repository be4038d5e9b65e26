"""Sums that the Blackwell backward has left in fp32 memory, rounded into dQ, dK and dV."""

from typing import Any

import cutlass.cute as cute

from ...primitives.register_chunks import THREADS
from ..fused.kernels.around.backward_gather import RowGather
from ..fused.kernels.around.postprocess import COLUMNS, RowPostprocess
from ..fused.kernels.rounding import LineSums, RowSums, Sums
from ..fused.planning.plan_backward import PostprocessPlan
from .backward_tiling import BlackwellBackwardTiling, BlackwellPairBackwardTiling, QueryPairTiling, WideBackwardTiling
from .tiling import ROWS

ROWS_OF_BLOCK = ROWS // 2  # of a pair


class BlackwellPostprocess(RowPostprocess[BlackwellBackwardTiling]):
    """Rounds dQ of a pair, of which each block has left half of the rows. Where these are half of a product's, its
    upper threads have the right half of the columns.
    """

    def __init__(self, plan: PostprocessPlan[BlackwellBackwardTiling]):
        super().__init__(plan)
        self.folded = isinstance(plan.tiling, BlackwellPairBackwardTiling)
        if isinstance(plan.tiling, QueryPairTiling):
            self.parts = plan.tiling.sharing

    def sums(self) -> RowSums:
        return FoldedSums(COLUMNS) if self.folded else super().sums()

    def part(self, shared: cute.Tensor, group: Any) -> cute.Tensor:
        if not self.folded:
            return super().part(shared, group)
        each = self.groups // 2  # of those that have left a block's sums
        right = cute.arch.thread_idx()[0] % THREADS // ROWS_OF_BLOCK
        return cute.local_tile(shared, (ROWS_OF_BLOCK, COLUMNS), (group // each, group % each + right * each))


class FoldedSums(RowSums):
    """Sums of `ROWS_OF_BLOCK` rows."""

    def put(self, rounded: cute.Tensor, shared: cute.Tensor, thread: Any) -> None:
        super().put(rounded, shared, thread % ROWS_OF_BLOCK)


class BlackwellGather(RowGather[BlackwellBackwardTiling]):
    """Adds up dK and dV of split tiles; of wide rows, lanes have left columns."""

    def sums(self, columns: int) -> Sums:
        wide = isinstance(self.tiling, WideBackwardTiling | QueryPairTiling)
        return LineSums(self.rows, columns) if wide else super().sums(columns)
