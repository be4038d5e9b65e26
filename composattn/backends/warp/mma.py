"""A warp's tensor core (mma.sync): products of 16 rows, operands from shared memory by ldmatrix, sums in registers."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from ...primitives.matrix_loads import MatrixTile, Operand
from ...primitives.remembered import Remembered
from ...primitives.score_tile import FragmentShape
from ...primitives.values import Fixed
from ..fused.kernels.registers.output_rows import OutputProducts

ROWS = 16  # of one product
DEPTH = 16  # numbers that it sums over
COLUMNS = 8
LANES = 32


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
        op = warp.MmaF16BF16Op(dtype, Float32, (ROWS, COLUMNS, DEPTH))
        self.mma = cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))
        # of all products: of each its own, they were a quarter of what a forward traces
        self.right = cute.make_rmem_tensor(((2, 2), 2), dtype)
        self.right_words = cute.recast_tensor(self.right, Int32)
        self.two = cute.make_layout(((2, 2), blocks, 2))

    def shape(self, columns: int) -> Any:
        """The shape of the sums of so many columns."""
        return (2, 2), self.blocks, columns // COLUMNS

    def sums(self, columns: int) -> cute.Tensor:
        """Registers for them, zero."""
        registers = cute.make_rmem_tensor(self.shape(columns), Float32)
        registers.fill(0.0)
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

    def rounded(self, columns: int) -> cute.Tensor:
        """Registers for so many columns of 16 bits, in the order of sums; `steps_of` has them as a left operand."""
        registers = cute.make_rmem_tensor(self.blocks * ROWS * columns // LANES, self.dtype)
        shape = 2, 2, self.blocks, 2, columns // DEPTH
        return cute.make_tensor(registers.iterator, cute.make_layout(shape, stride=(1, 2, 8, 4, 8 * self.blocks)))

    def steps_of(self, rounded: cute.Tensor) -> list[cute.Tensor]:
        """Rounded sums as left operands of a product that sums over their columns, one for each step."""
        steps = cute.size(rounded) // (8 * self.blocks)
        left = cute.make_tensor(rounded.iterator, cute.make_layout(((2, 2, 2), self.blocks, steps)))
        return [left[None, None, step] for step in range(steps)]

    def left(self) -> cute.Tensor:
        """Registers for one step of a left operand."""
        return cute.make_rmem_tensor(((2, 2, 2), self.blocks), self.dtype)

    def get(self, registers: cute.Tensor, tile: MatrixTile, below: int, beside: int, before: Any = 0) -> cute.Tensor:
        """Fills them, block by block of rows `below` each other; of an operand whose columns are rows, `beside`."""
        words = cute.recast_tensor(registers, Int32)
        for i in range(self.blocks):
            across = i if tile.is_turned else 0
            tile.load(words, 4 * i, below + i - across, beside + across, before)
        return registers

    def parts(self, sums: cute.Tensor) -> list[cute.Tensor]:
        """Each 16 columns of sums, for all steps that add to them: made in each, they are an eighth of the trace."""
        of_part = 8 * self.blocks
        return [cute.make_tensor(sums.iterator + at, self.two) for at in range(0, cute.size(sums), of_part)]

    def add(
        self, part: cute.Tensor, left: cute.Tensor, tile: MatrixTile, down: int, beside: int, before: Any = 0
    ) -> None:
        """To 16 columns of sums one step, with a block of the right operand, which lies in shared memory."""
        tile.load(self.right_words, 0, down, beside, before)
        cute.gemm(self.mma, part, left, self.right, part)


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

    def probabilities(self) -> cute.Tensor:
        return self.warp.rounded(self.keys)

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

    def scores(self, stage: Any) -> cute.Tensor:
        """The products of queries and keys of a stage."""
        tSrS = self.warp.sums(self.keys)
        parts = self.warp.parts(tSrS)
        for step in range(self.steps):
            left = self.warp.get(self.warp.left(), self.q, 0, step)
            for j, part in enumerate(parts):
                self.warp.add(part, left, self.k, j, step, stage * self.k_bytes)
        return tSrS

    def add_output(self, tOrO: cute.Tensor, tOrP: cute.Tensor, stage: Any) -> None:
        """To the output the probabilities times the values of a stage."""
        parts = self.warp.parts(tOrO)
        for step, left in enumerate(self.warp.steps_of(tOrP)):
            for j, part in enumerate(parts):
                self.warp.add(part, left, self.v, step, j, stage * self.v_bytes)


def start_of(shared: cute.Tensor) -> Any:
    """Where a tile of shared memory begins."""
    return shared.iterator.toint()
