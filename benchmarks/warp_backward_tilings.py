"""The backward of warps (mma.sync, cp.async), by tiling: right first, then how fast, in turns with FlashAttention-2.

    python -m benchmarks.warp_backward_tilings --dims 64,128,256 --lengths 2048,8192 --out result.json
    python -m benchmarks.warp_backward_tilings --chosen --lengths 512,2048,8192     what calls get, and grouped heads
    python -m benchmarks.warp_backward_tilings --dry    compiles them all, with no GPU: registers, spills, shared memory

Calls, and FlashAttention-2, are those of `warp_tilings`. A time is that of all kernels of a backward.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_cases import Launched, by_call, compile_first, right_ones, save
from benchmarks.timing import Call, Stopwatch, interleaved
from benchmarks.warp_tilings import CHOSEN, FLASH, HEADS, TOKENS
from composattn.analysis.program import Program
from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.planning.plan_backward import BackwardPlans, plan_backward
from composattn.backends.fused.running.launch_backward import BackwardLauncher
from composattn.backends.fused.tiles.target import AMPERE, Target
from composattn.backends.warp import ARCHITECTURE
from composattn.backends.warp.backward_table import BackwardShape, fits, shaped
from composattn.call.problem import Problem
from composattn.mods import causal

Gradients = tuple[torch.Tensor, ...]
WRONG_FROM = 2e-2
"""Relative distance from FlashAttention-2's gradients; those of right ones are 5e-3 apart."""

NARROW = (
    BackwardShape(128, 128, 8, 16, 16, 32, 2), BackwardShape(128, 64, 8, 16, 16, 16, 2),
    BackwardShape(128, 64, 8, 16, 16, 32, 2), BackwardShape(128, 128, 8, 32, 32, 32, 2),
    BackwardShape(64, 64, 4, 16, 16, 16, 2, 2), BackwardShape(64, 64, 4, 16, 16, 16, 1, 3),
    BackwardShape(64, 64, 4, 16, 16, 32, 1, 2), BackwardShape(64, 128, 4, 16, 16, 32, 1, 2),
    BackwardShape(128, 64, 8, 32, 32, 32, 2, 1), BackwardShape(128, 32, 4, 32, 32, 16, 2, 2),
    BackwardShape(128, 64, 8, 16, 16, 32, 1, 2),
)  # fmt: skip
MIDDLE = (
    BackwardShape(128, 64, 8, 16, 16, 16, 2), BackwardShape(128, 64, 8, 16, 16, 32, 2),
    BackwardShape(128, 64, 8, 16, 16, 16, 1), BackwardShape(128, 64, 8, 32, 32, 32, 2),
    BackwardShape(128, 64, 8, 32, 32, 16, 2), BackwardShape(64, 64, 4, 16, 16, 16, 1, 2),
    BackwardShape(64, 64, 4, 16, 16, 32, 1, 2), BackwardShape(64, 64, 8, 16, 32, 32, 1, 2),
    BackwardShape(64, 128, 8, 32, 32, 32, 1), BackwardShape(128, 32, 8, 16, 16, 16, 2),
)  # fmt: skip
WIDE = (
    BackwardShape(64, 64, 8, 16, 32, 32, 2), BackwardShape(64, 64, 8, 16, 32, 32, 1),
    BackwardShape(64, 64, 8, 16, 32, 16, 2), BackwardShape(64, 64, 8, 32, 32, 32, 2),
    BackwardShape(64, 64, 8, 16, 32, 16, 1), BackwardShape(64, 64, 8, 16, 16, 16, 1),
    BackwardShape(64, 64, 8, 16, 64, 32, 1), BackwardShape(64, 64, 4, 32, 32, 32, 1),
)  # fmt: skip
CANDIDATES = {64: NARROW, 96: MIDDLE, 128: MIDDLE, 192: WIDE, 256: WIDE}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of `TOKENS` tokens, and one of the tilings of its D; None: the one that calls get."""

    dim: int
    length: int
    masked: bool
    shape: BackwardShape | None
    group: int = 1

    @property
    def name(self) -> str:
        return CHOSEN if self.shape is None else str(self.shape)

    @property
    def text(self) -> str:
        of_heads = f" {self.group} heads a group" if self.group > 1 else ""
        return f"backward D{self.dim} S{self.length} {'causal' if self.masked else 'full'}{of_heads}"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sequences, query heads, key/value heads."""
        heads = HEADS[self.dim]
        return max(1, TOKENS // self.length), heads, heads // self.group

    @property
    def flops(self) -> float:
        batch, heads, _ = self.sizes
        return 10 * batch * heads * self.length**2 * (0.5 if self.masked else 1.0) * self.dim

    @property
    def problem(self) -> Problem:
        sizes = (*self.sizes, self.length, self.length, self.dim, self.dim)
        return Problem(*sizes, torch.bfloat16, torch.device("cuda"))

    @property
    def program(self) -> Program:
        return Program(None, causal().expr if self.masked else None)

    def plans(self, target: Target) -> BackwardPlans:
        tiling = None if self.shape is None else shaped(self.shape, self.problem, self.program)
        return plan_backward(self.problem, self.program, target, tiling=tiling)

    @property
    def is_one(self) -> bool:
        """Whether its shape can cut calls of its D on an A100."""
        return self.shape is None or fits(shaped(self.shape, self.problem, self.program), AMPERE)


def compiled(case: Case) -> str:
    """Compiles a case where its kernel is kept; gives what it takes."""
    made = compile_offline(case.plans(AMPERE).main)
    return f"{made.spills} spills, {made.registers} registers, {made.shared_memory} bytes"


def kept(case: Case) -> str:
    """Compiles a case for the GPU that is there, into the cache on disk."""
    BackwardLauncher(case.plans(ARCHITECTURE.target_on(torch.device("cuda")))).kernels()
    return ""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Inputs of a backward, with the forward of FlashAttention-2, and its gradients."""

    case: Case
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    dout: torch.Tensor
    of_forward: tuple[Any, ...]

    @staticmethod
    def of(case: Case) -> Drawn:
        torch.manual_seed(0)
        batch, heads, kv_heads = case.sizes
        q, k, v, dout = (
            torch.randn(batch, h, case.length, case.dim, device="cuda", dtype=torch.bfloat16)
            for h in (heads, kv_heads, kv_heads, heads)
        )
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, case.masked, False)
        return Drawn(case, (q, k, v), dout, tuple(found))

    def flash(self) -> Gradients:
        """FlashAttention-2's gradients."""
        out, lse, *lengths, seed, offset, _ = self.of_forward
        return tuple(
            torch.ops.aten._scaled_dot_product_flash_attention_backward(
                self.dout, *self.qkv, out, lse, *lengths, 0.0, self.case.masked, seed, offset
            )
        )

    def launched(self, case: Case, wanted: Gradients) -> Launched:
        launcher = BackwardLauncher(case.plans(ARCHITECTURE.target_on(self.dout.device)))
        into = tuple(torch.full_like(t, torch.nan) for t in self.qkv)
        out, lse = self.of_forward[:2]

        def call() -> object:
            return launcher(*self.qkv, out, lse, self.dout, None, case.dim**-0.5, into=into)  # type: ignore[arg-type]

        return call, lambda: distance(into, wanted)


def distance(found: Gradients, wanted: Gradients) -> float:
    """The largest relative distance of a gradient."""
    pairs = zip(found, wanted, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def measured(group: list[Case], rounds: int) -> Iterator[dict[str, Any]]:
    """All tilings of one call, in turns with FlashAttention-2; what is wrong is not timed."""
    drawn = Drawn.of(group[0])
    wanted = drawn.flash()
    calls, errors = right_ones(group, lambda case: drawn.launched(case, wanted), WRONG_FROM)
    of_flash: Call = drawn.flash
    calls, errors = {FLASH: of_flash, **calls}, {FLASH: 0.0, **errors}
    timings = interleaved(calls, Stopwatch(torch.device("cuda")), rounds=rounds, sample_ms=6.0, limit_s=30.0)
    for name, timing in sorted(timings.items(), key=lambda item: item[1].ms):
        ratio, first = timings[FLASH].ms / timing.ms, group[0]
        row = {"call": first.text, "name": name, "tflops": round(first.flops / timing.ms / 1e9, 1), "ms": timing.ms}
        row |= {"spread": round(timing.spread, 4), "from flash": errors[name], "of flash": round(ratio, 3)}
        print(
            f"{row['call']}: {row['tflops']:4.0f} TFLOP/s, {ratio:.3f} of {FLASH}'s (spread {timing.spread:.1%}, "
            f"{errors[name]:.1e} from it): {name}",
            flush=True,
        )
        yield row


def cases(given: argparse.Namespace) -> list[Case]:
    dims, lengths = ([int(n) for n in text.split(",")] for text in (given.dims, given.lengths))
    calls = [(d, n, mask == "causal") for d in dims for n in lengths for mask in given.masks.split(",")]
    if given.chosen:
        return [Case(*call, None, group) for call in calls for group in (1, 4)]
    every = [Case(*call, shape) for call in calls for shape in CANDIDATES[call[0]]]
    return [case for case in every if case.is_one]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", default="64,96,128,192,256")
    parser.add_argument("--lengths", default="2048,8192")
    parser.add_argument("--masks", default="full,causal")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--chosen", action="store_true")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    every = cases(given)
    once = list({(c.dim, c.masked, c.group, c.shape): c for c in every}.values())
    compile_first(compiled if given.dry else kept, once, given.workers)
    for group in [] if given.dry else by_call(every):
        rows += measured(group, given.rounds)
    save(rows, given.out)


if __name__ == "__main__":
    main()
