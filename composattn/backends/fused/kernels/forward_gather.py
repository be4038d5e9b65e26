"""After a forward of which some tiles were cut by keys: both pieces of each, weighted by their sums of exponentials."""

import abc
from typing import Generic

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from ....primitives.exponential import LN_2, LOG2_E, exp2
from ....primitives.register_chunks import THREADS, load_part
from ....primitives.score_tile import FragmentShape
from ....primitives.seqlen import DenseRows
from ....primitives.swizzled_tiles import tile_layout
from ....primitives.values import choose
from ..architecture import Kernel
from ..arguments import RemainderGatherArguments
from ..plan import AnyForwardTiling, RemainderPlan
from .forward_call import remainder_of
from .rounding import Exit, Sums, is_first_warp


class ForwardGather(Kernel, Generic[AnyForwardTiling]):
    """A block per `rows` queries of a tile that was cut: what one group of the main kernel has left of both pieces."""

    arguments = RemainderGatherArguments
    rows: int
    fragment: FragmentShape  # of the output

    def __init__(self, plan: RemainderPlan[AnyForwardTiling]):
        self.plan, self.tiling = plan, plan.tiling

    @abc.abstractmethod
    def sums(self) -> Sums:
        """Of the output."""

    @abc.abstractmethod
    def rows_of(self, sums: cute.Tensor) -> cute.Tensor:
        """Its registers as (row, column)."""

    @cute.jit
    def __call__(self, stream, *arguments):
        given, tiling = self.arguments(*arguments), self.tiling
        self.dtype = given.out.element_type
        box = (self.rows, tiling.dv)
        tma, tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), DenseRows.for_copies(given.out), tile_layout(*box), box
        )
        remainder = remainder_of(self.plan, given)
        self.kernel(tma, tensor, remainder, given.lse).launch(
            grid=(given.remainder.cut, tiling.tile_m // self.rows, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, tma, tensor, remainder, lse):
        cute.arch.griddepcontrol_wait()  # for the main kernel's pieces
        tile, group, _ = cute.arch.block_idx()
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        shape = self.fragment
        sums = self.sums()
        first, second = sums.registers(), sums.registers()
        load_part(remainder.sums[tile, None], first, group, thread)
        load_part(remainder.sums[tile + remainder.cut, None], second, group, thread)
        b, head, m = (remainder.places[tile, i] for i in range(3))
        row = (thread // 32) * shape.warp_rows + shape.lane_row(lane)
        one, other = self.rows_of(first), self.rows_of(second)
        for r in cutlass.range_constexpr(shape.rows):
            at = row + shape.row_offsets[r]
            pair = (
                remainder.lse[tile, group * self.rows + at],
                remainder.lse[tile + remainder.cut, group * self.rows + at],
            )
            weights, whole = weighed(*pair)
            for c in cutlass.range_constexpr(cute.size(one, mode=[1])):
                # what a part that saw nothing left there may be anything
                one[r, c] = one[r, c] * weights[0] + other[r, c] * weights[1]
            if const_expr(lse is not None):
                q = m * self.tiling.tile_m + group * self.rows + at
                _store_if(shape.first_in_row(lane) & (q < lse.shape[2]), lse[b, head, None], q, whole)

        def outputs(shared):
            tiles = cute.local_tile(tensor[None, None, head, b], (self.rows, self.tiling.dv), (None, 0))
            yield is_first_warp(), tma, shared, tiles, m * (self.tiling.tile_m // self.rows) + group

        Exit(tile_layout(self.rows, self.tiling.dv), self.dtype).leave(
            sums, first, lambda shared: shared, thread, outputs
        )


def weighed(first: Float32, second: Float32) -> tuple[tuple[Float32, Float32], Float32]:
    """Weights of two parts with these LSE, and LSE of both."""
    highest = cute.arch.fmax(first, second)
    shift = choose(highest == -Float32.inf, Float32(0.0), highest)
    one, other = exp2((first - shift) * LOG2_E), exp2((second - shift) * LOG2_E)
    total = one + other
    nothing = total == 0.0
    factor = choose(nothing, Float32(0.0), cute.arch.rcp_approx(total))
    lse = choose(nothing, -Float32.inf, shift + cute.math.log2(total, fastmath=True) * LN_2)
    return (one * factor, other * factor), lse


@cute.jit
def _store_if(condition, target, at: Int32, value: Float32):
    if condition:
        target[at] = value
