"""Gradients of sinks, beside those of queries: shares of the blocks before a backward, added up behind it.

d sink is the sum of -exp(sink - LSE)·D over rows (`composattn.backends.sinks`). The preprocess has both of each row
in registers, so its blocks leave one number each; the postprocess adds them in an order that never changes.
"""

from __future__ import annotations

from operator import add
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from .....primitives.branches import store_if
from .....primitives.exponential import LOG2_E
from .....primitives.lanes import LANES, WARP, neighbours, over_lanes
from .....primitives.padded_tiles import shares_of
from .....primitives.query_blocks import QueryBlocks
from .....primitives.values import Bundle
from ...planning.plan_backward import COUNTER, PostprocessPlan, PreprocessPlan


class SinkSums(Bundle):
    """Sinks, fp32 shares (sinks, blocks that have rows of one), and their gradient.

    `by_sequence`: each sequence has sinks of its own, heads one after the other.
    """

    parts = ("sinks", "shares", "gradient")

    def __init__(self, sinks: Any, shares: Any, gradient: Any, by_sequence: bool) -> None:
        self.sinks, self.shares, self.gradient, self.by_sequence = sinks, shares, gradient, by_sequence

    @staticmethod
    def of(plan: PreprocessPlan | PostprocessPlan, given: Any) -> SinkSums | None:
        """On the host, of the kernel's arguments; None where no sink gets a gradient."""
        if given.sinks is None:
            return None
        (sinks, workspace, gradient), tiling = given.sinks, plan.tiling
        where = workspace, COUNTER, given.dq_accum, tiling.tile_m, tiling.flags(given.dq_accum.shape[2])
        shares = shares_of(*where, cute.size(sinks), given.query_tiles)
        return SinkSums(sinks, shares, gradient, plan.sinks.by_sequence)

    # --- in the preprocess: a block per tile of queries and head -------------------------------------------

    def of_rows(self, blocks: QueryBlocks, head: Int32, b: Int32) -> Float32:
        """The sink of these, in log2 units."""
        return self.sinks[self._number(blocks, head, b)].to(Float32) * LOG2_E

    def leave(self, blocks: QueryBlocks, share: Float32, head: Int32, b: Int32, threads: int) -> None:
        """The sum of what all `threads` of the block have of its rows."""
        warps = threads // LANES
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        of_warps = SmemAllocator().allocate_tensor(Float32, cute.make_layout(warps), byte_alignment=16)
        store_if(lane == 0, of_warps, warp, over_lanes(add, share, WARP))
        cute.arch.sync_threads()
        total = over_lanes(add, of_warps[lane % warps], neighbours(warps))
        (x, _, z), (width, _, _) = blocks.place(), blocks.counts()
        at = x if self.by_sequence else z * width + x
        store_if((warp == 0) & (lane == 0), self.shares[self._number(blocks, head, b), None], at, total)

    def _number(self, blocks: QueryBlocks, head: Int32, b: Int32) -> Int32:
        return b * blocks.counts()[1] + head if self.by_sequence else head

    # --- in the postprocess ----------------------------------------------------------------------------------

    @cute.jit
    def add_up(self, blocks: cutlass.Constexpr[QueryBlocks]):
        """The first blocks of the grid take a sink each: others still begin when they end."""
        (x, y, z), (width, height, _) = blocks.place(), blocks.counts()
        sink = x + width * (y + height * z)
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        if (warp == 0) & (sink < cute.size(self.gradient)):
            total = Float32(0.0)
            for number in cutlass.range(lane, self.shares.shape[1], LANES, unroll=4):
                total = total + self.shares[sink, number]
            total = over_lanes(add, total, WARP)
            store_if(lane == 0, self.gradient, sink, (-total).to(self.gradient.element_type))
