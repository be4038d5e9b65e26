"""A backward's warp that multiplies, where products lie in memory of the tensor core: its walk over query tiles."""

import abc
from typing import Any

import cutlass
import cutlass.cute as cute

from .....primitives.dynamic_scheduler import DynamicScheduler
from .....primitives.pipelines import Slot
from .....primitives.values import Fixed


class KeyProducts(Fixed, abc.ABC):
    """The order of an architecture's products: how they begin, go on and end, for the query tiles of a tile of keys.

    `block` has the edges `kv_edge`, on which K and V come, and `sums`, which says that dV and dK are complete.
    """

    def __init__(self, kernel: Any, block: Any):
        self.kernel, self.block = kernel, block

    @cute.jit
    def run(self, call):
        first = Slot.first(1), Slot.first(1), self.first_step()
        self.kernel.walk(call, self.block, lambda *work: self.visit(*work), DynamicScheduler.hear, first)

    def first_step(self) -> Any:
        """Where rings are at the first query tile."""
        return Slot.first(1)

    @cute.jit
    def visit(self, call, work, slots):
        """All query tiles of a tile of keys."""
        block = self.block
        kv_slot, sums_slot, at = slots
        count = self.kernel.steps(call, work)
        block.kv_edge.wait(kv_slot)
        if count > 0:
            self.begin(at)
            for _ in cutlass.range(1, count, unroll=1):
                following = at.next()
                self.go_on(at, following)
                at = following
            self.end(at)
            at = at.next()
        block.sums.fill(sums_slot)
        return kv_slot.next(), sums_slot.next(), at

    @abc.abstractmethod
    def begin(self, at: Any) -> None:
        """The first query tile's scores, dP and dV."""

    @abc.abstractmethod
    def go_on(self, at: Any, following: Any) -> None:
        """dK and dQ of a query tile, and the following one's scores, dP and dV."""

    @abc.abstractmethod
    def end(self, at: Any) -> None:
        """dK and dQ of the last one."""
