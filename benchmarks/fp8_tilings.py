"""The Hopper forward of e4m3 q, k and v, by tiling: right first, then how fast, in turns with our bf16 and an FP8 GEMM.

python -m benchmarks.fp8_tilings --dims 64,128,256 --lengths 16384,2048 --rounds 8 --mods --out result.json
python -m benchmarks.fp8_tilings --dry          compiles them all, with no GPU: registers, spills, shared memory
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import composattn as ca
from benchmarks.kernel_cases import Launched, by_call, compile_first, error_of_rows, right_ones, save
from benchmarks.timing import Call, Stopwatch, interleaved
from composattn.analysis.program import Program
from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.planning.plan import ForwardPlan, plan_forward
from composattn.backends.fused.running.launch import ForwardLauncher
from composattn.backends.fused.tiles.scheduler import Scheduler
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.hopper.fp8_tiling import Fp8Tiling
from composattn.call.problem import Problem
from composattn.mods import alibi, causal, document, sliding_window, softcap
from composattn.primitives.rescale_threshold import ALWAYS_RESCALE

E4M3 = torch.float8_e4m3fn
TOKENS = 16384
HEADS = {(64, 64): 32, (96, 96): 16, (128, 128): 16, (192, 128): 16, (192, 192): 8, (256, 256): 8}
GEMM = 8192
LOGARITHMS = 0, 2, 4, 6, 8
ROWS_CHECKED = 256


def candidates(dims: tuple[int, int], masked: bool) -> dict[str, Fp8Tiling]:
    """By name: rows x keys, in how many pieces the output is multiplied, whether warpgroups take turns, and whether
    how many exponentials of 8 are logarithms, rounded. Behind a mask warpgroups pass by tiles that only others see."""
    d, dv = dims
    found: dict[str, Fp8Tiling] = {}
    cuts = [(128, 128, 8)] if d == 256 else [(128, 128, 1), (128, 128, 2)]
    if max(dims) <= 128:
        cuts += [(192, 96, 1), (192, 128, 1), (192, 128, 2), (128, 192, 1)]
    elif dv <= 128:
        cuts += [(192, 96, 1)]
    if max(dims) <= 64:
        cuts += [(192, 160, 1), (192, 192, 1), (128, 256, 1)]
    for tile_m, tile_n, pieces in cuts:
        for in_turns, logarithms in itertools.product((True, False), LOGARITHMS):
            of = f", {logarithms} of 8 as logarithms" if logarithms else ""
            name = f"{tile_m}x{tile_n} pieces={pieces} in_turns={in_turns}{of}"
            found[name] = Fp8Tiling(
                logarithms=logarithms,
                passes_by=masked and tile_m == 192,
                tile_m=tile_m,
                tile_n=tile_n,
                d=d,
                dv=dv,
                stages=2,
                scheduler=Scheduler.LATE,
                threshold=ALWAYS_RESCALE,
                pieces=pieces,
                in_turns=in_turns,
            )
    return found


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of `TOKENS` tokens, and one of the tilings of its D and Dv."""

    dims: tuple[int, int]
    length: int
    masked: bool
    name: str

    @property
    def text(self) -> str:
        return f"D{self.dims[0]}/{self.dims[1]} S{self.length} {'causal' if self.masked else 'full'}"

    @property
    def heads(self) -> int:
        return HEADS[self.dims]

    @property
    def batch(self) -> int:
        return max(1, TOKENS // self.length)

    @property
    def flops(self) -> float:
        pairs = self.batch * self.heads * self.length**2 * (0.5 if self.masked else 1.0)
        return 2 * pairs * sum(self.dims)

    def plan(self, device: str = "cuda") -> ForwardPlan:
        d, dv = self.dims
        sizes = (self.batch, self.heads, self.heads, self.length, self.length, d, dv)
        problem = Problem(*sizes, torch.bfloat16, torch.device(device), narrow=(E4M3, E4M3, E4M3))
        program = Program(None, causal().expr if self.masked else None)
        tiling = candidates(self.dims, self.masked)[self.name]
        return plan_forward(problem, program, HOPPER, return_lse=False, tiling=tiling)


def cases(dims: list[tuple[int, int]], lengths: list[int], masks: list[bool]) -> Iterator[Case]:
    for each in dims:
        for length in lengths:
            for masked in masks:
                for name in candidates(each, masked):
                    yield Case(each, length, masked, name)


def compiled(case: Case) -> str:
    """Compiles a case where its kernel is kept; gives what it takes."""
    made = compile_offline(case.plan("cuda"))
    return f"{made.spills} spills, stack {made.stack}, {made.shared_memory} bytes"


def kept(case: Case) -> str:
    """Compiles a case for the GPU that is there, into the cache on disk."""
    ForwardLauncher(case.plan()).kernels()
    return ""


def drawn(case: Case, mean: float = 0.0) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    d, dv = case.dims
    shapes = [(case.batch, case.heads, case.length, n) for n in (d, d, dv)]
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    return q, k, v + mean


def launch(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Launched:
    launcher = ForwardLauncher(case.plan())
    out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, device="cuda", dtype=torch.bfloat16)
    scale, last = case.dims[0] ** -0.5, slice(case.length - min(ROWS_CHECKED, case.length), case.length)
    return (
        lambda: launcher.fill(q, k, v, out, None, None, scale, (), ()),
        lambda: error_of_rows(out, q, k, v, case.masked, last),
    )


def gemm() -> Call:
    a = torch.randn(GEMM, GEMM, device="cuda").to(E4M3)
    one = torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16)


def measured(group: list[Case], rounds: int) -> Iterator[dict[str, Any]]:
    """All tilings of one call, in turns with our bf16 and the GEMM; what is wrong is not timed."""
    first = group[0]
    q, k, v = drawn(first, mean=1.0)
    narrow = [t.to(E4M3) for t in (q, k, v)]
    attn = ca.Attention(mask_mod=causal() if first.masked else None)
    calls: dict[str, Call] = {"FP8 GEMM": gemm(), "bf16": lambda: attn(q, k, v)}
    right, errors = right_ones(group, lambda case: launch(case, *narrow), 0.01)
    calls |= right
    timings = interleaved(calls, Stopwatch(torch.device("cuda")), rounds=rounds, sample_ms=8.0, limit_s=40.0)
    for name, timing in timings.items():
        flops = 2.0 * GEMM**3 if name == "FP8 GEMM" else first.flops
        row = {"call": first.text, "name": name, "tflops": round(flops / timing.ms / 1e9, 1), "ms": timing.ms}
        row |= {"spread": round(timing.spread, 4), "error": errors.get(name)}
        of_error = "" if row["error"] is None else f", relative error {row['error']:.1e}"
        print(f"{row['call']} {name}: {row['tflops']:.0f} TFLOP/s (spread {row['spread']:.1%}){of_error}", flush=True)
        yield row


def mods() -> dict[str, dict[str, Any]]:
    """Masks and score mods of calls with 16 heads of 8k, and scales of k."""
    with torch.device("cuda"):
        return {
            "causal": {"mask_mod": causal()},
            "causal ALiBi": {"mask_mod": causal(), "score_mod": alibi(torch.linspace(0.01, 0.5, 16))},
            "causal soft cap": {"mask_mod": causal(), "score_mod": softcap(30.0)},
            "window 1024": {"mask_mod": sliding_window(1024)},
            "causal documents": {"mask_mod": causal() & document(torch.arange(8192) // 1024)},
            "causal, scales of heads": {"mask_mod": causal(), "k_scale": torch.ones(2, 16)},
            "causal, scales of keys": {"mask_mod": causal(), "k_scale": torch.ones(2, 16, 8192)},
        }


def with_mods(rounds: int) -> Iterator[dict[str, Any]]:
    """Calls of `ca.attention` with mods, D 128, B 2, H 16, S 8k, in turns with ours in bf16."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 16, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    narrow = [t.to(E4M3) for t in (q, k, v)]
    for name, given in mods().items():
        of_bf16 = {key: value for key, value in given.items() if key != "k_scale"}
        q8, k8, v8 = ca.Quantized(narrow[0]), ca.Quantized(narrow[1], given.get("k_scale")), ca.Quantized(narrow[2])
        calls: dict[str, Call] = {
            "bf16": functools.partial(ca.attention, q, k, v, **of_bf16),
            "fp8": functools.partial(ca.attention, q8, k8, v8, **of_bf16),
        }
        out, want = calls["fp8"](), calls["bf16"]()
        assert isinstance(out, torch.Tensor) and isinstance(want, torch.Tensor)
        off = float((out - want).float().norm() / want.float().norm())
        timings = interleaved(calls, Stopwatch(torch.device("cuda")), rounds=rounds, sample_ms=8.0, limit_s=20.0)
        ratio = timings["bf16"].ms / timings["fp8"].ms
        row = {"call": f"D128 S8192 {name}", "name": "fp8", "ms": timings["fp8"].ms, "of bf16": round(ratio, 3)}
        print(f"{row['call']}: {row['ms']:.3f} ms, {ratio:.2f} of bf16's speed, {off:.1e} from it", flush=True)
        yield row


def by_length(lengths: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Relative error of the output by number of keys, V of mean 1, D 128; 66 heads, so that no row's keys are split."""
    for length in lengths:
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 66, n, 128, device="cuda").to(E4M3) for n in (ROWS_CHECKED, length, length))
        v = (v.float() + 1.0).to(E4M3)
        out = ca.attention(q, k, v, out_dtype=torch.bfloat16)
        row: dict[str, Any] = {"call": f"D128 q{ROWS_CHECKED} kv{length}, V of mean 1", "name": "fp8"}
        row["error"] = error_of_rows(out, q, k, v, False, slice(0, ROWS_CHECKED))
        print(*row.values(), flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", default="64,96,128,192/128,192,256")
    parser.add_argument("--lengths", default="16384")
    parser.add_argument("--masks", default="full,causal")
    parser.add_argument("--only", default="", help="regular expression on the names of tilings")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--mods", action="store_true", help="calls with mods too")
    parser.add_argument("--sums", action="store_true", help="errors by number of keys too")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    dims = [(int(d.split("/")[0]), int(d.split("/")[-1])) for d in given.dims.split(",") if d]
    every = list(
        cases(dims, [int(n) for n in given.lengths.split(",")], [m == "causal" for m in given.masks.split(",")])
    )
    every = [case for case in every if re.search(given.only, case.name)]
    compile_first(compiled if given.dry else kept, every, given.workers)
    if given.dry:
        return
    rows: list[dict[str, Any]] = []
    for group in by_call(every):
        rows += measured(group, given.rounds)
    rows += with_mods(given.rounds) if given.mods else []
    rows += by_length(2048 * 4**n for n in range(4)) if given.sums else []
    save(rows, given.out)


if __name__ == "__main__":
    main()
