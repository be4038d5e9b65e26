"""The forward of warps (mma.sync, cp.async), by tiling: right first, then how fast, in turns with FlashAttention-2.

    python -m benchmarks.warp_tilings --dims 64,128,256 --lengths 2048,16384 --out result.json
    python -m benchmarks.warp_tilings --chosen --lengths 512,2048,8192,32768      what calls get, and grouped heads
    python -m benchmarks.warp_tilings --mods                                      beside compiled FlexAttention
    python -m benchmarks.warp_tilings --dry          compiles them all, with no GPU: registers, spills, shared memory

FlashAttention-2 is the one in torch (`scaled_dot_product_attention`). On a Hopper GPU the kernels are those of an A100,
built for it: both use the same instructions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import composattn as ca
from benchmarks.kernel_cases import Launched, compile_first, error_of_rows, right_ones, save
from benchmarks.timing import Call, Stopwatch, interleaved
from benchmarks.warp_cases import FLASH, WarpCase, beside_flash, cases_of, options_of, rows_of
from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.planning.plan import ForwardPlan, plan_forward
from composattn.backends.fused.running.launch import ForwardLauncher
from composattn.backends.fused.tiles.target import AMPERE, Target
from composattn.backends.fused.tiles.traits import padded
from composattn.backends.warp import ARCHITECTURE
from composattn.backends.warp.forward_table import Shape, shaped
from composattn.mods import alibi, causal, document, sliding_window, softcap

ROWS_CHECKED = 256
NARROW = (
    Shape(128, 64, 32, blocks=2), Shape(128, 32, 32, blocks=2), Shape(128, 64, 16), Shape(128, 64, 16, stages=2),
    Shape(128, 64, 16, resident=True), Shape(64, 64, 16, blocks=2), Shape(64, 64, 16, blocks=3),
    Shape(128, 32, 32, 2, 2),
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
        wide = padded(self.dim)
        tiling = None if self.shape is None else shaped(self.shape, wide, wide, 1, self.problem)
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


MODS = "causal ALiBi", "causal soft cap", "window 1024", "causal documents", "causal relative bias"


def mods() -> dict[str, dict[str, Any]]:
    """Masks and score mods of calls with 16 heads of 8k."""
    with torch.device("cuda"):
        distances = torch.randn(16, 2 * 8192) / 8
        slopes = torch.linspace(0.01, 0.5, 16)
        ids = torch.arange(8192) // 1024

    def relative(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + distances[h, q - kv + 8192]

    given: tuple[dict[str, Any], ...] = (
        {"mask_mod": causal(), "score_mod": alibi(slopes)},
        {"mask_mod": causal(), "score_mod": softcap(30.0)},
        {"mask_mod": causal() & sliding_window(1024)},
        {"mask_mod": causal() & document(ids)},
        {"mask_mod": causal(), "score_mod": relative},
    )
    return dict(zip(MODS, given, strict=True))


@dataclasses.dataclass(frozen=True)
class Modded:
    """A call of `ca.attention` with one of `mods`: B 2, H 16, S 8k."""

    dim: int
    name: str

    @property
    def text(self) -> str:
        return f"D{self.dim} S8192 {self.name}"

    @property
    def qkv(self) -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [torch.randn(2, 16, 8192, self.dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def kept_with_mods(case: Modded) -> str:
    """Compiles a call's kernels into the cache on disk."""
    ca.attention(*case.qkv, backend="warp", **mods()[case.name])
    return ""


def flex(qkv: list[torch.Tensor], given: dict[str, Any]) -> tuple[Call, str]:
    """Compiled FlexAttention, and what had to be said for it to fit in shared memory."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = create_block_mask(given["mask_mod"], None, None, 8192, 8192, device="cuda", _compile=True)
    for options in ({}, {"num_stages": 1}):
        torch._dynamo.reset()
        of = functools.partial(
            torch.compile(flex_attention), *qkv, score_mod=given.get("score_mod"), block_mask=blocks,
            kernel_options=options,
        )  # fmt: skip
        try:
            of()
            return of, str(options or "")
        except Exception as failed:  # of the compiler: out of shared memory
            said = str(failed)
    raise RuntimeError(said)


def with_mods(case: Modded, rounds: int) -> dict[str, Any]:
    """One call in turns with compiled FlexAttention."""
    with torch.no_grad():
        qkv, given = case.qkv, mods()[case.name]
        ours = functools.partial(ca.attention, *qkv, backend="warp", **given)
        of_flex, said = flex(qkv, given)
        out, want = ours(), of_flex()
        assert isinstance(out, torch.Tensor) and isinstance(want, torch.Tensor)
        off = float((out - want).float().norm() / want.float().norm())
        calls: dict[str, Call] = {"ours": ours, "FlexAttention": of_flex}
        timings = interleaved(calls, Stopwatch(torch.device("cuda")), rounds=rounds, sample_ms=6.0, limit_s=20.0)
    ratio = timings["FlexAttention"].ms / timings["ours"].ms
    row = {"call": case.text, "name": "ours", "ms": timings["ours"].ms, "of flex": round(ratio, 3), "flex": said}
    print(
        f"{row['call']}: {row['ms']:.3f} ms, {ratio:.2f} of FlexAttention's speed, {off:.1e} from it {said}", flush=True
    )
    return row


def main() -> None:
    parser = options_of(__doc__, "2048,16384")
    parser.add_argument("--mods", action="store_true", help="calls with mods alone")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if given.mods:
        modded = [Modded(int(dim), name) for dim in given.dims.split(",") for name in MODS]
        compile_first(kept_with_mods, modded, given.workers)
        for case in modded:
            rows.append(with_mods(case, given.rounds))
            save(rows, given.out)
    else:
        rows = rows_of(cases_of(Case, CANDIDATES, given), compiled, kept, measured, given)
    save(rows, given.out)


if __name__ == "__main__":
    main()
