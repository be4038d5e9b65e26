"""Gradients of sinks, of what a backward knows of rows anyway: LSE, which the sink is in, and D.

A sink is a key without a value: of the row's P, exp(sink - LSE) is its own, its dP is 0, and so d sink is
-exp(sink - LSE) D, D = rowsum(dO·O) - dLSE (FlashAttention-2, section 3.1, with one column more).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ..graph.evaluate import Env, evaluate_all
from ..graph.expr import Capture, Expr
from ..graph.gradient import partials
from .gathered import accumulate


def by_head(sink: Expr) -> Capture | None:
    """The captured tensor of which `sink` is a number per head, the form of `sinks=`; None where it is another."""
    is_read = sink.op == "read" and [(at.op, at.attr) for at in sink.args] == [("index", "h")]
    return sink.attr if is_read else None


def gradient_by_head(sinks: torch.Tensor, log2_lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """The gradient of sinks (Hq,), of log2(e)·LSE and D of rows (B or 1, Hq, rows): added in fp64, in a fixed order."""
    log_share = torch.rsub(log2_lse, sinks.unsqueeze(1), alpha=math.log(2.0))
    # the derivative of ELU, turned round: -D exp(x) where x <= 0, and no share is above 1; one kernel, not two
    of_row = _elu_backward(delta, 1.0, -1.0, 1.0, False, log_share)
    return of_row.sum((0, 2), dtype=torch.float64).to(sinks.dtype)


_elu_backward = torch.ops.aten.elu_backward.default


def add_sink_gradients(
    sink: Expr, env: Env, lse: torch.Tensor, delta: torch.Tensor, totals: Mapping[int, torch.Tensor]
) -> None:
    """Adds the gradients of what `sink` reads into `totals`, which are known by the id of the captured tensor.

    lse and delta (D) have the same axes; indices of `env` broadcast to them. Rows of no sequence: D 0, LSE not NaN.
    """
    reads = [(leaf, d) for leaf, d in partials(sink).items() if leaf.op == "read" and id(leaf.attr.tensor) in totals]
    if not reads:
        return
    (value,) = evaluate_all([sink], env)
    of_row = -torch.exp(value - lse) * delta
    for leaf, d in reads:
        slope, *indices = evaluate_all([d, *leaf.args], env)
        accumulate(totals[id(leaf.attr.tensor)], of_row * slope, indices)
