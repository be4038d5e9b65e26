"""Attention with given graphs, called: what `Attention` and cached plans share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad

from .. import errors
from ..analysis.program import Program
from ..call import checks
from ..call.block_sparse import Table
from ..call.checks import check_flag
from ..call.eight_bits import EIGHT_BITS, refuse_narrow_gradient
from ..call.inputs import OUT_ALONE, Asked, InputOptions, Inputs, Outputs
from ..call.prepared import FastPath, PreparedCall
from ..call.schedule import Schedule
from ..graph.borrowed import Borrowed
from ..graph.dynamo import left_alone
from ..graph.tensor_forms import of_these_forms
from . import transforms
from .contents import check_call
from .plans import Options, Plans
from .serialized import Serialized

_LATEST = 4  # forms that are looked for one by one: 0.4 µs each, where to make a key of one and find it takes 1.9

_NOTHING: AbstractContextManager[None] = nullcontext()
# whether q, k and v are of these forms, and sequences lie so
_Met = tuple[Callable[..., bool], Any, PreparedCall, FastPath | None]


class CallOptions(InputOptions, total=False):
    """The keywords of `ca.attention` but those that say what it returns."""

    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    sinks: torch.Tensor | None
    dropout_p: float
    dropout_seed: int | torch.Tensor | None
    scale: float | None
    backend: str | None
    deterministic: bool | None
    schedule: Schedule | None


class Planned(Plans):
    """Plans that can be called. `serialized`: the call as text, where operators may know it by a number."""

    serialized: Serialized | None = None

    def __init__(self, program: Program, options: Options) -> None:
        super().__init__(program, options)
        self._latest: tuple[_Met, ...] = ()  # of the forms
        self._tables = [c for c in program.read_by_mods[0] if isinstance(c, Table)]

    @left_alone  # compiled code calls an operator
    def __call__(self, inputs: Inputs, asked: Asked, borrowed: Borrowed | None = None) -> Any:
        """out and what else is `asked` for. `borrowed`: tensors of the call, to be entered where that matters."""
        autocast = torch._C._is_any_autocast_enabled()
        if autocast:
            inputs = inputs.autocast
        q, k, v, varlen, paged = inputs
        call: PreparedCall | None = None
        # `transforms.active`, without the call
        if not _are_functorch_transforms_active() and forward_ad._current_level < 0:
            lie = None if varlen is None and paged is None else inputs.lie
            try:  # torch ends the process where a nested tensor is compared: `prepared` refuses it by name
                latest = () if q.is_nested or k.is_nested or v.is_nested else self._latest
            except AttributeError:  # likewise
                latest = ()
            for are_of_forms, then, call, fast_path in latest:  # noqa: B007  which of them is what is looked for
                if are_of_forms(q, k, v) and lie == then:
                    break
            else:
                inputs = inputs.resolved
                q, k, v = inputs[:3]
                call, fast_path = self._met(inputs, borrowed)
            # a backward below autocast reads captured tensors with it off
            apart = autocast and torch.is_grad_enabled() and self.program.captures
            if fast_path is not None and asked is OUT_ALONE and not checks.are_on and not apart:
                out = fast_path(q, k, v, borrowed)
                if out is not None:
                    return out
        else:
            inputs = inputs.resolved
        with _NOTHING if borrowed is None else borrowed:
            return asked_of(self._called(call, inputs, asked), asked)

    def fast_path_of(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> FastPath | None:
        """Gives the output of a dense call that asks for nothing else, where its form is known; each form has its own.

        Not to be asked below a transform: a plan that was made there knows no forms.
        """
        try:  # as above
            if checks.are_on or q.is_nested or k.is_nested or v.is_nested or torch._C._is_any_autocast_enabled():
                return None
        except AttributeError:
            return None
        for are_of_forms, lie, _, fast_path in self._latest:
            if lie is None and fast_path is not None and are_of_forms(q, k, v):
                return fast_path
        return None

    def _met(self, inputs: Inputs, borrowed: Borrowed | None) -> tuple[PreparedCall, FastPath | None]:
        """The call of inputs of this form, and its fast path, from now on among the latest where forms tell all."""
        with _NOTHING if borrowed is None else borrowed:
            self._refuse_gradient(inputs)
            call = self.prepared(inputs)
            q, k, v, _, _ = inputs
            if self.hangs_on_contents:  # to be looked at in each call
                return call, None
            met = of_these_forms(q, k, v), inputs.lie, call, call.fast_path(inputs)
            self._latest = (met, *self._latest[: _LATEST - 1])
        return met[-2:]

    def _called(self, call: PreparedCall | None, inputs: Inputs, asked: Asked) -> Outputs:
        """The whole way, by the call of the inputs' form; None below transforms."""
        self._refuse_gradient(inputs)
        if call is None:
            return transforms.attend(self, inputs, asked.max_scores)
        check_call(self.program, self._tables, inputs, self.options.scale)
        return call(inputs, asked)

    def _refuse_gradient(self, inputs: Inputs) -> None:
        """Raises `GradientUnsupported` where autograd would record a call whose keys lie in pages or have 8 bits."""
        for name, t in (("k", inputs.k), ("v", inputs.v)):
            if getattr(t, "dtype", None) in EIGHT_BITS:  # nobody has looked at it yet: it may be anything
                refuse_narrow_gradient(name, t)
        if inputs.paged is not None:
            refuse_gradient(*inputs[:3], *(c.tensor for c in self.program.read_by_mods[0]))

    def forget_checks(self) -> None:
        super().forget_checks()
        self._latest = ()


def asked_for(return_lse: bool, return_max_scores: bool) -> Asked:
    """What a call asks for besides its output. Raises: `UnsupportedOption` for what is neither True nor False."""
    check_flag("return_lse", return_lse)
    check_flag("return_max_scores", return_max_scores)
    return Asked(return_lse, return_max_scores)


def asked_of(found: Any, asked: Asked) -> Any:
    """The results that a call asked for, in the order (out, lse, max_scores); out alone is no tuple."""
    out, lse, max_scores = found
    if asked.max_scores:
        return (out, lse, max_scores) if asked.lse else (out, max_scores)
    return (out, lse) if asked.lse else out


def refuse_gradient(*tensors: torch.Tensor) -> None:
    """Raises `GradientUnsupported` where autograd would record a call with these tensors, whose keys lie in pages."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise errors.GradientUnsupported(
            "keys in pages are for inference, forward only; call under torch.no_grad() or torch.inference_mode(), "
            "or pack the keys and pass varlen=ca.Varlen(cu_seqlens_q, cu_seqlens_k)"
        )
