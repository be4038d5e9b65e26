"""When asynchronous operations complete, and who runs next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """When asynchronous operations complete and who runs next. `late`: as late as the waits allow, last issued first.

    With a `seed` the schedule is random: single warps in random order, copies complete at random moments.
    `fenced_reads`: a copy over what plain loads have read wants a fence.proxy.async on the way from these. An arrival
    does not wait for them, so without one they are in time only where what was read has been used before.
    """

    late: bool = False
    seed: int | None = None
    warps_together: int = 4
    fenced_reads: bool = False

    def __str__(self) -> str:
        if self.seed is not None:
            return f"random({self.seed})"
        return "late" if self.late else "eager"


EAGER = Mode()
LATE = Mode(late=True)


def random_mode(seed: int) -> Mode:
    return Mode(late=True, seed=seed, warps_together=1)
