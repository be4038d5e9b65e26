"""Ping-pong: consumer warpgroups take turns at the matrix unit, so one's softmax runs under another's products."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...primitives.barriers import Barrier, BarrierRow
from ...primitives.values import Fixed, choose


@dataclasses.dataclass(frozen=True)
class PingPong(Fixed):
    """A barrier per warpgroup, of two warpgroups' threads: its owner waits on it, the one before arrives.

    One warpgroup has nobody to wait for.
    """

    warpgroups: int
    barriers: BarrierRow

    def start(self, warpgroup) -> None:
        """The last warpgroup lets the first one begin."""
        if self.warpgroups > 1:
            _arrive_if(warpgroup == self.warpgroups - 1, self.barriers[0])

    def take(self, warpgroup) -> None:
        if self.warpgroups > 1:
            self.barriers[warpgroup].meet()

    def give(self, warpgroup) -> None:
        if self.warpgroups == 2:
            self.barriers[1 - warpgroup].arrive()
        elif self.warpgroups > 2:
            is_last = warpgroup == self.warpgroups - 1
            self.barriers[choose(is_last, Int32(0), warpgroup + 1)].arrive()


@cute.jit
def _arrive_if(condition: cutlass.Boolean, barrier: cutlass.Constexpr[Barrier]):
    if condition:
        barrier.arrive()
