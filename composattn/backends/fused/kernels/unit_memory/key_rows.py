"""A backward that computes P and dS where products lie in memory of the tensor core, and a thread has a key."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from .....primitives.branches import when
from .....primitives.bulk_stores import send, wait_read
from .....primitives.emit_backward import BoundBackwardMods
from .....primitives.lane_diagonals import LaneDiagonals
from .....primitives.pipelines import Slot
from .....primitives.register_chunks import THREADS, store_part
from .....primitives.score_tile import FragmentShape, ScoreTile
from .....primitives.values import Fixed, narrow, narrowed
from ..key_tile import KeyGroup, KeyTile, RowStatistic
from ..rounding import put_row
from .matrix_memory import MatrixMemory

AT_ONCE = 16  # numbers of dP that are fetched together
COLUMNS = 32  # of dK and dV in registers at once


class KeyRows(KeyGroup):
    """A group of `THREADS` with the scores of all keys and its part of a tile's queries: a thread has a key.

    `block` says by edges when there is something to do: `scores` and `gradients`, that Sᵀ and dPᵀ are there, `sums`,
    that dK and dV are complete; and hears by `probabilities` and `scores_done` that P and dS are over them.
    """

    tiling: Any  # of the architecture whose unit it is
    apart = 0

    def __init__(self, kernel: Any, block: Any, memory: MatrixMemory, thread: Any, shape: FragmentShape):
        """`shape`: of a group's scores, (query, key)."""
        tiling = kernel.tiling
        self.tiling, self.block, self.memory, self.lane = tiling, block, memory, cute.arch.lane_idx()
        self.number = cute.arch.make_warp_uniform(thread // THREADS)
        self.thread = thread % THREADS
        self.shape = shape
        self.row = self.number * tiling.strip
        self.diagonals = None
        if tiling.distances:
            warps = tiling.groups * THREADS // 32
            self.diagonals = LaneDiagonals(shape, block.lines, tiling.distances, thread // 32, warps)
            self.diagonals.clear()

    def wait_for_keys(self, kv_slot: Slot) -> None:
        """Products have: what waits for them knows."""

    def is_first_warp(self) -> Boolean:
        return (self.number == 0) & (self.thread // 32 == 0)

    def begin(self, work: KeyTile) -> None:
        """Sums start from zeros: products add to them from the first one on, once P is there."""
        super().begin(work)
        zeros = cute.make_rmem_tensor(COLUMNS, Int32)
        zeros.fill(0)
        for columns in (self.tiling.columns.dk, self.tiling.columns.dv):
            for first in range(columns.first, columns.stop, COLUMNS):
                when(self._mine(first), functools.partial(self.memory.write, first, zeros))
        self.memory.written()

    def _mine(self, column: int) -> Boolean:
        """Which group has the sums of these columns: they take turns."""
        return self.number == column // COLUMNS % self.tiling.groups

    def step(self, call: Any, m: Int32, tested: Boolean, q_slot: Slot, slot: Slot) -> None:
        """One query tile: P to the unit's memory, dS also to shared memory."""
        block, mods, memory = self.block, self.mods, self.memory
        parts = [self.part(m, number, q_slot) for number in range(self.tiling.queries // self.shape.rows)]
        block.rows_edge.wait(q_slot)
        self.wait_for_scores(parts, slot)
        for part in parts:
            part.fetch()
            if const_expr(mods.backward.one_pass):
                mods.drop(part.at, part.gradients)
                mods.both(part.at, part.lse, part.gradients, part.delta, tested)
                part.leave_gradients()
            else:
                mods.probabilities(part.at, part.lse, tested)
            part.leave_probabilities(mods)
        memory.written()
        cute.arch.sync_warp()
        block.probabilities.fill(slot, self.lane)
        if const_expr(not mods.backward.one_pass):
            block.gradients.wait(slot)
            memory.heard()
            for part in parts:
                mods.drop(part.at, part.gradients)
                mods.score_gradients(part.at, part.gradients, part.delta)
                part.leave_gradients()
        self.share_gradients(parts, q_slot, slot)
        for part in parts:
            mods.sum_captured(part.at, part.gradients.numbers, self.diagonals)()

    def wait_for_scores(self, parts: list["RowPart"], slot: Slot) -> None:
        """Waits for scores, and for dP where both are computed at once."""
        self.block.scores.wait(slot)
        if const_expr(self.mods.backward.one_pass):
            self.block.gradients.wait(slot)
        self.memory.heard()

    def part(self, m: Int32, number: int, q_slot: Slot) -> "RowPart":
        """The `number`-th that is computed of this thread's scores of a query tile."""
        return RowPart(self, m, number, q_slot)

    def row_of(self, number: Any) -> Any:
        """The first row of a part, counted from the thread's first one."""
        return number * self.shape.rows

    def share_gradients(self, parts: list["RowPart"], q_slot: Slot, slot: Slot) -> None:
        """dS, which all parts have left, to the products."""
        cute.arch.fence_view_async_shared()
        self.memory.written()
        cute.arch.sync_warp()
        self.block.scores_done.fill(slot, self.lane)

    # --- the end of a tile ------------------------------------------------------------------------------------

    def finish(self, call: Any) -> None:
        self.block.sums.wait(Slot.first(1))
        self.memory.heard()
        super().finish(call)

    def write_keys(self, call: Any) -> None:
        """Through the shared memory of K and V, which all products have read."""
        for _, columns, factor, shared, _ in self._results(call):
            for first in range(columns.first, columns.stop, COLUMNS):
                _put_if(self._mine(first), self, shared, first, first - columns.first, factor)
        send(self._outputs(call), self.block.of_compute.meet)
        wait_read(self.is_first_warp())

    def _outputs(self, call: Any) -> Iterator[tuple]:
        work = self.work
        for i, _, _, shared, width in self._results(call):
            tiles = self.keys(call).tiles(call.tensors.results[i], work.kv_head, (self.tiling.block_keys, width))
            yield self.is_first_warp(), call.tmas.results[i], shared, tiles, self.stored_tile()

    def keys(self, call: Any) -> Any:
        """Where they lie, read again for each result: kept along the walk, a packed length was spilled."""
        return call.keys.sequence(self.work.b)

    def stored_tile(self) -> Int32:
        """Which one of the keys of all blocks this block's are."""
        return self.work.n

    def leave_piece(self, call: Any) -> None:
        for i, columns, factor, _, width in self._results(call):
            target = call.pieces.sums[i][self.work.piece.slot, None]
            for first in range(columns.first, columns.stop, COLUMNS):
                _leave_if(self._mine(first), self, target, width, first, first - columns.first, factor)
        call.pieces.note(self.work, self.tiling.tile_n, (self.number == 0) & (self.thread == 0))

    def _results(self, call: Any) -> tuple[tuple[int, Any, Any, cute.Tensor, int], ...]:
        """dK and dV: number, columns of the unit's memory, factor, shared memory, and its columns."""
        tiling, columns, block = self.tiling, self.tiling.columns, self.block
        return (0, columns.dk, call.scale, block.sK, tiling.d), (1, columns.dv, None, block.sV, tiling.dv)

    def put(self, shared: cute.Tensor, sums: cute.Tensor, first: int) -> None:
        """`COLUMNS` of a result, the `first`-th of its columns in the unit's memory first, to its tile."""
        put_row(sums, shared, self.thread, first)

    def leave(self, target: cute.Tensor, sums: cute.Tensor, first: int, width: int) -> None:
        """`COLUMNS` of a result in fp32 to the partial sums of a split tile, of `width` columns."""
        store_part(target, sums, first // COLUMNS, self.thread)

    def sums(self, column: int, factor: Any) -> cute.Tensor:
        """`COLUMNS` of a result's sums."""
        numbers = cute.make_rmem_tensor(COLUMNS, Float32)
        for i, value in enumerate(self.memory.read(column, COLUMNS)):
            numbers[i] = value if factor is None else value * factor
        return numbers


class RowPart(Fixed):
    """A thread's scores of a query tile, the `number`-th part of its queries."""

    def __init__(self, me: KeyRows, m: Int32, number: Any, q_slot: Slot):
        self.block, self.thread, self.memory = me.block, me.thread, me.memory
        first, columns = me.row_of(number), me.tiling.columns
        self.row = me.row + first
        scores, gradients = [of.first + me.row for of in (columns.scores, columns.gradients)]
        self.scores, self.values = scores + first, self.numbers(me.shape.rows)
        self.gradients = Fetched(self.numbers(me.shape.rows), me.memory, gradients + first)
        # two numbers in a column, of all parts one after the other: over what this thread has read
        left = me.number * columns.apart + number * (me.shape.rows // 2)
        self.left_scores, self.left_gradients = columns.scores.first + left, columns.gradients.first + left
        first_q = m * me.tiling.tile_m + self.row
        tile = ScoreTile(me.shape, self.values, me.work.b, me.head, first_q, me.first_kv)
        self.at = me.mods.evaluator(tile)
        me.mods.read_ahead(self.at)
        self.lse, self.delta = [
            RowStatistic(of[None, q_slot.index].iterator + self.row, me.shape, together=4)
            for of in (me.block.sLse, me.block.sDelta)
        ]

    @staticmethod
    def numbers(rows: int) -> cute.Tensor:
        return cute.make_rmem_tensor((rows, 1), Float32)

    def fetch(self) -> None:
        for r, value in enumerate(self.memory.read(self.scores, cute.size(self.values))):
            self.values[r, 0] = value

    def rounded(self, values: cute.Tensor, column: Any) -> cute.Tensor:
        """To 16 bits, in registers and in memory from `column` on."""
        numbers = cute.make_rmem_tensor(cute.size(values), self.block.dtype)
        narrow(numbers, values)
        self.memory.write(column, cute.recast_tensor(numbers, Int32))
        return numbers

    def leave_probabilities(self, mods: BoundBackwardMods) -> None:
        self.rounded(mods.dropped(self.at, self.values, lambda values: values), self.left_scores)

    def leave_gradients(self) -> None:
        """dS to both memories: the product with K reads shared memory, whose last dS was read before dP came."""
        put_row(self.rounded(self.gradients.numbers, self.left_gradients), self.block.sdS, self.thread, self.row)


class Fetched(Fixed):
    """Registers for scores from `column` on, of which `AT_ONCE` are fetched when the first of them is asked for.

    All at once, beside P, spilled 24 of 160 registers. `then`: what is done once all are there.
    """

    then: Callable[[], None] | None = None

    def __init__(self, numbers: cute.Tensor, memory: MatrixMemory, column: Any):
        self.numbers, self.memory, self.column = numbers, memory, column
        self.there: set[int] = set()

    def __getitem__(self, place: tuple[int, int]) -> Float32:
        number = sum(place)  # one of them is 0
        first = number - number % AT_ONCE
        if first not in self.there:
            self.there.add(first)
            for i, value in enumerate(self.memory.read(self.column + first, AT_ONCE)):
                self.numbers[first + i] = value
            if self.then is not None and len(self.there) * AT_ONCE == cute.size(self.numbers):
                self.then()
        return self.numbers[place]

    def __setitem__(self, place: tuple[int, int], value: Float32) -> None:
        self.numbers[place] = value


@cute.jit
def _put_if(mine: Boolean, me: Any, shared: cute.Tensor, column: int, first: int, factor: Any):
    if mine:
        me.put(shared, narrowed(me.sums(column, factor), me.block.dtype), first)


@cute.jit
def _leave_if(mine: Boolean, me: Any, target: cute.Tensor, width: int, column: int, first: int, factor: Any):
    if mine:
        me.leave(target, me.sums(column, factor), first, width)
