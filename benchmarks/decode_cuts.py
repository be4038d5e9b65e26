"""One query of many sequences, cut in every way there is, in turns: what `tiles/few_queries.py` is fitted to.

    python -m benchmarks.decode_cuts --out benchmarks/results/cuts/h200-decode.json
    python -m benchmarks.decode_cuts --dims 64 --lengths 2048 --sequences 20 40 --parts 1 2 4

All calls of a row read the same memory, from CUDA graphs. A row's names: `planned`, what the plan chose; `three`,
`two` and `one`, three blocks an SM (D 64), two and one, `two/2` of two stages, with the number of parts behind; `torch
cuDNN`. Those of `shares` had equal shares of all keys, which is gone (docs/design.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import composattn as ca
from benchmarks.provenance import provenance
from benchmarks.run import save
from benchmarks.tilings import planning_with
from benchmarks.timing import Call, Stopwatch, captured, interleaved
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.tiles.scheduler import Scheduler
from composattn.backends.fused.tiles.target import Target
from composattn.call.problem import Problem

HEADS, KV_HEADS = 32, 8


def cuts(dim: int) -> dict[str, dict[str, Any]]:
    """Fields of the tilings that `hopper/forward_choice.py` chooses among."""

    def of(blocks: int, tile_n: int, stages: int) -> dict[str, Any]:
        return {"blocks": blocks, "tile_n": tile_n, "stages": stages, "scheduler": Scheduler.ONE_TILE}

    one = 128, {64: 4, 96: 2, 128: 2}[dim]
    found = {"two": of(2, 128 if dim == 64 else 64, {64: 3, 96: 4, 128: 3}[dim]), "one": of(1, *one)}
    if dim == 64:
        found["three"] = of(3, 64, 3)
    fewer = {
        f"{kind}/{stages}": cut | {"stages": stages}
        for kind, cut in found.items()
        if cut["blocks"] > 1
        for stages in range(2, cut["stages"])
    }
    return found | fewer


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def calls(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kinds: str, parts: list[int], target: Target
) -> dict[str, Call]:
    """Each checked against the first."""
    dim, tiles = q.shape[-1], q.shape[0] * KV_HEADS
    planned = ca.Attention()
    wanted = planned(q, k, v).float()
    found: dict[str, Call] = {
        "planned": functools.partial(planned, q, k, v),
        "torch cuDNN": functools.partial(cudnn, q, k, v),
    }
    for (name, fields), n in itertools.product(cuts(dim).items(), parts):
        if not re.search(kinds, name) or n * tiles > 12 * target.sms:
            continue
        attention = ca.Attention(schedule=ca.Schedule(split_kv=n))
        with planning_with("forward", fields):
            torch.testing.assert_close(attention(q, k, v).float(), wanted, atol=1e-2, rtol=1e-2)
        found[f"{name} {n}"] = functools.partial(attention, q, k, v)
    return found


def chosen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, target: Target) -> str:
    """The name of what the plan chose, and the number of its parts; "other" where none of these cuts is like it."""
    plan = plan_forward(Problem.of(q, k, v), ca.Attention().program, target)
    same = [
        name
        for name, fields in cuts(q.shape[-1]).items()
        if all(getattr(plan.tiling, field) == fields[field] for field in ("blocks", "stages"))
    ]
    return f"{same[0] if same else 'other'} {plan.splits}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 64, 96])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 32768])
    parser.add_argument(
        "--sequences", type=int, nargs="+", default=[1, 2, 4, 6, 8, 10, 12, 14, 16, 17, 18, 20, 24, 28, 32, 34, 40, 64]
    )
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8, 12, 16, 32])
    parser.add_argument("--kinds", default="", help="regular expression on the names of cuts")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda")
    target = Target.of(device)
    result: dict[str, Any] = {**provenance(device), "rows": []}
    most = 2 * KV_HEADS * max(options.lengths) * max(options.sequences) * max(options.dims)
    memory = torch.empty(min(most, 1 << 33), dtype=torch.bfloat16, device=device).normal_()
    for dim, length, count in itertools.product(options.dims, options.lengths, options.sequences):
        numbers = count * KV_HEADS * length * dim
        if 2 * numbers > memory.numel():
            continue
        k, v = (memory[i * numbers : (i + 1) * numbers].view(count, KV_HEADS, length, dim) for i in range(2))
        q = torch.randn(count, HEADS, 1, dim, device=device, dtype=torch.bfloat16)
        with torch.no_grad():
            replays = {
                name: captured(call) for name, call in calls(q, k, v, options.kinds, options.parts, target).items()
            }
        times = interleaved(replays, Stopwatch(device), rounds=options.rounds, sample_ms=1.5)
        name, plan = f"decode B{count} kv{length} GQA {HEADS}/{KV_HEADS} D{dim}", chosen(q, k, v, target)
        result["rows"] += [{"row": name, "impl": i, "plan": plan, **dataclasses.asdict(t)} for i, t in times.items()]
        save(result, options.out)
        best = min(t.ms for i, t in times.items() if i != "torch cuDNN")
        planned = times["planned"].ms
        print(
            f"{name}: {plan} {planned * 1e3:.1f} µs, {planned / best:.3f} of the best cut, "
            f"{times['torch cuDNN'].ms / planned:.3f} of cuDNN's",
            flush=True,
        )


if __name__ == "__main__":
    main()
