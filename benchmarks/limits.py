"""What the kernels of a counted row can't beat: the clocks of the busiest unit for their tiles, in their rounds.

    python -m benchmarks.limits --only 'D96 S8192'      of rows and implementations that benchmarks/counters.py kept

Needs no GPU. Rows that are not asked for keep what they have, with the commit that it is of.

Counts are those of machine code (`benchmarks.model`), with its rates; nothing waits for anything. So this is a
bound and no forecast (docs/tile_model.md): what a kernel takes beyond it, it waits or stands in line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import CASES, Case
from benchmarks.counters import FLASH, OUT
from benchmarks.implementations import OURS, PACKED
from benchmarks.model import kernels
from benchmarks.model.clocks import TARGETS
from benchmarks.model.costs import tile_cost
from benchmarks.model.held import ARCH, blocks
from benchmarks.model.peer import PeerRefused
from benchmarks.model.visits import makespan, of_head
from benchmarks.provenance import provenance
from composattn.errors import ComposattnError

CPU = torch.device("cpu")
KEPT = OUT / "limits.json"


@dataclasses.dataclass(frozen=True)
class Limit:
    """Limits of a main kernel. `pairs`: visited for each visible one. `balance`: share of the SMs' time in use.

    `unit` is the busiest of a tile, with the clocks it takes for a pair of a tile that needs no test, `tested_unit` of
    one that does. `clocks` are those of the whole call.
    """

    tile: str
    pairs: float
    tested: float
    rounds: float
    balance: float
    unit: str
    tested_unit: str
    clocks: float
    flop_clocks: float


def limit(case: Case, name: str) -> Limit:
    """Raises `PeerRefused` or a `ComposattnError` where there is no such kernel."""
    pattern, packed = case.pattern(case, CPU), name == PACKED
    if name == FLASH:
        kernel, packed = kernels.peers(case, pattern, ARCH), bool(pattern.document_starts)
    else:
        kernel = kernels.ours(case, pattern, ARCH, packed)
        packed = packed or kernel.in_segments
    plain, tested = (tile_cost(kernel, ARCH, is_tested) for is_tested in (False, True))
    heads = of_head(case, pattern, kernel.queries, kernel.keys, packed)
    times, gpu = blocks(case, kernel, heads, plain.bound, tested.bound), TARGETS[ARCH]
    # of blocks that share an SM each has its part of the units
    span = makespan((t * kernel.together for t in times), gpu.sms * kernel.together)
    tiles, of_tested = (sum(int(getattr(v, which).sum()) for v in heads) for which in ("plain", "tested"))
    visible = case.visible_pairs(pattern, CPU)
    return Limit(
        f"{kernel.rows} x {kernel.keys}",
        (tiles + of_tested) * kernel.queries * kernel.keys * case.batch * case.heads / visible,
        of_tested / (tiles + of_tested),
        len(times) / gpu.sms / kernel.together,
        sum(times) / gpu.sms / span,
        plain.unit,
        tested.unit,
        span,
        case.flops(visible) / gpu.sms / gpu.matrix,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression on the case's name")
    asked = re.compile(parser.parse_args().only)
    cases = {case.name: case for case in CASES}
    counted = {(row["row"], row["impl"]): 0 for path in sorted(OUT.glob("h*.json")) for row in _rows(path)}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    if KEPT.exists():
        kept = json.loads(KEPT.read_text())
        found = {(row["row"], row["impl"]): {"commit": kept["commit"]} | row for row in kept["rows"]}
    for row, name in counted:
        if name not in (OURS, PACKED, FLASH) or cases[row].measure != "tflops" or not asked.search(row):
            continue
        found.pop((row, name), None)  # what is refused has no older bound
        try:
            made = limit(cases[row], name)
        except (PeerRefused, ComposattnError, KeyError) as refused:
            print(f"{row}: {name}: {str(refused).strip().splitlines()[-1][:200]}", file=sys.stderr)
            continue
        found[row, name] = {"row": row, "impl": name} | dataclasses.asdict(made)
        print(found[row, name], flush=True)
        KEPT.write_text(json.dumps(provenance(CPU) | {"rows": list(found.values())}, indent=1) + "\n")
    return 0


def _rows(path: Path) -> list[dict[str, Any]]:
    return [row for row in json.loads(path.read_text())["rows"] if row.get("kernels")]


if __name__ == "__main__":
    sys.exit(main())
