"""Which calls a row of a table is of: patterns of facts, in words of the call's class or of others."""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import Any


@dataclasses.dataclass(frozen=True)
class Span:
    """Numbers above `more`, up to `most`."""

    more: int
    most: int

    def __contains__(self, number: Any) -> bool:
        return bool(self.more < number <= self.most)


Pattern = dict[str, Container[Any]]  # what each of these facts may be; others may be anything


def matches(facts: object, pattern: Pattern) -> bool:
    """Whether every field that a pattern names is what it says."""
    return all(getattr(facts, name) in values for name, values in pattern.items())
