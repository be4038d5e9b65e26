"""Attention as `torch.library` operators: what torch.compile, torch.export and fake tensors see of a call.

Outside of them nothing goes through here: an operator costs more host time than `composattn.call.autograd` does.

    attend(q, k, v, captured, lengths, hints, form, plan, with_max) → (out, lse, max_scores, saved)
    attend_backward(grad_out, grad_lse, q, k, v, captured, out, lse, saved, lengths, hints, form, plan, wanted)
        → those of [dq, dk, dv, *d captured] that are wanted

`form` is a text that says all of the call but its tensors: the forms of both mods (`graph.form`) and the options. So a
program that was exported and saved carries its mods, and another mask of the same form runs the code compiled before.
`captured` are the tensors that the mods read: inputs, so their gradients flow. `plan` is the number of an `Attention`
of this process, or -1; where one of that number and that form lives, its plan serves and nothing is planned anew.
`lengths` and `hints` are the tensors and numbers of `Varlen` and `Paged` (see `composattn.call.inputs.Inputs`):
other lengths run the same code. `saved` holds the run-time numbers of the forward for the backward (64 bits each, CPU).

Run-time numbers follow the hints. A `ca.scalar`, named by its number in this process, is read when the operator runs:
set it outside of a compiled region. An int that compiled code keeps symbolic stands there itself. Without a plan, what
is derived from captured tensors is computed in every forward: compiled code may write to memory with no one counting.
"""

from __future__ import annotations

import functools
import itertools
import struct
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from ..analysis import streams
from ..analysis.cuda_graphs import numbers_now, refuse_outdated
from ..analysis.derived import derived_anew, derived_for_graph, same_memory
from ..analysis.refreshed import Moment, distrusting, no_caching
from ..call.autograd import BackwardInputs, Differentiable, autocast_off
from ..call.inputs import HINTS, Asked, Inputs, say_dense
from ..call.prepared import OperatorPath
from ..call.problem import Problem
from ..call.strides import ordered
from ..errors import UnreadableProgram, UnsupportedOption
from ..graph import copies
from ..graph.dynamo import is_written_down
from ..graph.expr import Capture
from ..graph.moved import Lay
from ..graph.scalar import LocalScalar, Scalar, scalar_of
from .contents import check_blocks, check_contents, check_reads
from .gradient_operator import differentiable, gradient_of, in_order
from .operator_plans import OperatorPlan, learn, may_be_taken, path_of, plan_in_use
from .plan_cache import made_plan
from .planned import Planned, asked_of, refuse_gradient
from .plans import Options
from .serialized import Serialized, parse
from .transforms import active, break_graph

_plans: weakref.WeakValueDictionary[int, Planned] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(planned: Planned) -> int:
    """The number by which operators find a plan that has `serialized`, for as long as it lives."""
    number = next(_numbers)
    _plans[number] = planned
    return number


def written_down() -> bool:
    """Whether `make_fx` writes down a call that lies below no transform: then the operator stands for it."""
    return is_written_down() and not active()


# --- a call -----------------------------------------------------------------------------------------------------


def call(inputs: Inputs, serialized: Serialized, plan: int, asked: Asked) -> Any:
    """A call as torch.compile, torch.export and fake tensors see it: out, and what else is `asked` for.

    Raises: `UnsupportedOption` for a `ca.scalar` in a program that is exported.
    """
    # Dynamo of torch 2.11 says yes to is_exporting() wherever it compiles
    if any(isinstance(s, Scalar) for s in serialized.scalars) and torch.compiler._is_exporting_flag:
        raise UnsupportedOption(
            "a ca.scalar is a number of this process and can't be exported; capture a 0-d tensor instead"
        )
    break_graph()
    inputs = inputs.autocast
    q, k, v, _, paged = inputs
    if paged is not None:
        refuse_gradient(q, k, v, *serialized.tensors)
    lengths, hints = inputs.flatten()
    numbers = [*hints, *[s.number if isinstance(s, Scalar) else s for s in serialized.scalars]]
    *found, _ = torch.ops.composattn.attend(
        q, k, v, list(serialized.tensors), lengths, numbers, serialized.form, plan, asked.max_scores
    )
    return asked_of(found, asked)


class OperatorCall(NamedTuple):
    """A call as an operator runs it: what is planned, its leaves in order, and what is to be entered around it."""

    planned: Planned
    leaves: tuple[Capture, ...]
    around: AbstractContextManager[Any]
    plan: OperatorPlan | None = None  # if it is known by the form of the call alone

    def replaced(self, captured: Sequence[torch.Tensor]) -> Mapping[Capture, torch.Tensor]:
        """The tensors that are read in place of those that the mods hold."""
        return dict(zip(self.leaves, captured, strict=True))


def _bound(
    form: str, plan: int, captured: Sequence[torch.Tensor], hints: Sequence[int], since: Moment | None
) -> OperatorCall:
    """The call; what is `around` it has to be entered."""
    known = _plans.get(plan) if plan >= 0 else None
    if known is not None and known.serialized is not None and known.serialized.form == form:
        refuse_other_leaves(form, captured, hints[HINTS:])
        held = tuple(map(Capture, known.serialized.tensors))
        # compiled code copies its inputs at times
        same = all(same_memory(c.tensor, t) for c, t in zip(held, captured, strict=True))
        return OperatorCall(known, held, nullcontext() if same else derived_anew(held, captured))
    leaves = leaves_of(form, captured, hints[HINTS:])
    forms, options, _ = parse(form)
    make = functools.partial(made_plan, forms, leaves, options)
    if active():  # their backward comes when nothing is borrowed any more
        return OperatorCall(make(), tuple(map(Capture, captured)), distrusting(since))
    numbers = [leaf.number for leaf in leaves if isinstance(leaf, Scalar)]
    return _using(plan_in_use(form, captured, numbers, make), captured, since)


def _using(plan: OperatorPlan, captured: Sequence[torch.Tensor], since: Moment | None) -> OperatorCall:
    return OperatorCall(plan.planned, plan.captures, _InUse(plan, captured, since), plan)


def leaves_of(form: str, captured: Sequence[torch.Tensor], numbers: Sequence[int]) -> list[Any]:
    """The leaves of the mods of a call in words, in their order: tensors, and run-time numbers.

    Raises: `UnreadableProgram`.
    """
    refuse_other_leaves(form, captured, numbers)
    tensors, left = iter(captured), iter(numbers)
    leaves: list[Any] = []
    for place, kind in enumerate(parse(form)[2]):
        if kind == "t":
            leaves.append(next(tensors))
        elif kind.isdigit():
            leaves.append(captured[int(kind)])
        else:
            leaves.append(scalar_of(next(left)) if kind == "s" else _standing_for(next(left), form, place))
    return leaves


def refuse_other_leaves(form: str, captured: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
    """Raises `UnreadableProgram` for other leaves than a form speaks of, as a direct call of an operator may give."""
    kinds = parse(form)[2]
    tensors, scalars = kinds.count("t"), kinds.count("s") + kinds.count("n")
    if len(captured) != tensors or len(numbers) != scalars:
        raise UnreadableProgram(
            f"the text of this call speaks of {tensors} captured tensors and {scalars} run-time numbers, "
            f"got {len(captured)} and {len(numbers)}; give what it speaks of, or call ca.attention, which does"
        )


def _standing_for(number: int, form: str, place: int) -> Scalar:
    """The run-time number that a plan of this form reads at this place, with the value of this call."""
    scalar = _given(form, place, -(2**31) <= number < 2**31)
    scalar.value = number
    return scalar


@functools.lru_cache(maxsize=512)
def _given(form: str, place: int, narrow: bool) -> LocalScalar:
    return LocalScalar(0 if narrow else 2**32)


class _InUse:
    """A plan while it serves a call that trusts nothing derived before but by its own forward, `since`."""

    __slots__ = ("_borrowed", "_inner", "_plan")

    def __init__(self, plan: OperatorPlan, captured: Sequence[torch.Tensor], since: Moment | None) -> None:
        self._plan, self._borrowed, self._inner = plan, plan.borrow(captured), distrusting(since)

    def __enter__(self) -> None:
        self._borrowed.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self._borrowed.__exit__(*error)
        self._plan.end()


# --- the operators -------------------------------------------------------------------------------------------


@torch.library.custom_op("composattn::attend", mutates_args=())
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    captured: Sequence[torch.Tensor],
    lengths: Sequence[torch.Tensor | None],
    hints: Sequence[int],
    form: str,
    plan: int,
    with_max: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, max_scores, saved), max_scores empty unless asked for; see the file's head."""
    if copies.made:
        refuse_outdated(captured)
    now, dense = Moment(), plan < 0 and not with_max and say_dense(lengths, hints)
    path = path_of(form, q, k, v, captured) if dense else None
    found = None if path is None else path.forward(q, k, v, captured, now)
    if found is not None:
        saved = _told(_saved(q, 0), _Said(now, Lay((*captured, *lengths)), path=path))
        return *found, q.new_empty(0, dtype=torch.float32), saved
    return _attended(now, dense, q, k, v, captured, lengths, hints, form, plan, with_max)


def _attended(
    now: Moment, learns: bool, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`attend` by the whole way. `learns`: whether calls of these forms may take a path of their own from now on."""
    q, k, v, captured, lengths, hints, form, plan, with_max = arguments
    with derived_for_graph():
        inputs = Inputs.unflatten(q, k, v, lengths, hints)
        check_contents(inputs)
        bound = _bound(form, plan, captured, hints, now)
        planned = bound.planned
        with bound.around, autocast_off(q):
            check_blocks(planned._tables)
            check_reads(planned.program, inputs, planned.options.scale)
            call = _differentiable(planned, None, inputs, with_max)
            with no_caching():
                out, lse, top = call.forward(q, k, v, call.read(bound.replaced(captured)))
    numbers = [_bits(s.value) for s in planned.program.scalars]
    saved = _saved(q, len(hints) - HINTS)
    if numbers:
        saved[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    _told(saved, _Said(now, Lay((*captured, *lengths)), bound.plan if len(hints) == HINTS else None))
    if learns and bound.plan is not None:
        learn(form, bound.plan, inputs, captured)
    max_scores = top if with_max and top is not None else lse.new_empty(0)
    dtype = planned.options.out_dtype or q.dtype
    return in_order(out.to(dtype), q), lse, max_scores, saved


@attend.register_fake
def _(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v, _, lengths, hints, form, _, with_max = arguments
    dtype = Options(*parse(form)[1]).out_dtype
    Problem.of(*Inputs.unflatten(q, k, v, lengths, hints), out_dtype=dtype)
    rows = q.shape[:3] if q.ndim == 4 else (q.shape[1], q.shape[0])
    lse, max_scores = (q.new_empty(shape, dtype=lse_dtype(q.dtype)) for shape in (rows, rows if with_max else (0,)))
    return ordered(q, v.shape[-1], dtype), lse, max_scores, _saved(q, len(hints) - HINTS)


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
    saved: torch.Tensor,
    lengths: Sequence[torch.Tensor | None],
    hints: Sequence[int],
    form: str,
    plan: int,
    wanted: Sequence[bool],
) -> list[torch.Tensor]:
    """Gradients of those of q, k, v and `captured` that are wanted."""
    said, path = _forward_of(saved), None
    if said is not None:
        said.lay.refuse_moved((*captured, *lengths))
        path = said.path if grad_lse is None and True not in wanted[3:] and may_be_taken() else None
    found = None
    if said is not None and path is not None:
        found = path.backward(q, k, v, out, lse, grad_out, captured, said.now)
    if found is not None:
        return [g for g, want in zip(found, wanted, strict=False) if want]
    given = grad_out, grad_lse, q, k, v, captured, out, lse, saved, lengths, hints, form, plan, wanted
    grads = _differentiated(said, *given)
    if path is not None:
        path.learn_backward(q, k, v, out, grad_out, captured)
    return grads


def _differentiated(said: _Said | None, *arguments: Any) -> list[torch.Tensor]:
    """`attend_backward` by the whole way."""
    grad_out, grad_lse, q, k, v, captured, out, lse, saved, lengths, hints, form, plan, wanted = arguments
    with derived_for_graph():
        since = None if said is None else said.now
        bound = (said and said.bound_again(captured)) or _bound(form, plan, captured, hints, since)
        with bound.around, autocast_off(q):
            captures = bound.planned.program.captures
            asked: dict[Capture, bool] = {}
            for capture, want in zip(bound.leaves, wanted[3:], strict=True):
                asked[capture] = asked.get(capture, False) or want
            call = _differentiable(bound.planned, saved, Inputs.unflatten(q, k, v, lengths, hints))
            read = call.read(bound.replaced(captured))
            of_call = read, (*wanted[:3], *(asked.get(c, False) for c in captures))
            with no_caching():
                found = call.backward(BackwardInputs(q, k, v, out, lse, grad_out, grad_lse, *of_call))
    of_captures = dict(zip(captures, found[3:], strict=True))
    # a tensor that is there twice gets its gradient once
    grads = [*found[:3], *(of_captures.pop(c, None) for c in bound.leaves)]
    leaves = [q, k, v, *captured]
    return [gradient_of(t, g) for t, want, g in zip(leaves, wanted, grads, strict=True) if want]


differentiable(attend, attend_backward, said=4)


# --- what they do ----------------------------------------------------------------------------------------------


def _differentiable(
    planned: Planned, saved: torch.Tensor | None, inputs: Inputs, return_max_scores: bool = False
) -> Differentiable:
    """The call with the run-time numbers of `saved`, or those of now."""
    scalars = planned.program.scalars
    numbers = numbers_now(scalars) if saved is None else [s.value for s in scalars]
    if saved is not None and numbers:
        numbers = [_from_bits(type(now), then) for now, then in zip(numbers, saved.tolist(), strict=False)]
    return planned.prepared(inputs).begin(numbers, inputs.sequences, return_max_scores)


class _Said:
    """What a forward says to its backward, which holds none of its tensors."""

    __slots__ = ("_plan", "lay", "now", "path")

    def __init__(
        self, now: Moment, lay: Lay, plan: OperatorPlan | None = None, path: OperatorPath | None = None
    ) -> None:
        """`plan`: the forward's, where nothing but tensors is read; `path`: the one that it took."""
        self.now, self.lay, self._plan, self.path = now, lay, plan, path

    def bound_again(self, captured: Sequence[torch.Tensor]) -> OperatorCall | None:
        """The backward's call by the plan of its forward, where no other call uses that now."""
        plan = self._plan
        if plan is None or active() or not plan.fits(captured) or not plan.begin():
            return None
        return _using(plan, captured, self.now)


def _told(saved: torch.Tensor, said: _Said) -> torch.Tensor:
    """`saved`, with what the forward says."""
    saved.untyped_storage().composattn_of = said  # type: ignore[attr-defined]
    return saved


def _forward_of(saved: torch.Tensor) -> _Said | None:
    """What the forward said of its moment; nothing where a CUDA graph is captured: it may be replayed beside others."""
    return None if streams.is_capturing() else getattr(saved.untyped_storage(), "composattn_of", None)


def _saved(q: torch.Tensor, numbers: int) -> torch.Tensor:
    """Memory for the bits of run-time numbers; without any, on q's device: a CPU tensor would rule out CUDA graphs."""
    return torch.empty(numbers, dtype=torch.int64, device="cpu" if numbers else q.device)


def _bits(number: float | int) -> int:
    """`number` in 64 bits, all of them."""
    return number if isinstance(number, int) else int(struct.unpack("q", struct.pack("d", number))[0])


def _from_bits(kind: type, bits: int) -> float | int:
    return bits if kind is int else float(struct.unpack("d", struct.pack("q", bits))[0])


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
