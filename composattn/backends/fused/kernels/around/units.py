"""Before a backward that sums gradients of captured tensors: in which units, from the largest numbers of dO and of V.

|dP| and |D| are at most their product for each column, and |dLSE| more: `composattn.analysis.captured_gradient` says
what follows. Lengths of rows are a closer bound, by some 4 of 59 bits, but their squares leave fp32 from 1e19 on.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from .....primitives.lanes import LANES, WARP, neighbours, over_lanes
from .....primitives.row_products import INFINITY, RowLanes, bits_of_size
from .....primitives.turns import arrive_if, read
from .....primitives.values import choose, larger, permuted, smaller
from ...planning.arguments import UnitsArguments
from ...planning.plan_around import UnitsPlan
from ...tiles.architecture import Kernel

WARPS = 8
THREADS = WARPS * LANES
LOADS = 8  # of a thread, all under way at once
EXPONENT = 23  # the place of a number's exponent, plus 127, among its bits
ROOM = 59  # a sum of less than twice 2^e takes units of 2^(e - ROOM): below 2^60, and a factor of 4 for rounding
LARGEST_DO, LARGEST_V, LARGEST_DLSE = range(3)


class Units(Kernel):
    """A block per `rows` of a head of dO or V; the last one to end knows the largest numbers, and leaves the units.

    Maxima are of the bits of numbers from 0 on: so NaN has a say, and blocks find them in any order.
    """

    arguments = UnitsArguments

    def __init__(self, plan: UnitsPlan):
        self.plan, self.lanes = plan, RowLanes(plan.head_dim_v)
        self.at_once = THREADS // self.lanes.lanes
        self.steps = max(1, LOADS // self.lanes.passes)
        self.rows = self.at_once * self.steps

    @cute.jit
    def __call__(self, stream, *arguments):
        given = self.arguments(*arguments)
        dout, v, dlse = given.dout, given.v, given.dlse
        if const_expr(not self.plan.is_dense):  # one entry of all rows
            dout, v = [_one_entry(permuted(t, 1, 0, 2)) for t in (dout, v)]
            dlse = None if dlse is None else _one_entry(dlse)
        places = given.rows_in_use, given.keys_in_use, given.found, given.bounds, given.units
        self.kernel(dout, v, dlse, *places).launch(
            grid=(self.blocks(dout) + self.blocks(v), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    def blocks(self, rows):
        batch, heads, length, _ = rows.shape
        return batch * heads * cute.ceil_div(length, self.rows)

    @cute.kernel
    def kernel(self, dout, v, dlse, rows_in_use, keys_in_use, found, bounds, units):
        number, of_dout = cute.arch.block_idx()[0], self.blocks(dout)
        shared = SmemAllocator().allocate_tensor(Int32, cute.make_layout((2, WARPS)), byte_alignment=16)
        if number < of_dout:
            self.look(dout, dlse, rows_in_use, number, shared, found, LARGEST_DO)
        else:
            self.look(v, None, keys_in_use, number - of_dout, shared, found, LARGEST_V)
        first = cute.arch.thread_idx()[0] == 0
        arrived = arrive_if(found.iterator + 3, first)
        _leave_units_if(first & (arrived == cute.arch.grid_dim()[0] - 1), found, bounds, units, self.plan.head_dim_v)

    @cute.jit
    def look(self, x, dlse, in_use, number: Int32, shared, found, which: cutlass.Constexpr[int]):
        """Leaves the largest number of a block's rows, and their largest |dLSE|."""
        _, heads, length, _ = x.shape
        tiles = cute.ceil_div(length, self.rows)
        tile, head, b = number % tiles, number // tiles % heads, number // tiles // heads
        rows = x[b, head, None, None]
        largest, sizes = Int32(0), Int32(0)
        for step in cutlass.range_constexpr(self.steps):
            row = tile * self.rows + step * self.at_once + cute.arch.thread_idx()[0] // self.lanes.lanes
            inside = row < length
            if const_expr(in_use is not None):
                inside = inside & _is_in_use(in_use, row)
            largest = larger(largest, self.lanes.largest(rows, row, inside))
            if const_expr(dlse is not None):
                size = dlse[b, head, choose(inside, row, 0)]
                sizes = larger(sizes, choose(inside, bits_of_size(size), Int32(0)))
        _leave_largest(largest, shared[0, None], found.iterator + which)
        if const_expr(dlse is not None):
            _leave_largest(sizes, shared[1, None], found.iterator + LARGEST_DLSE)


def _one_entry(t: cute.Tensor) -> cute.Tensor:
    """With a mode of size 1 in front."""
    return cute.make_tensor(t.iterator, cute.prepend(t.layout, cute.make_layout(1, stride=0)))


@cute.jit
def _is_in_use(in_use, row: Int32) -> Boolean:
    """Whether a packed row is used by the last sequence that begins there or before: empty ones may begin there too."""
    starts, used = in_use
    low, high = Int32(0), used.shape[0] + Int32(0)
    while high - low > 1:
        middle = (low + high) // 2
        begins = starts[middle] <= row
        low, high = choose(begins, middle, low), choose(begins, high, middle)
    return row - starts[low] < used[low]


@cute.jit
def _leave_largest(value: Int32, of_warps: cute.Tensor, target: cute.Pointer):
    """The largest of all threads, among those that other blocks leave at `target`."""
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    value = over_lanes(larger, value, WARP)
    if lane == 0:
        of_warps[warp] = value
    cute.arch.sync_threads()
    value = over_lanes(larger, of_warps[lane % WARPS], neighbours(WARPS))
    if cute.arch.thread_idx()[0] == 0:
        cute.arch.atomic_max(target, value)


@cute.jit
def _leave_units_if(condition: Boolean, found, bounds, units, columns: cutlass.Constexpr[int]):
    """Powers of two, in which the sums have room; NaN where a sum may not be finite."""
    if condition:
        of_dout, of_v, of_dlse = [read(found.iterator + i).bitcast(Float32) for i in range(3)]
        most = of_dout * of_v * (2.0 * columns) + of_dlse
        for i in cutlass.range_constexpr(len(bounds)):
            bits = bits_of_size(most * bounds[i])
            # units in 1: 2^(ROOM - e) where the sum is from 2^e on, and no more than 2^127
            exponent = smaller(Int32(2 * 127 + ROOM) - (bits >> EXPONENT), Int32(254))
            units[i] = choose(bits < INFINITY, exponent << EXPONENT, Int32(-1)).bitcast(Float32)
