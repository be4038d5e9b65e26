"""Kernels for Hopper GPUs; importing this imports no kernel language."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...launch import ForwardLauncher
from ...plan import ForwardPlan


def forward(
    plan: ForwardPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    captured: Sequence[torch.Tensor] = (),
    scalars: Sequence[float | int] = (),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse or None) of the planned forward; `captured` and `scalars` in the order of the plan's program.

    A caller that repeats keeps a `ForwardLauncher(plan)` instead and calls that.
    """
    return ForwardLauncher(plan)(q, k, v, scale, captured, scalars)
