"""Products of 8 bits with scales by head, block and row, and with score mods, by tiling; beside our bf16 in one run.

python -m benchmarks.fp8_scales --lengths 16384 --rounds 5 --out result.json
python -m benchmarks.fp8_scales --dry           compiles them all, with no GPU: registers and spills
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import composattn as ca
from benchmarks.kernel_cases import Launched, by_call, compile_first, right_ones, save
from benchmarks.timing import Call, Stopwatch, interleaved
from composattn.analysis.program import Program
from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.planning.plan import ForwardPlan, plan_forward
from composattn.backends.fused.running.launch import ForwardLauncher
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Problem
from composattn.call.quantized import in_eight_bits
from composattn.mods import alibi, causal, softcap
from composattn.mods.score import Score

E4M3 = torch.float8_e4m3fn
TOKENS = 16384
HEADS = {64: 32, 128: 16, 256: 8}
SCALES: dict[str, dict[str, Any]] = {
    "head": {"scale": "head"},
    "block 64": {"scale": "block", "block": 64},
    "block 128": {"scale": "block", "block": 128},
    "token": {"scale": "token"},
}
TILINGS: dict[str, dict[str, Any]] = {
    "chosen": {},
    "3 x 128": {"tile_m": 192, "tile_n": 128, "pieces": 1, "in_turns": True},
    "3 x 128, 2 pieces": {"tile_m": 192, "tile_n": 128, "pieces": 2, "in_turns": True},
    "3 x 128, at will": {"tile_m": 192, "tile_n": 128, "pieces": 1, "in_turns": False},
    "3 x 128, 2 pieces, at will": {"tile_m": 192, "tile_n": 128, "pieces": 2, "in_turns": False},
    "with LSE": {},
    "2 x 128": {"tile_m": 128, "tile_n": 128, "pieces": 1, "in_turns": True},
    "2 x 128, 8 pieces, at will": {"tile_m": 128, "tile_n": 128, "pieces": 8, "in_turns": False},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of `TOKENS` tokens: D, scales, mods, and how it is cut."""

    d: int
    scales: str
    mod: str
    masked: bool
    tiling: str

    @property
    def text(self) -> str:
        return f"D{self.d} {'causal' if self.masked else 'full'} {self.mod}"

    @property
    def name(self) -> str:
        return f"{self.scales}, {self.tiling}"

    @property
    def has_lse(self) -> bool:
        """Whether the softmax adds probabilities up, and no product."""
        return self.tiling == "with LSE"

    @property
    def flops(self) -> float:
        return 4 * HEADS[self.d] * TOKENS**2 * self.d * (0.5 if self.masked else 1.0)

    @property
    def score_mod(self) -> Any:
        heads = HEADS[self.d]
        return {"plain": None, "alibi": alibi(heads), "softcap": softcap(30.0)}[self.mod]

    def plan(self, made: ca.QuantizedInputs) -> tuple[ForwardPlan, tuple[torch.Tensor, ...]]:
        """The plan of a call of quantised tensors, and what it captures."""
        sums_are_seen = False
        given = in_eight_bits(
            made, (None,) * 3, torch.bfloat16, (None, None), self.score_mod, None, sums_are_seen, lambda *_: True
        )
        sizes = (1, HEADS[self.d], HEADS[self.d], TOKENS, TOKENS, self.d, self.d)
        problem = Problem(*sizes, torch.bfloat16, made.q.data.device, narrow=(E4M3,) * 3)
        score = None if given.score_mod is None else Score.of(given.score_mod).expr
        program = Program(
            score, causal().expr if self.masked else None, values=None if given.values is None else given.values.expr
        )
        plan = plan_forward(problem, program, HOPPER, return_lse=self.has_lse)
        changed = TILINGS[self.tiling]
        if changed:
            tiling = dataclasses.replace(plan.tiling, **changed)
            plan = plan_forward(problem, program, HOPPER, return_lse=False, tiling=tiling)
        return plan, tuple(c.tensor for c in program.captures)


def cases() -> Iterator[Case]:
    """What is timed."""
    for masked in (False, True):
        for scales in SCALES:
            yield Case(128, scales, "plain", masked, "chosen")
        for scales in ("block 64", "block 128", "token"):
            yield Case(128, scales, "plain", masked, "3 x 128, 2 pieces, at will")
        yield Case(128, "token", "plain", masked, "3 x 128, 2 pieces")
        for scales in ("head", "block 64", "block 128"):
            yield Case(128, scales, "plain", masked, "with LSE")
    for d in (64, 256):
        for scales in SCALES:
            yield Case(d, scales, "plain", False, "chosen")
    yield Case(64, "token", "plain", False, "3 x 128")
    for mod in ("alibi", "softcap"):
        yield Case(128, "head", mod, True, "chosen")
        yield Case(128, "block 128", mod, True, "chosen")
        yield Case(128, "token", mod, True, "chosen")
        for d in (64, 256):
            yield Case(d, "head", mod, True, "chosen")


def quantised(d: int, scales: str, wide: tuple[torch.Tensor, ...] | None = None) -> ca.QuantizedInputs:
    """The tensors of a case: of `wide` ones, or with no numbers in them."""
    how = SCALES[scales]
    if wide is None:
        shape = (1, HEADS[d], TOKENS)
        counts = {"head": 1, "block": TOKENS // how.get("block", 64), "token": TOKENS}
        one = ca.Quantized(
            torch.empty(*shape, d, dtype=E4M3), torch.empty(*shape[:2], counts[how["scale"]], 1, dtype=torch.float32)
        )
        return ca.QuantizedInputs(one, one, one)
    return ca.quantize(*wide, **how, power_of_two=False)


def compiled(case: Case) -> str:
    """Compiles a case where its kernel is kept; gives what it takes."""
    made = compile_offline(case.plan(quantised(case.d, case.scales))[0])
    return f"{made.spills} spills, stack {made.stack}"


def kept(case: Case) -> str:
    """Compiles a case for the GPU that is there, into the cache on disk."""
    made = quantised(case.d, case.scales)
    there = ca.QuantizedInputs(*(x._replace(data=x.data.cuda(), scale=x.scale.cuda()) for x in made))  # type: ignore[union-attr]
    ForwardLauncher(case.plan(there)[0]).kernels()
    return ""


def measured(group: list[Case], rounds: int) -> Iterator[dict[str, Any]]:
    """All cases of one call, in turns with our bf16; what is wrong is not timed."""
    first = group[0]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS[first.d], TOKENS, first.d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    v = v + 1.0
    attn = ca.Attention(mask_mod=causal() if first.masked else None, score_mod=first.score_mod)
    want = attn(q, k, v).float()
    calls: dict[str, Call] = {"bf16": lambda: attn(q, k, v)}

    def launch(case: Case) -> Launched:
        made = quantised(first.d, case.scales, (q, k, v))
        plan, reads = case.plan(made)
        q8, k8, v8 = (x.data for x in made)
        launcher, out = ForwardLauncher(plan), torch.full_like(q, torch.nan)
        lse = torch.empty(q.shape[:3], device="cuda") if case.has_lse else None
        return (
            lambda: launcher.fill(q8, k8, v8, out, lse, None, first.d**-0.5, reads, ()),
            lambda: float((out.float() - want).norm() / want.norm()),
        )

    right, errors = right_ones(group, launch, 0.1)
    calls |= right
    timings = interleaved(calls, Stopwatch(torch.device("cuda")), rounds=rounds, sample_ms=8.0, limit_s=20.0)
    for name, timing in timings.items():
        row = {"call": first.text, "name": name, "ms": timing.ms, "tflops": round(first.flops / timing.ms / 1e9, 1)}
        row |= {"of bf16": round(timings["bf16"].ms / timing.ms, 3), "spread": round(timing.spread, 4)}
        row |= {"error": errors.get(name)}
        print(*row.values(), flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    every = list(dict.fromkeys(cases()))
    compile_first(compiled if given.dry else kept, every, given.workers)
    rows: list[dict[str, Any]] = []
    for group in [] if given.dry else by_call(every):
        rows += measured(group, given.rounds)
    save(rows, given.out)


if __name__ == "__main__":
    main()
