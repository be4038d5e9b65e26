"""What says that a row of a table stands where it should: a run that timed every form, or nobody, and why."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Measured:
    """By `results`, a file in benchmarks/results: so many of its `shapes` are the row's.

    `gain`: geometric mean of the time of the best other form over this one's.
    """

    results: str
    shapes: int
    gain: float

    def __str__(self) -> str:
        return f"measured on {self.shapes} shapes: {self.gain - 1:+.1%} over the best other form ({self.results})"


@dataclasses.dataclass(frozen=True)
class NotMeasured:
    """By no run of all forms; what stands there is from single timings, or by likeness, as `why` says."""

    why: str

    def __str__(self) -> str:
        return f"not measured: {self.why}"


Evidence = Measured | NotMeasured
