"""What the README says of speed, in words: each figure from the kept results, every row counted, slower ones too."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable

from benchmarks.implementations import OURS
from benchmarks.report import (
    FLEX,
    RESULTS,
    SPEED,
    Result,
    Row,
    fraction_of_gemm,
    judged,
    ratio_to_best,
    runs_of_gpus,
    spread_of,
)

NAMES = {
    "flash-attn-3": "FlashAttention-3",
    "flash-attn-4": "flash-attn-4",
    "torch cuDNN": "PyTorch's cuDNN",
    "cudnn.flex": "cudnn.flex",
    "FlexAttention": "compiled FlexAttention",
}
ALONE = {"forward": "fa3"}
"""A direction whose rows were timed beside one more implementation in another run: its kind."""

TRAINED = "trained scores: "
STEADY = 0.05  # of drawn shapes: times that spread by more are of calls that are over before the host issues the next


def to_fastest(runs: dict[str, Result], way: str) -> dict[str, float]:
    """By row: ours over the fastest other, each other in its own run, in turns with ours."""
    found: dict[str, float] = {}
    for kind in (way, ALONE.get(way, "")):
        for row, rows in runs[kind].table.items() if kind in runs else ():
            ratio = ratio_to_best(rows) if "tflops" in rows.get(OURS, {}) else None
            if ratio and (kind == way or row in found):
                found[row] = min(ratio, found.get(row, ratio))
    return found


def counted(words: str, ratios: Iterable[float], more: str = "") -> list[str]:
    known = list(ratios)
    behind = sum(ratio < 1 for ratio in known)
    return [f"- {words}: {spread_of(known)};", f"  ours is slower in {behind} of {len(known)} rows.{more}"]


def peers(runs: dict[str, Result]) -> str:
    """Names of the implementations that rows are compared with, in words."""
    kinds = ("forward", "backward", *ALONE.values())
    there = {name for kind in kinds if kind in runs for rows in runs[kind].table.values() for name in rows}
    named = [words for name, words in NAMES.items() if name in there]
    return f"{', '.join(named[:-1])} and {named[-1]}" if len(named) > 1 else "".join(named)


def of_trained(run: Result) -> list[str]:
    """Rows whose scores lie as a trained model's, and the same rows of N(0, 1) in the same turns."""
    plain: dict[str, float] = {}
    trained: dict[str, float] = {}
    for row, rows in run.table.items():
        ratio = ratio_to_best(rows)
        if ratio is not None:
            (trained if row.startswith(TRAINED) else plain)[row.removeprefix(TRAINED)] = ratio
    both = [row for row in trained if row in plain]
    if not both:
        return []
    beside = f" The same rows of N(0, 1), in the same turns: {spread_of([plain[row] for row in both])}."
    ways = " and ".join(way for way in ("forward", "backward") if any(row.startswith(way) for row in both))
    return counted(f"scores as in the heads of a trained model, {ways}", [trained[row] for row in both], beside)


def sweeps() -> dict[str, list[Row]]:
    """Rows of shapes held out when choices were fitted, by direction: "unseen" ones, where such a run is kept."""
    found = {}
    for part, way in itertools.product(("held-out", "unseen"), ("forward", "backward")):
        for path in (RESULTS / "sweeps").glob(f"*-{way}-{part}*.json"):
            found[way] = json.loads(path.read_text())["rows"]
    return found


def of_shapes(drawn: dict[str, list[Row]]) -> list[str]:
    lines = []
    for way, rows in drawn.items():
        every, steady = (_to_peers(part) for part in (rows, [r for r in rows if r.get("spread", 0) <= STEADY]))
        mean = f" Geometric mean {statistics.geometric_mean(steady):.2f}×."
        if len(steady) < len(every):
            mean += f" {len(every) - len(steady)} whose times spread by more than {STEADY:.0%} are left out."
        words = f"{way} of shapes held out when choices were fitted, half of models and half drawn"
        lines += counted(words, steady, mean)
    return lines


def _to_peers(rows: list[Row]) -> list[float]:
    return [said["to peer"] for said in judged(rows).values() if not math.isnan(said["to peer"])]


def headline(results: list[Result], drawn: dict[str, list[Row]]) -> str:
    """The README's plot and what it says in words; "" where runs of both directions on a GPU lack.

    drawn: what `sweeps` gives.
    """
    runs = runs_of_gpus(results)
    if not {"forward", "backward"} <= set(runs):
        return ""
    machine = runs["forward"].facts["machine"].split(",")[0]
    machine = machine[0].upper() + machine[1:]
    lines = [
        f"![TFLOP/s by mask and score mod, forward and backward](docs/plots/{SPEED})\n",
        f"{machine}, bf16, TFLOP/s of the visible pairs. Where a bar is missing, that run did not measure it, or the",
        "implementation has no argument for the case. The ratios count all rows of these runs, not only those shown.",
        "A ratio is our speed over that of another implementation in the same run: above 1×, ours is faster. Each row",
        f"is compared with the fastest of those that have an argument for it: {peers(runs)}.",
        "Inputs are N(0, 1), so scores deviate by 1, but where more is said.\n",
    ]
    for way in ("forward", "backward"):
        yardstick = [f for row in runs[way].table.values() if (f := fraction_of_gemm(row))]
        to_gemm = f" To a cuBLAS matrix product: {spread_of(yardstick)}." if yardstick else ""
        lines += counted(f"{way}, to the fastest other of each row", to_fastest(runs, way).values(), to_gemm)
    if "trained" in runs:
        lines += of_trained(runs["trained"])
    lines += of_shapes(drawn)
    if "deviation" in runs:
        ratios = to_fastest(runs, "deviation").values()
        lines += counted("forward of scores that deviate by 2 to 6, to the fastest other of each row", ratios)
    flex = to_flex(runs)
    lines.append(f"- to compiled FlexAttention, both directions, {len(flex)} rows: {spread_of(flex)}.")
    return "\n".join(lines) + "\n"


def to_flex(runs: dict[str, Result]) -> list[float]:
    """Ours over compiled FlexAttention, of all rows of all runs that have both."""
    every = [row for r in runs.values() for row in r.table.values() if FLEX in row and OURS in row]
    pairs = [{OURS: row[OURS], FLEX: row[FLEX]} for row in every if "tflops" in row[OURS]]
    return [ratio for pair in pairs if (ratio := ratio_to_best(pair))]


def why(results: list[Result]) -> str:
    """Three lines: why not FlexAttention; "" where a run lacks."""
    runs = runs_of_gpus(results)
    if not {"forward", "backward", "planning"} <= set(runs):
        return ""
    flex = to_flex(runs)
    machine = runs["forward"].facts["machine"].split(",")[0].removeprefix("one NVIDIA ")
    planned = {(row["row"], row["impl"]): row for row in runs["planning"].facts["rows"] if row["S"] == 16384}
    ours, theirs = (planned["2-D neighbourhood", name]["peak_bytes"] / 2**20 for name in (OURS, "create_block_mask"))
    return (
        f"- **Speed**: {statistics.median(flex):.1f}× compiled FlexAttention in the median of {len(flex)} rows on an "
        f"{machine}, forward and backward,\n  and {min(flex):.1f}× or more in every row. "
        "[Against all others](#speed).\n"
        "- **Nothing to compile, no block mask**: the same lines run in eager mode, on a CPU with gradients too.\n"
        f"  To plan a 2-D neighbourhood of 16k tokens takes {ours:.1f} MiB, not {theirs:,.0f} MiB. "
        "A new mask of the same form\n  compiles nothing.\n"
        "- **Gradients** of everything that a function reads, of `lse`, and of gradients.\n"
        "  The same bits in each run if you ask.\n"
    )
