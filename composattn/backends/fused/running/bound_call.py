"""Dense calls of one form of inputs, of which all is known: what is left of a call is memory and its launches.

So are calls that ask for their output alone, where bulk copies can read q, k and v as they are. What asks for more
(LSE, gradients that no kernel sums, create_graph, a gradient of a form that was not seen before) takes the way of
`composattn.backends.fused.running.call`, which looks at everything anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor

from ....analysis.cuda_graphs import numbers_now
from ....call.autograd import gradients_of
from ....call.sequences import NO_SEQUENCES
from ....call.strides import strides_of_ordered
from ....graph.borrowed import Borrowed
from ....graph.dynamo import left_alone
from ....graph.foreign import in_memory
from ....graph.moved import Addresses
from ....graph.tensor_forms import of_the_form
from .bound_backward import BoundBackward, Memory, bound_backward
from .bulk import tidy
from .kernels import FusedKernels
from .launch import ForwardLauncher, form_alone, rows_of

Numbers = Sequence[float | int]
_WITH_LSE, _ALONE = (True, False), (False, False)


def is_bindable(*tensors: torch.Tensor) -> bool:
    """Whether bulk copies can read all tensors of the form of these, but for their addresses."""
    wrapped = any(is_functorch_wrapped_tensor(t) or is_legacy_batchedtensor(t) for t in tensors)
    return not wrapped and all(t.numel() and tidy(t) is t for t in tensors)


def memory_of(t: torch.Tensor, width: int, dtype: torch.dtype) -> Memory:
    """Makes memory like `t` of each tensor of its form, in its order of dimensions, with `width` as the last one."""
    if t.is_contiguous() and t.shape[-1] == width and t.dtype is dtype:
        return torch.empty_like
    like = form_alone((*t.shape[:-1], width), strides_of_ordered(t, width), t.device, dtype)
    return lambda t: torch.empty_like(like)


def never(_: Any) -> bool:
    return False


class BoundCall:
    """A fused call of inputs of one form that `is_bindable`, and of their output alone."""

    __slots__ = (
        "backwards",
        "borrowable",
        "call",
        "has_captures",
        "is_learned",
        "known",
        "learns_captured",
        "lse",
        "made",
        "numbers",
        "others",
        "with_lse",
    )  # fmt: skip

    def __init__(self, call: FusedKernels, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.call, self.numbers = call, call.program.scalars
        self.has_captures = bool(call.program.captures)
        self.is_learned = q.requires_grad or k.requires_grad or v.requires_grad
        # captures that are borrowed, whose forms are the plan's
        self.borrowable, self.others = call.captured.borrowable, call.captured.others
        self.with_lse: ForwardLauncher | None = None
        self.learns_captured = True in [t.requires_grad for t in call.captured()]
        dtype = call.problem.dtype
        self.made = tuple(memory_of(t, width.shape[-1], dtype) for t, width in ((q, v), (q, q), (k, k), (v, v)))
        self.lse = form_alone(*rows_of(q), q.device)
        self.known: Callable[[Any], bool] = never  # whether a gradient has the form of one that was read as it came
        # by whether dQ has to be repeatable, and which captured tensors want a gradient; None: more is always asked
        self.backwards: dict[Any, BoundBackward | None] = {}

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, borrowed: Borrowed | None
    ) -> torch.Tensor | None:
        """The output; None where more has to be looked at. `borrowed` has not to be entered."""
        call = self.call
        captured: Sequence[torch.Tensor] = ()
        if self.has_captures:
            if borrowed is None:
                captured = call.captured()
            elif self.others is not None and borrowed.captures == self.borrowable:  # `TensorsOf.of`, without the call
                captured = (*borrowed.tensors, *self.others) if self.others else borrowed.tensors
            else:
                return None
        numbers: Numbers = numbers_now(self.numbers) if self.numbers else ()
        if torch.is_grad_enabled() and (self.is_learned or (captured and True in [t.requires_grad for t in captured])):
            if _top_saved_tensors_default_hooks(False):  # what a hook gives back may lie in another way
                return None
            if borrowed is None and True in map(is_functorch_wrapped_tensor, captured):  # no borrowed one is
                return None
            launcher = self.with_lse
            if launcher is None:
                call.checks_gradient  # noqa: B018  raises where there is none
                launcher = self.with_lse = call.launchers.get(_WITH_LSE) or _made(call, _WITH_LSE, borrowed)
            if borrowed is None or self.learns_captured or None in borrowed.unwritten:
                return _recorded((self, launcher, numbers, borrowed, None), q, k, v, *captured)  # type: ignore[no-any-return]
            return _recorded((self, launcher, numbers, borrowed, captured), q, k, v)  # type: ignore[no-any-return]
        launcher = call.launchers.get(_ALONE) or _made(call, _ALONE, borrowed)
        out = self.made[0](q)
        launcher.fill(q, k, v, out, None, None, call.scale, captured, numbers, NO_SEQUENCES, borrowed)
        return out

    def learn(self, dout: torch.Tensor) -> None:
        """From now on gradients of this form take the fast path, if they can."""
        if is_bindable(dout) and dout.dtype is self.call.problem.dtype and not torch._C._is_any_autocast_enabled():
            self.known = of_the_form(dout)

    def learn_backward(self, asked: Any, of_captured: Sequence[bool], q: torch.Tensor) -> None:
        """From now on a backward that asks for this takes the fast path, if it can: it was just had the long way."""
        gradient = self.call.known_gradient
        _, *like = self.made
        self.backwards[asked] = None if gradient is None else bound_backward(gradient, of_captured, q, like)


def _made(call: FusedKernels, asked: tuple[bool, bool], borrowed: Borrowed | None) -> ForwardLauncher:
    """The kernels of a first call, which are made of what it reads."""
    with nullcontext() if borrowed is None else borrowed:
        launcher = call.launcher(*asked)
        launcher.kernels()
    return launcher


# the last: borrowed tensors that tell of their writes; autograd has to know of other captured tensors
_Known = tuple[BoundCall, ForwardLauncher, Numbers, Borrowed | None, Sequence[torch.Tensor] | None]


class _BoundAttention(torch.autograd.Function):
    """Attributes of `ctx` are set where torch has a function for it that does nothing else."""

    @staticmethod
    def forward(ctx: Any, known: _Known, q: Any, k: Any, v: Any, *captured: Any) -> Any:
        bound, launcher, numbers, borrowed, tensors = known
        read = captured if tensors is None else tensors
        out, lse = bound.made[0](q), torch.empty_like(bound.lse)
        launcher.fill(q, k, v, out, lse, None, bound.call.scale, read, numbers, NO_SEQUENCES, borrowed)
        ctx.known = known
        ctx.materialize_grads = False
        ctx.to_save = (q, k, v, out, lse, *captured)
        if captured:
            sources = bound.call.sources(borrowed)  # of which backwards make tables again
            if sources:
                ctx.to_save = (*ctx.to_save, *sources)
            ctx.read = Addresses(ctx.to_save[5:])
        return out

    @staticmethod
    @left_alone
    def backward(ctx: Any, dout: Any) -> Any:
        if dout is None:
            return (None,) * len(ctx.needs_input_grad)
        bound, _, numbers, borrowed, tensors = ctx.known
        call, saved, of_captured = bound.call, ctx.saved_tensors, ()
        stands = borrowed is not None and borrowed.is_valid()
        if tensors is None:
            q, k, v, out, lse, *captured = saved
            if captured:
                of_captured = ctx.needs_input_grad[4:]
                ctx.read.refuse_moved(captured)
                del captured[len(of_captured) :]
            if borrowed is not None and not stands:
                borrowed.refuse_written_apart()
        else:
            q, k, v, out, lse = saved
            captured = tensors
            if not stands:
                borrowed.refuse_written()
        asked: Any = torch._C._get_deterministic_algorithms()
        if of_captured:
            asked = asked, of_captured
        if not bound.known(dout) or dout.data_ptr() % 16 or torch.is_grad_enabled():
            dout = in_memory(dout)
            bound.learn(dout)
        elif run := bound.backwards.get(asked):
            found = run(q, k, v, out, lse, dout, captured, numbers, borrowed if stands else None)
            if found is not None:
                return (None, *found)
        begun, wanted = call.begun(captured, numbers, borrowed), ctx.needs_input_grad[1:]
        if tensors is None:
            of_all = gradients_of(begun, wanted, saved, dout, None)
        else:
            of_all = gradients_of(begun, (*wanted, *[False] * len(tensors)), (*saved, *tensors), dout, None)[:3]
        if asked not in bound.backwards and bound.known(dout):
            bound.learn_backward(asked, of_captured, q)
        return None, *of_all


# without what torch does in Python for `torch.func` (2 µs), and before a backward for Functions of other kinds
_recorded = super(torch.autograd.Function, _BoundAttention).apply
_BoundAttention._backward_cls.apply = _BoundAttention.backward  # type: ignore[attr-defined]
