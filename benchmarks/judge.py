"""What the tables of forms give away on recorded sweeps, and what each row of them is worth: no GPU is needed.

    python -m benchmarks.judge                     regret by direction and part; what calls lose without each row
    python -m benchmarks.judge --write             rows' shapes and gains, as the part "fit" has them, into the tables

**Regret** is the time of the form that the tables give a shape, over that of its fastest form. Without a row its shapes
get what rows behind it say: a row whose loss is small is one that may go.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.candidates import backward_facts_of_case, facts_of_case
from benchmarks.cases import Direction
from benchmarks.shapes import SEEDS, Part, shape_named
from benchmarks.sweep import of_forms
from composattn.backends.fused.planning.facts import Facts
from composattn.backends.fused.planning.tables import Row, Table, first, row_of
from composattn.backends.hopper import backward_choice, backward_tiling, forward_choice, tiling

RESULTS = Path(__file__).parent / "results" / "sweeps"
AGAIN = "h200-wide.json"  # forwards of other D than 64, 128, 192 and 256, since their large blocks draw their tiles
# times of backwards that spread by more are of calls that end before the host has issued the next
STEADY: dict[Direction, float] = {"forward": math.inf, "backward": 0.05}
FILES: dict[Direction, Path] = {"forward": tiling.FILE, "backward": backward_tiling.FILE}
TABLES: dict[Direction, dict[str, Table]] = {
    "forward": {"forms": tiling.TABLES["forms"]},
    "backward": {name: backward_tiling.TABLES[name] for name in ("tiles", "blocks")},
}
BACKWARD = backward_choice.FORMS
EVIDENCE = ("why", "shapes", "gain")


class Shape(NamedTuple):
    """A timed shape: its call, and what each form took, in ms."""

    name: str
    call: Any
    took: dict[str, float]


def form_of(direction: Direction, tables: dict[str, Table], call: Facts) -> str:
    """What these tables say, in words."""
    if direction == "forward":
        return str(first(tables["forms"], call))
    return f"{first(tables['tiles'], call)}, {first(tables['blocks'], call)}"


@functools.cache
def timed(direction: Direction, part: Part) -> list[Shape]:
    """The shapes of a part of which what the tables give was timed; none where there is no such sweep.

    Forms that are gone are left out. Of some unseen shapes all candidates were timed, in a run of their own. A shape
    timed again since its kernels changed (`AGAIN`) has the later times.
    """
    took = _times(direction, f"h200-{direction}-{part}.json")
    took |= _times(direction, f"h200-regret-{direction}.json") if part == "unseen" else {}
    took |= {name: times for name, times in _times(direction, AGAIN).items() if name in took}
    known = forward_choice.FORMS if direction == "forward" else BACKWARD
    took = {name: {form: ms for form, ms in times.items() if form in known} for name, times in took.items()}
    facts_of = facts_of_case if direction == "forward" else backward_facts_of_case
    shapes = [Shape(name, facts_of(shape_named(name)), times) for name, times in took.items()]
    return [shape for shape in shapes if form_of(direction, TABLES[direction], shape.call) in shape.took]


def _times(direction: Direction, file: str) -> dict[str, dict[str, float]]:
    path = RESULTS / file
    return of_forms(json.loads(path.read_text())["rows"], STEADY[direction]) if path.is_file() else {}


def regrets(direction: Direction, part: Part, tables: dict[str, Table] | None = None) -> dict[str, float]:
    """Regret by shape, 0 where the chosen form is the fastest; shapes whose form was not timed are left out."""
    chosen = ((shape, form_of(direction, tables or TABLES[direction], shape.call)) for shape in timed(direction, part))
    return {shape.name: shape.took[form] / min(shape.took.values()) - 1 for shape, form in chosen if form in shape.took}


def gains(direction: Direction, name: str, row: Row) -> list[float]:
    """For the row's shapes with other forms timed: the time of the best of these over the row's own."""
    found = []
    for shape in timed(direction, "fit"):
        if row_of(TABLES[direction][name], shape.call) is row:
            mine = form_of(direction, TABLES[direction], shape.call)
            others = [ms for form, ms in shape.took.items() if _competes(name, form, mine)]
            found += [min(others) / shape.took[mine]] if others else []
    return found


def _competes(name: str, form: str, mine: str) -> bool:
    """Whether another form says something else in a table: of blocks, for the same tile."""
    if name == "forms":
        return form != mine
    other, own = BACKWARD[form], BACKWARD[mine]
    return other["tile"] != own["tile"] if name == "tiles" else other["tile"] == own["tile"] and form != mine


def without(direction: Direction, name: str, row: Row) -> dict[str, Table]:
    """The tables with a row behind all others: for calls that no other has."""
    rows = tuple(other for other in TABLES[direction][name] if other is not row)
    return {**TABLES[direction], name: (*rows, row)}


def losses(direction: Direction, name: str, row: Row) -> Iterator[float]:
    """Time without a row over time with it, for each shape of all parts that gets another form."""
    others = without(direction, name, row)
    for part in SEEDS:
        for shape in timed(direction, part):
            mine, other = (form_of(direction, tables, shape.call) for tables in (TABLES[direction], others))
            if mine != other and other in shape.took:
                yield shape.took[other] / shape.took[mine]


def report() -> None:
    for direction, tables in TABLES.items():
        for part in SEEDS:
            if found := list(regrets(direction, part).values()):
                print(f"{direction} {part}: {len(found)} shapes, regret {_of(found)}")
        for name, rows in tables.items():
            for row in rows[:-1]:
                lost = list(losses(direction, name, row))
                print(f"    without {name} {row.says} {_facts(row)}: {_loss(lost)}")


def _of(found: Sequence[float]) -> str:
    return f"{statistics.fmean(found):.2%} in the mean, {max(found):.1%} at most"


def _loss(lost: Sequence[float]) -> str:
    if not lost:
        return "no timed shape differs"
    return f"{len(lost)} shapes take {statistics.geometric_mean(lost) - 1:+.1%}, {max(lost) - 1:+.1%} at most"


def _facts(row: Row) -> str:
    evidence = f"{row.shapes} shapes" if row.shapes else row.why
    return f"({', '.join(row.pattern)}; {evidence})"


def write(direction: Direction) -> None:
    """Each row's shapes and gain, in its line of the file, before what was written there by hand."""
    lines = FILES[direction].read_text().split("\n")
    for name, rows in TABLES[direction].items():
        start = lines.index(f'  "{name}": [') + 1
        for number, row in enumerate(rows, start):
            said = {key: value for key, value in json.loads(lines[number].rstrip(",")).items() if key not in EVIDENCE}
            found = gains(direction, name, row)
            told: dict[str, Any] = {}
            if found:
                told = {"shapes": len(found), "gain": round(statistics.geometric_mean(found), 3)}
            if row.why or not found:
                told["why"] = row.why or "as it was"
            comma = "," * lines[number].endswith(",")
            lines[number] = f"   {json.dumps(said | told, ensure_ascii=False)}{comma}"
    FILES[direction].write_text("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="shapes and gains into the tables")
    options = parser.parse_args()
    for direction in TABLES if options.write else ():
        write(direction)
    if not options.write:
        report()


if __name__ == "__main__":
    main()
