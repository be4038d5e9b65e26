"""What deciding which tiles to visit costs: host time, time until the device is done, memory; torch's BlockMask beside.

Every repeat plans a mask that nothing was planned for before; tracing the mask and compiling a kernel are not part of
it. `analysed` is the time until the host goes on (`cpu`: of its processor), `done` until the device has finished,
`kept` the bytes of tensors that stay, `peak` what was allocated besides at most (known on a GPU only).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import provenance
from composattn.analysis.derived import Derived
from composattn.analysis.program import Program
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Problem
from composattn.mods import causal, document, neighborhood, sliding_window
from composattn.mods.mask import Mask

LENGTHS = (700, 1500, 300, 2500, 1192, 1000, 500, 500)


@dataclass(frozen=True)
class Row:
    """A mask at a length: `masks` gives one that is new each time; `flex`: torch's BlockMask at the same length too."""

    name: str
    length: int
    masks: Callable[[torch.device], Iterator[Mask]]
    flex: bool = False


def windows(device: torch.device) -> Iterator[Mask]:
    for more in range(10_000):
        yield causal() & sliding_window(1024 + more)


def grids(rows: int, columns: int) -> Callable[[torch.device], Iterator[Mask]]:
    def drawn(device: torch.device) -> Iterator[Mask]:
        for _ in range(10_000):
            mask = neighborhood((rows, columns), (7, 7))
            yield Mask((mask & (lambda b, h, q, kv, n=_: q >= -n)).expr, "grid")

    return drawn


def documents(length: int) -> Callable[[torch.device], Iterator[Mask]]:
    def drawn(device: torch.device) -> Iterator[Mask]:
        lengths = torch.tensor(LENGTHS).repeat(length // sum(LENGTHS) + 1)
        ids = torch.arange(len(lengths)).repeat_interleave(lengths)[:length].to(device)
        for _ in range(10_000):
            yield document(ids.clone()) & causal()

    return drawn


ROWS = (
    Row("window", 1 << 20, windows),
    Row("2-D neighbourhood", 1 << 17, grids(256, 512)),
    Row("2-D neighbourhood", 1 << 14, grids(128, 128), flex=True),
    Row("documents by ids", 1 << 13, documents(1 << 13)),
    Row("documents by ids", 1 << 17, documents(1 << 17)),
)


def measure(row: Row, device: torch.device, repeats: int) -> dict[str, Any]:
    problem = Problem(1, 16, 16, row.length, row.length, 128, 128, torch.bfloat16, device)
    masks = row.masks(device)

    def ours() -> list[torch.Tensor]:
        program = Program(None, next_mask.expr)
        plan = plan_forward(problem, program, HOPPER)
        lists = [] if plan.lists is None else plan.lists.of_call()
        return [c.tensor for c in program.captures if isinstance(c, Derived)] + list(lists)

    samples = []
    gc.collect()  # once: before every sample it would leave the processor's caches cold
    for _ in range(repeats):
        next_mask = next(masks)
        samples.append(sample(ours, device))
    return {"row": row.name, "S": row.length, "impl": "composattn", **summary(samples)}


def flex(row: Row, device: torch.device, repeats: int) -> dict[str, Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    mask = next(row.masks(device))

    def theirs() -> list[torch.Tensor]:
        made = create_block_mask(lambda b, h, q, kv: mask(b, h, q, kv), None, None, row.length, row.length, str(device))
        return [t for t in made.as_tuple() if isinstance(t, torch.Tensor)]

    return {
        "row": row.name, "S": row.length, "impl": "create_block_mask",
        **summary([sample(theirs, device) for _ in range(repeats)]),
    }  # fmt: skip


def sample(make: Callable[[], list[torch.Tensor]], device: torch.device) -> dict[str, float | None]:
    """One run: seconds and bytes."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    started, processor = time.perf_counter(), time.thread_time()
    kept = make()
    analysed, cpu = time.perf_counter() - started, time.thread_time() - processor
    if on_gpu:
        torch.cuda.synchronize()
    done = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else None
    return {"analysed": analysed, "cpu": cpu, "done": done, "kept": sum(t.nbytes for t in kept), "peak": peak}


def summary(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians; the first sample warms up."""
    warm = samples[1:] or samples

    def median(name: str) -> float | None:
        return None if warm[0][name] is None else statistics.median(s[name] for s in warm)

    times = {f"{name}_ms": 1e3 * (median(name) or 0.0) for name in ("analysed", "cpu", "done")}
    return {**times, "kept_bytes": median("kept"), "peak_bytes": median("peak"), "repeats": len(warm)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="of torch on the host")
    parser.add_argument("--flex", action="store_true", help="torch's create_block_mask beside, where it fits")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    result: dict[str, Any] = {**provenance(device), "rows": []}
    for row in ROWS:
        found = [measure(row, device, options.repeats)]
        if options.flex and row.flex:
            found.append(flex(row, device, 3))
        for one in found:
            peak = "" if one["peak_bytes"] is None else f"   peak {one['peak_bytes'] / 2**20:8.2f} MiB"
            print(
                f"{one['row']:20} S {one['S']:8} {one['impl']:18} host {one['analysed_ms']:8.2f} ms   "
                f"cpu {one['cpu_ms']:8.2f} ms   done {one['done_ms']:8.2f} ms   "
                f"kept {one['kept_bytes'] / 2**20:8.2f} MiB{peak}",
                flush=True,
            )
        result["rows"] += found
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
