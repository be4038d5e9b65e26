"""What masks and score mods have in common: a form and its leaves, and the graph that both give, made when asked for.

A mod that was traced before, on tensors of the same form, is not traced again: its form is known by the fingerprint of
its function. So `alibi(slopes)` written inside of a training step costs a few microseconds per call.
"""

from __future__ import annotations

import functools
import numbers
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.parametrize import cached

from .. import errors
from ..analysis.symbolic import definition
from ..graph import copies, titles
from ..graph.among import among, among_form
from ..graph.dynamo import HANDED_OVER, is_traced, read, unfollowed
from ..graph.dynamo_versions import teach_dynamo
from ..graph.evaluate import Env, evaluate
from ..graph.expr import Expr, has_no_shape, index, score, walk
from ..graph.fingerprint import Fingerprint, fingerprint, places_of
from ..graph.form import JOINED, form_of, graph_of, joined
from ..graph.ops import apply
from ..graph.proxies import Symbolic, as_expr, traced
from ..graph.rebuilt import substitute
from ..graph.to_device import on_device

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on


class Mod:
    """A mask or score mod as a value: `form` says what it computes, `leaves` are the tensors and scalars it reads."""

    __slots__ = ("__weakref__", "_expr", "form", "leaves", "name")
    _kind: str  # the name of one without a name
    _names: tuple[str, ...]  # of what it is called with

    def __init__(self, mod: Callable[..., Any] | Expr, name: str | None = None) -> None:
        """`mod` is a function, which is traced, or a graph. Raises: what `of` raises."""
        self._expr: Expr | None = None
        if isinstance(mod, Expr):
            self.form, self.leaves = form_of(mod)
            self.name, self._expr = name or self._kind, mod
            if name is not None:
                titles.remember(self.form, name)
        else:
            made = self.of(mod)
            self.form, self.leaves, self.name = made.form, made.leaves, name or made.name

    def __repr__(self) -> str:
        return self.name

    @staticmethod
    def of(fn: Any, name: str | None = None) -> Any:
        """`fn` as a mod of this class: itself, or traced."""
        raise NotImplementedError

    @classmethod
    def formed(cls, form: str, leaves: tuple[Any, ...], name: str) -> Self:
        """The mod of this form."""
        made = cls.__new__(cls)
        made.form, made.leaves, made.name, made._expr = form, leaves, name, None
        return made

    @classmethod
    def joined(cls, kind: str, sign: str, a: Mod, b: Mod) -> Self:
        """Two mods joined by one of `graph.form.JOINS`, which is written as `sign`."""
        made = cls.__new__(cls)
        known = None if is_traced() else JOINED.get((kind, a.form, b.form))
        made.form = joined(kind, a.form, b.form) if known is None else known
        made.leaves, made.name, made._expr = a.leaves + b.leaves, f"({a.name} {sign} {b.name})", None
        return made

    def named(self, name: str) -> Self:
        """This function by another name. Raises: `InvalidModArgument` for what is no text."""
        if not isinstance(name, str):
            raise errors.InvalidModArgument(f"a name is a text, got {name!r:.40}")
        if not is_traced():
            titles.remember(self.form, name)
        return self.formed(self.form, self.leaves, name)

    def shifted(self, *, b: Any = None, h: Any = None, q: Any = None, kv: Any = None) -> Self:
        """This function at (b + `b`, h + `h`, q_idx + `q`, kv_idx + `kv`), for a part of a larger call.

        So a rank that has heads from 8 on and queries from 1024 on passes `mod.shifted(h=8, q=1024)`. Each is an int, a
        `ca.scalar` (a new value compiles nothing) or an integer 0-d tensor; None leaves a position as it is. `b` and
        `h`, 0 included, say that the call has some of more sequences or heads, so that tables of all are taken. Lengths
        stay those of the part: what is aligned at the end wants its alignment said by `q` instead.

        Raises: `InvalidModArgument`.
        """
        given = {name: by for name, by in (("b", b), ("h", h), ("q", q), ("kv", kv)) if by is not None}
        for name, by in given.items():
            _check_shift(name, by)
        if is_traced():
            return self.of(lambda *values: self.at(_moved(self._names, values, given), {}), self.name)  # type: ignore[attr-defined]
        at = {index(name): apply("add", _of_more(index(name), name), as_expr(by)) for name, by in given.items()}
        return type(self)(substitute(self.expr, at), self.name)

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Self:
        """This function with its tensors on `device`; itself if they are there. Gradients reach the original tensors.

        Raises: `InvalidArgument` for what names no device.
        """
        leaves = tuple(on_device(self.leaves, device, non_blocking))
        if all(there is here for there, here in zip(leaves, self.leaves, strict=True)):
            return self
        if is_traced():
            return self.formed(self.form, leaves, self.name)
        form, _, name, *others = self.__getstate__()
        made = type(self).__new__(type(self))
        made.__setstate__((form, leaves, name, *others))
        return made

    @property
    def expr(self) -> Expr:
        """The graph. Raises: `CapturedTensorChanged`, see `graph.copies`."""
        if copies.made:
            copies.refuse_outdated(self.leaves)
        if self._expr is None:
            with torch._C.DisableTorchFunction():  # a mod may be running, whose torch calls are all intercepted
                self._expr = graph_of(self.form, self.leaves)
        return self._expr

    def _repr_latex_(self) -> str:
        """What notebooks show: the formula, and a score mod's derivatives; printed by sympy, which is imported here."""
        return rf"$\displaystyle {definition(self.expr)}$"

    def composattn_fingerprint(self) -> tuple[str, tuple[Any, ...]]:
        """What a function that calls it depends on; see `graph.fingerprint`."""
        return self.form, self.leaves

    def __eq__(self, other: object) -> bool:
        """Whether `other` is this function of these tensors, whatever its name."""
        return isinstance(other, Mod) and self.expr is other.expr

    def __hash__(self) -> int:
        if not hasattr(self, "form"):  # Dynamo of torch 2.11 asks one that stands for a mod, and is none
            return object.__hash__(self)
        return hash(self.expr)

    def __getstate__(self) -> tuple[Any, ...]:
        """What copies and pickles keep; a deep copy of a module maps captured parameters to their copies."""
        return self.form, self.leaves, self.name, copies.sources_of(self.leaves)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.form, self.leaves, self.name, sources = state
        self._expr = None
        copies.follow(self.leaves, sources)

    def at(self, leaves: dict[str, Any], lengths: dict[str, Any]) -> Any:
        """The mod at positions: traced where any of them is a traced value, else a tensor (0-d for Python numbers).

        `lengths` gives q_len and kv_len where they are known. Raises: `UnknownLength`.
        """
        if any(isinstance(v, Symbolic) for v in leaves.values()):
            return of_traced(self, tuple(leaves), tuple(leaves.values()))
        return _evaluated(self.expr, leaves, {name: v for name, v in lengths.items() if v is not None})


def _check_shift(name: str, by: Any) -> None:
    """Raises `InvalidModArgument` unless it is an integer: a number, a run-time one, or a 0-d tensor."""
    if _is_plain_tensor(by):
        is_integer = by.ndim == 0 and not (by.dtype.is_floating_point or by.dtype.is_complex or by.dtype is torch.bool)
    elif isinstance(by, Symbolic):
        is_integer = by.expr.dtype.is_integer
    else:
        is_integer = isinstance(by, numbers.Integral) and not isinstance(by, bool)
    if not is_integer:
        got = f"a {by.dtype} tensor of shape {tuple(by.shape)}" if _is_plain_tensor(by) else f"{by!r:.40}"
        raise errors.InvalidModArgument(
            f"a mod is shifted by integers, got {name}={got}; where each sequence has its own, ask a mask at "
            "`lambda b, h, q, kv: mask(b, h, q + first[b], kv)` and a score mod at "
            "`lambda s, b, h, q, kv: mod(s, b, h, q + first[b], kv)`"
        )


def _moved(names: tuple[str, ...], values: tuple[Any, ...], by: dict[str, Any]) -> dict[str, Any]:
    """Where a shifted mod is asked, by name, in code that Dynamo follows."""
    at = dict(zip(names, values, strict=True))
    for name, number in by.items():
        value = at[name]
        if name in _COUNTED:
            value = Mod.formed(among_form(name, None), (), "among").at({name: value}, {})
        at[name] = value + number
    return at


_COUNTED = ("b", "h")


def _of_more(position: Expr, name: str) -> Expr:
    return among(position, None) if name in _COUNTED else position


def asked_by_dynamo() -> bool:
    """Whether the caller's caller is Dynamo: before torch 2.13 it asks any object that is called whether it is true."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("torch._dynamo")


def of_traced(mod: Mod, names: Sequence[str], values: Sequence[Any]) -> Any:
    """A mod of traced values, by their names."""
    at = {score() if k == "score" else index(k): as_expr(v) for k, v in zip(names, values, strict=True)}
    return traced(substitute(mod.expr, at))


HANDED_OVER.add(of_traced.__code__)


def _evaluated(expr: Expr, leaves: dict[str, Any], known: dict[str, Any]) -> torch.Tensor:
    for leaf in walk(expr):
        if leaf.op == "index" and leaf.attr in ("q_len", "kv_len") and leaf.attr not in known:
            raise errors.UnknownLength(
                "this mod depends on the lengths of the sequence (bottom-right alignment does), which attention() "
                "knows; called on its own it needs them: mod(b, h, q, kv, q_len=..., kv_len=...)"
            )
    leaves = {**leaves, **known}
    _check_positions(leaves)
    tensors = [v for v in leaves.values() if isinstance(v, torch.Tensor)]
    device = tensors[0].device if tensors else "cpu"
    given = {k: torch.as_tensor(v, device=device) for k, v in leaves.items()}
    score_value = given.pop("score", None)
    env = Env(index=given, device=device, float_dtype=torch.float32)
    if score_value is not None:
        env.score = score_value
        env.float_dtype = score_value.dtype if score_value.is_floating_point() else torch.float32
    return evaluate(expr, env)


def _check_positions(leaves: dict[str, Any]) -> None:
    """Raises `InvalidArgument` unless positions are integers, a score is a number, and all broadcast."""
    for name, value in leaves.items():
        if not _is_place(value, name == "score"):
            what = f"{value.dtype} {value.layout}" if _is_plain_tensor(value) else repr(value)
            raise errors.InvalidArgument(
                f"{name} is {what}; a mod takes tensors that broadcast, or numbers of 64 bits; positions are integers"
            )
    shapes = {name: tuple(v.shape) for name, v in leaves.items() if isinstance(v, torch.Tensor)}
    try:
        torch.broadcast_shapes(*shapes.values())
    except RuntimeError:
        raise errors.ShapeMismatch(f"the tensors that a mod is called with don't broadcast: {shapes}") from None


def _is_plain_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not has_no_shape(value)


def _is_place(value: Any, is_score: bool) -> bool:
    if _is_plain_tensor(value):
        taken = is_score or not value.dtype.is_floating_point
        return taken and value.layout is torch.strided and not value.is_meta and not value.is_complex()
    if isinstance(value, numbers.Integral):
        return -(2**63) <= int(value) < 2**63
    return is_score and (
        isinstance(value, float) or (isinstance(value, numbers.Real) and hasattr(value, "item"))
    )  # numpy's


def title(mod: Any) -> str:
    """What a mod is called in a text: a name alone, as what a method or a partial holds may print the mod again."""
    if isinstance(mod, Mod):
        return mod.name
    if isinstance(mod, functools.partial):
        return f"partial({title(mod.func)})"
    if isinstance(mod, types.MethodType):
        return f"{type(mod.__self__).__name__}.{title(mod.__func__)}"
    name = getattr(mod, "__name__", None)
    return name if isinstance(name, str) else type(mod).__name__


# --- functions ---------------------------------------------------------------------------------------------------

# by fingerprint: form, places of leaves (None: all in their order), name
_traced: OrderedDict[Any, tuple[str, tuple[int, ...] | None, str]] = OrderedDict()
_TRACED_LIMIT = 4096  # forms by fingerprint; both are texts and numbers, no tensors
_lock = threading.Lock()


def known_form(trace: Callable[[Any], Expr], mark: Fingerprint) -> tuple[str, tuple[Any, ...], str] | None:
    """(form, leaves, name) of a function of this fingerprint, if such a one was traced before."""
    known = _traced.get((trace, mark[0]))
    if known is None:
        return None
    form, places, name = known
    return form, mark[1] if places is None else tuple([mark[1][n] for n in places]), name


def _parametrized(fn: Any) -> list[str]:
    """What a method reads by its name of its module and parametrizations compute."""
    owner = fn.__self__ if isinstance(fn, types.MethodType) else None
    if not isinstance(owner, torch.nn.Module) or not hasattr(owner, "parametrizations"):
        return []
    return [name for name in fn.__func__.__code__.co_names if name in owner.parametrizations]  # type: ignore[operator]


def _read_in_region(fn: Any, trace: Callable[..., Any]) -> tuple[str, tuple[Any, ...]]:
    """(form, leaves) of a function; what parametrizations give is computed by the region, as a mod can't.

    Torch counts who caches that: a write, which Dynamo of torch 2.11 refuses below a checkpoint.
    """
    unknown = teach_dynamo()
    if unknown is not None:
        return unknown, ()
    names = _parametrized(fn)
    if not names:
        return read(fn, trace)
    with cached():
        for name in names:
            getattr(fn.__self__, name)
        return read(fn, trace)


def form_of_function(
    fn: Callable[..., Any],
    name: str | None,
    trace: Callable[[Callable[..., Any]], Expr],
    names: Sequence[str],
) -> tuple[str, tuple[Any, ...], str]:
    """(form, leaves, name) of a function: known by its fingerprint, else traced, or written down while compiling."""
    if is_traced():
        form, leaves = _read_in_region(fn, trace)
        return form, leaves, name or "mod"  # which matters to nobody there
    mark = fingerprint(fn, len(names))
    known = None if mark is None else known_form(trace, mark)
    if known is not None:
        form, leaves, own = known
        return form, leaves, name or own
    own = str(getattr(fn, "__name__", None) or type(fn).__name__)
    with cached():  # what parametrizations compute is computed here, and while tracing it is the same tensor
        mark = None if mark is None else fingerprint(fn, len(names))
        with unfollowed():
            form, leaves = form_of(trace(fn))
    at = None if mark is None else places_of(leaves, mark[1])
    if mark is not None and at is not None:
        with _lock:
            _traced[trace, mark[0]] = form, None if at == tuple(range(len(mark[1]))) else at, own
            if len(_traced) > _TRACED_LIMIT:
                _traced.popitem(last=False)
    titles.remember(form, name or own)
    return form, leaves, name or own
