"""What sinks, dropout and batch invariance cost: calls with them beside the same calls without, in turns.

    python benchmarks/options.py --out benchmarks/results/h200-options.json

bf16. A forward, and a backward alone (sinks with their gradient). No parts of kv where a call is batch-invariant.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)

import composattn as ca  # noqa: E402
from benchmarks.implementations import OURS  # noqa: E402
from benchmarks.provenance import provenance  # noqa: E402
from benchmarks.timing import Stopwatch, interleaved  # noqa: E402
from composattn.call.schedule import Schedule  # noqa: E402
from composattn.mods import causal, sliding_window  # noqa: E402

INVARIANT = "batch_invariant"


@dataclass(frozen=True)
class Shape:
    name: str
    batch: int
    heads: tuple[int, int]
    lengths: tuple[int, int]
    dim: int
    mask: Any = None


SHAPES = (
    Shape("causal D128 S8192", 1, (32, 8), (8192, 8192), 128, causal()),
    Shape("causal D64 S8192", 1, (64, 8), (8192, 8192), 64, causal()),
    Shape("window 1024 D128 S16384", 1, (32, 8), (16384, 16384), 128, causal() & sliding_window(1024)),
    Shape("window 128 D64 S8192", 1, (64, 8), (8192, 8192), 64, causal() & sliding_window(127)),
    Shape("decode B16 D64 of 8192", 16, (64, 8), (1, 8192), 64),
    Shape("decode B16 D128 of 8192", 16, (32, 8), (1, 8192), 128),
)


def calls(shape: Shape, device: torch.device) -> dict[str, dict[str, Callable[[], Any]]]:
    """Ways to call forward and backward, by name; the first is the one without options."""
    (hq, hkv), (sq, skv) = shape.heads, shape.lengths

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, dtype=torch.bfloat16).requires_grad_()

    q, k, v = (normal(shape.batch, h, s, shape.dim) for h, s in ((hq, sq), (hkv, skv), (hkv, skv)))
    sinks = torch.randn(hq, device=device).requires_grad_()
    options: dict[str, dict[str, Any]] = {"": {}, "sinks": {"sinks": sinks}, "dropout": {"dropout_p": 0.1}}
    if device.type == "cuda":
        options[INVARIANT] = {"schedule": Schedule(batch_invariant=True)}

    def forward(more: dict[str, Any]) -> Callable[[], Any]:
        return torch.no_grad()(lambda: ca.attention(q, k, v, mask_mod=shape.mask, **more))

    def backward(more: dict[str, Any]) -> Callable[[], Any]:
        out, leaves = (
            ca.attention(q, k, v, mask_mod=shape.mask, **more),
            [q, k, v, *([sinks] if "sinks" in more else [])],
        )
        dout = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    made = {f"forward {shape.name}": {_named(name): forward(more) for name, more in options.items()}}
    if sq > 1:
        options.pop(INVARIANT, None)  # of the forward
        made[f"backward {shape.name}"] = {_named(name): backward(more) for name, more in options.items()}
    return made


def _named(option: str) -> str:
    return f"{OURS}, {option}" if option else OURS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--limit", type=float, default=4.0, help="seconds of timing for one row")
    parser.add_argument("--smoke", action="store_true", help="short calls, to see that it runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {**provenance(device), "rows": []}
    for shape in SHAPES:
        if options.smoke:
            shape = Shape(shape.name, 1, (4, 2), (min(shape.lengths[0], 64), 64), 16, shape.mask)
        for row, ways in calls(shape, device).items():
            timings = interleaved(ways, Stopwatch(device), rounds=options.rounds, sample_ms=4.0, limit_s=options.limit)
            default = timings[OURS].ms
            for name, t in timings.items():
                result["rows"].append(
                    {"row": row, "impl": name, "ms": t.ms, "spread": t.spread, "of default": default / t.ms}
                )
                print(f"{row:36} {name:28} {t.ms:8.4f} ms  {default / t.ms:.3f}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
