"""Which calls are planned otherwise than before: thousands of drawn ones, their plans, and what differs by class.

    python -m benchmarks.plan_changes --out /tmp/before.json        # in the tree as it was
    python -m benchmarks.plan_changes --against /tmp/before.json    # in the tree as it is

Who changes a table, or what reads it, says with this what calls get that they did not get before. Lengths, heads, head
dimensions, element types, layouts, mods and schedules are drawn; no GPU is needed, and nothing is compiled.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.candidates import call_of
from benchmarks.cases import CASES
from benchmarks.shapes import every_shape
from composattn.analysis.captured_gradient import GradientProgram, fused_reads
from composattn.analysis.program import Program
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.planning.plan_backward import plan_backward
from composattn.backends.fused.tiles.target import ADA, AMPERE, BLACKWELL, HOPPER, Target
from composattn.call.problem import DENSE, Layout, Problem
from composattn.call.schedule import AUTO, Schedule
from composattn.errors import ComposattnError
from composattn.mods.dropout import Dropout
from composattn.mods.mask import Mask
from composattn.mods.score import Score

Said = dict[str, list[str]]
MOST = 16384
TARGETS: dict[str, Target] = {"hopper": HOPPER, "blackwell": BLACKWELL, "ampere": AMPERE, "ada": ADA}
IDS = torch.arange(MOST) // 700
MIXED_IDS = torch.arange(MOST) // 350 % 8
LENGTHS = torch.full((512,), 900)
SLOPES = torch.linspace(0.1, 1.0, 128)
BIAS = torch.zeros(MOST, dtype=torch.bfloat16).expand(MOST, MOST)
WIDE_BIAS = BIAS.float()[:1].expand(MOST, MOST)
MASKS: dict[str, Any] = {
    "full": None,
    "causal": lambda b, h, q, kv: q >= kv,
    "window": lambda b, h, q, kv: (q >= kv) & (q - kv < 256),
    "wide window": lambda b, h, q, kv: (q >= kv) & (q - kv < 2000),
    "dilated": lambda b, h, q, kv: (q >= kv) & (q - kv < 2048) & ((q - kv) % 4 == 0),
    "rows": lambda b, h, q, kv: (q >= kv) & (q % 7 != 3),
    "sinks and window": lambda b, h, q, kv: (kv < 4) | ((q >= kv) & (q - kv < 512)),
    "documents": lambda b, h, q, kv: IDS[q] == IDS[kv],
    "causal documents": lambda b, h, q, kv: (IDS[q] == IDS[kv]) & (q >= kv),
    "documents again": lambda b, h, q, kv: MIXED_IDS[q] == MIXED_IDS[kv],
    "lengths": lambda b, h, q, kv: kv < LENGTHS[b],
    "by head": lambda b, h, q, kv: (q >= kv) & (q - kv < 256 * (h + 1)),
    "grid": lambda b, h, q, kv: ((q // 64 - kv // 64).abs() <= 3) & ((q % 64 - kv % 64).abs() <= 3),
    "opaque": lambda b, h, q, kv: (q * kv) % 7 < 3,
}
SCORES: dict[str, Any] = {
    "plain": None,
    "ALiBi": lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q),
    "soft cap": lambda s, b, h, q, kv: 30.0 * torch.tanh(s / 30.0),
    "other": lambda s, b, h, q, kv: torch.where(q >= kv, s, -1e9),
    "by key": lambda s, b, h, q, kv: s + SLOPES[kv % 128],
    "bias": lambda s, b, h, q, kv: s + BIAS[q, kv],
    "wide bias": lambda s, b, h, q, kv: s + WIDE_BIAS[q, kv],
    "relative": lambda s, b, h, q, kv: s + WIDE_BIAS[0, (q - kv + MOST) % MOST],
}
# gradients of these are wanted in a backward
LEARNED: dict[str, Any] = {
    "learned head": (lambda t: lambda s, b, h, q, kv: s - t[h] * (q - kv), (128,)),
    "learned column": (lambda t: lambda s, b, h, q, kv: s + t[kv], (MOST,)),
    "learned row": (lambda t: lambda s, b, h, q, kv: s + 0.01 * t[q] * (q - kv), (MOST,)),
    "learned distance": (lambda t: lambda s, b, h, q, kv: s + t[q - kv + MOST], (2 * MOST,)),
    "learned curve": (lambda t: lambda s, b, h, q, kv: torch.tanh(s + t[q - kv + MOST]), (2 * MOST,)),
    "learned pair": (lambda t: lambda s, b, h, q, kv: s + t[q, kv], (MOST, MOST)),
}
DIMS = (8, 32, 40, 64, 64, 64, 72, 80, 96, 96, 104, 128, 128, 128, 128, 144, 160, 192, 192, 256, 256, 320, 512, 576)
HEADS = ((4, 4), (8, 8), (16, 16), (12, 12), (16, 2), (24, 3), (28, 4), (32, 8), (40, 8), (64, 8), (8, 1), (128, 128))
SCHEDULES = (
    *([AUTO] * 12), Schedule(batch_invariant=True), Schedule(persistent=True), Schedule(persistent=False),
    Schedule(split_kv=3), Schedule(heads_together=2), Schedule(pack_gqa=False), Schedule(order="in_order"),
)  # fmt: skip
TYPES = torch.float8_e4m3fn, torch.float8_e5m2
NARROW = (*([None] * 10), (torch.bfloat16, *TYPES), (torch.float8_e4m3fn,) * 3)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A call, by what was drawn."""

    problem: Problem
    score: str
    mask: str
    dropout: bool
    direction: str
    target: str
    deterministic: bool

    def __str__(self) -> str:
        p, more = self.problem, [word for word in ("dropout", "deterministic") if getattr(self, word)]
        at_most = [f"{name} {most}" for name, most in zip(("queries", "keys"), p.layout.hints, strict=False) if most]
        lies = f"{p.layout.q}/{p.layout.kv} {' '.join(at_most)}"
        return (
            f"{self.target} {self.direction} B{p.batch} H{p.q_heads}/{p.kv_heads} S{p.q_len} on {p.kv_len} "
            f"D{p.head_dim}/{p.head_dim_v} {p.types} {lies} {self.score}, {self.mask} "
            f"{' '.join(more)} {'' if p.schedule == AUTO else p.schedule}"
        )

    @property
    def program(self) -> Program:
        return program(self.score, self.mask, self.dropout, self.direction)


def said(problem: Problem, mods: Program, target: Target, direction: str, deterministic: bool) -> Said:
    """What is planned, in numbers and words, and the class of the call; the error's name where it is refused."""
    try:
        if direction == "forward":
            plan: Any = plan_forward(problem, mods, target)
            numbers = str(plan.splits)
        else:
            plan = plan_backward(problem, mods, target, deterministic=deterministic).main
            numbers = str(plan.cut)
        text, _, _ = str(plan).partition("\n  class ")
        return {"plan": [repr(plan.tiling), numbers, *text.splitlines()], "words": plan.why.splitlines()}
    except ComposattnError as error:
        return {"plan": [type(error).__name__], "words": []}


@functools.cache
def program(score: str, mask: str, dropout: bool, direction: str) -> Program:
    """The mods of a call, with gradients of what they learn in a backward."""
    made, size = LEARNED.get(score, (None, ()))
    score_mod = SCORES[score] if made is None else made(torch.zeros(1).expand(size).requires_grad_())
    keep = Dropout.with_seed(0.1, 5) if dropout else None
    bare = Program(
        None if score_mod is None else Score.of(score_mod).expr,
        None if MASKS[mask] is None else Mask.of(MASKS[mask]).expr,
        **{} if keep is None else {"keep": keep.expr},
    )
    learned = {capture: reads for capture, reads in fused_reads(bare).items() if reads}
    return GradientProgram(bare, learned) if made is not None and direction == "backward" else bare


def length(generator: random.Random, least: int = 16) -> int:
    """Half are powers of two and their halves' sums, the others any."""
    if generator.random() < 0.5:
        return generator.choice((64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, MOST))
    return round(math.exp(generator.uniform(math.log(least), math.log(MOST))))


def layout(generator: random.Random, q_len: int, direction: str) -> Layout:
    of_forwards = ["paged", "packed paged"] if direction == "forward" else []  # no gradient goes into pages
    kind = generator.choice(["dense"] * 5 + ["packed", "used", "mixed", *of_forwards])
    most = generator.choice([None, q_len])
    return {
        "dense": DENSE,
        "packed": Layout("packed", "packed", max_q_len=most, max_kv_len=most, keys_lie_as_queries=True),
        "used": Layout("packed", "packed", used_q=True, used_kv=True),
        "paged": Layout(kv="paged", page_size=16, used_kv=True),
        "packed paged": Layout("packed", "paged", page_size=128, used_kv=True, max_q_len=most),
        "mixed": Layout("packed", "dense", max_q_len=most),
    }[kind]


def drawn(count: int, seed: int) -> Iterator[Drawn]:
    generator = random.Random(seed)
    for _ in range(count):
        direction = generator.choice(["forward", "backward"])
        heads, kv_heads = generator.choice(HEADS)
        q_len = generator.choice([1, 1, 4, 8, 16, 64]) if generator.random() < 0.15 else length(generator)
        kv_len = length(generator, 1) if generator.random() < 0.3 or q_len < 128 else q_len
        d = generator.choice(DIMS)
        dv = generator.choice(DIMS) if generator.random() < 0.1 else d
        batch = generator.choice((1, 1, 1, 2, 4, 8, 16, 64, 200))
        lies = layout(generator, q_len, direction)
        rows = {"q": q_len * (batch if lies.q == "packed" else 1), "kv": kv_len * (batch if lies.kv == "packed" else 1)}
        problem = Problem(
            batch, heads, kv_heads, rows["q"], rows["kv"], d, dv, generator.choice((torch.bfloat16, torch.float16)),
            torch.device("cpu"), layout=lies, schedule=generator.choice(SCHEDULES),
        )  # fmt: skip
        narrow = generator.choice(NARROW) if direction == "forward" else None
        if narrow is not None and (narrow[0] is torch.bfloat16 or max(d, dv) <= 256):  # wider products are of 16 bits
            problem = dataclasses.replace(problem, dtype=torch.bfloat16, narrow=narrow)
        scores = [*SCORES, *(LEARNED if direction == "backward" else ()), *["plain"] * len(SCORES)]
        yield Drawn(
            problem, generator.choice(scores), generator.choice([*MASKS, *["full", "causal"] * 4]),
            generator.random() < 0.05, direction, generator.choice(["hopper"] * 4 + ["blackwell", "ampere", "ada"]),
            direction == "backward" and generator.random() < 0.3,
        )  # fmt: skip


def of_cases() -> dict[str, Said]:
    """Each call of the harness and of sweeps: its plan, and what is said of it."""
    found: dict[str, Said] = {}
    for case in (*CASES, *every_shape()):
        if not case.page_size and case.measure in ("tflops", "tbps"):
            for name in ("", " in order") if case.direction == "backward" else ("",):
                found[case.name + name] = said(*call_of(case), HOPPER, case.direction, bool(name))
    return found


def of_drawn(count: int, seed: int) -> dict[str, Said]:
    return {
        str(call): said(call.problem, call.program, TARGETS[call.target], call.direction, call.deterministic)
        for call in drawn(count, seed)
    }


def compared(before: dict[str, Any], now: dict[str, Any], shown: int) -> int:
    """Prints what differs, by direction and mods, with some calls of each; returns how many plans differ."""
    differ = [call for call in now if now[call]["plan"] != before[call]["plan"]]
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for call in differ:
        groups[" ".join(now[call]["words"][:1]) or "refused"].append(call)
    for group, calls in sorted(groups.items(), key=lambda item: -len(item[1])):
        print(f"{len(calls):5} {group}")
        for call in calls[:shown]:
            print(f"      {call}")
            for was, so in zip(before[call]["plan"], now[call]["plan"], strict=False):
                if was != so:
                    print(f"        - {was}\n        + {so}")
    others = sum(now[call]["words"] != before[call]["words"] for call in now)
    print(f"of {len(now)} calls {len(differ)} are planned otherwise, and {others} described so")
    return len(differ)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shown", type=int, default=1, help="calls of a class that are printed")
    parser.add_argument("--out", type=Path, help="writes the plans")
    parser.add_argument("--against", type=Path, help="compares them with those of this file")
    options = parser.parse_args()
    now = of_cases() | of_drawn(options.count, options.seed)
    if options.out is not None:
        options.out.write_text(json.dumps(now))
    if options.against is not None:
        raise SystemExit(compared(json.loads(options.against.read_text()), now, options.shown) > 0)


if __name__ == "__main__":
    main()
