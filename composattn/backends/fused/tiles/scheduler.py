"""How the blocks of a forward get their work tiles."""

from __future__ import annotations

import enum


class Scheduler(enum.Enum):
    """One tile a block, or persistent blocks: by a fixed stride, or by a counter from which the next number is drawn.

    Drawn behind the copies of the tile before it: about 1 µs late, but the tile goes to a block that is free sooner.
    Stream-K gives blocks keys of equal number, not tiles, of the last ones, which are no whole rounds
    (`primitives.stream_k`).
    """

    ONE_TILE = "one block per tile"
    STRIDE = "persistent"
    LATE = "persistent, the next tile drawn late"
    LATE_STREAM_K = "persistent, the next tile drawn late, the last two rounds shared alike"

    @staticmethod
    def asked(persistent: bool | None) -> Scheduler:
        """By a stride where blocks are asked to stay, else of one tile each."""
        return Scheduler.STRIDE if persistent else Scheduler.ONE_TILE

    @property
    def draws(self) -> bool:
        """Whether there is a counter."""
        return self in (Scheduler.LATE, Scheduler.LATE_STREAM_K)

    @property
    def shares(self) -> bool:
        """Whether tiles have keys in several blocks."""
        return self is Scheduler.LATE_STREAM_K
