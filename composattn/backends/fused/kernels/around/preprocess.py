"""Before the backward kernel: statistics of query rows, padded to whole tiles, and an empty sum for dQ."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from .....analysis.strips import parts_of
from .....primitives.branches import store_if
from .....primitives.exponential import LOG2_E, exp2
from .....primitives.padded_tiles import PaddedTiles, counter_of, flags_of, statistics_of
from .....primitives.query_blocks import QueryBlocks
from .....primitives.register_chunks import clear
from .....primitives.row_products import RowLanes
from .....primitives.strip_rows import rows_of
from .....primitives.values import choose, permuted
from ...planning.arguments import PreprocessArguments
from ...planning.plan_backward import COUNTER, PreprocessPlan
from ...tiles.architecture import Kernel
from ..chain import let_next_begin
from .sink_sums import SinkSums

THREADS = 512


class Preprocess(Kernel):
    """A block per query tile: D = rowsum(dO·O) - dLSE and log2(e)·LSE of its rows, zeros for its dQ, or for its flags.

    Neighbouring threads share a row, see `RowLanes`. Where sinks get a gradient, blocks leave shares of it. Each block
    clears a share of the flags: what has been cleared or claimed of dQ, which strips have written (`strip_sums`).
    """

    arguments = PreprocessArguments

    def __init__(self, plan: PreprocessPlan):
        self.plan, self.tiling, self.lanes = plan, plan.tiling, RowLanes(plan.head_dim_v)

    @cute.jit
    def __call__(self, stream, *arguments):
        given = self.arguments(*arguments)
        queries, _ = rows_of(self.plan.layout, given.out, given.out, given.sequences)
        out, dout, dq_accum, work = given.out, given.dout, given.dq_accum, given.query_tiles
        if const_expr(not self.plan.layout.is_dense):
            out, dout = [permuted(t, 1, 0, 2) for t in (out, dout)]
        statistics = statistics_of(given.workspace, COUNTER, dq_accum, self.tiling.tile_m)
        counter = counter_of(given.workspace)
        sinks = SinkSums.of(self.plan, given)
        entries, heads, tiles, _ = dq_accum.shape
        numbers = entries * heads * self.tiling.flags(tiles)
        if const_expr(given.keys is not None):
            _, keys = rows_of(self.plan.layout, given.out, given.keys, given.sequences)
            numbers = numbers + 2 * entries * given.keys.shape[1] * parts_of(keys.length, self.tiling.tile_n)
        flags = None
        if const_expr(self.tiling.clears or self.tiling.claimed_parts or given.keys is not None):
            flags = flags_of(given.workspace, COUNTER, dq_accum, self.tiling.tile_m, numbers)
        filled = statistics, dq_accum, counter, flags
        self.kernel(out, dout, given.lse, given.dlse, *filled, queries, work, sinks).launch(
            grid=QueryBlocks(dq_accum, work, self.plan.in_one_row).grid, block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, out, dout, lse, dlse, statistics, dq_accum, counter, flags, queries, work, sinks):
        blocks = QueryBlocks(dq_accum, work, self.plan.in_one_row)
        let_next_begin(self.plan.target)  # the main kernel's blocks start as these end
        if const_expr(self.tiling.persistent):
            store_if((cute.arch.thread_idx()[0] == 0) & _is_first(blocks), counter, 0, Int32(0))
        if const_expr(self.tiling.clears):
            handed_out = cute.make_tensor(counter.iterator + 1, cute.make_layout(1))
            store_if((cute.arch.thread_idx()[0] == 0) & _is_first(blocks), handed_out, 0, Int32(0))
        if const_expr(flags is not None):
            _clear_share(flags, blocks)
        tile, head, b = blocks.tile()
        sink = None if sinks is None else sinks.of_rows(blocks, head, b)
        share = Float32(0.0)
        if const_expr(work is None):
            place = queries.sequence(b), tile, head, b
            share = self.prepare(out, dout, lse, dlse, sink, statistics, dq_accum, *place)
        else:
            if b >= 0:
                place = queries.sequence(b).within(blocks.segment()), tile, head, b
                share = self.prepare(out, dout, lse, dlse, sink, statistics, dq_accum, *place)
        if const_expr(sinks is not None):
            sinks.leave(blocks, share, head, b, THREADS)

    @cute.jit
    def prepare(self, out, dout, lse, dlse, sink, statistics, dq_accum, sequence, tile, head, b):
        """Gives the shares of a sink's gradient that a thread's rows have, less the sign."""
        thread = cute.arch.thread_idx()[0]
        padded = PaddedTiles.of(sequence, b, self.tiling.tile_m)
        out, dout, lse, dlse = [None if t is None else sequence.head(t, head) for t in (out, dout, lse, dlse)]
        lanes = self.lanes.lanes
        at_once = THREADS // lanes
        rows = []
        for step in cutlass.range_constexpr(-(-self.tiling.tile_m // at_once)):
            local = step * at_once + thread // lanes
            of_tiles = tile * self.tiling.tile_m + local
            q = sequence.from_start(of_tiles)
            inside = sequence.has(q) & (local < self.tiling.tile_m)
            product = self.lanes.share(out, dout, q, inside)
            row_lse = _load_statistic(lse, q, inside, -Float32.inf)
            row_dlse = Float32(0.0) if dlse is None else _load_statistic(dlse, q, inside, Float32(0.0))
            rows.append((of_tiles, (thread % lanes == 0) & (local < self.tiling.tile_m), row_lse, product, row_dlse))
        if const_expr(self.tiling.dq_begins == "before"):
            numbers = self.tiling.tile_m * self.tiling.d
            clear(dq_accum[padded.b, head, padded.first + tile, None], numbers, THREADS, thread)
        first = padded.first * self.tiling.tile_m
        found = [statistics[kind, padded.b, head, None] for kind in range(2)]
        share = Float32(0.0)
        for step in cutlass.range_constexpr(len(rows)):
            of_tiles, mine, row_lse, product, row_dlse = rows[step]
            log2, delta = row_statistics(row_lse, self.lanes.whole(product), row_dlse)
            _store_if(mine, found, first + of_tiles, (log2, delta))
            if const_expr(sink is not None):  # 2^(sink - inf) is 0
                share = share + choose(mine, exp2(sink - log2) * delta, Float32(0.0))
        return share


def _load_statistic(tensor: cute.Tensor, q: Int32, inside: Boolean, else_: Float32) -> Float32:
    # under way with the loads of rows: behind their sum it is a second wait (0.3 to 0.8 us of 39 to 48 at 1k, H200)
    return choose(inside, tensor[choose(inside, q, 0)], else_)


def _is_first(blocks: QueryBlocks) -> Boolean:
    x, y, z = blocks.place()
    return (x == 0) & (y == 0) & (z == 0)


@cute.jit
def _clear_share(flags: cute.Tensor, blocks: cutlass.Constexpr[QueryBlocks]):
    """A block's share of numbers that lie side by side."""
    (x, y, z), place = blocks.counts(), blocks.place()
    number, count = place[0] + x * (place[1] + y * place[2]), x * y * z
    first = number * THREADS + cute.arch.thread_idx()[0]
    for i in cutlass.range(first, cute.size(flags), count * THREADS, unroll=1):
        flags[i] = Int32(0)


@cute.jit
def _store_if(condition: Boolean, targets, at: Int32, values):
    if condition:
        for target, value in zip(targets, values, strict=True):
            target[at] = value


def row_statistics(lse: Float32, product: Float32, dlse: Float32) -> tuple[Float32, Float32]:
    """(log2(e)·LSE, D) with D = rowsum(dO·O) - dLSE, as d LSE / dS is P (FlashAttention-2, section 3.1).

    A row with nothing to attend (LSE = -inf) gets inf, so that 2^(s - inf) is 0, and D = 0, whatever its dLSE is.
    """
    nothing = lse == -Float32.inf
    return (
        choose(nothing, Float32.inf, lse * LOG2_E),
        choose(nothing, Float32(0.0), product - dlse),
    )
