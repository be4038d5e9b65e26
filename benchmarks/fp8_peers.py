"""Products of 8 bits beside flash-attention 3's, our bf16 and an FP8 GEMM in one run: 16k tokens, D 64 to 256.

FA3_SO=fa3.so python -m benchmarks.fp8_peers --rounds 5 --lengths 16384 2048 --out result.json
python -m benchmarks.fp8_peers --rounds 0 --dims 64/64      compiles, so that several do so side by side

All are replays of CUDA graphs: 2k tokens take less time than a slow host needs to ask for them.
flash-attention 3 is the one that vLLM builds, with two levels of sums, by head. Ours are by head and by block of 128.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import composattn as ca
from benchmarks import flash_attention_3
from benchmarks.fp8_tilings import GEMM, HEADS, TOKENS, gemm
from benchmarks.kernel_cases import save
from benchmarks.timing import Call, Stopwatch, captured, interleaved
from composattn.mods import causal

DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))


def by_head_in_8_bits(made: ca.QuantizedInputs, masked: bool) -> Call:
    """A call of flash-attention 3, with a scale of each head."""
    q, k, v = (x.data.transpose(1, 2).contiguous() for x in made)
    scales = [x.scale[:, :, 0, 0].contiguous() for x in made if x.scale is not None]
    given = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    return functools.partial(flash_attention_3.forward, q, k, v, is_causal=masked, **given)


def calls_of(dims: tuple[int, int], length: int, masked: bool) -> dict[str, Call]:
    """What is timed, by name; who gives something else than our bf16 is left out, with a word."""
    torch.manual_seed(0)
    shape = TOKENS // length, HEADS[dims], length
    q, k, v = (torch.randn(*shape, n, device="cuda", dtype=torch.bfloat16) for n in (dims[0], *dims))
    v = v + 1.0
    mask = causal() if masked else None
    by_head, by_block = ca.quantize(q, k, v), ca.quantize(q, k, v, scale="block", block=128)
    calls: dict[str, Call] = {
        "bf16": lambda: ca.attention(q, k, v, mask_mod=mask),
        "fp8, head": lambda: ca.attention(*by_head, mask_mod=mask),
        "fp8, block of 128": lambda: ca.attention(*by_block, mask_mod=mask),
        "FP8 GEMM": gemm(),
    }
    if flash_attention_3.is_there():
        calls["flash-attention 3"] = by_head_in_8_bits(by_head, masked)
    want = calls["bf16"]().float()  # type: ignore[attr-defined]
    found: dict[str, Call] = {}
    for name, call in calls.items():
        try:
            out: Any = call()
        except Exception as failed:
            print(f"D{dims} {name}: {type(failed).__name__} {str(failed)[:300]}", flush=True)
            continue
        if name == "flash-attention 3":
            out = out.transpose(1, 2)
        off = 0.0 if name == "FP8 GEMM" else float((out.float() - want).norm() / want.norm())
        print(f"D{dims} {name}: {off:.1e} from bf16", flush=True)
        if off < 0.05:
            found[name] = captured(call)
    return found


def measured(rounds: int, every: Sequence[tuple[int, int]], lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    for dims, length in itertools.product(every, lengths):
        for masked in (False, True):
            calls = calls_of(dims, length, masked)
            if not rounds:
                continue
            timings = interleaved(calls, Stopwatch(torch.device("cuda")), rounds=rounds, sample_ms=8.0, limit_s=12.0)
            for name, timing in timings.items():
                flops = 2 * HEADS[dims] * TOKENS * length * sum(dims) * (0.5 if masked else 1.0)
                flops = 2.0 * GEMM**3 if name == "FP8 GEMM" else flops
                row: dict[str, Any] = {
                    "call": f"D{dims[0]}/{dims[1]} S{length} {'causal' if masked else 'full'}",
                    "name": name,
                }
                row |= {"ms": timing.ms, "tflops": round(flops / timing.ms / 1e9, 1), "spread": round(timing.spread, 4)}
                row |= {"of bf16": round(timings["bf16"].ms / timing.ms, 3)}
                print(*row.values(), flush=True)
                yield row


def dims_of(text: str) -> tuple[tuple[int, int], ...]:
    """D and Dv by their names, as "64/64,192/128". Raises: `ValueError` for others than `DIMS`."""
    by_name = {f"{d}/{dv}": (d, dv) for d, dv in DIMS}
    if unknown := set(text.split(",")) - by_name.keys():
        raise ValueError(f"{unknown} are none of {', '.join(by_name)}")
    return tuple(by_name[name] for name in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dims", default=DIMS, help="64/64,128/128 and so on; default: all", type=dims_of)
    parser.add_argument("--lengths", nargs="+", default=[TOKENS], type=int)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if flash_attention_3.is_there():
        print(flash_attention_3.operator()[0].default._schema, flush=True)
    rows: list[dict[str, Any]] = []
    for row in measured(given.rounds, given.dims, given.lengths):
        rows.append(row)
        save(rows, given.out)


if __name__ == "__main__":
    main()
