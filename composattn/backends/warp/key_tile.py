"""What a block of the backward of warps has in shared memory, and the products of a warp, whose operands lie there."""

import copy
import itertools
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from ...primitives.matrix_loads import MatrixTile, Operand
from ...primitives.swizzled_tiles import at_column, swizzled
from ...primitives.values import Fixed
from .mma import Left, Shared, Warp
from .tiling import ROWS, Part, WarpBackwardTiling

LINE = 8  # numbers of 16 bytes
DQ_AT_ONCE = 48  # sums of dQ in a thread's registers


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
        held = min(tiling.held, d)
        # with how many columns registers hold
        self.keys = {
            name: (self.tile(name, n, width, Operand.LEFT, self.first_key), columns)
            for name, width, columns in (("k", d, held), ("v", dv, min(tiling.held - held, dv)))
        }
        self.held: dict[str, list[Left]] = {}
        self.q = self.tile("q", m, d, Operand.RIGHT_ROWS, of_queries)
        self.do = self.tile("do", m, dv, Operand.RIGHT_ROWS, of_queries)
        # dK and dV are summed over parts of the queries: those of its own scores, if these are of the same keys, first
        self.keeps_own = tiling.sums == Part(tiling.score_keys, side)
        parts = range(side if self.keeps_own else 1)
        queries = [self.first_query ^ (part * tiling.score_queries) if len(parts) > 1 else None for part in parts]
        self.steps = m // len(parts) // ROWS
        column = self.first_column * ROWS if across > 1 else None
        self.q_columns, self.do_columns = (
            [self.tile(name, m, width, Operand.RIGHT_COLUMNS, first, column) for first in queries]
            for name, width in (("q", d), ("do", dv))
        )
        self.p, self.ds = (
            [] if tiling.keeps_weights else [self.tile(name, n, m, Operand.LEFT, self.first_sum, q) for q in queries]
            for name in ("p", "ds")
        )
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
        return self._of_keys("k", Shared(self.q, stage * self.q_bytes), self.tiling.d)

    def gradients(self, stage: Any) -> cute.Tensor:
        """V dOᵀ of a stage."""
        return self._of_keys("v", Shared(self.do, stage * self.do_bytes), self.tiling.dv)

    def hold_keys(self) -> None:
        """Columns of K and V to registers, once they are in shared memory."""
        for name, (keys, columns) in self.keys.items():
            self.held[name] = [self.of_scores.words(Shared(keys), step) for step in range(columns // ROWS)]

    def _of_keys(self, name: str, queries: Shared, columns: int) -> cute.Tensor:
        warp, (keys, _) = self.of_scores, self.keys[name]
        sums = warp.sums(self.tiling.score_queries)
        warp.add(sums, Shared(keys, held=self.held.get(name, [])), queries, columns // ROWS)
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

    def add_own(self, sums: tuple[cute.Tensor, cute.Tensor], rounded: tuple[Any, Any], stage: Any) -> None:
        """Pᵀ dO to dV and dSᵀ Q to dK, of the P and dS that this warp has in registers."""
        self._add_sums(sums, [self.of_sums.steps_of(r) for r in rounded], 0, stage)

    def add_others(self, sums: tuple[cute.Tensor, cute.Tensor], stage: Any) -> None:
        """Pᵀ dO to dV and dSᵀ Q to dK, of what others put to shared memory; of all, where it keeps none of its own."""
        for part in range(int(self.keeps_own), len(self.q_columns)):
            self._add_sums(sums, [Shared(tiles[part]) for tiles in (self.p, self.ds)], part, stage)

    def _add_sums(self, sums: tuple[cute.Tensor, cute.Tensor], lefts: list[Any], whose: int, stage: Any) -> None:
        across = self.tiling.sums.across
        rights = (self.do_columns[whose], self.do_bytes), (self.q_columns[whose], self.q_bytes)
        for total, left, (right, size) in zip(sums, lefts, rights, strict=True):
            self.of_sums.add(total, left, Shared(right, stage * size, across), self.steps)

    # --- sums over keys ------------------------------------------------------------------------------------

    @property
    def dq_pieces(self) -> int:
        """In how many pieces this warp's part of dQ leaves: as many as are asked for, or as registers want."""
        if self.tiling.dq_pieces > 1:
            return self.tiling.dq_pieces
        part, d = self.tiling.dq, self.tiling.d
        count, of_column = d // ROWS // part.across, part.rows // 2
        return next(n for n in range(1, count + 1) if part.serves(d, n) and count // n * of_column <= DQ_AT_ONCE)

    @property
    def dq_steps(self) -> int:
        return self.tiling.tile_n // ROWS

    def dq_held(self) -> list[Left]:
        """dS as left operands in registers, step by step, for all pieces."""
        return [self.of_dq.words(Shared(self.ds_rows), step) for step in range(self.dq_steps)]

    def dq(self, held: list[Left] | None, piece: Any) -> cute.Tensor:
        """A piece of this warp's columns of dS K; dS is read from shared memory where registers do not hold it."""
        across, k = self.tiling.dq.across, copy.copy(self.k_columns)
        count = self.tiling.d // ROWS // across // self.dq_pieces
        columns = count * across * ROWS
        side = max(1, k.wide // columns)  # pieces that lie beside each other in lines of shared memory
        if side > 1:
            k.place = k.place ^ (piece % side * (2 * columns))
        sums, before = self.of_dq.sums(count * ROWS), piece // side * (2 * self.tiling.tile_n * max(columns, k.wide))
        self.of_dq.add(sums, held or Shared(self.ds_rows), Shared(k, before, across), self.dq_steps)
        return sums


__all__ = ["BackwardProducts", "WarpBackwardBlock"]
