"""The gradient of an attention operator, which is an operator too: what goes from one to the other, by autograd."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _after_autograd_keyset, _AutoDispatchBelowAutograd
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch._library.autograd import make_autograd_impl

from ..call.strides import ordered, strides_of_ordered


def differentiable(op: Any, backward: Any, said: int) -> None:
    """Makes `backward` the gradient of `op`.

        op(q, k, v, captured, *said, ...) → (out, lse, max_scores, saved)
        backward(grad_out, grad_lse, q, k, v, captured, out, lse, saved, *said, wanted) → the wanted ones of
            [dq, dk, dv, *d captured]

    said: how many arguments behind `captured` the backward gets too, lists of tensors among them.
    """

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        q, k, v, captured, *others = inputs
        out, lse, max_scores, saved = output
        ctx.mark_non_differentiable(max_scores, saved)
        ctx.set_materialize_grads(False)
        lists = [list(one) if _of_tensors(one) else None for one in others[:said]]
        ctx.others = len(others)
        ctx.said = [one if tensors is None else len(tensors) for one, tensors in zip(others, lists, strict=False)]
        ctx.listed = [tensors is not None for tensors in lists]
        ctx.captured = len(captured)
        ctx.save_for_backward(q, k, v, out, lse, saved, *captured, *itertools.chain(*(one or () for one in lists)))

    def gradient(ctx: Any, grad_out: Any, grad_lse: Any, *_: Any) -> tuple[Any, ...]:
        q, k, v, out, lse, saved, *rest = ctx.saved_tensors
        captured, listed = rest[: ctx.captured], iter(rest[ctx.captured :])
        arguments = [
            list(itertools.islice(listed, one)) if is_list else one
            for one, is_list in zip(ctx.said, ctx.listed, strict=True)
        ]
        need_q, need_k, need_v, need_captured, *_ = ctx.needs_input_grad
        wanted = [need_q, need_k, need_v, *(need_captured or [])]
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grads = iter(backward(grad_out, grad_lse, q, k, v, captured, out, lse, saved, *arguments, wanted))
        found = [next(grads) if want else None for want in wanted]
        return (*found[:3], found[3:], *[None] * ctx.others)

    op.register_autograd(gradient, setup_context=setup)
    backward.register_fake(_empty_gradients)
    _shorten(op)
    _shorten(backward)


_OURS = torch.library.Library("composattn", "IMPL")


def _shorten(op: Any) -> None:
    """Calls of plain tensors where nothing is recorded, as compiled code makes them, go straight to the function.

    Torch's own way leads through four functions of Python and back through its dispatcher: 37 µs, where this takes 15.
    """
    whole, plain = make_autograd_impl(op._opoverload, op), op._init_fn
    unfollowed = _disable_dynamo(plain)

    def kernel_of(dense: Any) -> Callable[..., Any]:
        def kernel(keys: Any, *given: Any) -> Any:
            # whatever is to be asked before a plain tensor's function: modes, subclasses, negated views
            if torch.is_grad_enabled() or (keys & _after_autograd_keyset).highestPriorityTypeId() != dense:
                return whole(keys, *given)
            # where Dynamo follows nothing, as below all that it compiled, it need not be told so: 3 µs
            run = plain if get_eval_frame_callback() is None else unfollowed
            with _AutoDispatchBelowAutograd():
                return run(*given)

        return kernel

    for key in ("CPU", "CUDA"):
        kernel = kernel_of(getattr(torch._C.DispatchKey, key))
        _OURS.impl(op._opoverload, kernel, f"Autograd{key}", with_keyset=True)


def _of_tensors(one: Any) -> bool:
    return isinstance(one, list | tuple) and any(t is None or isinstance(t, torch.Tensor) for t in one)


def _empty_gradients(*arguments: Any) -> list[torch.Tensor]:
    _, _, q, k, v, captured, *_, wanted = arguments
    return [empty_gradient(t) for t, want in zip([q, k, v, *captured], wanted, strict=True) if want]


def empty_gradient(t: torch.Tensor) -> torch.Tensor:
    """Memory for the gradient of `t`, in its order of dimensions."""
    return ordered(t, t.shape[-1]) if t.ndim else t.new_empty(())


def gradient_of(t: torch.Tensor, found: torch.Tensor | None) -> torch.Tensor:
    """What was found as the gradient of `t`, in that form; zeros where nothing was."""
    if found is None:
        return empty_gradient(t).zero_()
    if found.dtype is not t.dtype:
        found = found.to(t.dtype)
    return in_order(found, t) if t.ndim else in_form(found, empty_gradient(t))


def in_order(found: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """`found` in the order of dimensions of `t`, its last one aside; itself, where it lies so."""
    # memory only to compare with it would take microseconds
    if found.stride() == strides_of_ordered(t, found.shape[-1]):
        return found
    return in_form(found, ordered(t, found.shape[-1], found.dtype))


def in_form(t: torch.Tensor, form: torch.Tensor) -> torch.Tensor:
    """`t` in the strides of `form`: what compiled code has been promised."""
    return t if t.stride() == form.stride() else form.copy_(t)
