"""What `ca.quantize` takes on a GPU, alone and with attention behind it, beside attention in 16 bits.

    python benchmarks/quantising.py --out benchmarks/results/eight-bits/quantising.json

bf16, B 1, 16 heads, D 128. "quantise": `ca.quantize` alone; "in all": with `ca.attention` of what it made; "by
PyTorch": the operations that the kernel stands for. `of_bytes` is the time that memory needs to move 16 bits in and 8
out at the rate that the GPU's clocks say, over the time taken.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)

import composattn as ca  # noqa: E402
from benchmarks.provenance import provenance  # noqa: E402
from benchmarks.run import save  # noqa: E402
from benchmarks.timing import Stopwatch, interleaved  # noqa: E402
from composattn import quantising  # noqa: E402
from composattn.backends.fused.tiles.target import Target  # noqa: E402
from composattn.errors import InvalidArgument  # noqa: E402
from composattn.mods import causal  # noqa: E402

HEADS, DIM = 16, 128
WAYS: dict[str, dict[str, Any]] = {
    "head": {},
    "block of 64": {"scale": "block"},
    "block of 128": {"scale": "block", "block": 128},
    "block of 64, best of 4": {"scale": "block", "power_of_two": False},
    "block of 128, best of 4": {"scale": "block", "block": 128, "power_of_two": False},
    "token": {"scale": "token"},
    "token, best of 4": {"scale": "token", "power_of_two": False},
    "head, no mean": {"center": False},
}
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def by_pytorch(given: Tensors) -> ca.QuantizedInputs:
    with mock.patch.object(quantising, "target_of", return_value=None):
        return ca.quantize(*given)


def calls_of(given: Tensors, mask: Any, ways: dict[str, dict[str, Any]]) -> dict[str, Callable[[], object]]:
    """What is timed, by name; attention in 8 bits where it is served."""
    calls: dict[str, Callable[[], object]] = {"bf16": lambda: ca.attention(*given, mask_mod=mask)}
    for name, how in ways.items():

        def quantise(how: dict[str, Any] = how) -> ca.QuantizedInputs:
            return ca.quantize(*given, **how)

        def in_all(how: dict[str, Any] = how) -> object:
            return ca.attention(*ca.quantize(*given, **how), mask_mod=mask)

        calls[f"quantise, {name}"] = quantise
        try:
            in_all()
        except InvalidArgument as refused:
            print(f"{name}: attention is refused: {str(refused)[:100]}", flush=True)
        else:
            calls[f"in all, {name}"] = in_all
    calls["quantise by PyTorch"] = lambda: by_pytorch(given)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 16384])
    parser.add_argument("--only", default="", help="regular expression on the ways to quantise")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda")
    rate = Target.of(device).memory_rate
    result: dict[str, Any] = {**provenance(device), "rows": []}
    ways = {name: how for name, how in WAYS.items() if re.search(options.only, name)}
    for length in options.lengths:
        given = tuple(torch.randn(1, HEADS, length, DIM, device=device, dtype=torch.bfloat16) for _ in range(3))
        least = 3 * 3 * given[0].numel() / rate / 1e6  # ms: 2 bytes in and 1 out of each number
        for name, mask in (("full", None), ("causal", causal())):
            found = interleaved(calls_of(given, mask, ways), Stopwatch(device), rounds=options.rounds)  # type: ignore[arg-type]
            for impl, took in found.items():
                row = {"row": f"D{DIM} S{length} {name}", "impl": impl, "ms": took.ms, "spread": took.spread}
                row |= {"of_bytes": least / took.ms} if impl.startswith("quantise") else {}
                row |= {"of_bf16": found["bf16"].ms / took.ms} if impl.startswith("in all") else {}
                print(*row.values(), flush=True)
                result["rows"].append(row)
            save(result, options.out)


if __name__ == "__main__":
    main()
