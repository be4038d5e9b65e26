"""What a block of the backward of warps has in shared memory, and the products of a warp, whose operands lie there."""

import itertools
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from ...primitives.matrix_loads import MatrixTile, Operand
from ...primitives.swizzled_tiles import at_column, swizzled
from ...primitives.values import Fixed
from .mma import Warp
from .tiling import ROWS, WarpBackwardTiling

LINE = 8  # numbers of 16 bytes


class WarpBackwardBlock(Fixed):
    """Shared memory of one block: K and V, stages of Q and dO, of P and dS, (key, query), and of statistics of rows.

    Tiles lie one after the other from `start` on; `behind` says how many bytes.
    """

    turn_edge = queue = None

    def __init__(self, tiling: WarpBackwardTiling, dtype: Any) -> None:
        n, m, d, dv, stages = tiling.tile_n, tiling.tile_m, tiling.d, tiling.dv, tiling.stages
        shapes = {"k": (n, d, 1), "v": (n, dv, 1), "q": (m, d, stages), "do": (m, dv, stages), "ds": (n, m, 1)}
        if not tiling.keeps_weights:
            shapes["p"] = n, m, 1
        smem, self.dtype = SmemAllocator(), dtype
        ends = list(itertools.accumulate(rows * columns * count for rows, columns, count in shapes.values()))
        first = smem.allocate_array(dtype, ends[-1], byte_alignment=1024)
        self.start = first.toint()
        self.behind = {name: 2 * end for name, end in zip(shapes, [0, *ends], strict=False)}
        self.sRows = smem.allocate_tensor(Float32, cute.make_layout((m, stages, 2)), 128)
        self.sLse, self.sDelta = (self.sRows[None, None, kind] for kind in range(2))
        self.sLines = smem.allocate_array(Float32, tiling.distances, byte_alignment=128) if tiling.distances else None


class BackwardProducts(Fixed):
    """A warp's parts of the five products, of which the place among the others follows from its `number`."""

    def __init__(self, tiling: WarpBackwardTiling, block: WarpBackwardBlock, number: Int32) -> None:
        self.tiling, self.block = tiling, block
        n, m, d, dv = tiling.tile_n, tiling.tile_m, tiling.d, tiling.dv
        side = m // tiling.score_queries  # warps that have the same keys
        self.first_key, self.first_query = number // side * tiling.score_keys, number % side * tiling.score_queries
        self.of_scores = Warp(block.dtype, tiling.score_keys // ROWS)
        across = tiling.sums.across
        self.first_sum, self.first_column = number // across * tiling.sum_keys, number % across
        self.of_sums = Warp(block.dtype, tiling.sum_keys // ROWS)
        self.dq_row, self.dq_column = number // tiling.dq.across * tiling.dq_rows, number % tiling.dq.across
        self.of_dq = Warp(block.dtype, tiling.dq_rows // ROWS)
        of_queries = self.first_query if side > 1 else None
        column = self.first_column * ROWS if across > 1 else None
        self.k = self.tile("k", n, d, Operand.LEFT, self.first_key)
        self.v = self.tile("v", n, dv, Operand.LEFT, self.first_key)
        self.q = self.tile("q", m, d, Operand.RIGHT_ROWS, of_queries)
        self.do = self.tile("do", m, dv, Operand.RIGHT_ROWS, of_queries)
        self.q_columns = self.tile("q", m, d, Operand.RIGHT_COLUMNS, None, column)
        self.do_columns = self.tile("do", m, dv, Operand.RIGHT_COLUMNS, None, column)
        self.p = self.ds = None
        if not tiling.keeps_weights:
            self.p, self.ds = (self.tile(name, n, m, Operand.LEFT, self.first_sum) for name in ("p", "ds"))
        self.ds_rows = self.tile("ds", n, m, Operand.LEFT_COLUMNS, None, self.dq_row)
        self.k_columns = self.tile("k", n, d, Operand.RIGHT_COLUMNS, None, self.dq_column * ROWS)
        self.q_bytes, self.do_bytes = 2 * m * d, 2 * m * dv

    def tile(
        self, name: str, rows: int, columns: int, operand: Operand, row: Any = None, column: Any = None
    ) -> MatrixTile:
        """A tile of the block as an operand, from a row and a column on."""
        return MatrixTile(self.block.start, rows, columns, operand, row, column, self.block.behind[name])

    # --- scores and gradients of probabilities: (keys, queries) ---------------------------------------------

    def scores(self, stage: Any) -> cute.Tensor:
        """K Qᵀ of a stage."""
        return self._of_keys(self.k, self.q, self.tiling.d, stage * self.q_bytes)

    def gradients(self, stage: Any) -> cute.Tensor:
        """V dOᵀ of a stage."""
        return self._of_keys(self.v, self.do, self.tiling.dv, stage * self.do_bytes)

    def _of_keys(self, keys: MatrixTile, queries: MatrixTile, columns: int, before: Any) -> cute.Tensor:
        warp = self.of_scores
        sums = warp.sums(self.tiling.score_queries)
        for step in range(columns // ROWS):
            left = warp.get(warp.left(), keys, 0, step)
            for j in range(self.tiling.score_queries // ROWS):
                warp.add(sums, left, queries, j, step, j, before)
        return sums

    def put(self, rounded: cute.Tensor, name: str) -> None:
        """P or dS, rounded, to shared memory: two neighbouring queries of a key at once."""
        warp, rows, columns = self.of_scores, self.tiling.tile_n, self.tiling.tile_m
        lane, wide = cute.arch.lane_idx(), swizzled(columns)
        place = self.block.start + at_column(self.first_key + lane // 4, self.first_query, rows, columns) + lane % 4 * 4
        words = cute.recast_tensor(cute.make_tensor(rounded.iterator, cute.make_layout(cute.size(rounded))), Int32)
        for j in range(self.tiling.score_queries // LINE):
            block, line = divmod(j, wide // LINE)
            address = place ^ (line * 16) if line else place
            for row in range(2 * warp.blocks):
                # rounded sums lie as left operands, see `Warp.rounded`
                word = row % 2 + 2 * (j % 2) + 4 * (row // 2) + 4 * warp.blocks * (j // 2)
                down = self.block.behind[name] + (row * LINE + block * rows) * wide * 2
                target = cute.make_ptr(Int32, address + down, cute.AddressSpace.smem, assumed_align=4)
                cute.make_tensor(target, cute.make_layout(1))[0] = words[word]

    # --- sums over queries ---------------------------------------------------------------------------------

    def add_values(self, tVrdV: cute.Tensor, rounded: cute.Tensor | None, stage: Any) -> None:
        """Pᵀ dO to dV, P from registers or, None, from shared memory."""
        self._add_sums(tVrdV, rounded, self.p, self.do_columns, self.tiling.dv, stage * self.do_bytes)

    def add_keys(self, tKrdK: cute.Tensor, rounded: cute.Tensor | None, stage: Any) -> None:
        """dSᵀ Q to dK, likewise."""
        self._add_sums(tKrdK, rounded, self.ds, self.q_columns, self.tiling.d, stage * self.q_bytes)

    def _add_sums(
        self, sums: cute.Tensor, rounded: Any, left: Any, right: MatrixTile, columns: int, before: Any
    ) -> None:
        warp, across = self.of_sums, self.tiling.sums.across
        steps = None if rounded is None else warp.steps_of(rounded)
        for step in range(self.tiling.tile_m // ROWS):
            operand = warp.get(warp.left(), left, 0, step) if steps is None else steps[step]
            for j in range(columns // ROWS // across):
                warp.add(sums, operand, right, step, j * across, j, before)

    # --- sums over keys ------------------------------------------------------------------------------------

    def dq(self, first: int, count: int) -> cute.Tensor:
        """`count` of this warp's 16 columns of dS K, from the `first` on."""
        warp, across = self.of_dq, self.tiling.dq.across
        sums = warp.sums(count * ROWS)
        for step in range(self.tiling.tile_n // ROWS):
            left = warp.get(warp.left(), self.ds_rows, step, 0)
            for j in range(count):
                warp.add(sums, left, self.k_columns, step, (first + j) * across, j)
        return sums


__all__ = ["BackwardProducts", "WarpBackwardBlock"]
