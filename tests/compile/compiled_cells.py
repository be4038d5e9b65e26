"""What the compiler made of many kernels, kept as rows of a record, and the tool that Blackwell's and warps' share.

    python -m tests.compile.warp_matrix --seconds 450            cells with no row yet, for so long; go on by again
    python -m tests.compile.warp_matrix D128 sm_86               cells with all these words in their names
    python -m tests.compile.warp_matrix --backward ...           the same of the kernels of gradients
    python -m tests.compile.warp_matrix --part 3/48 --record 3.json      each 48th cell from the third on
    python -m tests.compile.warp_matrix --gather 1.json 2.json ...       rows of several records into one
    python -m tests.compile.warp_matrix --check --part 1/60              are cells still as the record says?

Rows of other sources are dropped, but for `--check`: of most changes kernels know nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import provenance
from composattn.backends.fused.compiling import toolchain
from tests.compile.golden import language

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "compiled"
Row = dict[str, object]


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Cells by the names that they have as text, what the compiler makes of one with its "faults", and their record."""

    cells: list[Any]
    row: Callable[[Any], Row]
    record: Path


@dataclasses.dataclass
class Record:
    """Rows by the names of their cells, and what made them: `sources` is the hash of all that a kernel depends on."""

    language: str
    sources: str
    commit: str
    rows: dict[str, Row]

    @staticmethod
    def read(path: Path) -> Record:
        """The record in a file, as it was written."""
        kept = json.loads(path.read_text())
        rows = {name: dict(zip(kept["fields"], values, strict=True)) for name, values in kept["rows"].items()}
        return Record(kept["language"], kept["sources"], kept["commit"], rows)

    @staticmethod
    def of_these_sources(path: Path) -> Record:
        """Without rows that other sources made."""
        here = Record(language(), toolchain.source_hash(), provenance.commit(), {})
        kept = Record.read(path) if path.exists() else here
        return kept if (kept.language, kept.sources) == (here.language, here.sources) else here

    def write(self, path: Path) -> None:
        """A line a row, its values in the order of `fields`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        head: dict[str, object] = {"language": self.language, "sources": self.sources, "commit": self.commit}
        head["fields"] = list(next(iter(self.rows.values())))
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(list(row.values()))}" for name, row in self.rows.items())
        path.write_text("{\n" + ",\n".join([*lines, f'"rows": {{\n{rows}\n}}']) + "\n}\n")


def gather(paths: list[Path], record: Path, every: list[Any]) -> Record:
    """All rows of several records, in the order of cells."""
    found = Record.of_these_sources(record)
    for path in paths:
        found.rows |= Record.of_these_sources(path).rows
    found.rows = {str(cell): found.rows[str(cell)] for cell in every if str(cell) in found.rows}
    found.write(record)
    return found


def wanted(words: list[str], part: str, every: list[Any]) -> list[Any]:
    """Cells with all words in their names; of those each N-th from the I-th on, with `part` I/N."""
    first, step = map(int, part.split("/"))
    return [cell for cell in every if all(word in str(cell).split() for word in words)][first - 1 :: step]


def compiled(left: list[Any], made: Callable[[Any], Row], record: Record, path: Path, seconds: float) -> None:
    """Rows of cells that have none yet into the record and its file, as each is made."""
    end = time.monotonic() + seconds
    for cell in left:
        if time.monotonic() > end:
            break
        begun = time.monotonic()
        found = record.rows[str(cell)] = made(cell)
        record.write(path)
        print(f"{cell}: {time.monotonic() - begun:.1f} s {found}", flush=True)


def check(asked: list[Any], made: Callable[[Any], Row], record: Record) -> int:
    """Compiles cells that the record has, and prints which are not as it says; 1 where one is not."""
    known = [cell for cell in asked if str(cell) in record.rows]
    other = 0
    for cell in known:
        was, now = record.rows[str(cell)], made(cell)
        if was != now:
            other += 1
            print(f"{cell}: {now}, was {was}", flush=True)
    print(f"of {len(known)} cells {len(known) - other} are as in the record of {record.commit[:7]}")
    return int(other > 0)


def main(arguments: list[str], forward: Matrix, backward: Matrix) -> int:
    """Does what is asked of one of two matrices; 1 where a cell is not lean, or none yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="compile no further cell after so long")
    parser.add_argument("--part", default="1/1", help="I/N: each N-th cell from the I-th on")
    parser.add_argument("--backward", action="store_true", help="of gradients")
    parser.add_argument("--record", type=Path, help="file that keeps the rows")
    parser.add_argument("--gather", type=Path, nargs="+", default=[], help="records whose rows go to it")
    parser.add_argument("--check", action="store_true", help="compile cells of the record again; 1 where one differs")
    parser.add_argument("words", nargs="*", help="only cells with all of these in their names")
    asked = parser.parse_args(arguments)
    matrix = backward if asked.backward else forward
    path = asked.record or matrix.record
    cells_asked = wanted(asked.words, asked.part, matrix.cells)
    if asked.check:
        return check(cells_asked, matrix.row, Record.read(path))
    if asked.gather:
        record = gather(asked.gather, path, matrix.cells)
    else:
        record = Record.of_these_sources(path)
        left = [cell for cell in cells_asked if str(cell) not in record.rows]
        compiled(left, matrix.row, record, path, asked.seconds)
    rows = [record.rows[str(cell)] for cell in cells_asked if str(cell) in record.rows]
    bad = sum(bool(found["faults"]) for found in rows)
    print(f"of {len(cells_asked)} cells {len(rows)} are compiled, {bad} are not lean")
    return int(bad > 0 or len(rows) < len(cells_asked))
