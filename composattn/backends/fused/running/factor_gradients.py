"""Gradients of what multiplies the score, from rows of q and dQ at a call (`composattn.analysis.score_factor`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ....analysis.score_factor import LEAST, ScoreFactor
from ....graph.evaluate import Env, evaluate
from ....graph.expr import Capture
from ...gathered import total_for
from ...sinks import add_gradients


def gradients_of_factor(
    factor: ScoreFactor,
    asked: Sequence[Capture],
    given: Mapping[Capture, torch.Tensor],
    q: torch.Tensor,
    dq: torch.Tensor,
) -> dict[Capture, torch.Tensor | None]:
    """The gradients of captured tensors that only the `factor` of the score reads, `asked` of those `given`.

    q (B, H, S, D), or packed (total, H, D) where the factor is of a head alone; `dq` by kernels that are
    `ScoreFactor.away_from_zero`. Some operations on rows, for none of which the host waits.
    """
    if q.ndim == 4:
        products = q.float() * dq
    else:  # rows that no sequence has hold anything
        products = torch.where(dq == 0, 0.0, q.float() * dq).transpose(0, 1)[None]
    batch, heads, length, _ = products.shape
    b, h, row = (torch.arange(n, device=q.device) for n in (batch, heads, length))
    # (B, H, S, 1): nobody asks whether positions follow the distance
    index = {"b": b.view(-1, 1, 1, 1), "h": h.view(-1, 1, 1), "q": row.view(-1, 1)}
    tensors = {id(c.tensor): t for c, t in given.items()}
    env = Env(index, float_dtype=torch.float32, device=q.device, tensors=tensors)
    value = evaluate(factor.value, env)
    gradient = products.sum(-1, keepdim=True) / torch.where(value.abs() < LEAST, LEAST, value)
    totals = {id(c.tensor): total_for(given[c], torch.float32, q.device) for c in asked}
    add_gradients(factor.value, env, gradient, totals)
    return {c: totals[id(c.tensor)].to(given[c].dtype) for c in asked}


__all__ = ["gradients_of_factor"]
