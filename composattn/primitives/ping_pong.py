"""Ping-pong: groups of threads take turns at the tensor core, so one's softmax runs under another's products."""

import dataclasses

from cutlass import Int32

from .barriers import BarrierRow
from .branches import when
from .values import Fixed, choose


@dataclasses.dataclass(frozen=True)
class PingPong(Fixed):
    """A barrier per group, of two groups' threads: its owner waits on it, the one before arrives.

    One group has nobody to wait for.
    """

    groups: int
    barriers: BarrierRow

    def start(self, group) -> None:
        """The last group lets the first one begin."""
        if self.groups > 1:
            when(group == self.groups - 1, self.barriers[0].arrive)

    def take(self, group) -> None:
        if self.groups > 1:
            self.barriers[group].meet()

    def give(self, group) -> None:
        if self.groups == 2:
            self.barriers[1 - group].arrive()
        elif self.groups > 2:
            is_last = group == self.groups - 1
            self.barriers[choose(is_last, Int32(0), group + 1)].arrive()
