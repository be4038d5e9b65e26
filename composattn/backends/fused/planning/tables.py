"""Tables of choices, as data: which calls a row is of, what these get, and what says so.

A file of tables has, by name, rows one a line; the first row that a call matches is taken. "says" is what it gets. "of"
names patterns of the file; "shapes" and "gain", or "why", are its evidence. All else are facts of a call: "(64, 96]"
numbers above 64 up to 96, a list what a fact may be, {"not": a list} what it may not. Files are read when their modules
are imported: about a millisecond each.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from .call_class import MaskKind, ModsKind, Rounds

T = TypeVar("T")
Pattern = dict[str, Container[Any]]  # what each of these facts may be; others may be anything
KINDS: dict[str, type[enum.Enum]] = {"mods": ModsKind, "mask": MaskKind, "work": Rounds}


@dataclasses.dataclass(frozen=True)
class Span:
    """Numbers above `more`, up to `most`."""

    more: float
    most: float

    def __contains__(self, number: Any) -> bool:
        return bool(self.more < number <= self.most)

    @staticmethod
    def read(text: str) -> Span:
        """A span as it is written: "(64, 96]" or "(96, inf)"."""
        return Span(*map(float, text.strip("(])").split(",")))


@dataclasses.dataclass(frozen=True)
class Evidence:
    """`results`, in benchmarks/results, timed every form of so many `shapes` that are a row's; of none: `why` it is so.

    `gain`: geometric mean of the time of the best other form over that of the row's.
    """

    why: str = ""
    shapes: int = 0
    gain: float = math.nan
    results: str = ""

    def __str__(self) -> str:
        if not self.shapes:
            return f"not measured: {self.why}"
        return f"measured on {self.shapes} shapes: {self.gain - 1:+.1%} over the best other form ({self.results})"


@dataclasses.dataclass(frozen=True)
class Row(Generic[T]):
    """Calls that match the pattern, and no row before."""

    says: T
    pattern: Pattern
    evidence: Evidence


Table = tuple[Row[T], ...]


@functools.cache
def file_of(path: Path) -> Any:
    return json.loads(path.read_text())


def table(path: Path, name: str, made: Callable[[Any], T]) -> Table[T]:
    """A table of a file; `made`: of what a row says, what it means.

    Raises: `ValueError`, with the file and the row, where it says what no row can.
    """
    file = file_of(path)
    return tuple(_row(row, file, made, f"{path}, {name!r}") for row in file["tables"][name])


def _row(row: Mapping[str, Any], file: Any, made: Callable[[Any], T], where: str) -> Row[T]:
    try:
        return _read(row, file, made)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: no row of a table is {json.dumps(row)}, by {error!r}") from error


def _read(row: Mapping[str, Any], file: Any, made: Callable[[Any], T]) -> Row[T]:
    facts = dict(row)
    says, shared = facts.pop("says"), [file["patterns"][name] for name in facts.pop("of", "").split()]
    why, shapes, gain = facts.pop("why", ""), facts.pop("shapes", 0), facts.pop("gain", math.nan)
    pattern = {name: _values(name, said) for part in (*shared, facts) for name, said in part.items()}
    return Row(made(says), pattern, Evidence(why, shapes, gain, file.get("results", "")))


def _values(name: str, said: Any) -> Container[Any]:
    """What a fact may be."""
    if isinstance(said, str):
        return Span.read(said)
    kind = KINDS.get(name)
    if isinstance(said, dict):
        assert kind is not None, f"{name} has no list of all there are"
        return tuple(member for member in kind if member.name.lower() not in said["not"])
    return tuple(kind[value.upper()] if kind else tuple(value) if isinstance(value, list) else value for value in said)


def matches(call: object, pattern: Pattern, **more: Any) -> bool:
    """Whether all facts that a pattern names are as it says; `more`: those that are not the call's."""
    return all((more[name] if name in more else getattr(call, name)) in values for name, values in pattern.items())


def row_of(rows: Iterable[Row[T]], call: object, **more: Any) -> Row[T]:
    """The first row that a call is in."""
    return next(_rows_of(rows, call, more))


def first(rows: Iterable[Row[T]], call: object, **more: Any) -> T:
    """What the first row says that a call is in."""
    return next(_rows_of(rows, call, more)).says


def all_of(rows: Iterable[Row[T]], call: object, **more: Any) -> Iterator[T]:
    """What every row says that a call is in, as several numbers that are added up."""
    return (row.says for row in _rows_of(rows, call, more))


def _rows_of(rows: Iterable[Row[T]], call: object, more: Mapping[str, Any]) -> Iterator[Row[T]]:
    return (row for row in rows if matches(call, row.pattern, **more))
