"""A call of ranks that share a sequence as `torch.library` operators: what torch.compile sees of it.

    attend_shared(q, k, v, captured, numbers, form, with_max) → (out, lse, max_scores, mark)
    attend_shared_backward(grad_out, grad_lse, q, k, v, captured, out, lse, mark, numbers, form, wanted)
        → those of [dq, dk, dv, *d captured] that are wanted

`form`, `captured` and `numbers` are a call as text (`dispatch.serialized`), after the number that the shard has in this
process. `mark` is an empty tensor: what the forward began hangs on its memory. Where that is lost, the backward begins
again. Compiled code may write to memory with no one counting, so what a mask reads is looked at in every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..call.autograd import BackwardInputs
from ..call.inputs import Asked, Inputs
from ..call.strides import ordered
from ..dispatch.gradient_operator import differentiable, gradient_of, in_form
from ..dispatch.operators import leaves_of, lse_dtype
from ..dispatch.planned import asked_of
from ..dispatch.serialized import Serialized, parse
from ..errors import UnsupportedInParallel
from ..graph.form import leaf_count
from ..graph.moved import Lay
from ..graph.scalar import Scalar
from ..mods.mask import Mask
from ..mods.score import Score
from ..mods.sink import Sink
from .attend import gradients
from .shard import SharedPlan, given_of, refuse_eight_bits, shard_of
from .strategy import Given


def call(number: int, inputs: Inputs, serialized: Serialized, asked: Asked) -> Any:
    """A call in compiled code. Raises: `UnsupportedInParallel` for packed rows."""
    if inputs.varlen is not None or inputs.paged is not None or inputs.q.ndim != 4:
        raise UnsupportedInParallel("packed sequences that ranks share are not compiled; call outside of torch.compile")
    q, k, v = inputs.autocast[:3]
    refuse_eight_bits((k.dtype, v.dtype))
    numbers = [number, *[s.number if isinstance(s, Scalar) else s for s in serialized.scalars]]
    op = torch.ops.composattn.attend_shared
    *found, _ = op(q, k, v, list(serialized.tensors), numbers, serialized.form, asked.max_scores)
    return asked_of(found, asked)


class _SharedCall(NamedTuple):
    """A call as its operators run it; `places`: of each captured tensor, where it is among the given ones."""

    planned: SharedPlan
    given: Given
    places: list[int]
    whole: bool


def _bound(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    captured: Sequence[torch.Tensor],
    numbers: Sequence[int],
    form: str,
) -> _SharedCall:
    known = shard_of(numbers[0])
    forms, options, _ = parse(form)
    leaves = leaves_of(form, captured, numbers[1:])
    mods: list[Any] = []
    for kind, mod_form in zip((Score, Mask, Sink), forms, strict=False):
        count = leaf_count(mod_form)
        mods.append(None if mod_form is None else kind.formed(mod_form, tuple(leaves[:count]), "compiled"))
        leaves = leaves[count:]
    score, mask, sink = [*mods, None][:3]
    given = given_of((score, mask, sink), q.shape[1])
    at = {id(t): n for n, t in enumerate(given.tensors)}
    q, k, v = known.dense(Inputs(q, k, v))
    planned = known.planned((score, mask, sink), options, (q, k, v), given.tensors, counted=False)
    whole = known.cp.captured_gradients == "whole"
    held = given._replace(tensors=planned.given(given.tensors))
    return _SharedCall(planned, held, [at[id(t)] for t in captured], whole)


@torch.library.custom_op("composattn::attend_shared", mutates_args=())
def attend_shared(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    captured: Sequence[torch.Tensor],
    numbers: Sequence[int],
    form: str,
    with_max: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, max_scores, mark), max_scores empty unless asked for; see the file's head."""
    bound = _bound(q, k, v, captured, numbers, form)
    out, lse, top, *begun = bound.planned.strategy.forward(q, k, v, bound.given._replace(max_scores=with_max))
    mark = q.new_empty(0)
    mark.untyped_storage().composattn_begun = (out, *begun)  # type: ignore[attr-defined]
    mark.untyped_storage().composattn_lay = Lay(captured)  # type: ignore[attr-defined]
    return (
        in_form(out.to(q.dtype), ordered(q, v.shape[-1])),
        lse.contiguous(),
        lse.new_empty(0) if top is None else top,
        mark,
    )


@attend_shared.register_fake
def _(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q, _, v, *_, with_max = arguments
    lse = q.new_empty(q.shape[:3], dtype=lse_dtype(q.dtype))
    return ordered(q, v.shape[-1]), lse, torch.empty_like(lse) if with_max else lse.new_empty(0), q.new_empty(0)


@torch.library.custom_op("composattn::attend_shared_backward", mutates_args=())
def attend_shared_backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    captured: Sequence[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    mark: torch.Tensor,
    numbers: Sequence[int],
    form: str,
    wanted: Sequence[bool],
) -> list[torch.Tensor]:
    """Gradients of those of q, k, v and `captured` that are wanted."""
    lay = getattr(mark.untyped_storage(), "composattn_lay", None)
    if lay is not None:
        lay.refuse_moved(captured)
    bound = _bound(q, k, v, captured, numbers, form)
    strategy = bound.planned.strategy
    state = getattr(mark.untyped_storage(), "composattn_begun", None)
    if state is None:
        out, _, _, begun, saved = strategy.forward(q, k, v, bound.given)
    else:
        out, begun, saved = state
    tensors = bound.given.tensors
    of_given = [False] * len(tensors)
    for place, want in zip(bound.places, wanted[3:], strict=True):
        of_given[place] |= want
    known = BackwardInputs(q, k, v, out, lse, grad_out, grad_lse, tensors, (*wanted[:3], *of_given))
    dq, dk, dv, *totals = gradients(strategy, known, begun, saved, bound.given.sink, bound.whole)
    grads = [dq, dk, dv]
    for place in bound.places:  # a tensor that is there twice gets its gradient once
        grads.append(totals[place])
        totals[place] = None
    leaves = [q, k, v, *captured]
    return [gradient_of(t, g) for t, g, want in zip(leaves, grads, wanted, strict=True) if want]


differentiable(attend_shared, attend_shared_backward, said=2)
