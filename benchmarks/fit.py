"""What fits in registers, found by compiling with no GPU: columns of K and V that wait there, keys of a forward's tile.

    python -m benchmarks.fit backward --out benchmarks/results/compiled/hopper-fit-backward.json
    python -m benchmarks.fit forward --only "D 96"

Of each sample (head dimension, score mod, mask) it compiles the plan as the tables have it, then with more by 16 as
long as nothing spills and no product waits for another one (ptxas' warning C7510), or with less until that is so. The
file says what the tables take and the most that fits: who changes "resident" of `hopper/backward.json`, or
"taken" of `hopper/forward.json`, reads it, and a test holds the tables to it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Direction
from benchmarks.provenance import provenance
from composattn.analysis.program import Program
from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.planning.plan_backward import plan_backward
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Problem
from composattn.mods import causal, softcap
from composattn.mods.mask import Mask
from composattn.mods.score import Score

STEP = 16  # columns, or keys
MOST_STEPS = 3  # above what the tables say
VARIED: dict[Direction, str] = {"forward": "tile_n", "backward": "resident"}
SLOPES = torch.linspace(0.1, 1.0, 16)
BIAS = torch.zeros(4096, 4096, dtype=torch.bfloat16)
SCORES: dict[str, Any] = {
    "plain": None,
    "ALiBi": lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q),
    "soft cap": softcap(30.0),
    "bias": lambda s, b, h, q, kv: s + BIAS[q, kv],
}
MASKS: dict[str, Any] = {
    "full": None, "causal": causal(), "dilated": lambda b, h, q, kv: (q >= kv) & ((q - kv) % 4 == 0)
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sample:
    """A call of 16 heads and 4,096 tokens."""

    direction: Direction
    d: int
    score: str
    mask: str

    def __str__(self) -> str:
        return f"{self.direction} D {self.d} {self.score} {self.mask}"

    def plan(self) -> Any:
        score, mask = SCORES[self.score], MASKS[self.mask]
        program = Program(None if score is None else Score.of(score).expr, None if mask is None else Mask.of(mask).expr)
        problem = Problem(4, 16, 16, 4096, 4096, self.d, self.d, torch.bfloat16, torch.device("cpu"))
        if self.direction == "forward":
            return plan_forward(problem, program, HOPPER)
        return plan_backward(problem, program, HOPPER).main


def samples(direction: Direction) -> Iterator[Sample]:
    for d, score, mask in itertools.product((64, 96, 128), SCORES, MASKS):
        if mask == "causal" or score == "plain":
            yield Sample(direction, d, score, mask)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Spilling instructions, and those by which warps wait for products; what a block takes of shared memory."""

    spills: int
    waits: int
    bytes: int

    @classmethod
    def of(cls, plan: Any) -> Cost:
        made = compile_offline(plan)
        return cls(
            made.spills or 0, made.mnemonics["WARPGROUP"], plan.shared_memory * getattr(plan.tiling, "blocks", 1)
        )


def fitted(sample: Sample) -> dict[str, int]:
    """What the tables take, the most that fits, and how many instructions spill with what the tables take."""
    plan, name = sample.plan(), VARIED[sample.direction]
    table = getattr(plan.tiling, name)
    costs: dict[int, Cost] = {}

    def fits(value: int) -> bool:
        if value not in costs:
            costs[value] = Cost.of(dataclasses.replace(plan, tiling=dataclasses.replace(plan.tiling, **{name: value})))
        found, least = costs[value], min(costs.values(), key=lambda c: (c.waits, c.spills))
        return found.spills <= least.spills and found.waits <= least.waits and found.bytes <= HOPPER.shared_memory

    least, most = (48, 256) if name == "tile_n" else (0, plan.tiling.d + plan.tiling.dv)
    fits(max(least, table - STEP))
    best = table
    if fits(table):
        while best + STEP <= min(most, table + MOST_STEPS * STEP) and fits(best + STEP):
            best += STEP
    else:
        best = next((n for n in range(table - STEP, least, -STEP) if fits(n)), least)
    return {"table": table, "fits": best, "spills": costs[table].spills}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("direction", choices=VARIED)
    parser.add_argument("--only", default="", help="samples with this in their name")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    known = json.loads(options.out.read_text())["samples"] if options.out and options.out.exists() else {}
    for sample in samples(options.direction):
        if options.only in str(sample):
            known[str(sample)] = fitted(sample)
            print(f"{sample}: {known[str(sample)]}", flush=True)
            if options.out:
                made = {**provenance(torch.device("cpu")), "samples": known}
                options.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
