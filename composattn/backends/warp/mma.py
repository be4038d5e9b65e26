"""A warp's tensor core (mma.sync): products of 16 rows, operands from shared memory by ldmatrix, sums in registers."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from ...primitives.matrix_loads import MatrixTile, Operand
from ...primitives.remembered import Remembered
from ...primitives.score_tile import FragmentShape
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


class WarpProducts(OutputProducts):
    """S = Q Kᵀ and O += P V of one warp's rows. They are computed by and by; who reads a sum waits for it.

    Where `resident`, Q waits in registers for all tiles of keys, else it is read again with each of them.
    """

    def __init__(self, tiling: Any, block: Any) -> None:
        self.dtype, self.keys, self.columns = block.dtype, tiling.tile_n, tiling.dv
        op = warp.MmaF16BF16Op(self.dtype, Float32, (ROWS, COLUMNS, DEPTH))
        self.mma = cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))
        self.blocks, self.steps = tiling.warp_rows // ROWS, tiling.d // DEPTH
        number = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.first = number * self.blocks
        self.q = MatrixTile(_start(block.sQ), tiling.tile_m, tiling.d, Operand.LEFT)
        self.q.place = self.q.place + number * (tiling.warp_rows * self.q.wide * 2)
        self.k = MatrixTile(_start(block.sK), tiling.tile_n, tiling.d, Operand.RIGHT_ROWS)
        self.v = MatrixTile(_start(block.sV), tiling.tile_n, tiling.dv, Operand.RIGHT_COLUMNS)
        self.k_bytes, self.v_bytes = 2 * tiling.tile_n * tiling.d, 2 * tiling.tile_n * tiling.dv
        self.output_shape = self._sums(tiling.dv)
        self.tSrQ = [self._left() for _ in range(self.steps)] if tiling.resident else None

    def _sums(self, columns: int) -> Any:
        return (2, 2), self.blocks, columns // COLUMNS

    def _left(self) -> cute.Tensor:
        """Registers for one step of a left operand."""
        return cute.make_rmem_tensor(((2, 2, 2), self.blocks), self.dtype)

    def probabilities(self) -> cute.Tensor:
        """Registers for them in the order of scores; as a left operand they lie as `add_output` sees them."""
        registers = cute.make_rmem_tensor(self.blocks * ROWS * self.keys // LANES, self.dtype)
        shape = 2, 2, self.blocks, 2, self.keys // DEPTH
        return cute.make_tensor(registers.iterator, cute.make_layout(shape, stride=(1, 2, 8, 4, 8 * self.blocks)))

    def rows_of(self, sums: cute.Tensor) -> cute.Tensor:
        apart = 4 * self.blocks  # registers between those of neighbouring 8 columns
        pairs = cute.size(sums) // apart
        layout = cute.make_layout((2 * self.blocks, (2, pairs)), stride=(2, (1, apart)))
        return cute.make_tensor(sums.iterator, layout)

    def remembered(self, sums: cute.Tensor) -> Remembered:
        return Remembered(sums, lambda r, c: 4 * self.blocks * (c // 2) + 2 * r + c % 2)

    def resident_queries(self) -> list[cute.Tensor] | None:
        """Registers for Q where it stays there."""
        return self.tSrQ

    def get_queries(self) -> None:
        """Fills them."""
        for step, registers in enumerate(self.tSrQ or ()):
            self._get_queries(registers, step)

    def _get_queries(self, registers: cute.Tensor, step: int) -> None:
        words = cute.recast_tensor(registers, Int32)
        for i in range(self.blocks):
            self.q.load(words, 4 * i, i, step)

    def wait(self, running: int) -> None:
        """Nothing: who reads a sum waits for it."""

    def put_output(self, rounded: cute.Tensor, shared: cute.Tensor, thread: Any) -> None:
        raise NotImplementedError("rows leave from registers")

    def scores(self, stage: Any) -> cute.Tensor:
        """The products of queries and keys of a stage."""
        tSrS = cute.make_rmem_tensor(self._sums(self.keys), Float32)
        tSrS.fill(0.0)
        for step in range(self.steps):
            if self.tSrQ is None:
                left = self._left()
                self._get_queries(left, step)
            else:
                left = self.tSrQ[step]
            for j in range(self.keys // ROWS):
                self._multiply(tSrS, left, self.k, j, step, j, stage * self.k_bytes)
        return tSrS

    def add_output(self, tOrO: cute.Tensor, tOrP: cute.Tensor, stage: Any) -> None:
        """To the output the probabilities times the values of a stage."""
        shape = (2, 2, 2), self.blocks, self.keys // DEPTH
        left = cute.make_tensor(tOrP.iterator, cute.make_layout(shape))
        for step in range(self.keys // DEPTH):
            for j in range(self.columns // ROWS):
                self._multiply(tOrO, left[None, None, step], self.v, step, j, j, stage * self.v_bytes)

    def _multiply(
        self, sums: cute.Tensor, left: cute.Tensor, tile: MatrixTile, down: int, beside: int, j: int, before: Any
    ) -> None:
        """To the `j`-th 16 columns of sums: one step, with a block of the right operand."""
        right = cute.make_rmem_tensor(((2, 2), 2), self.dtype)
        tile.load(cute.recast_tensor(right, Int32), 0, down, beside, before)
        two = cute.make_layout(((2, 2), self.blocks, 2))
        part = cute.make_tensor(sums.iterator + j * cute.size(two), two)
        cute.gemm(self.mma, part, left, right, part)


def _start(shared: cute.Tensor) -> Any:
    return shared.iterator.toint()
