"""The model held to what an H200 measured: of each row with our time and the peer's, which does it call the faster?"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import CASES, Case, Pattern
from benchmarks.implementations import OURS, PACKED
from benchmarks.model import kernels
from benchmarks.model.clocks import TARGETS
from benchmarks.model.costs import Cost, tile_cost
from benchmarks.model.kernels import Kernel
from benchmarks.model.peer import PACKAGE
from benchmarks.model.visits import Visits, makespan, of_head
from benchmarks.report import RESULTS

RECORD = RESULTS / "model" / "h200.json"
MATTERS = 0.03  # rows that differ by less name no faster one
TIE = 0.01  # ratios as near to 1 as that name none either
WANTED = 0.8
ARCH = "sm_90a"
CPU = torch.device("cpu")
READINGS: dict[str, Callable[[Cost], float]] = {"bound": lambda c: c.bound, "sum": lambda c: c.total}


@dataclasses.dataclass(frozen=True)
class Row:
    """A measured row: ratios are the peer's time over ours, above 1 where we are faster; `modelled` by reading."""

    name: str
    run: str
    implementation: str
    measured: float
    modelled: dict[str, float]

    @property
    def direction(self) -> str:
        return self.name.partition(" ")[0]

    @property
    def matters(self) -> bool:
        return abs(math.log(self.measured)) > math.log(1 + MATTERS)

    def verdict(self, reading: str) -> str:
        """right, wrong, or neither where the model sees no difference."""
        ratio = self.modelled[reading]
        if abs(ratio - 1) <= TIE:
            return "neither"
        return "right" if (ratio > 1) == (self.measured > 1) else "wrong"


def measured_rows() -> Iterator[tuple[str, Case, str, float]]:
    """(run, case, our implementation, the peer's time over ours) of each row that both have in one run."""
    cases = {case.name: case for case in CASES}
    for path in sorted(RESULTS.glob("*.json")):
        table: dict[str, dict[str, Any]] = {}
        for row in json.loads(path.read_text())["rows"]:
            table.setdefault(row["row"], {})[row["impl"]] = row
        for name, by in table.items():
            case, peer = cases.get(name), by.get(PACKAGE, {}).get("ms")
            if case is None or case.measure != "tflops" or peer is None:
                continue
            for implementation in (OURS, PACKED):
                mine = by.get(implementation, {}).get("ms")
                if mine is not None:
                    yield path.stem, case, implementation, peer / mine


def rows(modelled: dict[str, dict[str, float]]) -> list[Row]:
    """The measured rows of which the model's ratios are known, by `key`."""
    found = ((run, case, by, measured, modelled.get(key(case, by))) for run, case, by, measured in measured_rows())
    return [Row(case.name, run, by, measured, ratios) for run, case, by, measured, ratios in found if ratios]


def key(case: Case, implementation: str) -> str:
    return f"{case.name}: {implementation}"


def modelled() -> dict[str, dict[str, float]]:
    """The model's ratios for each measured row; compiles every kernel that isn't kept (a minute or two)."""
    known: dict[str, dict[str, float]] = {}
    for _, case, implementation, _ in measured_rows():
        if key(case, implementation) not in known:
            pattern, packed = case.pattern(case, CPU), implementation == PACKED
            kernel = kernels.ours(case, pattern, ARCH, packed)
            mine = times(case, pattern, kernel, packed or kernel.in_segments)
            theirs = times(case, pattern, kernels.peers(case, pattern, ARCH), bool(pattern.document_starts))
            known[key(case, implementation)] = {reading: theirs[reading] / mine[reading] for reading in READINGS}
    return known


def times(case: Case, pattern: Pattern, kernel: Kernel, packed: bool) -> dict[str, float]:
    """Clocks of a call by each reading: its blocks' tiles, on the SMs as they come free."""
    costs = [tile_cost(kernel, ARCH, tested) for tested in (False, True)]
    heads = of_head(case, pattern, kernel.queries, kernel.keys, packed)
    found = {}
    for reading, read in READINGS.items():
        found[reading] = makespan(blocks(case, kernel, heads, *map(read, costs)), TARGETS[ARCH].sms)
    return found


def blocks(case: Case, kernel: Kernel, heads: Iterable[Visits], plain: float, tested: float) -> list[float]:
    """Clocks of a call's blocks in the order in which they start, given those of a tile without a test and with one."""
    # a block's heads follow each other in a backward, and share the rows in a forward
    turns = kernel.heads if case.direction == "backward" else 1
    one = [float(t) for v in heads for t in (v.plain * plain + v.tested * tested) * turns]
    repeats = case.batch * case.heads // kernel.heads
    tiles = [t for t in sorted(one, reverse=True) for _ in range(repeats)] if kernel.interleaved else one * repeats
    cut = [t / kernel.pieces for t in tiles[kernel.whole :] for _ in range(kernel.pieces)]
    return tiles[: kernel.whole] + cut


@dataclasses.dataclass(frozen=True)
class Reliability:
    """How many rows that differ by more than 3 % the model names right, wrong, or not at all.

    `always_ours` is how many it would name right that says always that we are faster.
    """

    right: int
    wrong: int
    neither: int
    always_ours: int

    @staticmethod
    def of(rows: Iterable[Row], reading: str, direction: str = "") -> Reliability:
        counted = [row for row in rows if row.matters and row.direction.startswith(direction)]
        verdicts = [row.verdict(reading) for row in counted]
        right, wrong, neither = (verdicts.count(word) for word in ("right", "wrong", "neither"))
        return Reliability(right, wrong, neither, sum(row.measured > 1 for row in counted))

    @property
    def rows(self) -> int:
        return self.right + self.wrong + self.neither

    @property
    def share(self) -> float:
        return self.right / self.rows if self.rows else 0.0

    @property
    def is_enough(self) -> bool:
        return self.share >= WANTED

    def __str__(self) -> str:
        return f"{self.right} of {self.rows} ({self.share:.0%}; always naming ours: {self.always_ours})"


def kept(path: Path = RECORD) -> dict[str, dict[str, float]]:
    """The model's ratios as they were when the record was written; none where there is no record."""
    return json.loads(path.read_text())["modelled"] if path.exists() else {}


def keep(modelled: dict[str, dict[str, float]], provenance: dict[str, object], path: Path = RECORD) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(provenance | {"modelled": modelled}, indent=1) + "\n")


def confusion(rows: Iterable[Row], reading: str, direction: str) -> dict[tuple[str, str], int]:
    """(who was faster, whom the model names) to the number of rows that differ by more than 3 %."""
    count: dict[tuple[str, str], int] = {}
    for row in rows:
        if row.matters and row.direction == direction:
            named = row.modelled[reading]
            said = "neither" if abs(named - 1) <= TIE else "ours" if named > 1 else "theirs"
            key = ("ours" if row.measured > 1 else "theirs"), said
            count[key] = count.get(key, 0) + 1
    return count
