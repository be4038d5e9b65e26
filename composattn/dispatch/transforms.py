"""Attention below transforms of torch: vmap, grad, vjp, jvp, and per-sample gradients and jacobians made of them.

    vmap           N calls become one with N times the sequences. The mods are rewritten for it: b % B is the sequence
                   number in the call that the user wrote, b // B is the number of the call, and a captured tensor that
                   differs from call to call, or whose gradient shall, has that number as one more index.
    grad, vjp      an `autograd.Function` whose backward is one too, so that either may lie below a vmap.
    forward mode   and derivatives of gradients: the steps of `backends.reference`, which torch differentiates. The
                   generated kernels refuse both by name.

Nothing is analysed or planned before the transforms are peeled off: what mods read may be anything until then.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch._C import _are_functorch_transforms_active
from torch._C import _functorch as functorch
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad

from .. import backends
from ..analysis.cuda_graphs import numbers_now
from ..analysis.derived import refresh
from ..analysis.other_sizes import refuse_other_sizes
from ..analysis.program import Program
from ..backends import reference
from ..call.autograd import BackwardInputs, Differentiable, without_autocast
from ..call.block_sparse import Table
from ..call.inputs import LENGTHS, Inputs
from ..call.problem import softmax_scale
from ..errors import GradientUnsupported, UnsupportedTransform
from ..graph.dynamo import is_written_down, left_alone
from ..graph.expr import Capture, Expr, const, index, read, size, walk
from ..graph.form import Formed
from ..graph.moved import Unchanged
from ..graph.ops import apply
from ..graph.rebuilt import rebuild
from .captured import check_captures
from .contents import check_blocks, check_contents, check_reads
from .plans import Plans

_B = index("b")
_NONE: Mapping[Capture, Expr] = MappingProxyType({})


def active() -> bool:
    """Whether a call may have to be seen by a transform."""
    return _are_functorch_transforms_active() or forward_ad._current_level >= 0


def break_graph() -> None:
    """Where a transform lies around a call in compiled code: it would not see into the operator that stands for it.

    Raised, not broken: what follows a break would be compiled again.
    """
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedTransform(
            "a call of composattn below a transform of torch.func is not compiled; without fullgraph=True it runs in "
            "eager mode, with the transform"
        )
    if forward_ad._current_level >= 0:
        raise UnsupportedTransform(
            "a call of composattn in a dual level of torch.autograd.forward_ad is not compiled; without fullgraph=True "
            "it runs in eager mode"
        )


@left_alone
def attend(
    attention: Plans, inputs: Inputs, return_max_scores: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, max_scores) of `attention`, which any transforms around it may look at.

    Raises: as `Attention`; `GradientUnsupported` for forward mode of generated kernels, `UnsupportedTransform`.
    """
    problem = attention.problem(inputs)
    program = attention.program
    captures, numbers = program.read_by_mods
    if any(_is_batched(c.tensor) for c in captures):
        refuse_other_sizes(program, {"b": problem.batch, "h": problem.q_heads})
    else:
        check_captures(program, problem)
        check_blocks(c for c in captures if isinstance(c, Table))
    refresh(captures)
    lengths, hints = inputs.flatten()
    q, k, v, *_ = inputs
    made_of = (t for c in captures for t in (c.leaves if isinstance(c, Formed) else (c.tensor,)))
    call = TransformedCall(
        attention,
        program.given,
        captures,
        dict(zip(numbers, numbers_now(numbers), strict=True)),
        tuple(hints),
        problem.batch,
        return_max_scores,
        Unchanged([None if t is None else list(_layers(t))[-1] for t in (*lengths, *made_of)]),
    )
    tensors = (q, k, v, *lengths, *(c.tensor for c in captures))
    if any(map(_has_tangent, tensors)):
        out, lse, top = call.formula(*tensors)
    elif is_written_down():
        raise UnsupportedTransform(
            "make_fx can't write down a call of composattn below vmap, grad or vjp; for gradients use "
            "torch.autograd.grad in the function that it traces"
        )
    else:
        out, lse, top = _TransformedAttention.apply(call, *tensors)
    statistics = torch.promote_types(q.dtype, torch.float32)
    return out.to(q.dtype), lse.to(statistics), top.to(statistics)


def _layers(tensor: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """What torch.func has wrapped `tensor` in, from the outside, and last the tensor itself."""
    while tensor is not None:
        yield tensor
        tensor = functorch.get_unwrapped(tensor) if functorch.is_functorch_wrapped_tensor(tensor) else None


def _is_batched(tensor: torch.Tensor | None) -> bool:
    return any(map(functorch.is_batchedtensor, _layers(tensor)))


def _has_tangent(tensor: torch.Tensor | None) -> bool:
    """Whether forward mode looks at `tensor`, torch.func's or that of `torch.autograd.forward_ad`."""
    if tensor is None or forward_ad._current_level < 0:
        return False
    forward = [i.level() for i in retrieve_all_functorch_interpreters() if i.key() == TransformType.Jvp]
    *wrapped, inside = _layers(tensor)
    if any(functorch.is_gradtrackingtensor(t) and functorch.maybe_get_level(t) in forward for t in wrapped):
        return True
    return forward_ad.unpack_dual(inside).tangent is not None


# --- one call ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class TransformedCall:
    """What is computed of tensors (q, k, v, those of `flatten`, those that stand for `captures`), at some level.

    `mods` (see `Program`) read `captures`, which are stand-ins: of each only type and rank count.
    """

    attention: Plans
    mods: tuple[Expr | None, ...]
    captures: tuple[Capture, ...]
    numbers: dict[Any, Any]
    hints: tuple[int, ...]
    batch: int  # sequences
    max_scores: bool  # whether they are asked for
    read: Unchanged  # lengths, and what mods read

    def begin(self, tensors: Sequence[Any], is_forward: bool) -> tuple[Differentiable, list[torch.Tensor]]:
        """The call of a backend on tensors that no transform wraps any more, and the captured ones as it holds them."""
        q, k, v, lengths, captured = parts(tensors)
        captured = _apart(captured)
        inputs = Inputs.unflatten(q, k, v, lengths, self.hints)
        check_contents(inputs)
        attention = _planned(self, captured)
        prepared = attention.prepared(inputs)
        if is_forward:
            check_reads(attention.program, inputs, attention.options.scale)
        refresh(attention.program.captures)
        numbers = [self.numbers[s] for s in attention.program.scalars]
        return prepared.begin(numbers, inputs.sequences, self.max_scores), captured

    def formula(self, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(out, lse, max_scores) in operations that torch differentiates in any mode, any number of times."""
        q, k, v, lengths, captured = parts(tensors)
        precision = self.precision(q)
        stand_ins = [id(c.tensor) for c in self.captures]
        program, scale = Program(*self.mods), softmax_scale(self.attention.options.scale, q.shape[-1])
        call = reference.Dense(program, scale, precision, dict(zip(stand_ins, captured, strict=True)), looks=False)
        call.scalars = {id(s): value for s, value in self.numbers.items()}
        if any(map(_is_batched, lengths)):
            raise UnsupportedTransform(
                "vmap over the lengths of sequences has no forward mode and no second derivatives; take the same "
                "lengths for all, or call once for each"
            )
        inputs = Inputs.unflatten(q.to(precision), k.to(precision), v.to(precision), lengths, self.hints)

        def compute(q: Any, k: Any, v: Any, b: int) -> reference.Three:
            return call(q, k, v, b, 0)

        return without_autocast(q, reference.by_sequences, compute, *inputs[:3], inputs.sequences)

    def precision(self, q: torch.Tensor) -> torch.dtype:
        """What the backend computes in, where it takes derivatives of any kind. Raises `GradientUnsupported`."""
        name = self.attention.options.backend or backends.default_for(q.device)
        if name == "reference":
            return torch.float64
        if name == "streaming":
            return torch.promote_types(q.dtype, torch.float32)
        raise GradientUnsupported(
            f"backend {name!r} has first derivatives in reverse mode only; for forward mode (jvp, jacfwd, hessian) and "
            'derivatives of gradients use backend="streaming"; for first derivatives grad, vjp or jacrev'
        )


def parts(tensors: Sequence[Any]) -> tuple[Any, Any, Any, Any, Any]:
    """(q, k, v, lengths, captured) of the tensors of a `TransformedCall`, or of what belongs to them."""
    q, k, v, *more = tensors
    return q, k, v, tuple(more[:LENGTHS]), tuple(more[LENGTHS:])


def _apart(tensors: Sequence[Any]) -> list[Any]:
    """`tensors`, each as an object of its own: two that a transform told apart may be one once it is peeled off."""
    seen: set[int] = set()
    found = []
    for t in tensors:
        found.append(t.view_as(t) if id(t) in seen else t)
        seen.add(id(t))
    return found


_plans: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
_PLANS_LIMIT = 64  # rewritten forms of one plan that are remembered, before it starts anew


def _planned(call: TransformedCall, captured: Sequence[Any]) -> Plans:
    """A plan that reads `captured`; remembered where the mods hold these tensors themselves."""
    attention = call.attention
    held = all(t is c.tensor for t, c in zip(captured, call.captures, strict=True))
    if held and call.mods == attention.program.given:
        return attention
    known = _plans.setdefault(attention, {}) if held else {}
    found = known.get(call.mods)
    if found is None:
        stand = dict(zip(call.captures, map(Capture, captured), strict=True))
        mods = [e if e is None or held else _rewritten(e, stand) for e in call.mods]
        if len(known) >= _PLANS_LIMIT:
            known.clear()
        found = known[call.mods] = Plans(Program(*mods), attention.options)
    return found  # type: ignore[no-any-return]


def _rewritten(
    root: Expr, stand: Mapping[Capture, Capture], b: Expr = _B, lead: Mapping[Capture, Expr] = _NONE
) -> Expr:
    """`root` with other tensors for its captures and `b` for its b; reads of captures in `lead` begin with that."""
    done: dict[Expr, Expr] = {}
    for node in walk(root):
        args = tuple(done[a] for a in node.args)
        if node.op == "read":
            first = (lead[node.attr],) if node.attr in lead else ()
            done[node] = read(stand[node.attr], (*first, *args))
        elif node.op == "size":
            done[node] = size(stand[node.attr], node.args[0].attr + (node.attr in lead))
        elif node is _B:
            done[node] = b
        else:
            done[node] = rebuild(node, args)
    return done[root]


# --- its derivative ---------------------------------------------------------------------------------------------


class _TransformedAttention(torch.autograd.Function):
    """(out, lse, max_scores) of a `TransformedCall` on its tensors; the last empty where nobody asked for it."""

    @staticmethod
    def forward(call: TransformedCall, *tensors: Any) -> Any:
        begun, _ = call.begin(tensors, is_forward=True)
        q, k, v, *_ = tensors
        out, lse, top = without_autocast(q, begun.forward, q, k, v, begun.captures)
        return out, lse, top if call.max_scores else lse.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, *tensors = inputs
        out, lse, top = output
        ctx.mark_non_differentiable(top)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, *tensors)

    @staticmethod
    @left_alone
    def backward(ctx: Any, dout: Any, dlse: Any, _: Any) -> Any:
        ctx.call.read.refuse_changed()
        out, lse, *tensors = ctx.saved_tensors
        wanted = tuple(ctx.needs_input_grad[1:])
        if dout is None and dlse is None:
            return (None,) * (len(wanted) + 1)
        dout = torch.zeros_like(out) if dout is None else dout
        if any(map(_has_tangent, (dout, dlse, *tensors))):
            return None, *_gradient_of_formula(ctx.call, wanted, dout, dlse, tensors)
        grads = _Gradient.apply(ctx.call, wanted, dout, dlse, out, lse, *tensors)
        return None, *(g if w else None for g, w in zip(grads, wanted, strict=True))

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: TransformedCall, *tensors: Any) -> Any:
        fold = Fold(info.batch_size, call, tensors, in_dims[1:])
        out, lse, top = _TransformedAttention.apply(fold.call, *fold.tensors)
        top, at = (fold.statistics_back(top), 0) if call.max_scores else (top, None)
        return (fold.rows_back(out), fold.statistics_back(lse), top), (0, 0, at)


class _Gradient(torch.autograd.Function):
    """Gradients of all tensors of a `TransformedCall`; an empty one stands for one that is not wanted."""

    @staticmethod
    def forward(
        call: TransformedCall, wanted: Sequence[bool], dout: Any, dlse: Any, out: Any, lse: Any, *tensors: Any
    ) -> Any:
        if call.hints[2]:
            raise GradientUnsupported(
                "keys in pages are for inference, forward only; pack the keys and pass varlen=ca.Varlen(...)"
            )
        begun, captured = call.begin(tensors, is_forward=False)
        asked = {id(t) for t, w in zip(captured, wanted[3 + LENGTHS :], strict=True) if w}
        q, k, v, *_ = tensors
        of_call = (*wanted[:3], *(id(t) in asked for t in begun.captures))
        known = BackwardInputs(q, k, v, out, lse, dout, dlse, begun.captures, of_call)
        found = without_autocast(q, begun.backward, known)
        by_tensor = dict(zip(map(id, begun.captures), found[3:], strict=True))
        grads = (*found[:3], *[None] * LENGTHS, *(by_tensor.get(id(t)) for t in captured))
        return tuple(
            dout.new_empty(0) if not w else torch.zeros_like(t) if g is None else g
            for t, w, g in zip((*tensors[: 3 + LENGTHS], *captured), wanted, grads, strict=True)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, ctx.wanted, dout, dlse, _, _, *tensors = inputs
        ctx.save_for_backward(dout, dlse, *tensors)

    @staticmethod
    @left_alone
    def backward(ctx: Any, *grads: Any) -> Any:
        """No gradients flow through out and lse: the formula computes them again from their inputs."""
        ctx.call.read.refuse_changed()
        given, needed = ctx.saved_tensors, (*ctx.needs_input_grad[2:4], *ctx.needs_input_grad[6:])

        def gradient(*varied: Any) -> Any:
            dout, dlse, *tensors = _filled(given, needed, varied)
            found = _gradient_of_formula(ctx.call, ctx.wanted, dout, dlse, tensors)
            return tuple(g for g in found if g is not None)

        _, pull = _vjp(gradient, *(t for t, n in zip(given, needed, strict=True) if n))
        of_wanted = pull(tuple(g for g, w in zip(grads, ctx.wanted, strict=True) if w))
        found = _filled((None,) * len(needed), needed, of_wanted)
        return None, None, *found[:2], None, None, *found[2:]

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: TransformedCall, wanted: Sequence[bool], *tensors: Any) -> Any:
        of_result, of_call = tensors[:4], tensors[4:]
        dims = in_dims[2:]
        fold = Fold(info.batch_size, call, of_call, dims[4:], wanted[3 + LENGTHS :])
        dout, dlse, out, lse = (
            None if t is None else put(t, d)
            for put, t, d in zip((fold.rows, fold.statistics) * 2, of_result, dims, strict=False)
        )
        grads = _Gradient.apply(fold.call, wanted, dout, dlse, out, lse, *fold.tensors)
        back = [fold.rows_back(g) if w and i < 3 else g for i, (g, w) in enumerate(zip(grads, wanted, strict=True))]
        return tuple(back), tuple(0 if w else None for w in wanted)


_vjp: Callable[..., Any] = torch.func.vjp  # as it is typed, it may give three results


def _filled(given: Sequence[Any], places: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    """`given` with `values`, one after the other, in the places that are marked."""
    left = iter(values)
    return [next(left) if here else t for t, here in zip(given, places, strict=True)]


def _gradient_of_formula(
    call: TransformedCall, wanted: Sequence[bool], dout: Any, dlse: Any, tensors: Sequence[Any]
) -> list[Any]:
    """The gradients that are wanted, as operations that torch differentiates in any mode."""

    def forward(*varied: Any) -> Any:
        return call.formula(*_filled(tensors, wanted, varied))[:2]

    (out, lse), pull = _vjp(forward, *(t for t, w in zip(tensors, wanted, strict=True) if w))
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    return _filled((None,) * len(tensors), wanted, pull((dout.to(out.dtype), dlse.to(lse.dtype))))


# --- N calls as one ---------------------------------------------------------------------------------------------


class Fold:
    """N calls as one of N times the sequences; they differ in the tensors that have a dimension in `dims`.

    `apart` says which captured tensors are to be told apart besides, so that each of the calls has its own gradient.
    Dense tensors become (N·B, H, S, D), packed ones (N·total, H, D), pages (N·pages, H, rows, D).
    """

    def __init__(
        self,
        n: int,
        call: TransformedCall,
        tensors: Sequence[Any],
        dims: Sequence[int | None],
        apart: Sequence[bool] = (),
    ) -> None:
        self.n = n
        q, k, v, lengths, captured = parts(tensors)
        q_dim, k_dim, v_dim, lengths_dims, captured_dims = parts(dims)
        self.packed = lengths[0] is not None
        q = self.rows(q, q_dim)
        one_cache = bool(call.hints[2]) and k_dim is None and v_dim is None  # pages, which all calls may share
        if not one_cache:
            k, v = self.rows(k, k_dim), self.rows(v, v_dim)
        lengths = self.lengths(lengths, lengths_dims, q.shape[0] // n, 0 if one_cache else k.shape[0] // n)
        told = [d is not None or own for d, own in zip(captured_dims, apart or (False,) * len(captured), strict=True)]
        captured = [self.each(t, d) if own else t for t, d, own in zip(captured, captured_dims, told, strict=True)]
        captured = _apart(captured)
        self.tensors = (q, k, v, *lengths, *captured)
        self.call = _folded(call, n, captured, told)

    def each(self, x: torch.Tensor, dim: int | None) -> torch.Tensor:
        """(N, ...)."""
        return (x.expand(self.n, *x.shape) if dim is None else x.movedim(dim, 0)).contiguous()

    def rows(self, x: torch.Tensor, dim: int | None) -> torch.Tensor:
        """q, k, v, out or a gradient of theirs, of all calls."""
        return self.each(x, dim).flatten(0, 1)

    def rows_back(self, x: torch.Tensor) -> torch.Tensor:
        """What `rows` undoes, (N, ...)."""
        return x.unflatten(0, (self.n, x.shape[0] // self.n))

    def statistics(self, x: torch.Tensor, dim: int | None) -> torch.Tensor:
        """lse or its gradient: dense (B, H, S), packed (H, total)."""
        x = self.each(x, dim)
        return x.transpose(0, 1).flatten(1, 2) if self.packed else x.flatten(0, 1)

    def statistics_back(self, x: torch.Tensor) -> torch.Tensor:
        """What `statistics` undoes, (N, ...)."""
        axis = int(self.packed)
        return x.unflatten(axis, (self.n, x.shape[axis] // self.n)).movedim(axis, 0)

    def lengths(self, tensors: Sequence[Any], dims: Sequence[int | None], q_rows: int, k_rows: int) -> list[Any]:
        """Lengths for `flatten`, where each call has `q_rows` packed queries and `k_rows` packed keys or pages."""
        given = [None if t is None else self.each(t, d) for t, d in zip(tensors, dims, strict=True)]
        cu_q, cu_k, used_q, used_k, table, used = given
        if table is not None:
            table = (table + self.begins(table, k_rows).unsqueeze(-1)).flatten(0, 1)
        counts = [None if t is None else t.flatten() for t in (used_q, used_k, used)]
        return [self.offsets(cu_q, q_rows), self.offsets(cu_k, k_rows), *counts[:2], table, counts[2]]

    def offsets(self, cu: torch.Tensor | None, total: int) -> torch.Tensor | None:
        """First rows of the sequences of all calls."""
        if cu is None:
            return None
        first = (cu[:, :-1] + self.begins(cu, total)).flatten()
        return torch.cat((first, first.new_full((1,), self.n * total)))

    def begins(self, like: torch.Tensor, rows: int) -> torch.Tensor:
        """(N, 1): the first row, or page, of each call."""
        return torch.arange(self.n, dtype=like.dtype, device=like.device).unsqueeze(-1) * rows


def _folded(call: TransformedCall, n: int, captured: Sequence[torch.Tensor], told: Sequence[bool]) -> TransformedCall:
    """`call` on the sequences of n calls; `told` are the captured tensors with a part for each call."""
    number, b = _B, const(0)
    if call.batch > 1:
        number, b = apply("floordiv", _B, const(call.batch)), apply("mod", _B, const(call.batch))
    stand = {
        c: c if t is c.tensor and type(c) is Capture else Capture(t)
        for c, t in zip(call.captures, captured, strict=True)
    }
    lead = {c: number for c, t in zip(call.captures, told, strict=True) if t}
    mods = tuple(None if e is None else _rewritten(e, stand, b, lead) for e in call.mods)
    return dataclasses.replace(call, mods=mods, captures=tuple(stand.values()), batch=n * call.batch)
