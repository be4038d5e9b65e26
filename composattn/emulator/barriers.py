"""Barriers in shared memory (mbarrier) and by number (bar.sync), with what passing one lets a warp rely on."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from composattn.emulator.findings import (
    BarrierMisuse,
    BarrierOverArrival,
    CollectiveMismatch,
    MissingInitFence,
    NegativeTransactions,
)

Array = np.ndarray[Any, Any]


class Knowledge:
    """Vectors of clocks, rows of `clocks`: what its owner may rely on, and passes on.

    `all`: writes and reads known; `fenced`: writes to their own block's memory that are visible to the async proxy
    (fence.proxy.async), `far`: those to another block's; `inits`: mbarriers whose initialisation is visible to the
    async proxy and the cluster (fence.mbarrier_init); `offers`: uses of tensor memory that
    tcgen05.fence::before_thread_sync has put before what follows it. What the owner's own tcgen05 instructions may rely
    on, `tensor`, is not passed on.
    """

    ROWS = 5

    def __init__(self, clocks: Array) -> None:
        self.clocks = clocks
        self.all, self.fenced, self.inits, self.offers, self.far = clocks

    @cached_property
    def tensor(self) -> Array:
        return np.zeros_like(self.all)

    @cached_property
    def _released(self) -> Array:
        """At the last fence that orders what comes before it."""
        return np.zeros_like(self.clocks)

    @staticmethod
    def nothing(agents: int) -> Knowledge:
        return Knowledge(np.zeros((Knowledge.ROWS, agents), np.int32))

    def join(self, other: Knowledge) -> None:
        np.maximum(self.clocks, other.clocks, out=self.clocks)

    def release(self) -> None:
        """A fence: a relaxed arrival passes this on, and nothing that comes later."""
        self._released[:] = self.clocks

    def offered(self, relaxed: bool) -> Knowledge:
        """What an arrival passes on. A relaxed one orders nothing by itself: what fences before it released."""
        if not relaxed:
            return self
        out = Knowledge(self._released.copy())
        out.inits[:], out.offers[:] = self.inits, self.offers
        return out

    def before_sync(self) -> None:
        """tcgen05.fence::before_thread_sync: what synchronises from now on passes on what was done in tensor memory."""
        np.maximum(self.offers, self.tensor, out=self.offers)

    def after_sync(self) -> None:
        """tcgen05.fence::after_thread_sync: tcgen05 instructions from now on may rely on what others passed on."""
        np.maximum(self.tensor, self.offers, out=self.tensor)


class MBarrier:
    """An mbarrier object: arrivals and bytes still missing in this phase, and how many phases are over."""

    def __init__(self, name: str, count: int, agent: int, agents: int) -> None:
        self.name, self.count, self.agent = name, count, agent
        self.pending, self.bytes, self.phase = count, 0, 0
        self.issued = 0  # copies that will complete on it
        self.gathering = Knowledge.nothing(agents)  # from the arrivals of the phase in progress
        self.released = Knowledge.nothing(agents)  # what a waiter of the last complete phase learns
        self.initialised: tuple[int, int] = (0, 0)  # by whom (agent, clock)
        self.in_phase: list[str] = []

    def __str__(self) -> str:
        return (f"mbarrier {self.name}: phase {self.phase} (parity {self.phase & 1}), {self.pending} of {self.count} "
                f"arrivals missing, {self.bytes} bytes missing")  # fmt: skip

    @property
    def in_use(self) -> bool:
        return self.pending != self.count or self.bytes != 0

    def check_known(self, knowledge: Knowledge) -> None:
        """Raises unless whoever knows this much may use the barrier."""
        agent, clock = self.initialised
        if max(knowledge.all[agent], knowledge.inits[agent]) < clock:
            raise BarrierMisuse(f"{self} is used with no barrier between its mbarrier.init and this warp")

    def check_visible(self, knowledge: Knowledge) -> None:
        """Raises unless a copy started by whoever knows this much may complete on the barrier."""
        agent, clock = self.initialised
        if max(knowledge.fenced[agent], knowledge.inits[agent]) < clock:
            raise MissingInitFence(
                f"{self} was initialised with no fence.mbarrier_init (or fence.proxy.async) before this copy, which "
                "completes on it"
            )

    def parity_done(self, parity: int) -> bool:
        """Whether the phase of that parity is over: the one before the current has the other parity than it."""
        return (self.phase & 1) != parity

    def arrive(self, count: int, knowledge: Knowledge | None, who: str) -> bool:
        """True if this completes the phase."""
        if count > self.pending:
            raise BarrierOverArrival(f"{self}; {who} arrives {count} more. Arrived in this phase: {self.in_phase}")
        self.pending -= count
        self.in_phase.append(who)
        if knowledge is not None:
            self.gathering.join(knowledge)
        return self._check()

    def expect(self, count: int) -> None:
        self.bytes += count

    def complete(self, count: int) -> bool:
        self.bytes -= count
        return self._check()

    def _check(self) -> bool:
        if self.pending:
            return False
        if self.bytes < 0:
            raise NegativeTransactions(f"{self}: more bytes came than were expected")
        if self.bytes:
            return False
        self.phase += 1
        self.pending = self.count
        self.in_phase = []
        self.released.join(self.gathering)
        return True


class NamedBarrier:
    """A barrier by number: how many threads it is used with in this phase and who came."""

    def __init__(self, name: str, agents: int) -> None:
        self.name = name
        self.expected = 0
        self.arrived = 0
        self.phase = 0
        self.who: list[str] = []
        self.asked = self.answer = False  # whether what is asked holds for one who came, and for one of the last phase
        self.gathering = Knowledge.nothing(agents)
        self.released = Knowledge.nothing(agents)

    def __str__(self) -> str:
        return f"barrier {self.name}: {self.arrived} of {self.expected} threads ({', '.join(self.who)})"

    def arrive(self, threads: int, expected: int, knowledge: Knowledge, who: str, holds: bool = False) -> bool:
        """True if this completes the phase."""
        if self.arrived and expected != self.expected:
            raise CollectiveMismatch(f"{self}; {who} uses it with {expected} threads")
        self.expected = expected
        self.arrived += threads
        self.who.append(who)
        self.asked |= holds
        if self.arrived > expected:
            raise BarrierOverArrival(f"{self}: more threads than it is used with")
        self.gathering.join(knowledge)
        if self.arrived < expected:
            return False
        self.phase += 1
        self.arrived = 0
        self.who = []
        self.asked, self.answer = False, self.asked
        self.released.join(self.gathering)
        return True
