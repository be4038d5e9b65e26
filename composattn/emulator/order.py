"""Which clusters of a launch are under way, and which goes on, where they hear of each other in global memory."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from composattn.emulator.cluster import Cluster
from composattn.emulator.mode import Mode
from composattn.emulator.ptx import Instr
from composattn.emulator.symbols import Symbols

LATE_TOGETHER = 4  # clusters under way in late mode
TOGETHER = 2, 3, 5, 8  # in random modes, one of these
STEPS = 3, 30, 1000, 30_000  # of the scheduler, one of which a cluster then takes before another one may go on
PATIENCE = 25  # turns in which nothing changes, and two of each cluster more: all spin


class Order:
    """Clusters start in the order of the grid, as on the device, at most `room` at a time.

    Eager: one runs to its end, or until it only spins. Late: of those under way the last one that can goes on, so
    whoever does not wait for those before it is ahead of them. Random: for some steps the one whose number is highest,
    which then gets another number. So one may stand still for long wherever it is, as a fair choice would not let it.
    One that only spins comes behind all others, and behind those that have spun before it.
    """

    def __init__(self, mode: Mode, room: int, program: Symbols) -> None:
        self.room = room
        self.random = None if mode.seed is None else random.Random(mode.seed)
        self.together = 1
        if mode.late and any(_is_heard(i) for i in program.kernel.code):
            self.together = min(room, self.random.choice(TOGETHER) if self.random else LATE_TOGETHER)
        self._numbers: dict[Cluster, float] = {}
        self._stuck = 0  # turns since something has changed

    def started(self) -> None:
        """One more has."""
        self._stuck = 0

    def starts_another(self, running: Sequence[Cluster]) -> bool:
        """Whether one more is to start: also where those under way may wait for it."""
        count = len(running)
        return count < self.together or (count < self.room and self._stuck >= count)

    def next(self, running: Sequence[Cluster]) -> tuple[Cluster, float]:
        """Who goes on, and for how many steps; without end: until it is done or only spins."""
        if self.random is None or self.together == 1:
            return running[-1 - self._stuck % len(running)], math.inf
        numbers = self._numbers = {c: self._numbers.get(c, self.random.random()) for c in running}
        cluster = max(running, key=numbers.__getitem__)
        numbers[cluster] = self.random.random()
        return cluster, self.random.choice(STEPS)

    def note(self, cluster: Cluster, changed: bool) -> None:
        """What the one that went on has done: something that others may see, or nothing."""
        self._stuck = 0 if changed else self._stuck + cluster.spins
        if cluster.spins:
            self._numbers[cluster] = min((0.0, *self._numbers.values())) - 1

    def is_hopeless(self, running: Sequence[Cluster]) -> bool:
        return self._stuck > PATIENCE + 2 * len(running)


def _is_heard(instr: Instr) -> bool:
    """Whether other blocks may hear of an instruction in global memory, or it hears of them."""
    head, *words = instr.parts
    asks = head == "ld" and not {"acquire", "volatile"}.isdisjoint(words)
    adds = head in ("atom", "red") or (head == "cp" and words[0] == "reduce")
    return (asks or adds) and ("global" in words or not any(word.startswith("shared") for word in words))


__all__ = ["Order"]
