"""A warp of the backward that sends what one group leaves in shared memory: parts of dQ, and its dK and dV."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, const_expr

from .....primitives.bulk_stores import begin, end, start, wait_read
from .....primitives.bulk_sums import add_if, wait_sums, write_or_add
from .....primitives.dynamic_scheduler import DynamicScheduler
from .....primitives.pipelines import Slot
from .....primitives.turns import say
from .....primitives.values import Fixed
from ..dq_claims import is_first, look, say_written

AHEAD = 2  # query tiles whose turn it is before they are added to


class DqSender(Fixed):
    """What the warp does for group `number`: the walk of the kernel again, a bulk copy that adds for each tile.

    So the load/store unit of those who compute is free: they write to shared memory, and wait for nothing. Where a
    block stays, dV and dK of its keys follow through the same place.
    """

    def __init__(self, kernel: Any, block: Any, number: Any):
        self.kernel, self.block, self.number = kernel, block, number
        self.part = kernel.tiling.tile_m * kernel.tiling.d // block.parts

    @cute.jit
    def run(self, call):
        if const_expr(call.claims is not None):
            cute.arch.griddepcontrol_wait()  # for empty claims
        self.kernel.walk(call, self.block, lambda *work: self.visit(*work), DynamicScheduler.hear, self.first_slots())

    def first_slots(self) -> tuple[Slot, ...]:
        """The first slots of parts of dQ, of turns, and of K where dK leaves from its place."""
        keys = (self.block.kv_edge.first,) if self.kernel.tiling.k_stages > 1 else ()
        return Slot.first(1), Slot.first(AHEAD), *keys

    @cute.jit
    def visit(self, call, work, slots):
        slot, turn_slot = slots[:2]
        edge, turns, lane = self.block.dq_edge, self.block.turn_edge, cute.arch.lane_idx()
        first = self.number * self.part
        source = (self.block.sdQ.iterator + first).toint()
        begin, stop = self.kernel.members(call, work)
        for member in cutlass.range(begin, stop, unroll=1):
            head = work.kv_head * call.group + member
            for run in self.kernel.query_tiles(call, work, head):
                for i in cutlass.range(run.count, unroll=1):
                    padded = work.padded
                    target = call.dq_accum[padded.b, head, padded.first + run.tile(i), None].iterator
                    if const_expr(call.claims is not None):
                        claim = call.claims.place(padded.b, head, padded.first + run.tile(i), self.number)
                        seen = look(claim)  # while the part is computed
                    writes = None
                    mine = Slot(1, self.number, slot.phase)
                    edge.wait(mine)
                    if const_expr(turns is not None):
                        turns.wait(turn_slot)
                        writes = self.block.is_first(turn_slot)
                        turns.release(turn_slot, lane)
                        turn_slot = turn_slot.next()
                    if const_expr(call.claims is not None):
                        writes = is_first(claim, seen, lane)
                    if const_expr(self.kernel.tiling.finishes_dq):
                        self.finish(call, work, head, run.tile(i))
                    else:
                        self.start_sum(writes, source, target + first, self.part)
                        wait_sums(Boolean(True), read=True)
                    edge.release(mine, lane)
                    if const_expr(turns is not None):
                        wait_sums(Boolean(True), read=False)
                        say(self.kernel.turn(call, work, head, run.tile(i)), lane == 0)
                    if const_expr(call.claims is not None):
                        say_written(claim, writes, lane)
                    slot = slot.next()
        if const_expr(self.kernel.tiling.k_stages == 1):
            self.end_tile(call, work, slot)
            return slot, turn_slot
        self.send_beside(call, work, slot, slots[2])
        return slot.next(), turn_slot, slots[2].next()

    def start_sum(self, writes, source, target, numbers: int) -> None:
        """A bulk copy of so many numbers of dQ that adds, or `writes`, where this block may be the first there."""
        if self.kernel.tiling.first_writes:
            write_or_add(writes, source, target, 4 * numbers)
        else:
            add_if(Boolean(True), source, target, 4 * numbers)

    def finish(self, call, work, head, m) -> None:
        """The copy of this group's part of dQ of a query tile."""
        place = work.queries.stored(call.tensors.dq, head, *self.kernel.part_of_dq(m, self.number))
        start(Boolean(True), call.tmas.dq, self.block.finished_over_dq(self.number), *place)
        wait_read(Boolean(True))

    @cute.jit
    def end_tile(self, call, work, slot):
        """Behind dQ of a tile of keys."""
        if const_expr(self.kernel.tiling.persistent):
            if const_expr(work.piece is None):
                self.send_keys(call, work, slot)
            else:
                if work.piece.is_whole:
                    self.send_keys(call, work, slot)

    def send_keys(self, call, work, slot) -> None:
        """dV and dK: two more laps of a ring of one stage, so `slot` is the next one again."""
        self.with_neighbours(begin, call, work, Boolean(True))
        for which in (1, 0):
            mine = Slot(1, self.number, slot.phase)
            self.block.dq_edge.wait(mine)
            self.start_result(call, work, which, Boolean(True), self.block.result_over_dq(which, self.number))
            wait_read(Boolean(True))
            self.block.dq_edge.release(mine, cute.arch.lane_idx())
            slot = slot.next()
        self.with_neighbours(end, call, work, Boolean(True))

    def send_beside(self, call, work, slot, kv_slot) -> None:
        """dV from the place of dQ, in one lap, and dK from that of K, which is free then."""
        block, mine, lane = self.block, Slot(1, self.number, slot.phase), cute.arch.lane_idx()
        whole = Boolean(True) if work.piece is None else work.piece.is_whole
        self.with_neighbours(begin, call, work, whole)
        block.dq_edge.wait(mine)
        self.start_result(call, work, 1, whole, block.result_over_dq(1, self.number))
        self.start_result(call, work, 0, whole, block.dk_over_keys(self.number, kv_slot))
        wait_read(whole)
        block.dq_edge.release(mine, lane)
        block.kv_edge.release(kv_slot, lane)
        self.with_neighbours(end, call, work, whole)

    def start_result(self, call, work, which: int, there, shared) -> None:
        """The copy of dK (0) or dV of this group's keys, where they are there."""
        start(there, call.tmas.results[which], shared, *self.result(call, work, which))

    def result(self, call, work, which: int) -> tuple[Any, Any]:
        """The tiles of dK (0) or dV, and which one is this group's."""
        tiling = self.kernel.tiling
        box = self.kernel.stored_rows, (tiling.d, tiling.dv)[which]
        number = work.n * self.block.parts + self.number
        return work.keys.stored(call.tensors.results[which], work.kv_head, box, number)  # type: ignore[no-any-return]

    def with_neighbours(self, do: Any, call, work, there) -> None:
        """`begin` or `end` of dK and dV, where strips share them: while others compute, and behind all copies."""
        if self.kernel.plan.layout.shares_keys:
            for which in range(2):
                do(there, *self.result(call, work, which))
