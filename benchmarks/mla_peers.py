"""Latent attention (D 576, Dv 512, one query a sequence) on 16- and 8-bit keys, ours beside FlashMLA's, in one run.

    FLASHMLA_SO=flashmla.so python -m benchmarks.mla_peers --rounds 5 --out result.json

FlashMLA is the one that vLLM builds. On Hopper its kernel of 8 bits is the sparse one, of 512 numbers in 8 bits with
four scales and 64 in bf16 a key; here its indices name all keys, in order. FlashMLA reads V as the first 512 numbers of
K, as "ours, v is k" does; elsewhere ours has V apart.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import composattn as ca
from benchmarks.kernel_cases import save
from benchmarks.timing import Call, Stopwatch, captured, interleaved

D, DV, PAGE = 576, 512, 64
KEYS = 32768
OF_A_KEY = DV + 4 * 4 + 2 * (D - DV)  # bytes of FlashMLA's 8-bit cache


def flash_mla(q: torch.Tensor, k: torch.Tensor) -> dict[str, Call]:
    """Its calls on these q (B, H, 1, D) and k (B, 1, S, D) in bf16; none where it is not there."""
    if "FLASHMLA_SO" not in os.environ:
        return {}
    torch.ops.load_library(os.environ["FLASHMLA_SO"])
    ops, batch, keys = torch.ops._flashmla_C, k.shape[0], k.shape[2]
    q, scale = q.transpose(1, 2).contiguous(), D**-0.5
    pages = torch.arange(batch * keys // PAGE, dtype=torch.int32, device=k.device).view(batch, -1)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=k.device)
    latent = k[..., :DV].to(torch.float8_e4m3fn).view(torch.uint8).view(batch, keys, DV)
    scales = torch.ones(batch, keys, 4, device=k.device).view(torch.uint8)
    rotary = k[..., DV:].contiguous().view(torch.uint8).view(batch, keys, -1)
    narrow = torch.cat([latent, scales, rotary], -1).view(-1, PAGE, 1, OF_A_KEY).view(torch.float8_e4m3fn)
    every = torch.arange(batch * keys, dtype=torch.int32, device=k.device).view(batch, 1, keys)
    wide = k.reshape(-1, PAGE, 1, D)
    _, _, plan, splits = ops.dense_decode_fwd(q, wide, DV, lengths, pages, scale, False, None, None, None)
    dense = functools.partial(ops.dense_decode_fwd, q, wide, DV, lengths, pages, scale, False, plan, splits, None)
    _, _, plan, splits = ops.sparse_decode_fwd(q, narrow, every, *(None,) * 7, DV, scale)
    known = (None, None, plan, splits, None, None, None)
    of_bytes = functools.partial(ops.sparse_decode_fwd, q, narrow, every, *known, DV, scale)
    return {"FlashMLA, bf16": dense, "FlashMLA, 8 bits": of_bytes}


def measured(rounds: int, heads: int, batch: int) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    normal = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    q, k, apart = normal(batch, heads, 1, D), normal(batch, 1, KEYS, D), normal(batch, 1, KEYS, DV)
    k8, v8 = k.to(torch.float8_e4m3fn), apart.to(torch.float8_e4m3fn)
    attention = ca.Attention()
    calls: dict[str, Call] = {
        "ours, bf16": lambda: attention(q, k, apart),
        "ours, 8 bits": lambda: attention(q, k8, v8),
        "ours, bf16, v is k": lambda: attention(q, k, k[..., :DV]),
        "ours, 8 bits, v is k": lambda: attention(q, k8, k8[..., :DV]),
    }
    try:
        calls |= flash_mla(q, k)
    except Exception as failed:
        print(f"FlashMLA: {type(failed).__name__} {str(failed)[:600]}", flush=True)
    want: Any = calls["ours, bf16, v is k"]()
    for name, call in calls.items():
        if name.startswith("FlashMLA"):
            out: Any = call()
            off = float((out[0].transpose(1, 2).float() - want.float()).norm() / want.float().norm())
            print(f"{name}: {off:.1e} from ours", flush=True)
    if not rounds:
        return
    replayed = {name: captured(call) for name, call in calls.items()}
    timings = interleaved(replayed, Stopwatch(torch.device("cuda")), rounds=rounds, sample_ms=4.0, limit_s=10.0)
    for name, timing in timings.items():
        of_keys = name.endswith("v is k") or name.startswith("FlashMLA")
        row: dict[str, Any] = {"call": f"D{D}/{DV} kv{KEYS} heads {heads} B{batch}", "name": name, "ms": timing.ms}
        row |= {"tflops": round(2 * batch * heads * KEYS * (D + DV) / timing.ms / 1e9, 1)}
        row |= {"spread": round(timing.spread, 4)}
        base = "FlashMLA, bf16" if name.startswith("FlashMLA") else "ours, bf16, v is k" if of_keys else "ours, bf16"
        row |= {"of 16 bits": round(timing.ms / timings[base].ms, 3)}
        print(*row.values(), flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--heads", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--batches", nargs="+", type=int, default=[4, 16, 64])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for heads, batch in itertools.product(given.heads, given.batches):
        rows += measured(given.rounds, heads, batch)
        save(rows, given.out)


if __name__ == "__main__":
    main()
