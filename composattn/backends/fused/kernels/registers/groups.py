"""A group of threads with products in its registers: which one of its block it is, and where it meets others."""

import cutlass.cute as cute

from .....primitives.bulk_stores import wait_read
from .....primitives.values import Fixed


class ThreadGroup(Fixed):
    """One of a block's consumers: its number among them, and this thread's number in it.

    `block` has the barriers where a group (`of_groups`) and where all of them (`of_consumers`) meet.
    """

    def __init__(self, block, number, thread):
        self.block, self.number, self.thread = block, number, thread
        self.lane = cute.arch.lane_idx()

    def is_first_warp(self):
        """Whether this is the first warp of the group."""
        return self.thread // 32 == 0

    def sync_group(self) -> None:
        self.block.of_groups[self.number].meet()

    def sync_consumers(self) -> None:
        self.block.of_consumers.meet()

    def drain_stores(self) -> None:
        """Shared memory stays until this group's copies have read it."""
        wait_read(self.is_first_warp())
