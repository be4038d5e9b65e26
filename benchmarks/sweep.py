"""How good choices are where nobody chose: drawn shapes, every candidate and the peers in turns.

    python -m benchmarks.sweep forward --part fit --out benchmarks/results/sweeps/h200-forward-fit.json
    python -m benchmarks.sweep forward --part unseen --seed 11 --others 2 --share 1/3 --out unseen-1.json
    python -m benchmarks.sweep --report benchmarks/results/sweeps/*.json

Of each shape (`shapes.py`) it times what is chosen, the other candidates (`candidates.py`), flash-attn-4 and cuDNN, or
FlexAttention where these serve no such mods; all are checked against fp64 before. **Regret** is the time of what is
chosen over that of the fastest candidate. Shapes of the part "fit" are what choices are fitted to; those of "held-out"
judge them; with a `--seed` of its own a part is drawn anew. `--others 2` takes little time of a GPU: candidates are
timed of those shapes alone that have so few, and of the others only what is chosen, and the peers.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import turns
from benchmarks.candidates import CANDIDATES, form_of_case, others_of
from benchmarks.cases import Case, Pattern
from benchmarks.implementations import OURS, available
from benchmarks.provenance import provenance
from benchmarks.report import judged
from benchmarks.run import Row, save
from benchmarks.shapes import SEEDS, drawn

PEERS = ("torch cuDNN", "flash-attn-4")
OTHERWISE = "FlexAttention"  # seconds to compile: where no other peer serves
BYTES_AT_ONCE = 60 << 30  # of shapes that are ready to be timed
COPIES = 5  # of a shape's tensors, in the layouts of all implementations, with outputs and gradients


def wanted(case: Case, peers: list[str], others: int | None = None) -> list[str]:
    """Who is timed for a case, by the names that `turns` knows; `others`: no candidates where there are more."""
    pattern: Pattern = case.pattern(case, torch.device("cpu"))
    served = pattern.is_plain or pattern.left_window is not None or bool(pattern.softcap or pattern.document_starts)
    served = served or (pattern.alibi_slopes is not None and case.direction == "forward")
    beside = [peer for peer in (PEERS if served else (OTHERWISE,)) if peer in peers]
    names = list(CANDIDATES[case.direction]) if others is None else others_of(case)
    return [OURS, *beside, *(f"{OURS}: {name}" for name in names if others is None or len(names) <= others)]


def waves(cases: list[Case]) -> Iterator[list[Case]]:
    """Cases in groups, each as large as memory has room for."""
    wave: list[Case] = []
    room = BYTES_AT_ONCE
    for case in cases:
        rows = case.batch * (case.heads * case.q_len + case.kv_heads * case.kv_len)
        takes = COPIES * rows * (case.dim + case.v_dim) * case.dtype.itemsize
        if wave and takes > room:
            yield wave
            wave, room = [], BYTES_AT_ONCE
        wave.append(case)
        room -= takes
    if wave:
        yield wave


def of_forms(rows: list[Row], steady: float = math.inf) -> dict[str, dict[str, float]]:
    """Milliseconds of each shape's forms, the chosen one by its own name.

    Times that spread by more than `steady` are left out: of calls that are over before the host has issued the next.
    """
    took: dict[str, dict[str, float]] = {}
    for row in rows:
        form = row["form"] if "form" in row else row["impl"].removeprefix(f"{OURS}: ")
        if "ms" in row and row["impl"].startswith(OURS) and form not in (None, OURS) and row["spread"] <= steady:
            took.setdefault(row["row"], {})[form] = row["ms"]
    return took


def report(rows: list[Row]) -> None:
    """Prints what the shapes say together, and those that say most."""
    found = judged(rows)
    if not found:
        print("no shape was timed")
        return
    regrets = [said["regret"] for said in found.values() if said["others"]]
    ratios = [said["to peer"] for said in found.values() if not math.isnan(said["to peer"])]
    print(f"{len(found)} shapes, {len(regrets)} with other candidates timed")
    if regrets:
        print(f"regret {statistics.fmean(regrets) - 1:.2%} in the mean, {max(regrets) - 1:.1%} at most")
    if ratios:
        behind, far = (sum(ratio < least for ratio in ratios) for least in (1, 0.95))
        print(
            f"to the best peer {statistics.geometric_mean(ratios):.3f} in the geometric mean, {min(ratios):.3f} at "
            f"least, behind in {behind} of {len(ratios)} ({behind / len(ratios):.1%}), below 0.95 in {far}"
        )
    for name, said in sorted(found.items(), key=lambda item: -item[1]["regret"])[:25]:
        print(f"    regret {said['regret'] - 1:6.1%}  {said['best']:24} {said['to peer']:6.3f}  {name}")
    for name, said in sorted(found.items(), key=lambda item: item[1]["to peer"])[:25]:
        print(f"    to peer {said['to peer']:6.3f}  regret {said['regret'] - 1:6.1%}  {name}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("direction", nargs="?", choices=list(CANDIDATES), default="forward")
    made.add_argument("--part", choices=list(SEEDS), default="fit")
    made.add_argument("--seed", type=int, dest="drawn_by", help="draw shapes of such a part with it; default: its own")
    made.add_argument("--share", default="1/1", metavar="N/OF", help="every so many'th shape, from the N'th on")
    made.add_argument("--others", type=int, help="no candidates of shapes that have more of them; default: all")
    made.add_argument("--only", default="", help="shapes with this in their name")
    made.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="SHAPES: FIELDS",
        help="of shapes whose name matches, a candidate by name, or fields of a tiling as `tilings.py` has them",
    )
    made.add_argument("--report", nargs="+", type=Path, help="say what these results say, and run nothing")
    made.add_argument(
        "--steady",
        type=float,
        default=math.inf,
        help="times that spread by more are not reported: the host's, not the GPU's",
    )
    made.add_argument("--workers", type=int, default=14, help="processes that compile")
    made.add_argument("--rounds", type=int, default=8)
    made.add_argument("--sample", type=float, default=3.0, help="milliseconds of a sample")
    made.add_argument("--budget", type=float, default=520.0, help="seconds after which no shape is begun")
    made.add_argument("--out", type=Path)
    return made


def main() -> None:
    options = parser().parse_args()
    if options.report:
        rows = [row for path in options.report for row in json.loads(path.read_text())["rows"]]
        report([row for row in rows if row.get("spread", 0) <= options.steady])
        return
    turns.SAMPLE_MS = options.sample
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peers = [i.name for i in available(device)]
    end = time.monotonic() + options.budget
    for name, value in {"seed": int(time.time()), "log": Path("/tmp/composattn-sweep.log")}.items():
        setattr(options, name, value)
    result: dict[str, Any] = {**provenance(device), "part": options.part, "seed": options.drawn_by, "rows": []}
    number, of = map(int, options.share.split("/"))
    shapes = drawn(options.direction, options.part, options.drawn_by)[number - 1 :: of]
    cases = [case for case in shapes if options.only in case.name]
    team = turns.Team({"this": Path.cwd()}, options.workers, options.log)
    for wave in waves(cases):
        left = end - time.monotonic()
        if left <= 0:
            print(f"the budget is spent before {wave[0].name}", flush=True)
            break
        options.prepare = left * 2 / 3

        def named(case: Case, _: bool) -> list[str]:
            asked = (text.rsplit(": ", 1) for text in options.variant)
            beside = [f"{OURS}: {fields}" for shapes, fields in asked if re.search(shapes, case.name)]
            return [*wanted(case, peers, options.others), *beside]

        holders, told = team.prepare(wave, named, options)
        ready = [case for case in wave if holders[case.name]]
        print(f"{len(ready)} of {len(wave)} are ready, {end - time.monotonic():.0f} s left", flush=True)
        for case in ready:
            if time.monotonic() > end:
                break
            try:
                timed = turns.timed(case, holders[case.name], told[case.name], options)
                form = form_of_case(case)
                result["rows"] += [row | {"form": form} if row["impl"] == OURS else row for row in timed]
            except turns.Raised as error:
                print(f"{case.name}: {error}", flush=True)
        save(result, options.out)
    team.stop()
    report(result["rows"])


if __name__ == "__main__":
    main()
