"""Sums that a Hopper backward kernel has left in fp32 memory, rounded into dQ, dK and dV."""

import cutlass.cute as cute

from ...primitives.swizzled_tiles import tile_layout
from ..fused.kernels.around.backward_gather import BackwardGather
from ..fused.kernels.around.postprocess import Postprocess
from ..fused.planning.plan_backward import GatherPlan, PostprocessPlan
from .backward_tiling import HopperBackwardTiling
from .dq import dq_columns, dq_part, dq_product
from .wgmma import MN, ROWS, WarpgroupSums, product


class HopperPostprocess(Postprocess[HopperBackwardTiling]):
    """dQ: each warpgroup has the part that the one of its number had in the main kernel."""

    def __init__(self, plan: PostprocessPlan[HopperBackwardTiling]):
        super().__init__(plan)
        self.groups = plan.tiling.dq_parts

    def layout(self):
        tiling = self.tiling
        return tile_layout(tiling.tile_m, tiling.d, together=dq_columns(tiling))

    def sums(self) -> WarpgroupSums:
        mma, part = dq_product(self.tiling, self.dtype)
        return WarpgroupSums(mma, part, transposed=self.tiling.dq_split == "transposed")

    def part(self, shared: cute.Tensor, group) -> cute.Tensor:
        tiling = self.tiling
        return dq_part(tiling, shared, group, dq_product(tiling, self.dtype)[1])


class HopperGather(BackwardGather[HopperBackwardTiling]):
    """dK and dV: a warpgroup's keys."""

    def __init__(self, plan: GatherPlan[HopperBackwardTiling]):
        super().__init__(plan)
        self.rows = ROWS
        self.across = plan.tiling.dk_parts

    def sums(self, columns: int) -> WarpgroupSums:
        return WarpgroupSums(product(self.dtype, columns, right=MN), (ROWS, columns))
