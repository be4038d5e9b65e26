"""The tables at the head of docs/benchmarks.md: a user's case, a line a run, one shape by mask, and host times."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from benchmarks.implementations import OURS
from benchmarks.report import SHOWN, Result, Row, best_peer, cell, is_measured, ratio_to_best, runs_of_gpus

RUNS = ("forward", "backward", "graph", "decode", "halves", "fa3", "trained", "deviation", "wide")
YOUR_CASE = {
    "causal, 16 heads of 128, 2 × 8k tokens": "D128 S8192 causal",
    "causal, 32k tokens": "D128 S32768 causal",
    "causal, 2k tokens": "D128 S2048 causal",
    "no mask (encoders, diffusion), 8k": "D128 S8192 full",
    "an image of FLUX.1 with its text, 4,608 tokens": "D128 B1 S4608 24 heads full",
    "Llama 3 8B: 32 heads on 8 of 128, 8k": "D128 B2 S8192 GQA 32/8 causal",
    "GPT-OSS, a global layer: 64 heads on 8 of 64, 8k": "D64 B2 S8192 GQA 64/8 causal",
    "Gemma 2 9B: 16 heads on 8 of 256, 8k": "D256 B2 S8192 GQA 16/8 causal",
    "DeepSeek-V3's prompts: D 192, Dv 128, 8k": "D192/128 S8192 causal",
    "sliding window of 1,024, 8k": "D128 S8192 window",
    "packed documents by ids, causal, 8k": "D128 S8192 eight_causal_documents",
    "a prefix that all see, 8k": "D128 S8192 prefix",
    "ALiBi, 8k": "D128 S8192 alibi",
    "soft cap, 8k": "D128 S8192 softcap",
    "a learned bias by head and distance, 8k": "D128 S8192 relative",
    "a bias of each pair, 8k": "D128 S8192 pair_bias",
    "neighbours 7×7 of an image of 128×128": "D128 neighborhood 128x128 7x7",
}
"""What users have, in their words, and the rows that say how fast it is: forward and backward."""

READS = {
    "a token each for 8 sequences of 8k, 64 heads on 8": "decode B8 q1 kv8192 GQA 64/8 D128, in a graph",
    "a token each for 64 sequences of 8k, 64 heads on 8": "decode B64 q1 kv8192 GQA 64/8 D128, in a graph",
    "one sequence of 128k, 32 heads on 8": "decode B1 q1 kv131072 GQA 32/8 D128",
    "one sequence of 128k, in pages of 64": "decode B1 q1 kv131072 GQA 32/8 D128 pages of 64",
}
"""Of decoding: TB/s, keys and values read once."""

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
    for kind in RUNS:
        rows = runs[kind].table.values() if kind in runs else ()
        ratios = [ratio for row in rows if (ratio := ratio_to_best(row))]
        if ratios:
            of_all = statistics.median(ratios), min(ratios), max(ratios)
            behind = str(sum(ratio < 1 for ratio in ratios))
            name = f"[{runs[kind].title}](#{runs[kind].anchor})"
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


def your_case(results: list[Result]) -> str:
    """What users have, a line each: ours, and how much faster than the fastest other, of the newest runs with them."""
    runs = [run for kind, run in runs_of_gpus(results).items() if kind in ("forward", "backward", "graph", "decode")]
    tables = {row: rows for run in runs for row, rows in run.table.items() if is_measured(rows.get(OURS, {}))}
    lines = []
    for words, case in YOUR_CASE.items():
        found = [tables.get(f"{way} {case}", {}) for way in ("forward", "backward")]
        if all(found):
            lines.append([words, *(part for rows in found for part in _gained(rows))])
    trained = table(
        ["your case", "forward, TFLOP/s", "to the fastest other", "backward", "to the fastest other"], lines
    )
    rows = [[words, *_gained(tables[case])] for words, case in READS.items() if case in tables]
    return f"{trained}\n{table(['decoding', 'TB/s', 'to the fastest other'], rows)}"


def _gained(rows: dict[str, Row]) -> tuple[str, str]:
    peer, ratio = best_peer(rows), ratio_to_best(rows)
    name = peer[0].replace("-", "\N{NON-BREAKING HYPHEN}") if peer else ""  # a column is as wide as two names
    return cell(rows[OURS]), f"{ratio:.2f}×, {name}" if ratio and peer else "–"


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
    """All of them, each with a sentence before it; "" where no run of a GPU is kept."""
    runs = runs_of_gpus(results)
    if not {"forward", "backward", "core"} <= set(runs):
        return ""
    machine = runs["forward"].facts["machine"].split(",")[0]
    parts = [
        f"Your case and its speed, on {machine} in bf16. All rows, and how they are measured, are below.\n",
        your_case(results),
        "Our speed over that of the fastest other implementation of each row. Inputs are N(0, 1) where nothing else is",
        f"said ({machine}).\n",
        to_peers(results),
        "TFLOP/s of the visible pairs, bf16, both directions:\n",
        speeds(results),
        "What the host takes to issue a call:\n",
        host_times(results),
    ]
    return "\n".join(parts)
