"""Attention as `torch.library` operators: what torch.compile, torch.export and fake tensors see of a call.

Outside of them nothing goes through here: an operator costs more host time than `composattn.autograd` does.

    attend(q, k, v, captured, lengths, hints, plan, numbers, with_lse) → (out, lse, kept)
    attend_backward(grad_out, grad_lse, q, k, v, captured, out, lse, kept, lengths, hints, plan, wanted)
        → [dq, dk, dv, *d captured]

`plan` is the number of an `Attention` (`numbers` how many run-time numbers it reads) and no constant of the graph:
another mask or another batch's captured tensors run the code compiled before. Captured tensors are inputs, so their
gradients flow. `lengths` and `hints` are the tensors and numbers of `Varlen` and `Paged` (see
`composattn.sequences.flatten`): other lengths run the same code. `kept` holds the run-time numbers of the forward for
the backward (one fp64 each, on the CPU) and keeps the `Attention` alive until then.

Run-time numbers (`ca.scalar`) are read when the operator runs: set them outside of a compiled region.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from .autograd import Differentiable, Grads, Known
from .block_sparse import BlockSparse
from .captured import originals, values
from .checks import check_blocks, check_contents
from .errors import GradientUnsupported
from .graph.keeping import keeping_nothing
from .graph.mask import Mask
from .graph.score import Score
from .problem import Problem
from .schedule import Schedule
from .sequences import Paged, Sequences, Varlen, unflatten

if TYPE_CHECKING:
    from .api import Attention

for _value in (Mask, BlockSparse, Score, Schedule):
    # compiled code compares them with those it was made for; torch before 2.13 takes no other objects as constants
    pytree.register_constant(_value)

_attentions: weakref.WeakValueDictionary[int, Attention] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(attention: Attention) -> int:
    """The number by which operators find `attention`, for as long as it lives."""
    number = next(_numbers)
    _attentions[number] = attention
    return number


def inputs(attention: Attention) -> list[torch.Tensor]:
    """The captured tensors that an operator takes; those that are derived from them it computes itself."""
    return [c.tensor for c in originals(attention.program.read_by_mods[0])]


# --- the operators -------------------------------------------------------------------------------------------


@torch.library.custom_op("composattn::attend", mutates_args=())
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    captured: Sequence[torch.Tensor],
    lengths: Sequence[torch.Tensor | None],
    hints: Sequence[int],
    plan: int,
    numbers: int,
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, kept); see the file's head."""
    attention = _attention(plan)
    varlen, paged = unflatten(lengths, hints)
    check_contents(q, k, varlen, paged)
    check_blocks(attention._tables)
    call = _differentiable(attention, None, q, k, v, varlen, paged)
    with torch.autocast(q.device.type, enabled=False), keeping_nothing():
        out, lse = call.forward(q, k, v, values(attention.program.captures, captured))
    scalars = [float(s.value) for s in attention.program.scalars]
    kept = _kept(q, numbers).copy_(torch.tensor(scalars, dtype=torch.float64))
    kept.untyped_storage().composattn_attention = attention  # type: ignore[attr-defined]
    return _in_form(out.to(q.dtype), _out_like(q, v)), lse, kept


@attend.register_fake
def _(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v, _, lengths, hints, _, numbers, _ = arguments
    Problem.of(q, k, v, *unflatten(lengths, hints))
    rows = q.shape[:3] if q.ndim == 4 else (q.shape[1], q.shape[0])
    return _out_like(q, v), q.new_empty(rows, dtype=lse_dtype(q.dtype)), _kept(q, numbers)


@torch.library.custom_op("composattn::attend_backward", mutates_args=())
def attend_backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    captured: Sequence[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    kept: torch.Tensor,
    lengths: Sequence[torch.Tensor | None],
    hints: Sequence[int],
    plan: int,
    wanted: Sequence[bool],
) -> list[torch.Tensor]:
    """Gradients of q, k, v and each of `captured`; an empty tensor stands for one that is not wanted."""
    attention = _attention(plan)
    captures = attention.program.captures
    call = _differentiable(attention, kept, q, k, v, *unflatten(lengths, hints))
    asked = dict(zip(originals(captures), wanted[3:], strict=True))
    of_call = values(captures, captured), (*wanted[:3], *(asked.get(c, False) for c in captures))
    with torch.autocast(q.device.type, enabled=False), keeping_nothing():
        found = call.backward(Known(q, k, v, out, lse, grad_out, grad_lse, *of_call))
    leaves = [q, k, v, *captured]
    of_captures = dict(zip(captures, found[3:], strict=True))
    grads = [*found[:3], *map(of_captures.get, asked)]
    return [_gradient(t, w, g) for t, w, g in zip(leaves, wanted, grads, strict=True)]


@attend_backward.register_fake
def _(*arguments: Any) -> list[torch.Tensor]:
    _, _, q, k, v, captured, *_, wanted = arguments
    return [_empty_gradient(t, want) for t, want in zip([q, k, v, *captured], wanted, strict=True)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, captured, lengths, ctx.hints, ctx.plan, _, ctx.with_lse = inputs
    out, lse, kept = output
    ctx.mark_non_differentiable(kept)
    ctx.save_for_backward(q, k, v, *lengths, *captured, out, lse, kept)
    ctx.count = len(lengths)


def _backward(ctx: Any, grad_out: Any, grad_lse: Any, _grad_kept: Any) -> tuple[Any, ...]:
    q, k, v, *captured, out, lse, kept = ctx.saved_tensors
    lengths, captured = captured[: ctx.count], captured[ctx.count :]
    need_q, need_k, need_v, need_captured, *_ = ctx.needs_input_grad
    wanted = [need_q, need_k, need_v, *(need_captured or [])]
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grad_lse = grad_lse if ctx.with_lse else None
    grads = torch.ops.composattn.attend_backward(
        grad_out, grad_lse, q, k, v, captured, out, lse, kept, lengths, ctx.hints, ctx.plan, wanted
    )
    found = [g if want else None for g, want in zip(grads, wanted, strict=True)]
    return (*found[:3], found[3:], None, None, None, None, None)


attend.register_autograd(_backward, setup_context=_setup)


# --- what they do ----------------------------------------------------------------------------------------------


def _attention(plan: int) -> Attention:
    attention = _attentions.get(plan)
    if attention is None:
        raise GradientUnsupported(
            "the ca.Attention of this call is gone before its backward ran; keep a reference to it until then"
        )
    return attention


def _differentiable(
    attention: Attention,
    kept: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    varlen: Varlen | None,
    paged: Paged | None,
) -> Differentiable:
    """The call with the run-time numbers of `kept`, or those of now."""
    call, sequences = attention.prepared(q, k, v, varlen, paged), Sequences.of(varlen, paged)
    program = attention.program
    numbers = [s.value for s in program.scalars]
    if kept is not None:
        numbers = [type(now)(then) for now, then in zip(numbers, kept.tolist(), strict=True)]
    begin = getattr(call, "begin", None)
    if begin is None:
        return ForwardOnly(call, [c.tensor for c in program.captures], sequences)
    return begin(numbers, sequences)  # type: ignore[no-any-return]


class ForwardOnly:
    """A backend that torch itself differentiates, as a `Differentiable`: below an operator torch records nothing.

    Its `call` takes by their ids what is read in place of captured tensors.
    """

    def __init__(self, call: Callable[..., Any], captures: Sequence[torch.Tensor], sequences: Sequences) -> None:
        self.call, self.captures, self.sequences = call, captures, sequences

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, captured: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = dict(zip(map(id, self.captures), captured, strict=True))
        with torch.no_grad():
            out, lse = self.call(q, k, v, True, self.sequences, tensors)
        return out, lse

    def backward(self, known: Known) -> Grads:
        raise GradientUnsupported(
            'this backend has no gradient inside of torch.compile; use backend="streaming" there, or call it outside'
        )


def _kept(q: torch.Tensor, numbers: int) -> torch.Tensor:
    """Memory for run-time numbers; where there are none, on q's device: a CPU tensor would rule out CUDA graphs."""
    return torch.empty(numbers, dtype=torch.float64, device="cpu" if numbers else q.device)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _out_like(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Memory for the output, in q's order of dimensions."""
    return _ordered(q, v.shape[-1])


def _ordered(t: torch.Tensor, width: Any) -> torch.Tensor:
    if t.ndim == 4 and t.stride(1) < t.stride(2):
        batch, heads, length, _ = t.shape
        return t.new_empty((batch, length, heads, width)).transpose(1, 2)
    return t.new_empty((*t.shape[:-1], width))


def _empty_gradient(t: torch.Tensor, wanted: bool) -> torch.Tensor:
    if not wanted:
        return t.new_empty(0)
    return _ordered(t, t.shape[-1]) if t.ndim == 4 else t.new_empty(t.shape)


def _gradient(t: torch.Tensor, wanted: bool, found: torch.Tensor | None) -> torch.Tensor:
    empty = _empty_gradient(t, wanted)
    if not wanted:
        return empty
    return empty.zero_() if found is None else _in_form(found.to(t.dtype), empty)


def _in_form(t: torch.Tensor, form: torch.Tensor) -> torch.Tensor:
    """`t` in the strides of `form`: what compiled code has been promised."""
    return t if t.stride() == form.stride() else form.copy_(t)
