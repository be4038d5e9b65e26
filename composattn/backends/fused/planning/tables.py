"""Tables of choices, as data: which calls a row is of, what these get, and what says so.

A file of tables has, by name, rows one a line; the first row that a call matches is taken. "says" is what it gets. "of"
names patterns of the file; "shapes" and "gain", or "why", are its evidence. All else are facts of a call: "(64, 96]"
numbers above 64 up to 96, a list what a fact may be, {"not": a list} what it may not. Files are read when their modules
are imported: about a millisecond each.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Pattern = dict[str, Callable[[Any], bool]]  # whether each of these facts is as a row says; others may be anything


@dataclasses.dataclass(frozen=True)
class Row:
    """What calls get that match the pattern, and no row before.

    `results`, in benchmarks/results, timed every form of so many `shapes` that are the row's; of none: `why` it is so.
    `gain`: geometric mean of the time of the best other form over that of the row's.
    """

    says: Any
    pattern: Pattern
    why: str
    shapes: int
    gain: float
    results: str

    @property
    def evidence(self) -> str:
        """For people to read."""
        if not self.shapes:
            return f"no sweep timed it: {self.why}"
        return f"measured on {self.shapes} shapes: {self.gain:.3f} of the best other form's speed ({self.results})"


Table = tuple[Row, ...]


def tables_of(path: Path) -> dict[str, Table]:
    """The tables of a file, by name. Raises: `ValueError`, with the file and the row, where it says what no row can."""
    file = json.loads(path.read_text())
    return {name: tuple(_row(row, file, f"{path}, {name!r}") for row in rows) for name, rows in file["tables"].items()}


def _row(row: Mapping[str, Any], file: Any, where: str) -> Row:
    facts = dict(row)
    why, shapes, gain = facts.pop("why", ""), facts.pop("shapes", 0), facts.pop("gain", math.nan)
    try:
        says, of = facts.pop("says"), facts.pop("of", "").split()
        named = dict(item for name in of for item in file["patterns"][name].items()) | facts
        pattern = {name: _test(said) for name, said in named.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: no row of a table is {json.dumps(row)}, by {error!r}") from error
    return Row(says, pattern, why, shapes, gain, file.get("results", ""))


def _test(said: Any) -> Callable[[Any], bool]:
    """Whether a fact is what a file says that it may be."""
    if isinstance(said, str):
        more, most = map(float, said.strip("(])").split(","))
        return lambda number: more < number <= most
    values = tuple(said["not"] if isinstance(said, dict) else said)
    return lambda value: (value in values) is not isinstance(said, dict)


def rows_of(table: Iterable[Row], call: object, **more: Any) -> Iterator[Row]:
    """The rows that a call is in: each fact is as the row says; `more`: those that are not the call's."""
    for row in table:
        if all(is_so(more[n] if n in more else getattr(call, n)) for n, is_so in row.pattern.items()):
            yield row


def row_of(table: Iterable[Row], call: object, **more: Any) -> Row:
    """The first of them."""
    return next(rows_of(table, call, **more))


def first(table: Iterable[Row], call: object, **more: Any) -> Any:
    """What it says."""
    return row_of(table, call, **more).says
