"""A pair of blocks that shares tiles of queries and keys in a backward of wide rows: P, dS, dQ and what is left."""

from collections.abc import Iterator
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from .....primitives.block_pair import rank
from .....primitives.emit_backward import BackwardMods, BoundBackwardMods
from .....primitives.pipelines import Slot
from .....primitives.register_chunks import THREADS, add_part
from .....primitives.score_tile import ScoreTile
from .....primitives.values import Fixed, narrowed
from ..key_tile import RowStatistic
from .key_rows import COLUMNS, Fetched
from .pair_rows import PairDqRows, put_here_or_there
from .query_lanes import QueryLanes


class QueryPairRows(QueryLanes):
    """A block's half of the queries, one a thread. Group g has the keys of which block g takes P and dS.

    Their places in shared memory are free when the next scores are there: products that read them were issued before.
    """

    def __init__(self, kernel: Any, block: Any, memory: Any, thread: Any, shape: Any):
        super().__init__(kernel, block, memory, thread, shape)
        self.row = rank() * (kernel.tiling.tile_m // 2) + self.thread

    def begin_head(self, mods: BackwardMods, head: Any, leaves: Any) -> None:
        self.head = head
        parts = range(self.tiling.keys // self.shape.columns)
        self.bound = [mods.at(self.tile_of(None, Int32(0), part), leaves) for part in parts]

    def tile_of(self, values: Any, m: Any, part: int) -> ScoreTile:
        first = m * self.tiling.tile_m + self.row, self.first_kv + part * self.shape.columns
        return ScoreTile(self.shape, values, self.work.b, self.head, *first)

    def step(self, call: Any, m: Int32, tested: Boolean, row_slot: Slot, slot: Slot) -> None:
        """One query tile: P to shared memory, dS also to the unit's memory."""
        block, memory = self.block, self.memory
        parts = [KeyPart(self, m, number, mods, row_slot) for number, mods in enumerate(self.bound)]
        one_pass = self.bound[0].backward.one_pass
        block.rows_edge.wait(row_slot)
        block.scores.wait(slot)
        if const_expr(one_pass):
            block.gradients.wait(slot)
        memory.heard()
        for part in parts:
            part.fetch()
            if const_expr(one_pass):
                part.both(tested)
            else:
                part.mods.probabilities(part.at, part.lse, tested)
            part.leave_probabilities()
        memory.have_read()
        self.share(block.probabilities, slot)
        if const_expr(not one_pass):
            block.gradients.wait(slot)
            memory.heard()
            for part in parts:
                part.find_gradients()
        for part in parts:
            part.leave_gradients()
        memory.written()
        self.share(block.scores_done, slot)
        for part in parts:
            part.mods.sum_captured(part.at, part.gradients.numbers, self.diagonals)()

    def share(self, edge: Any, slot: Slot) -> None:
        """What is in the shared memory of both blocks, to their products."""
        cute.arch.fence_proxy("async.shared", space="cluster")
        cute.arch.sync_warp()
        edge.fill(slot, self.lane)

    # --- the end of a tile ------------------------------------------------------------------------------------

    def _results(self, call: Any) -> tuple[tuple[int, Any, Any, cute.Tensor, int], ...]:
        """A block has half of the columns of all keys."""
        places = self.block.results
        return tuple(
            (i, columns, factor, place, width)
            for place, (i, columns, factor, _, width) in zip(places, super()._results(call), strict=True)
        )

    def _outputs(self, call: Any) -> Iterator[tuple]:
        work = self.work
        for i, _, _, shared, width in self._results(call):
            box = self.tiling.tile_n, width // 2
            tiles = self.keys(call).tiles(call.tensors.results[i], work.kv_head, box, rank())
            yield self.is_first_warp(), call.tmas.results[i], shared, tiles, work.n

    def put(self, shared: cute.Tensor, sums: cute.Tensor, first: int) -> None:
        _put_column(shared, sums, first, self.thread)

    def leave(self, target: cute.Tensor, sums: cute.Tensor, first: int, width: int) -> None:
        lines = cute.make_tensor(target.iterator, cute.make_layout((self.tiling.tile_n, width), stride=(width, 1)))
        _put_column(lines, sums, first, rank() * (width // 2) + self.thread)


class KeyPart(Fixed):
    """A thread's scores of a query tile, of the `number`-th part of its group's keys."""

    def __init__(self, me: QueryPairRows, m: Int32, number: int, mods: BoundBackwardMods, row_slot: Slot):
        self.me, self.mods, self.count = me, mods, me.shape.columns
        columns, self.first = me.tiling.columns, number * self.count
        self.scores = columns.scores.first + me.first_column + self.first
        gradients = columns.gradients.first + me.first_column
        self.left = gradients + self.first // 2  # over what this thread has read
        self.values = self.numbers()
        self.gradients = Fetched(self.numbers(), me.memory, gradients + self.first)
        self.at = mods.evaluator(me.tile_of(self.values, m, number))
        mods.read_ahead(self.at)
        self.lse, self.delta = [
            RowStatistic(of[None, row_slot.index].iterator + me.row, me.shape, together=1)
            for of in (me.block.sLse, me.block.sDelta)
        ]

    def numbers(self) -> cute.Tensor:
        return cute.make_rmem_tensor((1, self.count), Float32)

    def fetch(self) -> None:
        for c, value in enumerate(self.me.memory.read(self.scores, self.count)):
            self.values[0, c] = value

    def both(self, tested: Boolean) -> None:
        """P, and dS, in registers."""
        self.mods.drop(self.at, self.gradients)
        self.mods.both(self.at, self.lse, self.gradients, self.delta, tested)

    def find_gradients(self) -> None:
        """dS, in registers."""
        self.mods.drop(self.at, self.gradients)
        self.mods.score_gradients(self.at, self.gradients, self.delta)

    def leave_probabilities(self) -> None:
        values = self.mods.dropped(self.at, self.values, lambda values: values)
        self.put(narrowed(values, self.me.block.dtype), "p")

    def leave_gradients(self) -> None:
        numbers = narrowed(self.gradients.numbers, self.me.block.dtype)
        self.me.memory.write(self.left, cute.recast_tensor(numbers, Int32))
        self.put(numbers, "ds")

    def put(self, numbers: cute.Tensor, name: str) -> None:
        """To the block that takes these keys."""
        me = self.me
        here = me.block.shared[name]
        there = cute.make_tensor(cute.arch.map_dsmem_ptr(here.iterator, me.number), here.layout)
        put_here_or_there(rank() == me.number, numbers, here, there, me.row, self.first)


def _put_column(target: cute.Tensor, sums: cute.Tensor, key: int, column: Any) -> None:
    for i in range(COLUMNS):
        target[key + i, column] = sums[i]


class AddedDqRows(PairDqRows):
    """Its block's half of a tile of dQ, added from registers: through shared memory it would be written and read."""

    def start(self) -> None:
        pass

    def leave(self, numbers: Any, buffer: Slot, target: cute.Pointer) -> Slot:
        registers = cute.make_rmem_tensor(len(numbers), Float32)
        for i, number in enumerate(numbers):
            registers[i] = number
        add_part(cute.make_tensor(target, cute.make_layout(len(numbers) * THREADS)), registers, 0, self.thread)
        return buffer

    def give_turn_on(self, slot: Slot) -> None:
        cute.arch.sync_warp()
        self.block.turn_edge.release(slot, self.lane)

    def end(self) -> None:
        pass
