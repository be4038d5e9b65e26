"""Kernels on a GPU and in the emulator with equal inputs: O and LSE side by side, over many configurations.

    python -m benchmarks.emulator_agreement [--out FILE]

needs a Hopper or Blackwell GPU. What may differ: exp2 and the other approximate functions in their last bits, and the
order in which products are summed. A different last bit of a score can round a probability, or an output, to the
neighbouring 16-bit number; hence the bounds below.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import composattn as ca
from composattn.mods import alibi, causal, document, prefix_lm, sliding_window, softcap

# |O - O'| <= RELATIVE_O |O'| + UNIT_O max|V|;  |LSE - LSE'| <= UNIT_LSE + RELATIVE_LSE |LSE'|
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
UNIT_LSE, RELATIVE_LSE = 1e-5, 2e-6


@dataclass(frozen=True)
class Config:
    """One call. `mods` names an entry of `MODS`."""

    mods: str
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dim: int


def _tables(c: Config) -> dict[str, Any]:
    make = torch.Generator().manual_seed(11)
    return {
        "slopes": torch.rand(c.heads, generator=make),
        "ids": torch.sort(torch.randint(0, 4, (c.kv_len,), generator=make)).values,
        "bias": torch.randn(c.heads, c.q_len + c.kv_len, generator=make),
    }


def mods_of(c: Config, device: str) -> dict[str, Any]:
    """score_mod and mask_mod of a configuration, with captured tensors on `device`."""
    t = {k: v.to(device) for k, v in _tables(c).items()}
    bias = t["bias"]
    made: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"mask_mod": causal()},
        "window": {"mask_mod": causal() & sliding_window(70)},
        "prefix": {"mask_mod": causal() | prefix_lm(40)},
        "document": {"mask_mod": document(t["ids"]) & causal()},
        "alibi": {"score_mod": alibi(t["slopes"]), "mask_mod": causal()},
        "softcap": {"score_mod": softcap(20.0)},
        "relative": {"score_mod": lambda s, b, h, q, kv: s + bias[h, q - kv + c.kv_len - 1]},
    }
    return made[c.mods]


CONFIGS = tuple(
    Config(mods, dtype, batch, heads, kv_heads, q_len, kv_len, dim)
    for mods in ("plain", "causal", "window", "prefix", "document", "alibi", "softcap", "relative")
    for dtype, batch, heads, kv_heads, q_len, kv_len, dim in (
        ("bfloat16", 1, 2, 2, 256, 256, 128),
        ("bfloat16", 2, 4, 2, 199, 199, 64),
        ("float16", 1, 2, 1, 131, 313, 128),
        ("float16", 1, 3, 1, 385, 385, 64),
    )
)  # fmt: skip


def compare(c: Config, backend: str) -> dict[str, Any]:
    """Runs a configuration on both and says how far they are apart, and what that may be."""
    make, dtype = torch.Generator().manual_seed(CONFIGS.index(c)), getattr(torch, c.dtype)

    def tensor(heads: int, length: int) -> torch.Tensor:
        x = torch.randn(c.batch, heads, length, c.dim, generator=make)
        x += 10 * torch.randn(x.shape, generator=make) * (torch.rand(x.shape, generator=make) < 0.001)
        return x.to(dtype)

    q, k, v = tensor(c.heads, c.q_len), tensor(c.kv_heads, c.kv_len), tensor(c.kv_heads, c.kv_len)
    with torch.no_grad():
        gpu = ca.Attention(backend=backend, **mods_of(c, "cuda"))(q.cuda(), k.cuda(), v.cuda(), return_lse=True)
        start = time.perf_counter()
        here = ca.Attention(backend=f"{backend}-emulated", **mods_of(c, "cpu"))(q, k, v, return_lse=True)
    seconds = time.perf_counter() - start
    out, lse = (t.cpu().double() for t in gpu)
    emulated, emulated_lse = (t.double() for t in here)
    unit = UNIT[dtype]
    seen = torch.isfinite(lse)
    o_excess = ((out - emulated).abs() - 2 * unit * emulated.abs() - unit / 2 * v.double().abs().max()).max()
    l_excess = ((lse - emulated_lse).abs() - UNIT_LSE - RELATIVE_LSE * emulated_lse.abs())[seen].max()
    return {
        **asdict(c),
        "o_max_difference": float((out - emulated).abs().max()),
        "o_equal_share": float((out == emulated).double().mean()),
        "lse_max_difference": float((lse - emulated_lse)[seen].abs().max()),
        "within": bool(o_excess <= 0 and l_excess <= 0 and torch.equal(seen, torch.isfinite(emulated_lse))),
        "emulator_seconds": round(seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "agreement" / "emulator.json")
    options = parser.parse_args()
    rows, backend = [], ca.backends.default_for(torch.device("cuda"))
    for c in CONFIGS:
        rows.append(compare(c, backend))
        print(json.dumps(rows[-1]), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    apart = [r for r in rows if not r["within"]]
    print(f"{len(rows) - len(apart)} of {len(rows)} within the bounds")
    if apart:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
