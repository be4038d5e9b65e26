"""Gradients of sinks, of what a backward knows of rows anyway: LSE, which the sink is in, and D.

A sink is a key without a value: of the row's P, exp(sink - LSE) is its own, its dP is 0, and so d sink is
-exp(sink - LSE) D, D = rowsum(dO·O) - dLSE (FlashAttention-2, section 3.1, with one column more).
"""

from __future__ import annotations

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


def add_sink_gradients(
    sink: Expr, env: Env, lse: torch.Tensor, delta: torch.Tensor, totals: Mapping[int, torch.Tensor]
) -> None:
    """Adds the gradients of what `sink` reads, of rows with this LSE and D, whose axes indices of `env` broadcast to.

    As `add_gradients`. Rows of no sequence: D 0, LSE not NaN.
    """
    if any(leaf.op == "read" and id(leaf.attr.tensor) in totals for leaf in partials(sink)):
        (value,) = evaluate_all([sink], env)
        add_gradients(sink, env, -torch.exp(value - lse) * delta, totals)


def add_gradients(sink: Expr, env: Env, gradient: torch.Tensor, totals: Mapping[int, torch.Tensor]) -> None:
    """Adds the gradients of what `sink` reads, whose own is `gradient`, into `totals`.

    These are known by the id of the captured tensor.
    """
    for leaf, d in partials(sink).items():
        if leaf.op == "read" and id(leaf.attr.tensor) in totals:
            slope, *indices = evaluate_all([d, *leaf.args], env)
            accumulate(totals[id(leaf.attr.tensor)], gradient * slope, indices)
