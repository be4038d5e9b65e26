"""Rows of q, k and v to 8 bits: a rotation, a scale of what a block of threads has in registers, bytes."""

from operator import add

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute import math as cm
from cutlass.memory import SmemAllocator

from .....call.eight_bits import MANTISSAS
from .....primitives.eight_bits import E4M3, E5M2
from .....primitives.hadamard import Rotation
from .....primitives.lanes import LANES, WARP, neighbours, over_lanes
from .....primitives.values import Fixed, aligned, choose, move, total
from ...planning.arguments import QuantiseArguments
from ...planning.plan_around import QuantisePlan, RowLanes
from ...tiles.architecture import Kernel


class Quantise(Kernel):
    """A block has some rows of a head of q, k or v: it reads them once, and keeps them in registers.

    Where a head shares a scale, a first kernel finds what no number of it is beyond, and a second one reads that: the
    largest number, or the length of the longest row where rows are rotated, which it then need not do.
    """

    arguments = QuantiseArguments

    def __init__(self, plan: QuantisePlan):
        self.plan, self.warps = plan, plan.threads // LANES
        self.format = E4M3 if plan.to == torch.float8_e4m3fn else E5M2

    @cute.jit
    def __call__(self, stream, *arguments):
        given = self.arguments(*arguments)
        blocks = [self.blocks(x.given) for x in (given.q, given.k, given.v)]
        self.kernel(*given).launch(
            grid=(total(blocks), 1, 1), block=(self.plan.threads, 1, 1), stream=stream,
            min_blocks_per_mp=self.plan.resident,
            preferred_smem_carveout=10,  # said, else the kernel language asks the driver, as in `Forward`
        )  # fmt: skip

    def blocks(self, given):
        batch, heads, length, _ = given.shape
        return batch * heads * cute.ceil_div(length, self.plan.rows)

    @cute.kernel
    def kernel(self, q, k, v, mean, turned_mean):
        number, plan = cute.arch.block_idx()[0], self.plan
        shared = SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((1 + len(MANTISSAS), self.warps)), byte_alignment=16
        )
        behind_q = self.blocks(q.given)
        behind_k = behind_q + self.blocks(k.given)
        if number < behind_q:
            self.quantise(q, None, None, shared, plan.head_dim, plan.hadamard, number)
        else:
            if number < behind_k:
                self.quantise(k, mean, turned_mean, shared, plan.head_dim, plan.hadamard, number - behind_q)
            else:
                self.quantise(v, None, None, shared, plan.head_dim_v, False, number - behind_k)

    @cute.jit
    def quantise(
        self, x, mean, turned_mean, shared, d: cutlass.Constexpr[int], rotates: cutlass.Constexpr[bool], number: Int32
    ):
        by_length = rotates and self.plan.finds_largest  # no number of a rotated row is larger than the row is long
        rows = BlockRows(self.plan, d, rotates and not by_length, x.given.shape, number)
        taken = None if mean is None else rows.numbers(mean, 0, rows.has_columns)
        loaded = [rows.load(x.given, step, taken) for step in range(rows.steps)]
        if const_expr(turned_mean is not None):
            _rotate_mean_if(rows.is_first, rows, taken, turned_mean)
        largest = _lengths(rows, loaded) if by_length else _of_steps(_largest, rows, loaded)
        if const_expr(self.plan.finds_largest):
            self.leave_largest(x.largest[rows.b, rows.head, None], self.of_block(shared, largest, [])[0])
        elif const_expr(self.plan.scale == "token"):
            for step in cutlass.range_constexpr(rows.steps):
                errors = self.errors(loaded[step], rows.has(step))
                scale, factor = self.scale(*_of_row(rows, largest[step], errors))
                rows.store_scale(x.scale, rows.row(step), scale, (rows.member == 0) & rows.has_row(step))
                rows.store(x.data, step, loaded[step], factor, self.format)
        else:
            if const_expr(self.plan.scale == "head"):
                scale, factor = self.scale(x.largest[rows.b, rows.head, 0].bitcast(Float32))
            else:
                errors = [self.errors(values, rows.has(step)) for step, values in enumerate(loaded)]
                scale, factor = self.scale(
                    *self.of_block(shared, largest, [total(e) for e in zip(*errors, strict=True)])
                )
            first = (cute.arch.thread_idx()[0] == 0) & (rows.tile < x.scale.shape[2])
            rows.store_scale(x.scale, rows.tile, scale, first)
            for step in cutlass.range_constexpr(rows.steps):
                rows.store(x.data, step, loaded[step], factor, self.format)

    def errors(self, values, there):
        """Squares of what rounding leaves of numbers that are `there`, summed, by mantissa; none of powers of two."""
        if self.plan.power_of_two:
            return []
        found = [[self.format.rounding_error(x, m) for x in values] for m in MANTISSAS]
        sums = [total(e * e for e in of) * (m * m) for of, m in zip(found, MANTISSAS, strict=True)]
        return [choose(there, x, Float32(0.0)) for x in sums]

    def scale(self, largest, *errors):
        """The mantissa of the least error, times the least power of two that fits; and what to multiply by."""
        mantissa, inverse = Float32(1.0), Float32(1.0)
        least = errors[0] if errors else None
        for m, error in zip(MANTISSAS[1:], errors[1:], strict=False):  # no errors of powers of two
            better = error < least
            least = choose(better, error, least)
            mantissa, inverse = choose(better, Float32(m), mantissa), choose(better, Float32(1 / m), inverse)
        return self.format.scale(largest, mantissa, inverse)

    @cute.jit
    def of_block(self, shared, largest: cutlass.Constexpr, errors: cutlass.Constexpr):
        """The largest number of all threads, and sums of their errors, which all get."""
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        folds = [cute.arch.fmax] + [add] * len(errors)
        of_thread = [_tree(cute.arch.fmax, largest), *errors]
        for i in cutlass.range_constexpr(len(folds)):
            _store_if(lane == 0, shared[i, None], warp, over_lanes(folds[i], of_thread[i], WARP))
        cute.arch.sync_threads()
        return [over_lanes(fold, shared[i, lane % self.warps], neighbours(self.warps)) for i, fold in enumerate(folds)]

    @cute.jit
    def leave_largest(self, target, largest: Float32):
        if cute.arch.thread_idx()[0] == 0:
            # numbers from 0 on are in the order of their bits
            cute.arch.atomic_max(target.iterator, largest.bitcast(Int32))


class BlockRows(Fixed):
    """The rows of a block of threads, and the channels that its threads have: `lanes` neighbours have a row."""

    def __init__(self, plan: QuantisePlan, d: int, rotates: bool, shape, number: Int32):
        self.d = d
        self.lanes, self.elements = RowLanes.of(d)
        self.at_once = plan.threads // self.lanes
        self.steps = -(-plan.rows // self.at_once)
        thread = cute.arch.thread_idx()[0]
        _, heads, self.length, _ = shape
        tiles = cute.ceil_div(self.length, plan.rows)
        sequence, self.tile = number // tiles, number % tiles
        self.b, self.head = sequence // heads, sequence % heads
        self.is_first, self.of_block = self.tile == 0, thread // self.lanes
        self.first, self.rows, self.member = self.tile * plan.rows, plan.rows, thread % self.lanes
        self.column = self.member * self.elements
        self.has_columns = Boolean(True) if self.lanes * self.elements == d else self.column < d
        self.rotation = Rotation(d & -d, self.elements, self.member) if rotates else None

    def row(self, step: int):
        return self.first + step * self.at_once + self.of_block

    def has_row(self, step: int):
        inside = self.row(step) < self.length
        return inside if self.at_once * self.steps == self.rows else inside & (self.of_block < self.rows)

    def has(self, step: int):
        """Whether a thread has numbers of a row."""
        return self.has_row(step) & self.has_columns

    def load(self, given, step: int, taken):
        """A thread's numbers of a row, less those `taken`, rotated; some others where it `has` none."""
        values = self.numbers(given, self.row(step), self.has(step))
        if taken is not None:
            values = [x - m for x, m in zip(values, taken, strict=True)]
        return values if self.rotation is None else self.rotation(values)

    def numbers(self, given, row, inside):
        # no branch, so that loads of all rows are under way at once: what lies outside reads the first row
        source = given[self.b, self.head, choose(inside, row, 0), None]
        wide = 128 // given.element_type.width
        loaded = cute.make_rmem_tensor((wide, self.elements // wide), given.element_type)
        start = source.iterator + choose(inside, self.column, 0)
        move(cute.make_tensor(aligned(start), loaded.layout), loaded)
        return [loaded[i].to(Float32) for i in range(self.elements)]

    @cute.jit
    def store(self, data, step: cutlass.Constexpr[int], values: cutlass.Constexpr, factor, format: cutlass.Constexpr):
        """A thread's numbers of a row, times `factor`, as bytes."""
        words = cute.make_rmem_tensor((self.elements // 4, 1), Int32)
        scaled = [x * factor for x in values]
        for i in cutlass.range_constexpr(self.elements // 4):
            words[i] = format.word(scaled[4 * i : 4 * i + 4])
        if self.has(step):
            target = cute.recast_ptr(data[self.b, self.head, self.row(step), None].iterator + self.column, dtype=Int32)
            start = cute.make_ptr(Int32, target.toint(), target.memspace, assumed_align=self.elements)
            move(words, cute.make_tensor(start, words.layout))

    def store_scale(self, scales, at, scale: Float32, condition):
        _store_if(condition, scales[self.b, self.head, None, 0], at, scale)


@cute.jit
def _rotate_mean_if(condition, rows: cutlass.Constexpr, taken: cutlass.Constexpr, target):
    """The mean of a head, rotated; each row's threads would write the same, so those of the first do."""
    if condition:
        values = rows.rotation(list(taken))
        if (rows.of_block == 0) & rows.has_columns:
            turned = cute.make_rmem_tensor((4, rows.elements // 4), Float32)
            for i in cutlass.range_constexpr(rows.elements):
                turned[i] = values[i]
            start = target[rows.b, rows.head, 0, None].iterator + rows.column
            move(turned, cute.make_tensor(aligned(start), turned.layout))


def _of_row(rows: cutlass.Constexpr, largest, errors):
    """The largest and the sums of errors of a row, of which each of its threads has some numbers."""
    row = neighbours(rows.lanes)
    return [over_lanes(cute.arch.fmax, largest, row), *(over_lanes(add, e, row) for e in errors)]


def _of_steps(fold, rows: cutlass.Constexpr, loaded):
    """What `fold` gives of the numbers of each step, and 0 where there are none."""
    return [choose(rows.has(step), fold(values), Float32(0.0)) for step, values in enumerate(loaded)]


def _lengths(rows: cutlass.Constexpr, loaded):
    """The length of the row of each step."""
    return [cm.sqrt(over_lanes(add, of, neighbours(rows.lanes))) for of in _of_steps(_squares, rows, loaded)]


def _squares(values):
    """Their sum."""
    found = Float32(0.0)
    for x in values:
        found = cm.fma(x, x, found)
    return found


def _largest(values):
    return _tree(cute.arch.fmax, [cute.arch.fmax(x, -x) for x in values])


def _tree(op, values):
    while len(values) > 1:
        values = [op(*values[i : i + 2]) if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
    return values[0]


@cute.jit
def _store_if(condition, target, at, value):
    if condition:
        target[at] = value
