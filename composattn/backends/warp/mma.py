"""A warp's tensor core (mma.sync): products of 16 rows, operands from shared memory by ldmatrix, sums in registers."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm

from ...primitives.matrix_loads import MatrixTile, Operand, load_matrices
from ...primitives.remembered import Remembered
from ...primitives.score_tile import FragmentShape
from ...primitives.values import Fixed, narrow_words
from ...primitives.whole_products import Operands, listed, members
from ..fused.kernels.registers.output_rows import OutputProducts

ROWS = 16  # of one product
DEPTH = 16  # numbers that it sums over
COLUMNS = 8
LANES = 32

Left = list[list[ir.Value]]  # of a step, by blocks of rows: four registers with two numbers of 16 bits each


@dataclass(frozen=True)
class Shared:
    """An operand in shared memory, so many bytes behind the tile; the columns of sums lie so many blocks apart.

    Registers hold the first steps of a left one.
    """

    tile: MatrixTile
    before: Any = 0
    apart: int = 1
    held: Sequence[Left] = ()

    def block(self, step: int, number: int) -> tuple[int, int]:
        """Where block `number` of a step lies: its column, and bytes behind that column's address."""
        number *= self.apart
        return self.tile.block(step, number) if self.tile.is_turned else self.tile.block(number, step)


def fragment_shape(rows: int, columns: int) -> FragmentShape:
    """One thread of a warp with so many rows: rows r and r + 8 of each 16, pairs of columns every 8."""
    lanes = (0, 2), (0, 4), (1, 0), (2, 0), (4, 0)
    offsets = tuple(8 * i for i in range(rows // 8))
    return FragmentShape(offsets, tuple(8 * (c // 2) + c % 2 for c in range(columns // 4)), lanes, block=ROWS)


class Warp(Fixed):
    """One warp's tensor core: products of `blocks` of 16 rows, in steps of 16 numbers that are summed.

    Their sums, of 8 columns after the other, are added up by and by; who reads one waits for it.
    """

    def __init__(self, dtype: Any, blocks: int) -> None:
        self.dtype, self.blocks = dtype, blocks

    def shape(self, columns: int) -> Any:
        """The shape of the sums of so many columns."""
        return (2, 2), self.blocks, columns // COLUMNS

    def sums(self, columns: int) -> cute.Tensor:
        """Registers for them, zero."""
        registers = cute.make_rmem_tensor(self.shape(columns), Float32)
        # one value each: as constants they are made once on each way to a loop, 64 instructions more
        count = cute.size(registers)
        zeros = Operands(count).run((f"mov.f32 ${i}, 0f00000000;" for i in range(count)), has_side_effects=False)
        llvm.store(zeros, registers.iterator.to_llvm_ptr())
        return registers

    def rows_of(self, sums: cute.Tensor) -> cute.Tensor:
        """These registers as (row, column)."""
        apart = 4 * self.blocks  # registers between those of neighbouring 8 columns
        pairs = cute.size(sums) // apart
        layout = cute.make_layout((2 * self.blocks, (2, pairs)), stride=(2, (1, apart)))
        return cute.make_tensor(sums.iterator, layout)

    def remembered(self, sums: cute.Tensor) -> Remembered:
        """These registers by row and column, cached for who reads a number more than once."""
        return Remembered(sums, lambda r, c: 4 * self.blocks * (c // 2) + 2 * r + c % 2)

    def left_of(self, numbers: Any) -> list[Left]:
        """Sums by their number, rounded, as left operands of a product that sums over their columns, step by step."""
        words = list(narrow_words(numbers, cute.size(numbers.registers), self.dtype))
        steps, blocks = range(len(words) // (4 * self.blocks)), range(self.blocks)

        def of_block(step: int, block: int) -> list[ir.Value]:
            """Words of a left operand: of its left 8 columns the upper and the lower row, then of the right ones."""
            halves = (2 * (block + self.blocks * (half + 2 * step)) for half in range(2))
            return [words[first + row].ir_value() for first in halves for row in range(2)]

        return [[of_block(step, block) for block in blocks] for step in steps]

    def rounded(self, columns: int) -> cute.Tensor:
        """Registers for so many columns of 16 bits, in the order of sums; `steps_of` has them as a left operand."""
        registers = cute.make_rmem_tensor(self.blocks * ROWS * columns // LANES, self.dtype)
        shape = 2, 2, self.blocks, 2, columns // DEPTH
        return cute.make_tensor(registers.iterator, cute.make_layout(shape, stride=(1, 2, 8, 4, 8 * self.blocks)))

    def steps_of(self, rounded: cute.Tensor) -> list[Left]:
        """Rounded sums as left operands of a product that sums over their columns, one for each step."""
        steps, words = cute.size(rounded) // (8 * self.blocks), cute.size(rounded) // 2
        word = ir.IntegerType.get_signless(32)
        every = llvm.load(llvm.StructType.get_literal([word] * words), rounded.iterator.to_llvm_ptr())
        values = members(every, word, range(words))
        starts = [[4 * (step * self.blocks + block) for block in range(self.blocks)] for step in range(steps)]
        return [[values[first : first + 4] for first in of_blocks] for of_blocks in starts]

    def words(self, operand: Shared, step: int) -> Left:
        """One step of a left operand, to registers."""
        tile, blocks = operand.tile, []
        for i in range(self.blocks):
            column, behind = operand.block(step, i)
            words = load_matrices(tile.address(column, operand.before), turned=tile.is_turned, behind=behind)
            blocks.append([word.ir_value() for word in words])
        return blocks

    def add(self, sums: cute.Tensor, left: Shared | list[Left], right: Shared, steps: int) -> None:
        """To sums the products of so many steps, in one operation of the kernel language.

        `cute.gemm` makes a loop of each two instructions, which the compiler unrolls: a causal forward of D 256 took
        2.9 CPU seconds to compile for 1.5.
        """
        count, kept = cute.size(sums), sums.iterator.to_llvm_ptr()
        operands = Operands(count)
        operands.go_on(llvm.load(operands.results, kept))
        llvm.store(operands.run(self._lines(operands, count, left, right, steps)), kept)

    def _lines(
        self, operands: Operands, count: int, left: Shared | list[Left], right: Shared, steps: int
    ) -> Iterator[str]:
        """The instructions: of each step its left operand, then for each 16 columns the right one and the products."""
        numbers = {BFloat16: "bf16", Float16: "f16"}[self.dtype]
        of_left, of_right = _named(operands, left), _named(operands, right)
        rows = [[f"a{4 * block + i}" for i in range(4)] for block in range(self.blocks)]
        columns = [f"b{i}" for i in range(4)]
        yield f"{{ .reg .b32 {', '.join(itertools.chain(*rows, columns))};"
        for step in range(steps):
            lefts = []
            for block, free in enumerate(rows):
                names, loaded = of_left(step, block, free)
                lefts.append(listed(names))
                yield from loaded
            for part in range(count // (8 * self.blocks)):
                names, loaded = of_right(step, part, columns)
                yield from loaded
                for block, half in itertools.product(range(self.blocks), range(2)):
                    first = 8 * self.blocks * part + 4 * (block + self.blocks * half)
                    results = listed(f"${first + i}" for i in range(4))
                    words = listed(names[2 * half : 2 * half + 2])
                    yield (
                        f"mma.sync.aligned.m16n8k16.row.col.f32.{numbers}.{numbers}.f32 "
                        f"{results}, {lefts[block]}, {words}, {results};"
                    )
        yield "}"


# by step, block and four registers that are free: where its four words are, and the instruction that loads them, if any
_Named = Callable[[int, int, list[str]], tuple[list[str], list[str]]]


def _named(operands: Operands, operand: Shared | list[Left]) -> _Named:
    held = operand.held if isinstance(operand, Shared) else operand
    names = [[[operands.name("r", word) for word in block] for block in step] for step in held]
    if not isinstance(operand, Shared):
        return lambda step, block, free: (names[step][block], [])
    shared, addresses = operand, dict[int, str]()

    def loaded(step: int, block: int, free: list[str]) -> tuple[list[str], list[str]]:
        if step < len(names):
            return names[step][block], []
        column, behind = shared.block(step, block)
        if column not in addresses:
            addresses[column] = operands.name("r", shared.tile.address(column, shared.before).ir_value())
        return free, [shared.tile.spell(listed(free), addresses[column], behind)]

    return loaded


class WarpProducts(OutputProducts):
    """S = Q Kᵀ and O += P V of one warp's rows."""

    def __init__(self, tiling: Any, block: Any) -> None:
        self.keys, self.steps = tiling.tile_n, tiling.d // DEPTH
        self.warp = Warp(block.dtype, tiling.warp_rows // ROWS)
        number = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.q = MatrixTile(start_of(block.sQ), tiling.tile_m, tiling.d, Operand.LEFT)
        self.q.place = self.q.place + number * (tiling.warp_rows * self.q.wide * 2)
        self.k = MatrixTile(start_of(block.sK), tiling.tile_n, tiling.d, Operand.RIGHT_ROWS)
        self.v = MatrixTile(start_of(block.sV), tiling.tile_n, tiling.dv, Operand.RIGHT_COLUMNS)
        self.k_bytes, self.v_bytes = 2 * tiling.tile_n * tiling.d, 2 * tiling.tile_n * tiling.dv
        self.output_shape = self.warp.shape(tiling.dv)

    def probabilities(self) -> None:
        """None: they go from sums to operands as values."""

    def rows_of(self, sums: cute.Tensor) -> cute.Tensor:
        return self.warp.rows_of(sums)

    def remembered(self, sums: cute.Tensor) -> Remembered:
        return self.warp.remembered(sums)

    def wait(self, running: int) -> None:
        """Nothing: who reads a sum waits for it."""

    def resident_queries(self) -> None:
        """Q waits in no registers: it is read again with each tile of keys."""

    def put_output(self, rounded: cute.Tensor, shared: cute.Tensor, thread: Any) -> None:
        raise NotImplementedError("rows leave from registers")

    def scores(self, stage: Any, zero: Any) -> cute.Tensor:
        """The products of queries and keys of a stage. `zero`: added to all addresses."""
        tSrS = self.warp.sums(self.keys)
        self.warp.add(tSrS, Shared(self.q, zero), Shared(self.k, stage * self.k_bytes + zero), self.steps)
        return tSrS

    def add_output(self, tOrO: cute.Tensor, steps: list[Left], stage: Any, zero: Any) -> None:
        """To the output the probabilities, rounded, times the values of a stage."""
        self.warp.add(tOrO, steps, Shared(self.v, stage * self.v_bytes + zero), len(steps))


def start_of(shared: cute.Tensor) -> Any:
    """Where a tile of shared memory begins."""
    return shared.iterator.toint()
