"""What is known of an interval of kv positions when a kernel is compiled; plans hold it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class IntervalShape:
    """May tiles at the interval's left end, inside, at its right end exist?

    `left`/`right`: partly visible tiles at that end; `full`: tiles without a test. What can't exist gets no code.
    """

    left: bool = True
    full: bool = True
    right: bool = True
