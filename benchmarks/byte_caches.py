"""Keys and values of 8 bits beside the same of 16, queries of 16: times in turns, what fp64 says of both, on a GPU.

    python -m benchmarks.byte_caches "decode B(1|16) " --rounds 12 --out benchmarks/results/eight-bits/h200.json
    python -m benchmarks.byte_caches "kv32768 GQA 32/8" --variant "blocks=2 tile_n=64 stages=2 byte_stages=4"

A row is named by a regular expression. Calls of few queries are replays of CUDA graphs, and their caches are changed
from call to call, so that none finds its keys in L2. A variant is fields of the 8-bit call's tiling, see `tilings.py`,
or `many`: of how many rows of queries on k and v are made 16-bit tensors before the kernel. `--bounds`: beside them
what reads the same bytes and computes nothing, and a GEMM of as many operations, see `cache_reads`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import composattn as ca
from benchmarks.cache_reads import products, reads
from benchmarks.provenance import provenance
from benchmarks.run import Row, save
from benchmarks.tilings import changes_of, planning_with
from benchmarks.timing import Call, Stopwatch, captured, interleaved
from composattn.analysis.program import Program
from composattn.backends.fused.compiling.compile import compile_plan
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Problem
from composattn.mods import causal

dequantised: Any = importlib.import_module("composattn.backends.fused.rewrites.dequantised")  # a function has its name
KINDS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
PRODUCTS_COUNT = 16  # rows of each key: of fewer, products take a few per cent of the time
L2 = 64 << 20  # bytes that a round of caches is larger than


@dataclasses.dataclass(frozen=True)
class Shape:
    """A call that is timed; `scaled`: with scales by head."""

    batch: int
    heads: tuple[int, int]
    q_len: int
    kv_len: int
    dims: tuple[int, int] = (128, 128)
    is_causal: bool = False
    scaled: bool = False
    kind: str = "e4m3"
    dtype: torch.dtype = torch.bfloat16

    @property
    def decodes(self) -> bool:
        return self.q_len == 1

    def __str__(self) -> str:
        of = "decode" if self.decodes else f"prefill q{self.q_len}"
        mods = " causal" * self.is_causal + " scaled" * self.scaled
        dims = f"D{self.dims[0]}" + (f"/{self.dims[1]}" if self.dims[0] != self.dims[1] else "")
        dtype = "" if self.dtype is torch.bfloat16 else " fp16"
        heads = "{}/{}".format(*self.heads)
        return f"{of} B{self.batch} kv{self.kv_len} GQA {heads} {dims}{mods} {self.kind}{dtype}"


DECODES = [
    Shape(batch, heads, 1, kv_len, scaled=scaled)
    for heads in ((32, 8), (64, 8))
    for kv_len in (1024, 32768, 65536)
    for batch in (1, 2, 4, 8, 16, 32, 64)
    for scaled in (False, True)
    if batch * kv_len <= 1 << 21
]
SHAPES = [
    *DECODES,
    *(Shape(batch, (heads, 1), 1, 32768, (576, 512)) for heads in (16, 32, 64, 128) for batch in (1, 4, 16, 64)),
    *(Shape(16, (32, 8), 1, kv_len, (d, d)) for d in (64, 96, 192, 256) for kv_len in (1024, 32768)),
    Shape(16, (32, 8), 1, 32768, kind="e5m2"),
    Shape(16, (32, 8), 1, 32768, dtype=torch.float16),
    *(Shape(1, (32, 8), 8192, 8192, (d, d), is_causal) for d in (64, 128, 192, 256) for is_causal in (False, True)),
    *(Shape(1, (32, 8), q_len, kv_len) for q_len in (64, 128, 256, 512, 1024) for kv_len in (8192, 32768)),
    Shape(1, (32, 8), 8192, 8192, is_causal=True, scaled=True),
]


def drawn(shape: Shape, device: torch.device, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and 8-bit k and v, N(0, 1)."""
    make = torch.Generator(device).manual_seed(seed)

    def normal(heads: int, length: int, dim: int) -> torch.Tensor:
        return torch.randn(shape.batch, heads, length, dim, generator=make, device=device, dtype=shape.dtype)

    kind = KINDS[shape.kind]
    k, v = (normal(shape.heads[1], shape.kv_len, dim).to(kind) for dim in shape.dims)
    return normal(shape.heads[0], shape.q_len, shape.dims[0]), k, v


def scales(shape: Shape, device: torch.device) -> dict[str, Any]:
    """Powers of two by sequence and head, with which 16 bits are exact."""
    if not shape.scaled:
        return {}
    make = torch.Generator(device).manual_seed(1)
    k, v = (2.0 ** torch.randint(-2, 3, (shape.batch, shape.heads[1]), generator=make, device=device) for _ in range(2))
    return {"k_scale": k, "v_scale": v}


def error(shape: Shape, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """Largest error of one sequence and head against fp64 of these k and v, over the largest output."""
    rows = slice(-64, None)
    k, v = (t[:1, :1].double() for t in (k, v))
    scores = q[:1, :1, rows].double() @ k.mT * shape.dims[0] ** -0.5
    if shape.is_causal:
        visible = torch.ones(shape.q_len, shape.kv_len, dtype=torch.bool, device=q.device).tril()[rows]
        scores = scores.masked_fill(~visible, -torch.inf)
    exact = torch.softmax(scores, -1) @ v
    return float((out[:1, :1, rows].double() - exact).abs().max() / exact.abs().max())


def in_turns(calls: list[Call]) -> Call:
    """One after the other, all in one call."""

    def run() -> None:
        for call in calls:
            call()

    return run


@contextlib.contextmanager
def planning_as(text: str) -> Iterator[None]:
    """Inside, calls are planned as the variant says."""
    changes, before = changes_of(text), dequantised.MANY
    dequantised.MANY = changes.pop("many", before)
    try:
        with planning_with("forward", changes):
            yield
    finally:
        dequantised.MANY = before


def row(shape: Shape, variants: list[str], device: torch.device, options: argparse.Namespace) -> list[Row]:
    """Times of 8 and of 16 bits, and of each variant."""
    size = 2 * shape.batch * shape.heads[1] * shape.kv_len * sum(shape.dims)
    copies = min(8, 1 + 2 * L2 // size) if shape.decodes else 1  # of 16 bits; 8 have half
    given = [drawn(shape, device, seed) for seed in range(copies)]
    how: dict[str, Any] = {"mask_mod": causal()} if shape.is_causal else {}
    of_scales = scales(shape, device)
    wide = []
    for q, k, v in given:
        pair = [t.to(shape.dtype) for t in (k, v)]
        if of_scales:
            pair = [t * of_scales[f"{n}_scale"][..., None, None].to(t.dtype) for n, t in zip("kv", pair, strict=True)]
        wide.append((q, *pair))
    found: dict[str, Call] = {}
    errors: dict[str, float] = {}
    with torch.no_grad():
        jobs: list[tuple[str, list[Any], dict[str, Any]]] = [("16 bits", wide, {}), ("8 bits", given, of_scales)]
        for name, tensors, more in [*jobs, *((text, given, of_scales) for text in variants)]:
            attention = ca.Attention(**how)
            with planning_as(name) if name in variants else contextlib.nullcontext():
                try:
                    out = attention(*tensors[0], **more)
                except Exception as refused:  # a variant that does not fit
                    print(f"{shape}: {name}: {type(refused).__name__}: {str(refused)[:200]}", flush=True)
                    continue
            errors[name] = error(shape, out, *wide[0])
            calls: list[Call] = [functools.partial(attention, *t, **more) for t in tensors]
            found[name] = captured(in_turns(calls)) if shape.decodes else in_turns(calls)
    if options.bounds:
        found |= bounds(shape, {"16 bits": wide, "8 bits": given}, device)
    times = interleaved(found, Stopwatch(device), rounds=options.rounds, sample_ms=options.sample_ms)
    rows: list[Row] = []
    for name, timing in times.items():
        ms = timing.ms / copies
        told = {"row": str(shape), "impl": name, "ms": ms, "spread": timing.spread, "error": errors.get(name)}
        told["of_16_bits"] = timing.ms / times["16 bits"].ms
        told["bytes_per_s"] = size / (1 if "16 bits" in name else 2) / ms * 1e3
        rows.append(told)
        of_error = f"  error {errors[name]:.1e}" if name in errors else ""
        print(f"{told['row']:60} {name:44} {ms * 1e3:9.1f} us  {told['of_16_bits']:.3f}{of_error}", flush=True)
    return rows


def bounds(shape: Shape, drawn: dict[str, list[Any]], device: torch.device) -> dict[str, Call]:
    """Calls that do a part of what ours do: all reads of each cache, or as many products."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    found: dict[str, Call] = {}
    for name, copies in drawn.items():
        for end in (False, True):
            forms = [reads(k, v, sms, then_nothing=end) for _, k, v in copies]
            for form in forms[0]:
                text = f"read of {name}, {form}" + ", then nothing" * end
                found[text] = captured(in_turns([each[form] for each in forms]))
    if shape.heads[0] // shape.heads[1] >= PRODUCTS_COUNT:
        pairs = shape.batch * shape.heads[0] * shape.q_len * shape.kv_len
        product = products(2 * pairs * sum(shape.dims), device)
        found["products"] = captured(in_turns([product] * len(drawn["16 bits"])))
    return found


def compiled(shape: Shape) -> None:
    """The kernels of both calls, kept on disk, with or without a GPU."""
    for narrow in (None, (shape.dtype, KINDS[shape.kind], KINDS[shape.kind])):
        sizes = (shape.batch, *shape.heads, shape.q_len, shape.kv_len, *shape.dims)
        problem = Problem(*sizes, shape.dtype, torch.device("cpu"), narrow=narrow)
        mask = causal().expr if shape.is_causal else None
        plan = plan_forward(problem, Program(None, mask), HOPPER, return_lse=False)
        for each in [plan, *([plan.combine] if plan.is_split else [])]:
            compile_plan(each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="?", default="", help="regular expression on the names of rows")
    parser.add_argument("--variant", dest="variants", nargs="+", default=[])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sample-ms", type=float, default=4.0)
    parser.add_argument("--bounds", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chosen = [s for s in SHAPES if re.search(options.shapes, str(s))]
    if options.list:
        print("\n".join(map(str, chosen)))
        return
    device = torch.device("cuda")
    result: dict[str, Any] = {**provenance(device), "rows": []}
    for shape in chosen:
        result["rows"] += row(shape, options.variants, device, options)
        save(result, options.out)


if __name__ == "__main__":
    main()
