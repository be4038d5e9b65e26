"""Where attention meets torch's autograd: one Function for every backend that computes its own gradients.

A backend hands over an object with `forward` and `backward` (the `Differentiable` protocol below); the tensors that
a mod captured travel as inputs of their own, so that they get gradients like q, k and v.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch._functorch.utils import unwrap_dead_wrappers

from ..errors import GradientUnsupported
from ..graph.borrowed import Borrowed, current
from ..graph.dynamo import left_alone
from ..graph.expr import Capture
from ..graph.foreign import in_memory
from ..graph.moved import Addresses
from .sequences import NO_SEQUENCES, Sequences

T = TypeVar("T")
Grads = tuple[torch.Tensor | None, ...]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # of q, k and v
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # out, lse and, where it was asked for, max_scores


class BackwardInputs(NamedTuple):
    """What a gradient is computed from: what the forward had and gave, and the gradients of what it gave.

    `captured` are the tensors that the mods read, in the order of `captures`; `dlse` is None where nothing flows back
    through LSE. `wanted` says which gradients matter, of q, k, v and each of `captured`. `partial`: k and v are some of
    the keys that `out` and `lse` are made of, so neither can be computed again from them.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None
    captured: Sequence[torch.Tensor]
    wanted: Sequence[bool]
    partial: bool = False


class Differentiable(Protocol):
    """What a backend knows how to do with one call, given its tensors.

    `captured` are the tensors that the mods read, in the order of `captures`. Both methods run with autocast off, the
    forward with what the call borrowed (`graph.borrowed`): a backward that reads more than it is given
    borrows it again.
    """

    differentiable_twice: bool
    borrowed: Borrowed | None

    @property
    def captures(self) -> Sequence[torch.Tensor]:
        """The captured tensors as the mods hold them."""

    @property
    def sources(self) -> Sequence[torch.Tensor]:
        """What captured tensors are made of, where the backward may make them again: to be as they were."""

    @property
    def sequences(self) -> Sequences:
        """Where the sequences lie."""

    def read(self, replaced: Mapping[Capture, torch.Tensor]) -> Sequence[torch.Tensor]:
        """The captured tensors as `forward` and `backward` take them, where others stand in for some."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, captured: Sequence[torch.Tensor]) -> Results:
        """(out, lse, max_scores): nothing flows back through the last, which may be None where nobody asked for it."""

    def backward(self, known: BackwardInputs) -> Grads:
        """(dq, dk, dv, *d captured); those that are not wanted may be None.

        Where grad mode is on, the results have to be differentiable functions of all tensor arguments; a call that is
        not `differentiable_twice` is not called so, and who differentiates again is refused.
        """


def attend(call: Differentiable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Results:
    """What `call` computes, out and lse differentiable in q, k, v and every captured tensor that requires grad."""
    call.borrowed = current()
    tensors: tuple[torch.Tensor, ...] = (q, k, v, *call.captures)
    if True in map(is_functorch_wrapped_tensor, tensors):  # by a transform that is over
        tensors = unwrap_dead_wrappers(tensors)
    return _recorded(call, *tensors)  # type: ignore[no-any-return]


def without_autocast(on: torch.Tensor, function: Callable[..., T], *arguments: Any) -> T:
    """`function(*arguments)` with autocast off for the device of `on`."""
    with autocast_off(on):
        return function(*arguments)


def autocast_off(on: torch.Tensor) -> AbstractContextManager[Any]:
    """Inside, autocast is off for the device of `on`; where it is off already, nothing is entered."""
    return torch.autocast(on.device.type, enabled=False) if torch._C._is_any_autocast_enabled() else nullcontext()


class _Attend(torch.autograd.Function):
    """Outside of `torch.func`, whose transforms ask for a `setup_context`: it costs 25 µs per call."""

    @staticmethod
    def forward(ctx: Any, call: Differentiable, q: Any, k: Any, v: Any, *captured: Any) -> Any:
        if torch._C._is_any_autocast_enabled():
            found = without_autocast(q, call.forward, q, k, v, captured)
        else:  # without a function more on the way
            found = call.forward(q, k, v, captured)
        out, lse, max_scores = found
        if max_scores is not None:
            ctx.mark_non_differentiable(max_scores)
        ctx.call = call
        ctx.set_materialize_grads(False)
        lengths = () if call.sequences is NO_SEQUENCES else call.sequences
        # lengths and sources only so that a backward is refused after they were written to
        read = (*captured, *lengths, *call.sources)
        ctx.save_for_backward(q, k, v, out, lse, *read)
        ctx.read = Addresses(read) if read else None
        return found

    @staticmethod
    @left_alone
    def backward(ctx: Any, dout: Any, dlse: Any, _: Any) -> Any:
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors
        if ctx.read is not None:
            ctx.read.refuse_moved(saved[5:])
        return None, *gradients_of(ctx.call, ctx.needs_input_grad[1:], saved, dout, dlse)


# `_Attend.apply` without what it does in Python for `torch.func`: 2 µs
_recorded = super(torch.autograd.Function, _Attend).apply


def gradients_of(
    call: Differentiable,
    wanted: Sequence[bool],
    saved: Sequence[torch.Tensor],
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
) -> Grads:
    """Gradients of q, k, v and captured tensors, whatever way they are asked for; torch leaves those not wanted.

    saved: q, k, v, out, lse, the captured tensors and any others. One of `dout` and `dlse` is there.
    """
    if (dout is not None and is_legacy_batchedtensor(dout)) or (dlse is not None and is_legacy_batchedtensor(dlse)):
        return _one_by_one(functools.partial(_gradient, call, wanted, saved), dout, dlse)
    dout, dlse = (None if t is None else in_memory(t) for t in (dout, dlse))
    return _gradient(call, wanted, saved, dout, dlse)


def _gradient(
    call: Differentiable,
    wanted: Sequence[bool],
    saved: Sequence[torch.Tensor],
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
) -> Grads:
    q, k, v, out, lse, *captured = saved
    del captured[len(call.captures) :]  # behind them are lengths and sources
    dout = torch.zeros_like(out) if dout is None else dout
    if torch.is_grad_enabled() and not call.differentiable_twice:
        found: Grads = _Once.apply(call, wanted, q, k, v, out, lse, dout, dlse, *captured)
        return tuple([g if w else None for g, w in zip(found, wanted, strict=True)])
    known = BackwardInputs(q, k, v, out, lse, dout, dlse, captured, wanted)
    if torch._C._is_any_autocast_enabled():
        return without_autocast(q, call.backward, known)
    return call.backward(known)  # type: ignore[no-any-return]


def _one_by_one(gradient: Callable[..., Grads], *results: torch.Tensor | None) -> Grads:
    """Gradients of many at once, `torch.autograd.grad(..., is_grads_batched=True)`, computed one after the other."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    given = [None if t is None else torch._remove_batch_dim(t, level, 1, 0) for t in results]
    count = max(t.shape[0] for t in given if t is not None)
    each = [gradient(*(None if t is None else t[i % t.shape[0]] for t in given)) for i in range(count)]
    stacked = [None if None in of else torch.stack(of) for of in zip(*each, strict=True)]
    return tuple([None if t is None else torch._add_batch_dim(t, 0, level) for t in stacked])


class _Once(torch.autograd.Function):
    """A backward that can't be differentiated again, where grad mode is on (create_graph=True).

    It refuses only who asks for more.
    """

    @staticmethod
    def forward(ctx: Any, call: Differentiable, wanted: Any, *tensors: Any) -> Any:
        q, k, v, out, lse, dout, dlse, *captured = tensors
        grads = without_autocast(q, call.backward, BackwardInputs(q, k, v, out, lse, dout, dlse, captured, wanted))
        return tuple(q.new_empty(0) if g is None else g for g in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise GradientUnsupported(
            'the fused backward is not differentiable itself (create_graph=True); use backend="streaming", '
            "whose gradients are"
        )
