"""The backward of warps (mma.sync, cp.async), by tiling: right first, then how fast, in turns with FlashAttention-2.

    python -m benchmarks.warp_backward_tilings --dims 64,128,256 --lengths 2048,8192 --out result.json
    python -m benchmarks.warp_backward_tilings --chosen --lengths 512,2048,8192     what calls get, and grouped heads
    python -m benchmarks.warp_backward_tilings --dry    compiles them all, with no GPU: registers, spills, shared memory

Calls are those of `warp_tilings`; FlashAttention-2 is the one in torch. A time is that of all kernels of a backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.kernel_cases import Launched, right_ones, save
from benchmarks.timing import Call
from benchmarks.warp_cases import FLASH, WarpCase, beside_flash, cases_of, options_of, rows_of
from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.planning.facts import BACKWARD, Facts
from composattn.backends.fused.planning.plan_backward import BackwardPlans, plan_backward
from composattn.backends.fused.running.launch_backward import BackwardLauncher
from composattn.backends.fused.tiles.target import AMPERE, Target
from composattn.backends.warp import ARCHITECTURE
from composattn.backends.warp.tiling import WarpBackwardTiling, backward_of

Gradients = tuple[torch.Tensor, ...]
WRONG_FROM = 2e-2
"""Relative distance from FlashAttention-2's gradients; those of right ones are 5e-3 apart."""


class BackwardShape(NamedTuple):
    """Fields of a tiling."""

    tile_n: int
    tile_m: int
    warps: int
    score_keys: int
    sum_keys: int
    dq_rows: int
    stages: int = 1
    blocks: int = 1
    dq_pieces: int = 1
    held: int = 0


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
    BackwardShape(64, 64, 8, 16, 32, 32, 2, held=192), BackwardShape(64, 64, 8, 16, 32, 32, 2, dq_pieces=3, held=256),
    BackwardShape(64, 64, 8, 32, 32, 32, 2, held=96), BackwardShape(64, 64, 8, 32, 32, 32, 2, dq_pieces=3, held=160),
    BackwardShape(64, 64, 8, 16, 32, 16, 2), BackwardShape(64, 64, 8, 32, 32, 32, 2),
    BackwardShape(64, 64, 8, 16, 32, 16, 1), BackwardShape(64, 64, 8, 16, 16, 16, 1),
    BackwardShape(64, 64, 8, 16, 64, 32, 1), BackwardShape(64, 64, 4, 32, 32, 32, 1),
)  # fmt: skip
CANDIDATES = {64: NARROW, 96: MIDDLE, 128: MIDDLE, 192: WIDE, 256: WIDE}


class Case(WarpCase[BackwardShape]):
    """A backward."""

    direction = "backward "
    products = 5

    @property
    def tiling(self) -> WarpBackwardTiling | None:
        """What is asked for; None: what calls get."""
        if self.shape is None:
            return None
        return backward_of(self.shape._asdict(), Facts(BACKWARD, self.problem, self.program))

    def plans(self, target: Target) -> BackwardPlans:
        return plan_backward(self.problem, self.program, target, tiling=self.tiling)

    @property
    def is_one(self) -> bool:
        """Whether its shape can cut calls of its D on an A100."""
        return self.tiling is None or self.tiling.fits(AMPERE)


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
    yield from beside_flash(group[0], calls, errors, rounds, "from flash")


def main() -> None:
    given = options_of(__doc__, "2048,8192").parse_args()
    every = [case for case in cases_of(Case, CANDIDATES, given) if case.is_one]
    save(rows_of(every, compiled, kept, measured, given), given.out)


if __name__ == "__main__":
    main()
