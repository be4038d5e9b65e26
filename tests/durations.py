"""Which tests wait for the night: the slowest, by what they took when last measured, until the day's fit a budget.

`make durations` runs all of them and writes `durations.json`: seconds of one core for each test of a second or more,
and for all others together.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping
from pathlib import Path

FILE = Path(__file__).with_name("durations.json")
# of two cores together, less than 12 minutes, with what workers wait and take to collect: a day of 1,000 s took 10.8 on
# one host and 12.7 on a slower one. Measured with no kernel kept from before, as on a machine that has run none
BUDGET_S = 900.0
OTHERS = "others"  # all tests that took less than `LEAST_S`, together
LEAST_S = 1.0
LONGEST_S = 3.0  # a test whose quickest case takes longer waits whole


def measured() -> dict[str, float]:
    """Seconds of each test, by its node id, and of the others."""
    found: dict[str, float] = json.loads(FILE.read_text())
    return found


def waits_for_the_night(seconds: Mapping[str, float], budget: float = BUDGET_S) -> frozenset[str]:
    """The slowest tests, as many as leave the others within the budget.

    Of a test with several parameters one stays by day, the quickest, if it takes no longer than `LONGEST_S`: what it
    tests is tested each day.
    """
    left = collections.Counter(name.split("[")[0] for name in seconds if name != OTHERS)
    total = sum(seconds.values())
    found = set()
    for name in sorted((name for name in seconds if name != OTHERS), key=lambda name: (-seconds[name], name)):
        if total <= budget:
            break
        function = name.split("[")[0]
        if left[function] > 1 or seconds[name] > LONGEST_S:
            left[function] -= 1
            total -= seconds[name]
            found.add(name)
    return frozenset(found)


def keep(taken: Mapping[str, float]) -> None:
    """Writes what the tests of a whole run took."""
    slow = {name: round(time, 1) for name, time in sorted(taken.items()) if time >= LEAST_S}
    others = round(sum(time for time in taken.values() if time < LEAST_S), 1)
    FILE.write_text(json.dumps({OTHERS: others} | slow, indent=0) + "\n")
