"""Which calls a row of a table is of: patterns of facts, in words of the call's class or of others."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


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


def first(table: Iterable[tuple[T, Pattern]], facts: object) -> T:
    """What the first row says whose pattern the facts match."""
    return next(says for says, pattern in table if matches(facts, pattern))
