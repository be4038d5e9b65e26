"""The backward kernel for Hopper by pairs of blocks, each with half of the columns: D or Dv above 256."""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.memory import SmemAllocator

from ...primitives.block_pair import LEADER, OtherWarps, PairSums, meet, rank
from ...primitives.branches import when
from ...primitives.pipelines import Edge
from ..fused.kernels.backward import BackwardOperands
from .backward_tiling import HopperPairBackwardTiling
from .backward_wide import GradientSide, HopperBackwardWide, ProbabilitySide, Side
from .key_tile import HopperBackwardBlock
from .wgmma import WARPGROUP


class HopperBackwardPair(HopperBackwardWide):
    """`HopperBackwardWide` of half of D and Dv, by two blocks that have the same keys and visit the same queries.

    Sᵀ = K Qᵀ and dPᵀ = V dOᵀ of half of the columns are parts of a sum: the warpgroups of one number in both blocks
    exchange theirs, in fp32, and then compute the same P and dS. All other products have columns of their own.
    """

    @property
    def sides(self):
        return PairProbabilitySide, PairGradientSide

    def __init__(self, plan):
        super().__init__(plan)
        self.pair: HopperPairBackwardTiling = plan.tiling
        self.tiling = self.pair.of_block

    def block(self, layouts, counter):
        return HopperPairBlock(self.pair, layouts, self.dtype, self.plan.deterministic, counter)

    def of_block(self, tensors):
        """Its half of the columns of all but the statistics."""
        d, dv = self.tiling.d, self.tiling.dv
        widths = BackwardOperands(d, dv, d, dv, 0, d, dv, (), 0)

        def half(tensor, width):
            return cute.domain_offset((0, rank() * width, *(0,) * (cute.rank(tensor) - 2)), tensor)

        return BackwardOperands(*(half(t, w) if w else t for t, w in zip(tensors, widths, strict=True)))

    @cute.jit
    def share_roles(self, call, block, warp):
        meet()  # barriers of both blocks are there
        HopperBackwardWide.share_roles(self, call, block, warp)
        meet()  # neither leaves while the other may reach into its memory


class HopperPairBlock(HopperBackwardBlock):
    """Edges beside those of `HopperBackwardBlock`: for each warpgroup, its part of the scores from the other block."""

    def __init__(self, tiling: HopperPairBackwardTiling, layouts, dtype, deterministic, counter):
        super().__init__(tiling.of_block, layouts, dtype, deterministic, counter)
        # parts of a score product, which a block has of the other
        size, parts = tiling.tile_m * tiling.tile_n, tiling.warpgroups
        room = SmemAllocator().allocate_array(Float32, parts * size, byte_alignment=128)
        self.exchanged = [cute.make_tensor(room + n * size, cute.make_layout(size)) for n in range(parts)]

    def more_edges(self):
        warps = OtherWarps(WARPGROUP // 32)
        return {f"exchange {n}": Edge(1, warps, warps) for n in range(self.parts)}


class HalfOfColumns(Side):
    """A side in a block that has half of the columns."""

    ahead = 0  # 8 registers of ALiBi's scores spilled

    def complete(self, scores, slot):
        edge, room = self.block.bound[f"exchange {self.number}"], self.block.exchanged[self.number]
        PairSums(edge, room, self.thread, self.lane).add(scores, slot)

    def part(self):
        return rank()

    def dq_place(self):
        return rank() * self.tiling.warpgroups + self.number


class PairProbabilitySide(HalfOfColumns, ProbabilitySide):
    """S, P and half of dV."""


class PairGradientSide(HalfOfColumns, GradientSide):
    """dP, dS and half of dK."""

    def sum_captured(self, tSrdP, m):
        """Both blocks have all of dS."""
        when(rank() == LEADER, lambda: GradientSide.sum_captured(self, tSrdP, m))
