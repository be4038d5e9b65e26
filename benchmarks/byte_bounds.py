"""The table of a page: decodes of 8-bit caches beside what only reads their bytes, and what only multiplies as much."""

from __future__ import annotations

import json

from benchmarks.report import RESULTS

# of a call in both the last one counts: D above 256 has another kernel since
RUNS = [RESULTS / "eight-bits" / f"h200-byte-keys-{name}.json" for name in ("bounds", "wide-bounds")]
HEAD = ("heads, keys, sequences", "16 bits, µs", "8 bits", "reads alone, 16 bits", "8 bits",
        "then a kernel that does nothing, 16 bits", "8 bits", "products alone")  # fmt: skip


def table() -> str:
    """A line for each call, whose times of 8 bits are over those of 16 too."""
    calls: dict[str, dict[str, float]] = {}
    for run in RUNS:
        found: dict[str, dict[str, float]] = {}
        for row in json.loads(run.read_text())["rows"]:
            found.setdefault(row["row"], {})[row["impl"]] = row["ms"] * 1e3
        calls = {name: times for name, times in calls.items() if name not in found} | found
    lines = [HEAD, ["---"] * len(HEAD), *(_line(name, times) for name, times in calls.items())]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _line(name: str, times: dict[str, float]) -> list[str]:
    _, batch, keys, _, heads, dims, _ = name.split()
    shown = [f"{heads} {dims}, {keys[2:]}, {batch[1:]}"]
    for end in (None, False, True):
        wide, narrow = (_time(times, bits, end) for bits in ("16 bits", "8 bits"))
        shown += [f"{wide:.1f}", f"{narrow:.1f} ({narrow / wide:.3f})"]
    products = times.get("products")
    return [*shown, "" if products is None else f"{products:.1f} ({products / times['16 bits']:.2f})"]


def _time(times: dict[str, float], bits: str, end: bool | None) -> float:
    """µs that a call takes (`end` None), or the fastest read of its bytes, with a kernel behind it if `end`."""
    found = (t for n, t in times.items() if n.startswith(f"read of {bits},") and n.endswith("nothing") is end)
    return times[bits] if end is None else min(found)
