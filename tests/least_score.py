"""Large negative scores, with which many write "hidden": that backends take them for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

import composattn as ca
from composattn.graph.least_score import LEAST_SCORE
from composattn.mods import causal

LENGTH, BLIND = 150, 8  # the first rows see nothing
HIDING = [2 * LEAST_SCORE, -1e9, -1e30, torch.finfo(torch.bfloat16).min, torch.finfo(torch.float32).min]
Mod = Callable[..., Any]


def hidden_by(number: float, as_bias: bool, device: str = "cpu") -> Mod:
    """Scores that are `number`, or moved by it, where a key lies less than `BLIND` before its query."""
    positions = torch.arange(LENGTH, device=device)
    table = torch.where(positions[:, None] >= positions + BLIND, 0.0, number)
    if as_bias:
        return lambda score, b, h, q, kv: score + table[q, kv]
    return lambda score, b, h, q, kv: torch.where(q >= kv + BLIND, score, number)


def hold(
    backend: str, number: float, as_bias: bool, generator: torch.Generator, device: str = "cpu", **more: Any
) -> None:
    """Results and gradients are those of a mask that hides the same pairs."""
    *x, weights = (torch.randn(1, 2, LENGTH, 64, generator=generator).half().to(device) for _ in range(4))
    x = [t.requires_grad_() for t in x]
    found = []
    for mods in (
        {"score_mod": hidden_by(number, as_bias, device), "mask_mod": causal(), "backend": backend},
        {"mask_mod": lambda b, h, q, kv: q >= kv + BLIND, "backend": "reference"},
    ):
        out, lse = ca.attention(*x, **mods, **more, return_lse=True)
        finite = torch.where(lse > -math.inf, lse, 0.0)
        found.append([out, lse, *torch.autograd.grad((out * weights).sum() + finite.sin().sum(), x)])
    for mine, exact in zip(*found, strict=True):
        torch.testing.assert_close(mine.double(), exact.double(), rtol=4e-3, atol=4e-3)
    assert not found[0][0][:, :, :BLIND].any()
