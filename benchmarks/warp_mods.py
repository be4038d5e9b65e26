"""Calls with mods by the kernels of warps, both directions: right by fp64 first, then in turns with FlexAttention.

    python -m benchmarks.warp_mods --dims 64,128,256 --out result.json

Calls: B 2, H 16, S 8k, all of which keep what gradients need. FlexAttention is compiled and uses the newest
instructions of the GPU; where it does not compile, a row says so and has our time alone. A backward is that of
`torch.autograd.grad`, so without its forward, with the gradient of a bias that is learned.

A process has one call, and compiles both implementations; once all have, one after the other times its own.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import composattn as ca
from benchmarks.kernel_cases import save
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
PATIENCE = 80.0
"""Seconds after which those that are compiled are timed, others or not."""
Row = dict[str, Any]


def mods() -> dict[str, tuple[dict[str, Any], list[torch.Tensor]]]:
    """By name a mask and a score mod, and what of it is learned."""
    with torch.device("cuda"):
        distances = (torch.randn(HEADS, 2 * LENGTH) / 8).requires_grad_()
        slopes = torch.linspace(0.01, 0.5, HEADS)
        ids = torch.arange(LENGTH) // 1024

    def relative(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + distances[h, q - kv + LENGTH]

    given: tuple[tuple[dict[str, Any], list[torch.Tensor]], ...] = (
        ({"mask_mod": causal(), "score_mod": alibi(slopes)}, []),
        ({"mask_mod": causal(), "score_mod": softcap(30.0)}, []),
        ({"mask_mod": causal() & sliding_window(1024)}, []),
        ({"mask_mod": causal() & document(ids)}, []),
        ({"mask_mod": causal(), "score_mod": relative}, [distances]),
    )
    return dict(zip(MODS, given, strict=True))


class Both:
    """Two calls of one implementation: a forward, and the gradients of one that has run."""

    def __init__(self, attend: Callable[..., Any], qkv: list[torch.Tensor], dout: torch.Tensor, learned: list[Any]):
        self.out = attend(*qkv)
        self.forward: Call = lambda: attend(*qkv)
        self.backward: Call = lambda: torch.autograd.grad(self.out, [*qkv, *learned], dout, retain_graph=True)


@dataclasses.dataclass(frozen=True)
class Modded:
    """A call of `ca.attention` with one of `mods`."""

    dim: int
    mod: str

    @property
    def text(self) -> str:
        return f"D{self.dim} S{LENGTH} {self.mod}"

    @functools.cached_property
    def given(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        torch.manual_seed(0)
        return mods()[self.mod]

    @functools.cached_property
    def inputs(self) -> list[torch.Tensor]:
        """q, k, v and the gradient of the output."""
        torch.manual_seed(1)
        size = BATCH, HEADS, LENGTH, self.dim
        return [torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(4)]

    def both(self, attend: Callable[..., Any]) -> Both:
        return Both(attend, self.inputs[:3], self.inputs[3].detach(), self.given[1])

    def ours(self) -> Both:
        found = self.both(functools.partial(ca.attention, backend="warp", **self.given[0]))
        found.backward()
        return found

    def flex(self) -> tuple[Both | None, str]:
        """Compiled FlexAttention, and what had to be said for it to fit; None, and why, where nothing helps."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        given, said = self.given[0], ""
        blocks = create_block_mask(given["mask_mod"], None, None, LENGTH, LENGTH, device="cuda")
        for options in FITS:
            torch._dynamo.reset()
            attend = functools.partial(
                torch.compile(flex_attention), score_mod=given.get("score_mod"), block_mask=blocks,
                kernel_options=options,
            )  # fmt: skip
            try:
                found = self.both(attend)
                found.backward()
                return found, str(options or "")
            except Exception as failed:  # of the compiler, mostly: out of shared memory
                said = f"does not compile: {' '.join(str(failed).split())[:300]}"
        return None, said

    def off(self, ours: Both) -> dict[str, float]:
        """By direction, the largest relative distance from fp64 of what is found for the first head."""
        one = [t.detach()[:1, :1].clone().requires_grad_() for t in self.inputs]
        given = self.given[0]
        if "score_mod" in given:
            given = given | {"score_mod": Score.of(given["score_mod"]).shifted(h=0)}
        wanted = Both(functools.partial(ca.attention, backend="reference", **given), one[:3], one[3].detach(), [])
        pairs = {"": [(ours.out, wanted.out)], "backward ": list(zip(ours.backward(), wanted.backward(), strict=False))}  # type: ignore[call-overload]
        return {name: max(distance(a[:1, :1], b) for a, b in of) for name, of in pairs.items()}


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, of these two."""
    a, b = found.detach().double(), wanted.detach().double()
    return float((a - b).norm() / b.norm())


def measured(case: Modded, ours: Both, flex: Both | None, said: str, rounds: int) -> list[Row]:
    """A row for each direction, in turns with compiled FlexAttention; what is wrong is not timed."""
    rows = []
    for direction, error in case.off(ours).items():
        row: Row = {"call": direction + case.text, "name": OURS, "error": error, "flex": said}
        rows.append(row)
        if not error < WRONG_FROM:
            print(f"{row['call']}: WRONG, {error:.1e} from fp64", flush=True)
            continue
        of = {OURS: ours} | ({FLEX: flex} if flex else {})
        calls: dict[str, Call] = {name: both.backward if direction else both.forward for name, both in of.items()}
        timings = interleaved(calls, Stopwatch(torch.device("cuda")), rounds=rounds, sample_ms=6.0, limit_s=20.0)
        row |= {"ms": timings[OURS].ms, "spread": round(timings[OURS].spread, 4)}
        beside = f"{FLEX} {said}"
        if flex:
            row["of flex"] = round(timings[FLEX].ms / timings[OURS].ms, 3)
            beside = f"{row['of flex']:.2f} of {FLEX}'s speed {said}"
        print(f"{row['call']}: {row['ms']:.3f} ms, {error:.1e} from fp64, {beside}", flush=True)
    return rows


_shared: list[Any] = []  # of all processes: who compiles, that all have, whose turn it is


def _begin(*shared: Any) -> None:
    _shared.extend(shared)
    torch.set_num_threads(1)


def _rows(case: Modded, rounds: int) -> list[Row]:
    compiling, compiled, turn = _shared
    try:
        with compiling:
            ours = case.ours()
            flex, said = case.flex()
        torch.cuda.synchronize()
    finally:
        with contextlib.suppress(threading.BrokenBarrierError):
            compiled.wait(PATIENCE)
    with turn:
        return measured(case, ours, flex, said, rounds)


def run(dims: list[int], workers: int, rounds: int, out: Path | None) -> list[Row]:
    """The rows of all mods at these head dimensions, kept as they come; `workers` compile at once."""
    every, of = [Modded(dim, mod) for dim in dims for mod in MODS], multiprocessing.get_context("spawn")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a process compiles one call
    shared = of.Semaphore(workers), of.Barrier(len(every)), of.Lock()
    rows: list[Row] = []
    with concurrent.futures.ProcessPoolExecutor(len(every), of, _begin, shared) as pool:
        waiting = {pool.submit(_rows, case, rounds): case for case in every}
        for done in concurrent.futures.as_completed(waiting):
            try:
                rows += done.result()
            except Exception as error:
                print(f"{waiting[done].text}: {type(error).__name__}: {str(error)[-300:]}", flush=True)
            save(rows, out)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--workers", type=int, default=12, help="how many compile at once")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    run([int(dim) for dim in given.dims.split(",")], given.workers, given.rounds, given.out)


if __name__ == "__main__":
    main()
