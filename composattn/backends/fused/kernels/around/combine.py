"""After a forward split over kv: the parts' outputs, weighted by their sums of exponentials, into one."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from .....call.schedule import MOST_SPLITS
from .....primitives.branches import store_if
from .....primitives.split import MOST_PARTS, Weights
from .....primitives.values import choose, narrow, smaller
from ...planning.arguments import CombineArguments
from ...planning.plan import CombinePlan
from ...tiles.architecture import Kernel

WARPS = 4
LANES = 32
WIDE = 4  # columns of fp32 that a lane reads at once
AHEAD = 4  # parts that a warp reads before it knows their weights: all of 16


class Combine(Kernel):
    """A block per query row: warp w sums parts w, w + 4, ... (`WIDE` columns per lane), then all warps' sums.

    The order of the sums is fixed, so the result is the same in every run.
    """

    arguments = CombineArguments

    def __init__(self, plan: CombinePlan):
        assert MOST_SPLITS <= MOST_PARTS, "a lane has the LSE of so many parts"
        self.plan = plan
        self.chunks = -(-plan.head_dim_v // (LANES * WIDE))

    @cute.jit
    def __call__(self, stream, *arguments):
        given = self.arguments(*arguments)
        batch, heads, q_len, _ = given.out.shape
        self.kernel(given.parts, given.part_lse, given.out, given.lse).launch(
            grid=(q_len * batch * heads, 1, 1) if self.plan.in_one_row else (q_len * batch, heads, 1),
            block=(WARPS * LANES, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, parts, part_lse, o, lse):
        number, h, _ = cute.arch.block_idx()
        if const_expr(self.plan.in_one_row):
            number, h = number // o.shape[1], number % o.shape[1]
        b, q = number // o.shape[2], number % o.shape[2]
        of_parts = parts[None, b, h, q, None], part_lse[None, b, h, q]
        whole = o[b, h, q, None], None if lse is None else lse[b, h, None], q
        parts = cute.size(of_parts[1])
        if parts <= WARPS:
            self.combine(1, of_parts, whole)
        elif parts <= 2 * WARPS:
            self.combine(2, of_parts, whole)
        else:
            self.combine(AHEAD, of_parts, whole)

    @cute.jit
    def combine(self, ahead: cutlass.Constexpr[int], of_parts, whole):
        """A row's parts into the whole; each warp reads the first `ahead` of its parts before it knows their weights.

        So memory is waited for once, not three times.
        """
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        (row, row_lse), (out, lse, q) = of_parts, whole
        last = cute.size(row, mode=[0]) - 1
        first = [self.part(row, smaller(warp + WARPS * n, last), lane) for n in range(ahead)]
        cute.arch.sync_warp()  # else these are read behind the maximum
        weights = Weights(row_lse, lane)
        total = cute.make_rmem_tensor(self.chunks * WIDE, Float32)
        total.fill(0.0)
        for n in cutlass.range_constexpr(ahead):
            s = warp + WARPS * n
            self.add(total, first[n], choose(s <= last, weights.of(smaller(s, last)), Float32(0.0)))
        if const_expr(ahead == AHEAD):
            for s in cutlass.range(warp + WARPS * ahead, last + 1, WARPS, unroll=4):
                self.add(total, self.part(row, s, lane), weights.of(s))
        shared = SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((self.chunks * WIDE, LANES, WARPS)), byte_alignment=16
        )
        for i in range(self.chunks * WIDE):
            shared[i, lane, warp] = total[i]
        cute.arch.sync_threads()
        if warp == 0:
            self.store(shared, out, lane)
            if const_expr(lse is not None):
                store_if(lane == 0, lse, q, weights.lse)

    @cute.jit
    def part(self, row, s: Int32, lane: Int32):
        """The lane's columns of part `s`."""
        part = cute.make_rmem_tensor((WIDE, self.chunks), Float32)
        part.fill(0.0)
        for chunk in cutlass.range_constexpr(self.chunks):
            if self.has(chunk, lane):
                cute.autovec_copy(cute.local_tile(row[s, None], (WIDE,), (chunk * LANES + lane,)), part[None, chunk])
        return part

    @cute.jit
    def add(self, total, part, weight: Float32):
        """A part by its weight; what one that saw nothing left may be anything."""
        for i in cutlass.range_constexpr(self.chunks * WIDE):
            total[i] = total[i] + choose(weight == 0.0, Float32(0.0), weight * part[i])

    @cute.jit
    def store(self, shared, row, lane: Int32):
        for chunk in cutlass.range_constexpr(self.chunks):
            if self.has(chunk, lane):
                four = cute.make_rmem_tensor(WIDE, Float32)
                for i in cutlass.range_constexpr(WIDE):
                    value = shared[chunk * WIDE + i, lane, 0]
                    for warp in cutlass.range_constexpr(1, WARPS):
                        value = value + shared[chunk * WIDE + i, lane, warp]
                    four[i] = value
                rounded = cute.make_rmem_tensor(WIDE, row.element_type)
                narrow(rounded, four)
                cute.autovec_copy(rounded, cute.local_tile(row, (WIDE,), (chunk * LANES + lane,)))

    def has(self, chunk: int, lane: Int32):
        whole = (chunk + 1) * LANES * WIDE <= self.plan.head_dim_v
        return True if whole else (chunk * LANES + lane) * WIDE < self.plan.head_dim_v
