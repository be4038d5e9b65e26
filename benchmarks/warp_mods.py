"""Calls with mods by the kernels of warps, forward or backward: right by fp64 first, then in turns with FlexAttention.

`--mods` of `warp_tilings` and `warp_backward_tilings` run it. Calls: B 2, H 16, S 8k. FlexAttention is compiled
and uses the newest instructions of the GPU; where it does not compile, a row says so and has our time alone. A backward
is that of `torch.autograd.grad`, so without its forward.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

import composattn as ca
from benchmarks.kernel_cases import compile_first, save
from benchmarks.timing import Call, Stopwatch, interleaved
from composattn.mods import alibi, causal, document, sliding_window, softcap
from composattn.mods.score import Score

LENGTH, HEADS, BATCH = 8192, 16, 2
MODS = "causal ALiBi", "causal soft cap", "window 1024", "causal documents", "causal relative bias"
FLEX = "FlexAttention"
OURS = "ours"
WRONG_FROM = 2e-2
"""Relative distance of the first head from fp64; that of right ones is up to 6e-3."""
FITS: tuple[dict[str, int], ...] = (
    {}, {"num_stages": 1}, {"num_stages": 1, "BLOCK_M": 64, "BLOCK_N": 64},
)  # fmt: skip
"""What may be said for FlexAttention to fit in shared memory, one after the other."""


def mods(learned: bool) -> dict[str, dict[str, Any]]:
    """Masks and score mods by name; `learned`: the bias has a gradient."""
    with torch.device("cuda"):
        distances = (torch.randn(HEADS, 2 * LENGTH) / 8).requires_grad_(learned)
        slopes = torch.linspace(0.01, 0.5, HEADS)
        ids = torch.arange(LENGTH) // 1024

    def relative(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + distances[h, q - kv + LENGTH]

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
    """A call of `ca.attention` with one of `mods`."""

    dim: int
    mod: str
    backward: bool
    name: str = OURS

    @property
    def text(self) -> str:
        return f"{'backward ' if self.backward else ''}D{self.dim} S{LENGTH} {self.mod}"

    @property
    def given(self) -> dict[str, Any]:
        torch.manual_seed(0)
        return mods(self.backward)[self.mod]

    @property
    def inputs(self) -> list[torch.Tensor]:
        """q, k, v and the gradient of the output."""
        torch.manual_seed(1)
        size = BATCH, HEADS, LENGTH, self.dim
        return [torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=self.backward) for _ in range(4)]


def timed(attend: Callable[..., Any], inputs: list[torch.Tensor], backward: bool) -> Callable[[], tuple[Any, ...]]:
    """What a case times: the output, or the gradients of q, k and v, of a forward that has run."""
    *qkv, dout = inputs
    if not backward:
        return lambda: (attend(*qkv),)
    out = attend(*qkv)
    return lambda: torch.autograd.grad(out, qkv, dout, retain_graph=True)


def kept(case: Modded) -> str:
    """Compiles a call's kernels into the cache on disk."""
    timed(functools.partial(ca.attention, backend="warp", **case.given), case.inputs, case.backward)()
    return ""


def flex(case: Modded, given: dict[str, Any], inputs: list[torch.Tensor]) -> tuple[Call | None, str]:
    """Compiled FlexAttention, and what had to be said for it to fit; None, and why, where nothing helps."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = create_block_mask(given["mask_mod"], None, None, LENGTH, LENGTH, device="cuda", _compile=True)
    said = ""
    for options in FITS:
        torch._dynamo.reset()
        attend = functools.partial(
            torch.compile(flex_attention), score_mod=given.get("score_mod"), block_mask=blocks, kernel_options=options
        )
        try:
            call = timed(attend, inputs, case.backward)
            call()
            return call, str(options or "")
        except Exception as failed:  # of the compiler, mostly: out of shared memory
            said = f"does not compile: {' '.join(str(failed).split())[:300]}"
    return None, said


def off(case: Modded, given: dict[str, Any], inputs: list[torch.Tensor], found: tuple[torch.Tensor, ...]) -> float:
    """The largest relative distance from fp64 of what was found for the first head."""
    one = [t.detach()[:1, :1].clone().requires_grad_(case.backward) for t in inputs]
    if "score_mod" in given:
        given = given | {"score_mod": Score.of(given["score_mod"]).shifted(h=0)}
    wanted = timed(functools.partial(ca.attention, backend="reference", **given), one, case.backward)()
    pairs = [(a[:1, :1].double(), b.double()) for a, b in zip(found, wanted, strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def measured(case: Modded, rounds: int) -> dict[str, Any]:
    """One call in turns with compiled FlexAttention; what is wrong is not timed."""
    given, inputs = case.given, case.inputs
    ours = timed(functools.partial(ca.attention, backend="warp", **given), inputs, case.backward)
    error = off(case, given, inputs, ours())
    row: dict[str, Any] = {"call": case.text, "name": OURS, "error": error}
    if not error < WRONG_FROM:
        print(f"{case.text}: WRONG, {error:.1e} from fp64", flush=True)
        return row
    of_flex, said = flex(case, given, inputs)
    calls: dict[str, Call] = {OURS: ours, **({FLEX: of_flex} if of_flex else {})}
    timings = interleaved(calls, Stopwatch(torch.device("cuda")), rounds=rounds, sample_ms=6.0, limit_s=20.0)
    row |= {"ms": timings[OURS].ms, "spread": round(timings[OURS].spread, 4), "flex": said}
    beside = f"{FLEX} {said}"
    if of_flex:
        row["of flex"] = round(timings[FLEX].ms / timings[OURS].ms, 3)
        beside = f"{row['of flex']:.2f} of {FLEX}'s speed {said}"
    print(f"{case.text}: {row['ms']:.3f} ms, {error:.1e} from fp64, {beside}", flush=True)
    return row


def run(given: argparse.Namespace, *, backward: bool) -> list[dict[str, Any]]:
    """The rows of all mods at the head dimensions that are asked for, kept as they come."""
    every = [Modded(int(dim), mod, backward) for dim in given.dims.split(",") for mod in MODS]
    compile_first(kept, every, given.workers)
    rows: list[dict[str, Any]] = []
    for case in every:
        with torch.set_grad_enabled(backward):
            rows.append(measured(case, given.rounds))
        save(rows, given.out)
    return rows
