"""A shared attention as autograd sees it: one function, whatever moves, and sums over ranks that hang on no order.

Gradients of captured tensors are added as 64-bit integers, so no result depends on which rank was first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..call.autograd import BackwardInputs
from ..call.strides import in_order_of
from ..errors import GradientUnsupported
from ..graph.dynamo import left_alone
from ..graph.foreign import in_memory
from ..graph.moved import Addresses
from .exchange import Ranks
from .strategy import Given, Strategy

T = torch.Tensor


def attend(strategy: Strategy, q: T, k: T, v: T, given: Given, whole: bool) -> tuple[T, T, T | None]:
    """(out, lse, max_scores) of this rank's rows, differentiable in q, k, v and the given tensors.

    whole: gradients of given tensors are those of all ranks; else of this rank's rows, for who adds them up itself.
    """
    said = given.max_scores, given.sink
    out, lse, top = _SharedAttention.apply(strategy, said, whole, q, k, v, *given.tensors)  # type: ignore[no-untyped-call]
    return out.to(q.dtype), lse, top


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, strategy: Strategy, said: tuple[bool, int | None], whole: bool, q: T, k: T, v: T, *given: T
    ) -> Any:
        out, lse, top, ctx.begun, saved = strategy.forward(q, k, v, Given(given, *said))
        out = in_order_of(q, out)
        if top is not None:
            ctx.mark_non_differentiable(top)
        ctx.strategy, ctx.count, ctx.whole, ctx.sink = strategy, len(given), whole, said[1]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *given, *saved)
        ctx.read = Addresses(given)
        return out, lse, top

    @staticmethod
    @left_alone
    def backward(ctx: Any, dout: T | None, dlse: T | None, _: Any) -> Any:
        if torch.is_grad_enabled():
            raise GradientUnsupported(
                "the gradient of an attention that ranks share is not differentiable itself (create_graph=True)"
            )
        q, k, v, out, lse, *rest = ctx.saved_tensors
        given, saved = rest[: ctx.count], rest[ctx.count :]
        ctx.read.refuse_moved(given)
        dout = torch.zeros_like(out) if dout is None else dout
        known = BackwardInputs(q, k, v, out, lse, dout, dlse, given, ctx.needs_input_grad[3:])
        found = gradients(ctx.strategy, known, ctx.begun, saved, ctx.sink, ctx.whole)
        grads = [
            None if g is None else in_order_of(t, g.to(t.dtype)) if t.ndim == 4 else g.to(t.dtype)
            for t, g in zip((q, k, v, *given), found, strict=True)
        ]
        return None, None, None, *grads


def gradients(
    strategy: Strategy, known: BackwardInputs, begun: Any, saved: Sequence[T], sink: int | None, whole: bool
) -> list[T | None]:
    """Gradients of q, k, v and each given tensor, where wanted; `sink`: which of the given tensors has the sinks."""
    dlse = None if known.dlse is None else in_memory(known.dlse)
    known = known._replace(dout=in_memory(known.dout), dlse=dlse)
    found = strategy.backward(known, begun, saved)
    if known.wanted[0] and found[0] is None:  # nothing is seen
        found[0] = torch.zeros_like(known.q)
    if sink is not None and known.wanted[3 + sink]:
        of_rows, before = _sink_gradient(known, known.captured[sink]), found[3 + sink]
        found[3 + sink] = of_rows if before is None else before + of_rows
    if whole:
        found[3:] = [
            total_of(strategy.ranks, t, g) if want else None
            for t, g, want in zip(known.captured, found[3:], known.wanted[3:], strict=True)
        ]
    return [g if want else None for g, want in zip(found, known.wanted, strict=True)]


def _sink_gradient(known: BackwardInputs, sinks: T) -> T:
    """The sinks' gradient from this rank's rows: a sink is a key without a value, see `backends.sinks`."""
    delta = (known.dout.to(known.lse.dtype) * known.out.to(known.lse.dtype)).sum(-1)
    delta = delta if known.dlse is None else delta - known.dlse
    weight = torch.exp(sinks.to(known.lse.dtype)[:, None] - known.lse).nan_to_num(0.0)
    return -(weight * delta).sum((0, 2))


_BITS = 62  # of a sum in 64 bits


def total_of(ranks: Ranks, tensor: T, grad: T | None) -> T:
    """The gradient of `tensor` from the rows of all ranks: added as integers, so that no order matters.

    An element that is not finite on some rank makes all of them NaN.
    """
    mine = torch.zeros_like(tensor, dtype=torch.float64) if grad is None else grad.double()
    largest = ranks.total(mine.abs().amax().nan_to_num(nan=float("inf")).reshape(1), torch.distributed.ReduceOp.MAX)
    # |grad| < 2^exponent; that times the number of ranks fits
    exponent = torch.frexp(largest.nan_to_num(posinf=1.0)).exponent.double()
    shift = _BITS - (ranks.size - 1).bit_length() - exponent
    units = ranks.total(torch.ldexp(mine.nan_to_num(0.0, 0.0, 0.0), shift).round().to(torch.int64))
    found = torch.ldexp(units.double(), -shift)
    return torch.where(largest.isinf(), float("nan"), found)
