"""Where attention meets torch's autograd: one Function for every backend that computes its own gradients.

A backend hands over an object with `forward` and `backward` (the `Differentiable` protocol below); the tensors that
a mod captured travel as inputs of their own, so that they get gradients like q, k and v.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

Grads = tuple[torch.Tensor | None, ...]


class Differentiable(Protocol):
    """What a backend knows how to do with one call, given its tensors.

    `captured` are the tensors that the mods read, in the order of `captures`. Both methods run with autocast off.
    """

    @property
    def captures(self) -> Sequence[torch.Tensor]:
        """The captured tensors as the mods hold them."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, captured: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse)."""

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        captured: Sequence[torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
        wanted: Sequence[bool],
    ) -> Grads:
        """(dq, dk, dv, *d captured); `wanted` says which of them matter, the others may be None.

        Where grad mode is on, the results have to be differentiable functions of all tensor arguments, or the
        backend refuses.
        """


def attend(
    call: Differentiable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of `call`, differentiable in q, k, v and every captured tensor that requires grad."""
    out, lse = _Attend.apply(call, q, k, v, *call.captures)
    return out, lse


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(call: Differentiable, q: Any, k: Any, v: Any, *captured: Any) -> Any:
        with torch.autocast(q.device.type, enabled=False):
            return call.forward(q, k, v, captured)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call, q, k, v, *captured = inputs
        out, lse = output
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, *captured, out, lse)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        q, k, v, *captured, out, lse = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        if dout is None and dlse is None:
            return (None,) * (len(wanted) + 1)
        with torch.autocast(q.device.type, enabled=False):
            grads = ctx.call.backward(q, k, v, captured, out, lse, dout, dlse, wanted)
        return (None, *(g if w else None for g, w in zip(grads, wanted, strict=True)))
