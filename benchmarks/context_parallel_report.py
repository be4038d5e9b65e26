"""Tables of context parallel's runs for docs/parallel.md, and the kept file of a run.

python -m benchmarks.context_parallel_report FILE.jsonl h200x4     # rows of a run as benchmarks/results/parallel/…
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results") / "parallel"
NAMES = {"documents": "40 documents of mixed lengths, causal", "window": "window 4096", "causal": "causal"}
PEERS = ("torch flex", "flex gathered", "torch ring", "fa4 gathered")
MIB = 2**20

Row = dict[str, Any]


def kept_of(lines: list[str]) -> dict[str, Any]:
    """A run's rows with its provenance."""
    rows = [json.loads(line) for line in lines if line.strip()]
    facts = next(row["provenance"] for row in rows if "provenance" in row)
    facts["machine"] = facts["machine"].replace("one ", f"{ranks_of(rows)} of one host, each ", 1)
    return facts | {"rows": [row for row in rows if "provenance" not in row and "done" not in row]}


def ranks_of(rows: list[Row]) -> int:
    return int(next(row["ranks"] for row in rows if "ranks" in row))


def found(rows: list[Row], name: str, mask: str) -> Row:
    """The row of that name and mask; empty where there is none."""
    return next((row for row in rows if row.get("name") == name and row.get("mask") == mask), {})


def peer_cell(row: Row, ours: Row) -> str:
    """Milliseconds, and how many times ours of the same rounds; of what was not measured, why."""
    if "ms" in row:
        times = row.get("times_ours", row["ms"] / ours["ms"])
        return f"{row['ms']:.1f} ({times:.2f}×)"
    if "left_out" in row or not row:
        return "no time left"
    return "knows causal alone" if "NotImplementedError" in row["error"] else "failed"


def times(rows: list[Row]) -> str:
    """A line for each mask: one GPU, all of them, peers."""
    peers = [name for name in PEERS if any(row.get("name") == name for row in rows)]
    head = ["ms", "one GPU", f"{ranks_of(rows)} GPUs", "of linear", "nothing moved", *peers]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for mask, words in NAMES.items():
        one, ours, still = (found(rows, name, mask) for name in ("one GPU", "ours", "nothing moved"))
        if "ms" not in ours:
            continue
        cells = [f"{one['ms']:.1f}", f"**{ours['ms']:.1f}**", f"{ours['scaling']:.2f}"]
        cells.append(f"{still['ms']:.1f}" if "ms" in still else "–")
        cells += [peer_cell(found(rows, peer, mask), ours) for peer in peers]
        lines.append("| " + " | ".join([words, *cells]) + " |")
    return "\n".join(lines)


def memory(rows: list[Row]) -> str:
    """A line for each mask: what the rank with the most takes, and over its rows and those that it fetches."""
    head = [
        "MiB of the fullest rank",
        "forward",
        "to its rows",
        "forward and backward",
        "to its rows",
        "with sums of dQ",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for mask, words in NAMES.items():
        row = found(rows, "ours", mask)
        if "step_bytes" in row:
            forward, step = (max(row[f"{name}_bytes"]) / MIB for name in ("forward", "step"))
            ratios = [row[f"{name}_memory_ratio"] for name in ("forward", "step", "with_sums")]
            cells = [f"{forward:,.0f}", f"{ratios[0]:.2f}", f"{step:,.0f}", f"{ratios[1]:.2f}", f"{ratios[2]:.2f}"]
            lines.append("| " + " | ".join([words, *cells]) + " |")
    return "\n".join(lines) if len(lines) > 2 else ""


def checks(rows: list[Row]) -> str:
    """What was held to one GPU in the run, in a sentence."""
    held = [row for row in rows if "check" in row and "errors" in row]
    if not held:
        return ""
    right = sum(row["ok_on_all"] for row in held)
    same = [row["same_bits"] for row in held if row.get("deterministic")]
    worst = max(max(row["errors"][:4]) for row in held)
    said = f"Against one GPU {right} of {len(held)} calls agree (relative errors at most {worst:.1e})"
    said += f"; with `deterministic=True` {sum(same)} of {len(same)} gave the same bits twice" if same else ""
    for row in rows:
        if row.get("check") == "one rank fails":
            said += f". A rank that left: the others raised `{row['raised']}` after {row['seconds']:.1f} s"
    return said + "."


def generated(kept: dict[str, Any]) -> str:
    """What docs/parallel.md says of a run."""
    rows = kept["rows"]
    run = f"**{ranks_of(rows)} GPUs**, commit {kept['commit'][:7]}, {kept['date']}, torch {kept['versions']['torch']}:"
    return "\n\n".join(part for part in (run, times(rows), checks(rows), memory(rows)) if part)


def all_kept() -> str:
    """What docs/parallel.md says of the kept runs, each number of GPUs for itself."""
    return "\n\n".join(generated(json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json")))


def main() -> None:
    source, name = sys.argv[1:]
    kept = kept_of(Path(source).read_text().splitlines())
    (RESULTS / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
