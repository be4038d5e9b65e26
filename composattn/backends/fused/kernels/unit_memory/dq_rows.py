"""The part of a backward that takes dQ out of the tensor core's memory and adds it to fp32 memory, as all blocks do."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from .....primitives.branches import when
from .....primitives.bulk_sums import BulkSums, wait_sums
from .....primitives.dynamic_scheduler import DynamicScheduler
from .....primitives.pipelines import Slot
from .....primitives.register_chunks import THREADS
from .....primitives.values import Fixed
from .matrix_memory import MatrixMemory


class DqRows(Fixed):
    """A group of `THREADS`, each with a row of a tile of dQ, which leaves in pieces of `dq_part` columns.

    `block` says by its edge `dq`, a stage for each of the tile's parts that are there one after the other, that one is
    there, and hears that it has been read.
    """

    def __init__(self, kernel: Any, block: Any, memory: MatrixMemory, thread: Any):
        self.kernel, self.block, self.tiling, self.memory = kernel, block, kernel.tiling, memory
        self.lane, self.thread = cute.arch.lane_idx(), thread
        self.start()

    def start(self) -> None:
        self.sums = BulkSums(self.block.sums_of_dq, self.thread, self.tiling.dq_part, self.block.of_dq)

    @cute.jit
    def run(self, call):
        slots = Slot.first(1), Slot.first(2)
        self.kernel.walk(call, self.block, lambda *work: self.visit(*work), DynamicScheduler.hear, slots)
        self.end()

    def end(self) -> None:
        wait_sums(self.sums.is_sender, read=True)

    @cute.jit
    def visit(self, call, work, slots):
        slot, buffer = slots
        begin, stop = self.kernel.members(call, work)
        for member in cutlass.range(begin, stop, unroll=1):
            head = work.kv_head * call.group + member
            for run in self.kernel.query_tiles(call, work, head):
                for i in cutlass.range(run.count, unroll=1):
                    padded = work.padded
                    buffer = self.add(call.dq_accum[padded.b, head, padded.first + run.tile(i), None], slot, buffer)
                    slot = slot.next()
        return slot, buffer

    def add(self, target: cute.Tensor, slot: Slot, buffer: Slot) -> Slot:
        """A tile of dQ to `target`, in this block's turn where the order is fixed; gives the buffer that is free."""
        block = self.block
        done = 0
        for stage, columns in enumerate(self.tiling.columns.dq_parts):
            part = slot.at(stage)
            block.dq.wait(part)
            self.memory.heard()
            if const_expr(block.turn_edge is not None and stage == 0):
                block.turn_edge.wait(slot)
            buffer = self.add_part(columns, target.iterator + done * THREADS, part, buffer)
            done += columns.count
        if const_expr(block.turn_edge is not None):
            self.give_turn_on(slot)
        return buffer

    def give_turn_on(self, slot: Slot) -> None:
        """Once what was added is there."""

        def release() -> None:
            wait_sums(True, read=False)
            cute.arch.sync_warp()
            self.block.turn_edge.release(slot, self.lane)

        when(self.sums.is_sender, release)

    def add_part(self, columns: Any, target: cute.Pointer, part: Slot, buffer: Slot) -> Slot:
        """Columns of the unit's memory, which the next part may come to when they have been read."""
        tiling, size = self.tiling, self.tiling.dq_part
        for first in range(0, columns.count, tiling.dq_at_once):
            count = min(tiling.dq_at_once, columns.count - first)
            numbers = self.memory.read(columns.first + first, count)
            if first + count == columns.count:
                self.memory.have_read()
                cute.arch.sync_warp()
                self.block.dq.release(part, self.lane)
            for start in range(0, count, size):
                buffer = self.leave(numbers[start : start + size], buffer, target + (first + start) * THREADS)
        return buffer

    def leave(self, numbers: Any, buffer: Slot, target: cute.Pointer) -> Slot:
        return self.sums.add(numbers, buffer, target)
