"""Sums of a warp's products on their way out: rounded into dQ, dK and dV, from registers or from fp32 memory."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...primitives.padded_tiles import PaddedTiles
from ...primitives.register_numbers import load_numbers
from ...primitives.row_lines import store_lines
from ...primitives.tile_scheduler import Segment
from ...primitives.values import Fixed, permuted
from ..fused.kernels.around.backward_gather import BackwardGather
from ..fused.kernels.around.postprocess import Postprocess
from ..fused.planning.plan_backward import GatherPlan, PostprocessPlan
from .mma import LANES, Warp
from .tiling import ROWS, Part, WarpBackwardTiling


class PartRows(Fixed):
    """The part that a warp has of a product, of all warps that have some, the one of this `number`."""

    def __init__(self, part: Part, dtype: Any, number: Int32) -> None:
        self.across, self.warp = part.across, Warp(dtype, part.rows // ROWS)
        self.first_row, self.column = number // part.across * part.rows, number % part.across
        self.lane = cute.arch.lane_idx()

    def sums(self, columns: int) -> cute.Tensor:
        """Registers for its sums of a product of so many columns."""
        return self.warp.sums(columns // self.across)

    def store(self, sums: cute.Tensor, head: cute.Tensor, sequence: Any, first: Any, columns: int) -> None:
        """To a head's rows of a sequence, from the `first` of its tiles on, so many `columns` of them."""
        rows = self.warp.rows_of(sums)
        for r in range(2 * self.warp.blocks):
            row = sequence.from_start(first + (self.first_row + self.lane // 4 + 8 * r))
            there = sequence.has(row)
            store_lines(head, row, rows[r, None], self.lane, columns // 8, there, self.column, self.across)


def this_warp() -> Int32:
    """Its number in the block."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx())


class WarpPostprocess(Postprocess[WarpBackwardTiling]):
    """dQ: each warp has the part that the one of its number had in the main kernel."""

    def __init__(self, plan: PostprocessPlan[WarpBackwardTiling]):
        super().__init__(plan)
        self.groups = plan.tiling.threads // LANES

    @property
    def threads(self) -> int:
        return self.tiling.threads

    def layout(self):
        return None

    def output(self, given, queries, layout):
        return None, given if self.plan.layout.q == "dense" else permuted(given, 1, 0, 2)

    def sums(self):
        raise NotImplementedError("rows leave from registers")

    def part(self, shared, group):
        raise NotImplementedError("rows leave from registers")

    @cute.jit
    def finish(self, tma, tensor, layout, dq_accum, scale, sequence, tile, head, b):
        tiling = self.tiling
        padded = PaddedTiles.of(sequence, b, tiling.tile_m)
        rows = PartRows(tiling.dq, self.dtype, this_warp())
        registers = rows.sums(tiling.d)
        start = self.sums_of(dq_accum, padded, head, tile).iterator + cute.arch.thread_idx()[0]
        load_numbers(start, registers, tiling.threads)
        for i in range(cute.size(registers)):
            registers[i] = registers[i] * scale
        rows.store(registers, sequence.head(tensor, head), sequence, tile * tiling.tile_m, self.plan.head_dim)


class WarpGather(BackwardGather[WarpBackwardTiling]):
    """dK and dV: a block per cut tile of keys, whose warps have the parts that those of the main kernel had."""

    def __init__(self, plan: GatherPlan[WarpBackwardTiling]):
        super().__init__(plan)
        self.rows, self.threads = plan.tiling.tile_n, plan.tiling.threads

    def output(self, tensor, keys, columns):
        return None, tensor if self.plan.layout.kv == "dense" else permuted(tensor, 1, 0, 2)

    def sums(self, columns):
        raise NotImplementedError("rows leave from registers")

    @cute.jit
    def gather(self, tma, tensor, pieces, place, count, keys, d: cutlass.Constexpr):
        tiling, tile = self.tiling, cute.arch.block_idx()[0]
        rows = PartRows(tiling.sums, self.dtype, this_warp())
        total, thread = rows.sums(d), cute.arch.thread_idx()[0]
        load_numbers(pieces[tile * count, None].iterator + thread, total, tiling.threads)
        for piece in cutlass.range(1, count, unroll=1):
            more = rows.sums(d)
            load_numbers(pieces[tile * count + piece, None].iterator + thread, more, tiling.threads)
            for i in range(cute.size(total)):
                total[i] = total[i] + more[i]
        b, head, n, stop = [place[i] for i in range(4)]
        sequence, first = keys.sequence(b), n * tiling.tile_n
        if cutlass.const_expr(self.plan.has_segments):
            sequence, first = sequence.within(Segment(n, stop, Int32(0))), 0
        there = self.plan.head_dim if d == tiling.d else self.plan.head_dim_v
        rows.store(total, sequence.head(tensor, head), sequence, first, there)
