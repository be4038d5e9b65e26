"""What mods as users write them at their worst are held to: plain softmax over what torch says of each pair."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

import composattn as ca

LENGTH, BATCH, HEADS = 80, 2, 2
Mod = Callable[..., Any]


def visible(mask: Mod) -> torch.Tensor:
    axes = (BATCH, HEADS, LENGTH, LENGTH)
    b, h, i, j = (torch.arange(n).view([-1 if d == e else 1 for e in range(4)]) for d, n in enumerate(axes))
    return mask(b, h, i, j).expand(axes)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Mod | None, mask: Mod) -> list[torch.Tensor]:
    """out and lse by the definition, in the type of q."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if score is not None:
        # a number per call, as a mod sees it, so that reductions are over what it reads
        numbers = [torch.arange(n) for n in scores.shape]
        for d in (3, 2, 1, 0):
            score = torch.vmap(score, in_dims=(0, *(0 if d == e else None for e in range(4))))
        scores = score(scores, *numbers)
    scores = torch.where(visible(mask), scores, -math.inf)
    seen = (scores > -math.inf).any(-1)
    lse = torch.where(seen[..., None], scores, 0.0).logsumexp(-1)
    weights = torch.where(seen[..., None], (scores - lse[..., None]).exp(), 0.0)
    return [weights @ v, torch.where(seen, lse, -math.inf)]


def chosen(steps: torch.Tensor, signs: torch.Tensor) -> Mod:
    """A score moved by numbers of two tables, at places that it decides itself."""
    return lambda s, b, h, i, j: s + steps[(s.clamp(-3.9, 3.9) + 4).int()] + signs[h, (s > 0.1).long()]


def hold_chosen(backend: str, generator: torch.Generator, dtype: torch.dtype, device: str = "cpu") -> None:
    """Learned tables that are read at a place that the score decides get the gradients of autograd in fp64."""
    tables = [torch.randn(8, generator=generator), torch.randn(HEADS, 2, generator=generator)]
    *x, weights = (torch.randn(BATCH, HEADS, LENGTH, 64, generator=generator).to(dtype) for _ in range(4))
    mine, exact = ([t.detach().to(where).requires_grad_() for t in tables] for where in (device, "cpu"))
    out = ca.attention(*(t.to(device) for t in x), score_mod=chosen(*mine), backend=backend)
    wanted, _ = attended(*(t.double() for t in x), chosen(*exact), lambda b, h, i, j: i >= 0)
    found = torch.autograd.grad((out * weights.to(device)).sum(), mine)
    for total, truth in zip(found, torch.autograd.grad((wanted * weights).sum(), exact), strict=True):
        # a score that is rounded apart from a step's edge reads the next number
        assert (total.cpu() - truth).abs().max() <= 2e-2 * truth.abs().max()
