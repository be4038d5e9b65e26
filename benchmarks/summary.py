"""The three tables at the head of docs/benchmarks.md: all rows in a line a run, one shape by mask, and host times."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from benchmarks.implementations import OURS
from benchmarks.report import SHOWN, Result, Row, best_peer, cell, is_measured, ratio_to_best, runs_of_gpus

RUNS = {
    "forward": "forward",
    "backward": "backward",
    "graph": "short calls and decode, in a graph",
    "decode": "decode",
    "halves": "bf16 and fp16",
    "deviation": "forward, scores that deviate by 2, 3 and 6",
    "wide": "forward, D above 256",
}
HOST = {
    "ca.Attention, causal": "`ca.Attention`, causal",
    "ca.attention, alibi(slopes)": "`alibi(slopes)`, made in the call",
    "ca.attention, lambda over a tensor": "a lambda over a tensor",
    "ca.attention, alibi(slopes) >> softcap(30.0), causal() & document(ids)": "four mods joined in the call",
    "flex_attention, block_mask": "`flex_attention` with a `BlockMask`",
    "ca.nn.Attention, score_mod as a method": "`ca.nn.Attention`",
}
SDPA = "torch SDPA"


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = list(head)
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(rows + ["| " + " | ".join(line) + " |" for line in lines]) + "\n"


def to_peers(results: list[Result]) -> str:
    """A line a run: how many rows, in how many a peer is faster, and the ratios to the fastest peer of each row."""
    runs, lines = runs_of_gpus(results), []
    for kind, words in RUNS.items():
        rows = runs[kind].table.values() if kind in runs else ()
        ratios = [ratio for row in rows if (ratio := ratio_to_best(row))]
        if ratios:
            of_all = statistics.median(ratios), min(ratios), max(ratios)
            behind = str(sum(ratio < 1 for ratio in ratios))
            name = f"[{words}](#{runs[kind].name})"
            lines.append([name, str(len(ratios)), behind, *(f"{ratio:.2f}×" for ratio in of_all)])
    return table(["run", "rows", "behind in", "median", "least", "most"], lines)


def speeds(results: list[Result]) -> str:
    """At `SHOWN`, a line a pattern: ours and the fastest peer, forward and backward; rows that both directions have."""
    runs = runs_of_gpus(results)
    ways = [runs[way].table if way in runs else {} for way in ("forward", "backward")]
    patterns = [case.partition(SHOWN)[2].strip() for case in ways[0] if SHOWN in case]
    both = [name for name in patterns if f"backward {SHOWN} {name}" in ways[1]]
    lines = []
    for name in both:
        found = [way[f"{words} {SHOWN} {name}"] for words, way in zip(("forward", "backward"), ways, strict=True)]
        lines.append([name.replace("_", " "), *(part for rows in found for part in _beside(rows))])
    return table(["D 128, S 8192", "forward", "fastest other", "backward", "fastest other"], lines)


def _beside(rows: dict[str, Row]) -> tuple[str, str]:
    peer = best_peer(rows)
    return cell(rows.get(OURS)), f"{cell(rows[peer[0]])}, {peer[0]}" if peer else "–"


def host_times(results: list[Result]) -> str:
    """Microseconds until the host has issued a call, a line an entry, beside torch's SDPA in the same turns."""
    cases = runs_of_gpus(results)["core"].table if "core" in runs_of_gpus(results) else {}
    lines = []
    for entry, words in HOST.items():
        found = [cases.get(f"host {way}: {entry}", {}) for way in ("forward", "forward and backward")]
        if all(is_measured(rows.get(OURS, {})) for rows in found):
            lines.append([words, *(_micro(rows.get(name)) for rows in found for name in (OURS, SDPA))])
    return table(["on one core", "forward", "SDPA", "forward and backward", "SDPA"], lines)


def _micro(row: Row | None) -> str:
    return f"{row['ms'] * 1e3:.0f} µs" if row and "ms" in row else "–"


def summary(results: list[Result]) -> str:
    """All three, each with a sentence before it; "" where no run of a GPU is kept."""
    runs = runs_of_gpus(results)
    if not {"forward", "backward", "core"} <= set(runs):
        return ""
    machine = runs["forward"].facts["machine"].split(",")[0]
    parts = [
        "Our speed over that of the fastest other implementation of each row. Inputs are N(0, 1) where nothing else is",
        f"said ({machine}).\n",
        to_peers(results),
        "TFLOP/s of the visible pairs, bf16, both directions:\n",
        speeds(results),
        "What the host takes to issue a call:\n",
        host_times(results),
    ]
    return "\n".join(parts)
