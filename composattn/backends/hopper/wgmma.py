"""The warpgroup's tensor core: products, their operands in shared memory, and how their sums leave registers."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...primitives.e4m3_powers import e4m3
from ...primitives.exponential_units import HARDWARE, ExponentialUnits
from ...primitives.pipelines import Warps
from ...primitives.remembered import Remembered
from ...primitives.score_tile import FragmentShape
from ...primitives.values import Fixed
from ...primitives.whole_products import Instruction, multiply
from ..fused.kernels.registers.output_rows import OutputProducts
from ..fused.tiles.written import Written

ROWS = 64  # of one warpgroup's product
DEPTH_BYTES = 32  # of a row that a step of a product sums: 16 numbers of 16 bits, 32 of 8
WARPGROUP = 128  # threads
STEP = 16  # columns of 16-bit numbers that a step of a product sums, and that a matrix copy of a product has

K, MN = OperandMajorMode.K, OperandMajorMode.MN  # an operand's contiguous mode: what is summed over, or the other one


BESIDE_SUMS = 26  # registers of an instruction beside its sums


def in_steps(columns: int) -> int:
    """Columns of a tile that are multiplied: those behind are zeros, up to a multiple of what memory's blocks have."""
    return -(-columns // STEP) * STEP


def part_columns(columns: int, registers: int) -> int:
    """How many of a product's columns an instruction has where a thread has so many registers at launch: all, or a
    part of whole swizzled blocks. ptxas takes none that needs more (C7602), whatever `setmaxnreg` gives the thread.
    """
    most = 2 * (registers - BESIDE_SUMS)
    return columns if columns <= most else next(n for n in range(most // 32 * 32, 0, -32) if columns % n == 0)


def warps_of(warpgroups: int) -> Warps:
    return Warps(warpgroups * WARPGROUP // 32)


# --- products ---------------------------------------------------------------------------------------------------


class WholeProducts(warpgroup.MmaF16BF16Op):
    """The operation of a product that is written whole: a TiledMma keeps its operation, and so how it is written."""

    @property
    def instruction(self) -> Instruction:
        in_registers = self.a_src is warpgroup.OperandSource.RMEM
        majors = [self.b_major_mode] if in_registers else [self.a_major_mode, self.b_major_mode]
        transposed = "".join(f", {int(major == MN)}" for major in majors)
        return _instruction(self, "bf16" if self.a_dtype is BFloat16 else "f16", transposed)


class FreshProducts(WholeProducts):
    """`WholeProducts` products whose new sums name no registers of earlier sums."""


class WholeFp8Products(warpgroup.MmaF8Op):
    """The operation of a product of 8-bit numbers that is written whole; both operands lie along what is summed."""

    @property
    def instruction(self) -> Instruction:
        return _instruction(self, BYTES[self.a_dtype], "")


WHOLE = WholeProducts, WholeFp8Products
BYTES = {cutlass.Float8E4M3FN: "e4m3", cutlass.Float8E5M2: "e5m2"}
OPERATIONS: dict[Written, type] = {"by steps": warpgroup.MmaF16BF16Op, "whole": WholeProducts, "anew": FreshProducts}


def _instruction(op: warpgroup.MmaF16BF16Op | warpgroup.MmaF8Op, kind: str, transposed: str) -> Instruction:
    """`kind`: of the operands' numbers; `transposed`: which of them lie across what is summed, where that is said."""
    rows, columns, depth = op.shape_mnk
    name = f"wgmma.mma_async.sync.aligned.m{rows}n{columns}k{depth}.f32.{kind}.{kind}"

    def spell(sums: str, left: str, right: str, goes_on: str) -> str:
        return f"{name} {sums}, {left}, {right}, {goes_on}, 1, 1{transposed};"

    in_registers = op.a_src is warpgroup.OperandSource.RMEM
    return Instruction(rows * columns // WARPGROUP, rows * DEPTH_BYTES // 4 // WARPGROUP if in_registers else 0, spell)


def product(
    dtype, columns: int, left=K, right=K, left_in_registers: bool = False, written: Written = "by steps"
) -> cute.TiledMma:
    """64 rows by `columns`, summed in fp32; the operands' contiguous modes; how it is `written`, of 8 bits whole."""
    source = warpgroup.OperandSource.RMEM if left_in_registers else warpgroup.OperandSource.SMEM
    shape = (ROWS, columns, DEPTH_BYTES * 8 // dtype.width)
    if dtype.width == 8:
        op = WholeFp8Products(dtype, dtype, Float32, shape, source, left, right)
    else:
        op = OPERATIONS[written](dtype, Float32, shape, source, left, right)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))


def issue(mma: cute.TiledMma, accumulator: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: bool) -> None:
    """Starts a product, one group for `warpgroup.wait_group`."""
    issue_all(mma, [(accumulator, a, b)], accumulate)


def issue_all(
    mma: cute.TiledMma, products: Iterable[tuple[cute.Tensor, cute.Tensor, cute.Tensor]], accumulate: bool
) -> None:
    """Starts products (accumulator, left operand, right operand), all of them one group."""
    warpgroup.fence()
    for accumulator, a, b in products:
        _multiply(mma, accumulator, a, b, range(cute.size(a, mode=[2])), accumulate)
    warpgroup.commit_group()


class ColumnParts:
    """Products whose right operand has more columns than one instruction may, in equal parts, see `part_columns`.

    `values`: (columns, summed, stage). `registers`: of a thread at launch.
    """

    def __init__(self, dtype, values: cute.Tensor, registers: int, **how: Any) -> None:
        columns, summed = cute.size(values, mode=[0]), cute.size(values, mode=[1])
        self.columns = part_columns(columns, registers)
        self.mma = product(dtype, self.columns, right=MN, **how)
        mma = self.mma.get_slice(0)
        parts = (cute.local_tile(values, (self.columns, summed), (n, 0, None)) for n in range(columns // self.columns))
        self.right = [mma.make_fragment_B(mma.partition_B(part)) for part in parts]
        self.shape = mma.partition_shape_C((ROWS, self.columns))

    def issue(self, accumulator: cute.Tensor, left: cute.Tensor, slot, accumulate: bool) -> None:
        """Starts them all as one group, with the right operand of a slot."""
        layout = cute.make_layout(self.shape)
        products = (
            (
                cute.make_tensor(accumulator.iterator + n * self.columns // 2, layout),
                left,
                b[None, None, None, slot.index],
            )
            for n, b in enumerate(self.right)
        )
        issue_all(self.mma, products, accumulate)


def issue_in_parts(
    accumulator: cute.Tensor, parts: Iterable[tuple[cute.TiledMma, cute.Tensor, range]], b: cute.Tensor
) -> None:
    """Starts a product whose left operand lies in several places: which steps of the sum each of these has, in order.

    One group, and the same sums as from one place.
    """
    warpgroup.fence()
    for mma, a, steps in parts:
        _multiply(mma, accumulator, a, b, steps, accumulate=steps.start > 0)
    warpgroup.commit_group()


def _multiply(
    mma: cute.TiledMma, accumulator: cute.Tensor, a: cute.Tensor, b: cute.Tensor, steps: range, accumulate: bool
) -> None:
    if isinstance(mma.op, WHOLE):
        multiply(mma.op.instruction, accumulator, a, b, steps, accumulate, isinstance(mma.op, FreshProducts))
        return
    # an atom of its own: its accumulate flag changes along the way
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for step in steps:
        cute.gemm(atom, accumulator, a[None, None, step], b[None, None, step], accumulator)
        atom.set(warpgroup.Field.ACCUMULATE, True)


def fragment_shape(columns: int) -> FragmentShape:
    """One thread of a 64-row product: rows r and r + 8, pairs of columns every 8; four lanes share a row."""
    lanes = (0, 2), (0, 4), (1, 0), (2, 0), (4, 0)
    return FragmentShape((0, 8), tuple(8 * (c // 2) + c % 2 for c in range(columns // 4)), lanes, block=16)


def first_rows_shape(columns: int) -> FragmentShape:
    """The fragment where only the first eight of a product's rows are of use: no thread's second row is."""
    whole = fragment_shape(columns)
    return dataclasses.replace(whole, row_offsets=whole.row_offsets[:1])


def row_column_place(r: int, c: int) -> int:
    """Which register of a 64-row accumulator is at that row and column."""
    return 4 * (c // 2) + 2 * r + c % 2


def row_column_view(accumulator: cute.Tensor) -> cute.Tensor:
    """The registers of a 64-row accumulator ((2, 2, n/8), 1, 1) as (row, column)."""
    pairs = cute.size(accumulator) // 4
    layout = cute.make_layout((2, (2, pairs)), stride=(2, (1, 4)))
    return cute.make_tensor(accumulator.iterator, layout)


# --- from tensors to registers, and back ------------------------------------------------------------------------


def round_to_e4m3(left: cute.Tensor, sums: cute.Tensor, units: ExponentialUnits = HARDWARE) -> None:
    """A product's sums, rounded to e4m3 with no exchange between lanes, as the left operand of another one.

    A word has four columns that its thread has: two of each 8, so the operand's columns of each 16 come in the order
    0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15, in which the rows of the right operand have to lie. `units`: what computed
    which columns' sums.
    """
    words = cute.recast_tensor(left, cutlass.Int32)
    for i in range(cute.size(words)):
        first = 16 * (i // 4) + 8 * (i // 2 % 2) + 2 * (i % 2)  # rows r and r + 8 come in turns
        column = first // 4 * 2
        numbers = [sums[first + place] for place in (0, 1, 4, 5)]
        words[i] = e4m3(numbers, (units.is_polynomial(column), units.is_polynomial(column + 2)))


def get(mma: cute.TiledMma, registers: cute.Tensor, shared: cute.Tensor, thread) -> None:
    """Loads as many steps of a left operand as there are registers for: 8x8 matrices of its tile, four at a time."""
    from_shared = cute.make_copy_atom(cute.nvgpu.warp.LdMatrix8x8x16bOp(False, 4), shared.element_type)
    copy = cute.make_tiled_copy_A(from_shared, mma).get_slice(thread)
    source, target = copy.partition_S(shared), copy.retile(registers)
    for step in range(cute.size(registers, mode=[2])):
        cute.copy(copy, source[None, None, step], target[None, None, step])


def store_matrix(mma: cute.TiledMma, dtype, thread, transposed: bool = False, at_once: int = 4):
    """The copy of a product's registers, as 16-bit numbers, to shared memory: 8x8 matrices, four at a time."""
    to_shared = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(transposed, at_once), dtype)
    return cute.make_tiled_copy_C(to_shared, mma).get_slice(thread)


def put(mma: cute.TiledMma, rounded: cute.Tensor, shared: cute.Tensor, thread, transposed: bool = False) -> None:
    """A product's registers to its tile in shared memory. Columns of the tile behind the product's become zeros; of the
    product's those behind the tile's are left out, of which a tile has a multiple of 8.
    """
    columns, wide = 2 * cute.size(rounded), cute.size(shared, mode=[1])
    if columns == wide or transposed:
        copy = store_matrix(mma, rounded.element_type, thread, transposed)
        cute.copy(copy, copy.retile(rounded), copy.partition_D(shared))
        return
    rest = wide % STEP
    copy = store_matrix(product(rounded.element_type, STEP), rounded.element_type, thread)
    target = copy.partition_D(cute.local_tile(shared, (ROWS, wide - rest), (0, 0)) if rest else shared)
    layout = cute.make_layout(((2, 2, 2), 1, 1))  # a thread's registers of a step
    zeros = cute.make_rmem_tensor(layout, rounded.element_type)
    zeros.fill(0)
    for step in range(wide // STEP):
        there = step < columns // STEP
        part = cute.make_tensor(rounded.iterator + step * cute.size(layout), layout) if there else zeros
        cute.copy(copy, copy.retile(part)[None, None, 0], target[None, None, step])
    if rest:
        copy = store_matrix(product(rounded.element_type, rest), rounded.element_type, thread, at_once=2)
        last = rounded.iterator + (wide - rest) // STEP * cute.size(layout)
        part = cute.make_tensor(last, cute.make_layout(((2, 2, 1), 1, 1)))
        target = copy.partition_D(cute.local_tile(shared, (ROWS, rest), (0, wide // rest - 1)))
        cute.copy(copy, copy.retile(part), target)


class WarpgroupProducts(OutputProducts):
    """Products of which `pv` gives the output."""

    pv: cute.TiledMma

    def rows_of(self, sums: cute.Tensor) -> cute.Tensor:
        return row_column_view(sums)

    def remembered(self, sums: cute.Tensor) -> Remembered:
        return Remembered(sums, row_column_place)

    def wait(self, running: int) -> None:
        warpgroup.wait_group(running)

    def put_output(self, rounded: cute.Tensor, shared: cute.Tensor, thread) -> None:
        put(self.pv, rounded, shared, thread)


@dataclasses.dataclass
class WarpgroupSums(Fixed):
    """What a product of one warpgroup leaves of a tile of `shape`; `transposed`: the tile's rows are its columns."""

    mma: cute.TiledMma
    shape: tuple[int, int]
    transposed: bool = False

    def registers(self) -> cute.Tensor:
        return cute.make_rmem_tensor(self.mma.get_slice(0).partition_shape_C(self.shape), Float32)

    def put(self, rounded: cute.Tensor, shared: cute.Tensor, thread) -> None:
        put(self.mma, rounded, shared, thread, self.transposed)
