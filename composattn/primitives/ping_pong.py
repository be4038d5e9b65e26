"""Ping-pong: groups of threads take turns at the tensor core, so one's softmax runs under another's products."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .barriers import Barrier, BarrierRow
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
            _arrive_if(group == self.groups - 1, self.barriers[0])

    def take(self, group) -> None:
        if self.groups > 1:
            self.barriers[group].meet()

    def give(self, group) -> None:
        if self.groups == 2:
            self.barriers[1 - group].arrive()
        elif self.groups > 2:
            is_last = group == self.groups - 1
            self.barriers[choose(is_last, Int32(0), group + 1)].arrive()


@cute.jit
def _arrive_if(condition: cutlass.Boolean, barrier: cutlass.Constexpr[Barrier]):
    if condition:
        barrier.arrive()
