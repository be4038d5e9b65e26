"""The forward of warps (mma.sync, cp.async), by tiling: right first, then how fast, in turns with FlashAttention-2.

    python -m benchmarks.warp_tilings --dims 64,128,256 --lengths 2048,16384 --out result.json
    python -m benchmarks.warp_tilings --chosen --lengths 512,2048,8192,32768      what calls get, and grouped heads
    python -m benchmarks.warp_tilings --dry          compiles them all, with no GPU: registers, spills, shared memory

FlashAttention-2 is the one in torch (`scaled_dot_product_attention`). On a Hopper GPU the kernels are those of an A100,
built for it: both use the same instructions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernel_cases import Launched, error_of_rows, right_ones, save
from benchmarks.timing import Call
from benchmarks.warp_cases import FLASH, WarpCase, beside_flash, cases_of, options_of, rows_of
from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.planning.facts import FORWARD, Facts
from composattn.backends.fused.planning.plan import ForwardPlan, plan_forward
from composattn.backends.fused.running.launch import ForwardLauncher
from composattn.backends.fused.tiles.target import AMPERE, Target
from composattn.backends.warp import ARCHITECTURE
from composattn.backends.warp.tiling import forward_of

ROWS_CHECKED = 256


class Shape(NamedTuple):
    """Fields of a tiling."""

    tile_m: int
    tile_n: int
    warp_rows: int
    stages: int = 1
    blocks: int = 1


NARROW = (
    Shape(128, 64, 32, blocks=2), Shape(128, 32, 32, blocks=2), Shape(128, 64, 16), Shape(128, 64, 16, stages=2),
    Shape(64, 64, 16, blocks=2), Shape(64, 64, 16, blocks=3), Shape(128, 32, 32, 2, 2),
)  # fmt: skip
CANDIDATES: dict[int, tuple[Shape, ...]] = {
    64: (*NARROW, Shape(128, 128, 32, blocks=2), Shape(128, 128, 16)),
    96: NARROW,
    128: NARROW,
    192: (Shape(128, 64, 16), Shape(128, 32, 16, stages=2), Shape(64, 64, 16, blocks=2), Shape(64, 32, 16, 2, 2)),
    256: (Shape(128, 64, 16), Shape(128, 32, 16), Shape(64, 64, 16, blocks=2), Shape(64, 32, 16, blocks=2)),
}


class Case(WarpCase[Shape]):
    """A forward."""

    def plan(self, target: Target) -> ForwardPlan:
        call = Facts(FORWARD, self.problem, self.program)
        tiling = None if self.shape is None else forward_of(self.shape._asdict(), call)
        return plan_forward(self.problem, self.program, target, return_lse=False, tiling=tiling)


def compiled(case: Case) -> str:
    """Compiles a case where its kernel is kept; gives what it takes."""
    made = compile_offline(case.plan(dataclasses.replace(AMPERE, arch="sm_90a", sms=132)))
    return f"{made.spills} spills, {made.registers} registers, {made.shared_memory} bytes"


def kept(case: Case) -> str:
    """Compiles a case for the GPU that is there, into the cache on disk."""
    ForwardLauncher(case.plan(ARCHITECTURE.target_on(torch.device("cuda")))).kernels()
    return ""


def drawn(case: Case) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    batch, heads, kv_heads = case.sizes
    of_each = heads, kv_heads, kv_heads
    return tuple(torch.randn(batch, h, case.length, case.dim, device="cuda", dtype=torch.bfloat16) for h in of_each)


def error(case: Case, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """Relative error of the first and the last rows."""
    count = min(ROWS_CHECKED, case.length)
    ends = slice(0, count), slice(case.length - count, case.length)
    return max(error_of_rows(out, q, k, v, case.masked, rows) for rows in ends)


def launch(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Launched:
    launcher = ForwardLauncher(case.plan(ARCHITECTURE.target_on(q.device)))
    out = torch.full_like(q, torch.nan)
    scale = case.dim**-0.5
    return lambda: launcher.fill(q, k, v, out, None, None, scale, (), ()), lambda: error(case, out, q, k, v)


def flash(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.masked, enable_gqa=case.group > 1
            )

    return call


def measured(group: list[Case], rounds: int) -> Iterator[dict[str, Any]]:
    """All tilings of one call, in turns with FlashAttention-2; what is wrong is not timed."""
    first = group[0]
    q, k, v = drawn(first)
    of_flash = flash(first, q, k, v)
    its_error = error(first, of_flash(), q, k, v)  # type: ignore[arg-type]
    calls, errors = right_ones(group, lambda case: launch(case, q, k, v), 1.2 * its_error)
    calls, errors = {FLASH: of_flash, **calls}, {FLASH: its_error, **errors}
    yield from beside_flash(first, calls, errors, rounds, "error")


def main() -> None:
    given = options_of(__doc__, "2048,16384").parse_args()
    save(rows_of(cases_of(Case, CANDIDATES, given), compiled, kept, measured, given), given.out)


if __name__ == "__main__":
    main()
