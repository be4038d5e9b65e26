"""A pair of blocks that shares a tile of keys in a backward: what each computes of P and dS, and of dQ, and copies."""

import dataclasses
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from .....primitives.block_pair import rank
from .....primitives.pipelines import BoundEdge, Slot
from .....primitives.values import Fixed, narrowed
from ..rounding import put_row
from .dq_rows import DqRows
from .key_rows import KeyRows, RowPart


class PairPart(RowPart):
    """Its dS stays in registers until there is room for it in shared memory."""

    def leave_gradients(self) -> None:
        self.left = self.rounded(self.gradients.numbers, self.left_gradients)


class PairRows(KeyRows):
    """A block's half of the keys. Group g has the queries of which block g takes dS: the others' goes to its partner.

    The second group begins with its last part, so that what it leaves in tensor memory ends where its scores do.
    """

    def __init__(self, kernel: Any, block: Any, memory: Any, thread: Any, shape: Any):
        super().__init__(kernel, block, memory, thread, shape)
        self.first_row = rank() * kernel.tiling.block_keys

    def first_key(self, first: Any) -> Any:
        return super().first_key(first + self.first_row)

    def part(self, m: Int32, number: int, q_slot: Slot) -> PairPart:
        parts = self.tiling.queries // self.shape.rows
        return PairPart(self, m, number if parts == 1 else self.number ^ number, q_slot)

    def share_gradients(self, parts: list[Any], q_slot: Slot, slot: Slot) -> None:
        """To tensor memory, and to the shared memory of this block or the other one."""
        block = self.block
        self.memory.written()
        cute.arch.sync_warp()
        block.scores_done.fill(slot, self.lane)
        block.dq.wait(slot.before())  # the last ones have been read
        there = cute.make_tensor(cute.arch.map_dsmem_ptr(block.sdS.iterator, self.number), block.sdS.layout)
        for part in parts:
            column = part.row - self.row
            put_here_or_there(rank() == self.number, part.left, block.sdS, there, self.first_row + self.thread, column)
        cute.arch.fence_proxy("async.shared", space="cluster")
        cute.arch.sync_warp()
        block.exchanged.fill(slot, self.lane)

    def stored_tile(self) -> Int32:
        return 2 * self.work.n + rank()

    def leave(self, target: cute.Tensor, sums: cute.Tensor, first: int, width: int) -> None:
        mine = cute.make_tensor(target.iterator + self.first_row * width, target.layout)
        super().leave(mine, sums, first, width)


class StripPart(PairPart):
    """Its scores are fetched before any are computed, and its dS goes nowhere before all of dP are fetched."""

    fetched = False

    def __init__(self, me: KeyRows, m: Int32, number: Any, q_slot: Slot):
        super().__init__(me, m, number, q_slot)
        columns = me.tiling.columns
        self.left_gradients = self.left_scores + (columns.left_gradients.first - columns.scores.first)

    def fetch(self) -> None:
        if not self.fetched:
            super().fetch()
        self.fetched = True

    def leave_gradients(self) -> None:
        self.left = narrowed(self.gradients.numbers, self.block.dtype)


class StripPairRows(PairRows):
    """`PairRows` where columns are few: each group has a strip of the queries of either block.

    It says by `scores_read` that others may come to where its scores were, and by `gradients_read` to where its first
    strip of dP was. dS goes to shared memory that the next Q has left, so once the next scores are there.
    """

    def part(self, m: Int32, number: int, q_slot: Slot) -> StripPart:
        return StripPart(self, m, number, q_slot)

    def row_of(self, number: int) -> int:
        return number * self.tiling.groups * self.tiling.strip

    def wait_for_scores(self, parts: list[Any], slot: Slot) -> None:
        block = self.block
        block.scores.wait(slot)
        self.memory.heard()
        for part in parts:
            part.fetch()
        self.tell(block.scores_read, slot)
        parts[0].gradients.then = lambda: self.tell(block.gradients_read, slot)
        if const_expr(self.mods.backward.one_pass):
            block.gradients.wait(slot)
            self.memory.heard()

    def tell(self, edge: BoundEdge, slot: Slot) -> None:
        """That it has read what was there."""
        self.memory.have_read()
        cute.arch.sync_warp()
        edge.fill(slot, self.lane)

    def share_gradients(self, parts: list[Any], q_slot: Slot, slot: Slot) -> None:
        block = self.block
        for part in parts:
            self.memory.write(part.left_gradients, cute.recast_tensor(part.left, Int32))
        self.memory.written()
        cute.arch.sync_warp()
        block.scores_done.fill(slot, self.lane)
        block.scores.wait(slot.next())
        for number, part in enumerate(parts):
            there = cute.make_tensor(cute.arch.map_dsmem_ptr(block.sdS.iterator, Int32(number)), block.sdS.layout)
            row = self.first_row + self.thread
            put_here_or_there(rank() == number, part.left, block.sdS, there, row, self.row)
        cute.arch.fence_proxy("async.shared", space="cluster")
        cute.arch.sync_warp()
        block.exchanged.fill(slot, self.lane)


@cute.jit
def put_here_or_there(
    mine: Boolean, numbers: cute.Tensor, here: cute.Tensor, there: cute.Tensor, row: Int32, column: Any
):
    """To a row of a tile in the shared memory of this block, or of another one."""
    if mine:
        put_row(numbers, here, row, column)
    else:
        put_row(numbers, there, row, column)


class PairDqRows(DqRows):
    """Its block's half of a tile of dQ, whose sums lie one behind the other."""

    def add(self, target: cute.Tensor, slot: Slot, buffer: Slot) -> Slot:
        half = self.tiling.tile_m * self.tiling.d // 2
        return super().add(cute.make_tensor(target.iterator + rank() * half, target.layout), slot, buffer)


@dataclasses.dataclass
class Moving(Fixed):
    """Tiles `name` of `block` that are copied into one place, the `first`-th and then every `each`-th."""

    block: Any
    name: str
    tma: cute.CopyAtom
    target: cute.Tensor
    source: cute.Tensor
    first: Any = 0
    each: int = 1

    def start(self, number: Int32, slot: Slot) -> None:
        edge = self.block.moved[self.name]
        self.block.wait_for_room(self.name, slot)
        edge.fill(slot)
        self.copy(number, edge.full + slot.index)

    def copy(self, number: Int32, bar: cute.Pointer) -> None:
        cute.copy(self.tma, self.source[None, self.each * number + self.first], self.target, tma_bar_ptr=bar)
