"""Counted rows (benchmarks/counters.py), ours beside the fastest peer: `python -m benchmarks.counters_report`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES
from benchmarks.implementations import DETERMINISTIC, OURS, PACKED

RESULTS = Path(__file__).with_name("results") / "counters"
FLASH = "flash-attn-4"
NONE = "–"
STALL = "stall_"
PEAK = 132 * 4096e-3  # TFLOP of the tensor cores of an H200 in 10^9 clocks

Row = dict[str, Any]


def main_kernel(row: Row) -> Row:
    """The one that takes longest; empty where none was counted."""
    return max(row.get("kernels", []), key=lambda kernel: kernel.get("ns", 0.0), default={})


def others_us(row: Row) -> float | None:
    """Microseconds of all other kernels of the call."""
    times = [kernel.get("ns", 0.0) for kernel in row.get("kernels", [])]
    return (sum(times) - max(times)) * 1e-3 if times else None


def gigahertz(kernel: Row) -> float | None:
    """The clock while it was counted."""
    return kernel["cycles"] / kernel["ns"] if kernel.get("cycles") and kernel.get("ns") else None


def waits(kernel: Row, count: int = 3) -> str:
    """Why warps wait most, with how many of a scheduler's do per instruction issued."""
    found = {name.removeprefix(STALL): value for name, value in kernel.items() if name.startswith(STALL)}
    most = sorted(found, key=lambda name: -found[name])[:count]
    return " ".join(f"{name.replace('_', ' ')} {found[name]:.1f}" for name in most) or NONE


def of_both(ours: Row, theirs: Row, value: Callable[[Row], float | None], form: str) -> str:
    return ", ".join(NONE if (known := value(row)) is None else format(known, form) for row in (ours, theirs))


def newest(files: Iterable[dict[str, Any]]) -> dict[str, dict[str, Row]]:
    """Counted rows by case and implementation; those of a case are of one run, the last that has ours."""
    table: dict[str, dict[str, Row]] = {}
    for file in files:
        of_file: dict[str, dict[str, Row]] = {}
        for row in file["rows"]:
            if row.get("kernels"):
                of_file.setdefault(row["row"], {})[row["impl"]] = row | {"commit": file["commit"][:7]}
        table.update((case, by) for case, by in of_file.items() if OURS in by)
    return table


def compared(table: dict[str, dict[str, Row]]) -> list[tuple[str, Row, Row]]:
    """For each case and way to call it: the words for it, our row, and that of the fastest peer counted.

    A fixed order stands beside the default. Cases are in their order.
    """
    found = []
    places = {case.name: place for place, case in enumerate(CASES)}
    for case, by in sorted(table.items(), key=lambda item: places.get(item[0], -1)):
        peers = sorted((row for name, row in by.items() if not name.startswith(OURS)), key=lambda row: row["ms"])
        for name, words in ((OURS, case), (PACKED, f"{case}, packed")):
            if name in by and peers:
                found.append((words, by[name], peers[0]))
        if DETERMINISTIC in by:
            found.append((f"{case}, fixed order", by[DETERMINISTIC], by[OURS]))
    return found


def time_line(words: str, ours: Row, theirs: Row, limits: dict[tuple[str, str], Row]) -> list[str]:
    def limit(row: Row) -> Row:
        return limits.get((row["row"], row["impl"]), {})

    def reached(row: Row) -> float | None:
        clocks, cycles = limit(row).get("clocks"), main_kernel(row).get("cycles")
        return clocks / cycles if clocks and cycles else None

    def at_bound(row: Row) -> float | None:
        found, clock = limit(row), gigahertz(main_kernel(row))
        return found["flop_clocks"] / found["clocks"] * PEAK * clock if found and clock else None

    def in_use(row: Row) -> float | None:
        kernel = main_kernel(row)
        return kernel["occupied"] / kernel["cycles"] if kernel.get("cycles") and "occupied" in kernel else None

    def millions(row: Row) -> float | None:
        cycles = main_kernel(row).get("cycles")
        return cycles * 1e-6 if cycles else None

    known = [limit(row) for row in (ours, theirs)]
    return [
        words,
        f"`{ours['commit']}`",
        theirs["impl"].removeprefix("torch "),
        f"{theirs['ms'] / ours['ms']:.3f}",
        of_both(ours, theirs, lambda row: row["ms"], ".3f"),
        of_both(ours, theirs, millions, ".3f"),
        of_both(ours, theirs, others_us, ".0f"),
        of_both(ours, theirs, lambda row: gigahertz(main_kernel(row)), ".2f"),
        ", ".join(f"{one['pairs']:.3f}" if one else NONE for one in known),
        ", ".join(f"{one['rounds']:.1f} {one['balance']:.2f}" if one else NONE for one in known),
        of_both(ours, theirs, in_use, ".2f"),
        ", ".join(one.get("unit", NONE) for one in known),
        of_both(ours, theirs, at_bound, ".0f"),
        of_both(ours, theirs, reached, ".2f"),
    ]


TIMES = (
    "row", "commit", "peer", "ratio", "ms", "main kernel, M clocks", "others, µs", "GHz", "visited pairs",
    "rounds, balance", "had a block", "busiest unit", "bound, TFLOP/s", "of it",
)  # fmt: skip
SHARES = {
    "matrix": "matrix", "exp": "exp", "alu": "alu", "fma": "fma", "issue": "issue", "shared": "shared",
    "L2": "l2", "L2 hits": "l2_hits", "memory": "memory",
}  # fmt: skip


def share_line(words: str, ours: Row, theirs: Row) -> list[str]:
    one, other = main_kernel(ours), main_kernel(theirs)
    cells = [of_both(one, other, lambda kernel, key=key: kernel.get(key), ".0f") for key in SHARES.values()]  # type: ignore[misc]
    counts = of_both(one, other, lambda kernel: kernel.get("instructions", 0.0) * 1e-6 or None, ".4g")
    return [words, *cells, counts, waits(one), waits(other)]


def table(head: Iterable[str], lines: Iterable[list[str]]) -> str:
    head = list(head)
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(rows + ["| " + " | ".join(line) + " |" for line in lines]) + "\n"


def all_kept(folder: Path = RESULTS) -> str:
    """Both tables, with where they come from; a word where nothing is kept."""
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json")) if path.stem != "limits"]
    pairs = compared(newest(files))
    if not pairs:
        return "No counters are kept.\n"
    kept = folder / "limits.json"
    limits = {(row["row"], row["impl"]): row for row in json.loads(kept.read_text())["rows"]} if kept.exists() else {}
    facts = files[0]
    dates = ", ".join(sorted({f"`{file['commit'][:7]}` {file['date']}" for file in files}))
    source = f"{facts['machine']}; flash-attn-4 {facts['versions'].get(FLASH)}; commits {dates}."
    head = ["row", *(f"{name}, %" for name in SHARES), "M instructions", "ours waits for", "it waits for"]
    times = table(TIMES, (time_line(*pair, limits) for pair in pairs))
    return f"{source}\n\n{times}\n{table(head, (share_line(*pair) for pair in pairs))}"


if __name__ == "__main__":
    print(all_kept())
