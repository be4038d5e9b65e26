"""Whether torch's own gradient of a score mod is that of its graph: asked where the mod has a say in its gradient.

A `torch.autograd.Function` brings a backward of its own, which no graph shows. One that computes the gradient of its
forward (a hardware tanh) changes nothing; a straight-through estimator does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from .evaluate import Env, evaluate
from .expr import Expr, captures

_SCORES = [sign * size for size in (0.01, 0.3, 0.7, 1.0, 1.6, 3.2, 7.5, 40.0, 150.0) for sign in (1.0, -1.0)]
_PLACES = ((0, 0, 0, 0), (0, 0, 1, 0))
_STEEP = (1.0, -1e4, 1e-4)  # the gradients that come in: a backward that cuts them off, or rounds them, is not linear


def is_that_of(root: Expr, fn: Callable[..., Any]) -> bool:
    """Compares both at 36 numbers, 3 times each, in the score and in all captured tensors that learn."""
    learned = [c.tensor for c in captures(root) if c.tensor.requires_grad]
    try:
        with torch._C.DisableTorchFunction(), torch.enable_grad():  # the mod runs on tensors, as any function does
            tried = itertools.product(_SCORES, _PLACES, _STEEP)
            return all(_agree(root, fn, value, place, steep, learned) for value, place, steep in tried)
    except (RuntimeError, TypeError, ValueError, IndexError):  # it does not run on plain numbers
        return False


def _agree(
    root: Expr, fn: Callable[..., Any], value: float, place: tuple[int, ...], steep: float, learned: list[torch.Tensor]
) -> bool:
    index = dict(zip(("b", "h", "q", "kv"), map(torch.tensor, place), strict=True))

    def graph(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return evaluate(root, Env({**index, "q_len": 2, "kv_len": 2}, score=score))

    found, wanted = (_gradients(f, value, index, steep, learned) for f in (fn, graph))
    return all(
        torch.allclose(x.double(), y.double(), rtol=1e-3, atol=1e-6, equal_nan=True)
        for x, y in zip(found, wanted, strict=True)
    )


def _gradients(
    f: Callable[..., Any], value: float, index: dict[str, torch.Tensor], steep: float, learned: list[torch.Tensor]
) -> list[torch.Tensor]:
    """By the score and by what learns, for one unit of the gradient `steep` that comes in."""
    score = torch.tensor(value, dtype=torch.float64, device="cpu", requires_grad=True)
    leaves = [score, *learned]
    out = f(score, *index.values())
    if not out.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(out, leaves, torch.full_like(out, steep), allow_unused=True)
    return [torch.zeros_like(t) if g is None else g.double() / steep for g, t in zip(found, leaves, strict=True)]
