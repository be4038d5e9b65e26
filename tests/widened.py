"""Mods whose integers leave 32 bits, as hashes of positions do, as backends have to see them: as torch, in int64."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import composattn as ca
from composattn.testing.tolerance import Case, check

TABLE = torch.tensor([3, 2**29, -(2**29), 77], dtype=torch.int32)


def mask_of(table: torch.Tensor) -> Any:
    """A mask a head."""
    masks: tuple[Any, ...] = (
        lambda b, h, q, kv: ((q * 73856093) ^ (kv * 19349663)) % 100 < 40,
        lambda b, h, q, kv: (h * 1_500_000_000 + q) % 7 >= kv % 5,
        lambda b, h, q, kv: (h * 1_500_000_000 - q) // 50_000_000 >= kv - 100,
        lambda b, h, q, kv: q * q * 100_000 >= kv * kv * 90_001,
        lambda b, h, q, kv: ((q << 25) >> 20) >= kv,
        lambda b, h, q, kv: (q - kv) ** 5 > -(10**9),
        lambda b, h, q, kv: (table[b + 0 * q] * (q + 8) + kv).abs() % 3 < 2,
        lambda b, h, q, kv: -(q * 20_000_000) <= (h - kv) * 20_000_000 + b,
    )

    def every(b: Any, h: Any, q: Any, kv: Any) -> Any:
        seen: Any = False
        for n, mask in enumerate(masks):
            seen = torch.where(h == n, mask(b, h, q, kv), seen)
        return seen

    return every


def score_of(table: torch.Tensor) -> Any:
    def far(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        of_positions = ((q * 10_000_019 - kv * 30_000_001) % 1000) / 500.0
        return score + of_positions + table[(q * 1_000_003 * kv) % 4] * 2.0**-30

    return far


def hold(backend: str, d: int, device: str = "cpu") -> None:
    """The keys that each row sees, by their number; then results and gradients."""
    size, heads = 160, 8
    every, score_mod = mask_of(TABLE.to(device)), score_of(TABLE.to(device))
    zeros = torch.zeros(2, heads, size, d, dtype=torch.bfloat16, device=device)
    attention = partial(ca.attention, mask_mod=every, backend=backend)
    _, lse = attention(zeros, zeros[:, :4], zeros[:, :4], return_lse=True)
    b, h = torch.arange(2).view(2, 1, 1, 1), torch.arange(heads).view(heads, 1, 1)
    seen = mask_of(TABLE)(b, h, torch.arange(size)[:, None], torch.arange(size)).expand(2, heads, size, size).sum(-1)
    wrong = (lse.exp().round().int().cpu() != seen).sum((0, 2))
    assert not wrong.any(), f"rows of each head that see another number of keys: {wrong.tolist()}"
    generator = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(1, heads, 64, d, generator=generator).bfloat16().to(device) for _ in range(2))
    k, v = (torch.randn(1, 4, 64, d, generator=generator).bfloat16().to(device) for _ in range(2))
    check(partial(ca.attention, backend=backend), Case(q, k, v, mask_mod=every, score_mod=score_mod, dout=dout))
