"""Tables of choices, as data: which calls a row is of, what these get, and what says so.

A file of tables has, by name, rows one a line; the first row that a call matches is taken. "says" is what it gets. "of"
names patterns of the file; "shapes" and "gain", or "why", are its evidence. All else are facts of a call: "(64, 96]"
numbers above 64 up to 96, a list what a fact may be, {"not": a list} what it may not. Files are read when their modules
are imported: about a millisecond each.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from .call_class import MaskKind, ModsKind, Rounds

T = TypeVar("T")
Pattern = dict[str, Container[Any]]  # what each of these facts may be; others may be anything


# facts whose values are others than a file can have
READ: dict[str, Callable[[Any], Any]] = {
    "mods": lambda word: ModsKind[word.upper()],
    "mask": lambda word: MaskKind[word.upper()],
    "work": lambda word: Rounds[word.upper()],
    "dims": tuple,
}


@dataclasses.dataclass(frozen=True)
class Span:
    """Numbers above `more`, up to `most`."""

    more: float
    most: float

    def __contains__(self, number: Any) -> bool:
        return bool(self.more < number <= self.most)


@dataclasses.dataclass(frozen=True)
class Others:
    """All values but these."""

    but: Container[Any]

    def __contains__(self, value: Any) -> bool:
        return value not in self.but


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
            return f"no sweep timed it: {self.why}"
        return f"measured on {self.shapes} shapes: {self.gain:.3f} of the best other form's speed ({self.results})"


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


def _as_said(said: Any) -> Any:
    return said


def table(path: Path, name: str, made: Callable[[Any], T] = _as_said) -> Table[T]:
    """A table of a file; `made`: of what a row says, what it means.

    Raises: `ValueError`, with the file and the row, where it says what no row can.
    """
    file = file_of(path)
    return tuple(_row(row, file, made, f"{path}, {name!r}") for row in file["tables"][name])


def _row(row: Mapping[str, Any], file: Any, made: Callable[[Any], T], where: str) -> Row[T]:
    facts = dict(row)
    why, shapes, gain = facts.pop("why", ""), facts.pop("shapes", 0), facts.pop("gain", math.nan)
    try:
        says, of = made(facts.pop("says")), facts.pop("of", "").split()
        named = dict(item for name in of for item in file["patterns"][name].items()) | facts
        pattern = {name: _values(name, said) for name, said in named.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: no row of a table is {json.dumps(row)}, by {error!r}") from error
    return Row(says, pattern, Evidence(why, shapes, gain, file.get("results", "")))


def _values(name: str, said: Any) -> Container[Any]:
    """What a fact may be."""
    if isinstance(said, str):
        return Span(*map(float, said.strip("(])").split(",")))
    if isinstance(said, dict):
        return Others(_values(name, said["not"]))
    return tuple(map(READ.get(name, _as_said), said))


def matches(call: object, pattern: Pattern, **more: Any) -> bool:
    """Whether all facts that a pattern names are as it says; `more`: those that are not the call's."""
    return all((more[name] if name in more else getattr(call, name)) in values for name, values in pattern.items())


def rows_of(rows: Iterable[Row[T]], call: object, **more: Any) -> Iterator[Row[T]]:
    """The rows that a call is in."""
    return (row for row in rows if matches(call, row.pattern, **more))


def row_of(rows: Iterable[Row[T]], call: object, **more: Any) -> Row[T]:
    """The first of them."""
    return next(rows_of(rows, call, **more))


def first(rows: Iterable[Row[T]], call: object, **more: Any) -> T:
    """What it says."""
    return row_of(rows, call, **more).says


def all_of(rows: Iterable[Row[T]], call: object, **more: Any) -> Iterator[T]:
    """What every row says that a call is in, as several numbers that are added up."""
    return (row.says for row in rows_of(rows, call, **more))
