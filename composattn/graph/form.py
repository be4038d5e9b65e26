"""The form of a mod: what it computes, as a text with a place for each captured tensor; and the way back to a graph.

A form holds no tensor, so it may be kept, compared, written into a saved program and read in another process. The
tensors and `ca.scalar` values that it speaks of are its leaves, given beside it in order. It is a Python literal:

    ("steps", leaves, ((name, argument, ...), ...), result)     a straight line of operations
    ("and" | "or" | "not" | "then" | "plus", form, ...)         masks and score mods joined; leaves one after the other

Arguments are "b", "h", "q", "kv", "d", "q_len", "kv_len", "score", "t3" (leaf 3), "x5" (the value of step 5), ints,
bools, None, and ("f", hex) for floats, ("i", ...) for tuples, ("d", name) for dtypes, ("=", name, argument) for
keywords.
Steps named "op:..." are rows of `ops.OPS`; ("made", maker, constants, leaf, ...) is a captured tensor that one of
`MAKERS` makes of tensors. A mod that a compiled region refuses has a form too, which is refused when it runs:

    ("refused", error, message, line)
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import errors
from ..errors import ComposattnError, UnreadableProgram
from .borrowed import capture_of
from .dynamo import is_traced
from .expr import Capture, DType, Expr, const, index, read, score, size, walk
from .ops import apply
from .proxies import as_expr
from .rebuilt import substitute

INDICES = ("b", "h", "q", "kv", "d", "q_len", "kv_len")

MAKERS: dict[str, Callable[[tuple[Any, ...], Sequence[Any]], Capture]] = {}
"""(constants, tensors) → captured tensor made of them, by name: see `Formed`."""


class Formed(Capture):
    """A captured tensor that is made of others, and says how: `form` is (maker, constants), `leaves` its tensors."""

    __slots__ = ()

    @property
    def form(self) -> tuple[str, tuple[Any, ...]]:
        """The maker's name and its constants."""
        raise NotImplementedError

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The tensors that it is made of."""
        raise NotImplementedError


class Numbers(Formed):
    """A tensor that a mod makes of numbers."""

    __slots__ = ()

    @staticmethod
    def of(tensor: torch.Tensor) -> Numbers:
        """That which holds what `tensor` does."""
        return _numbers(*_written_out(tensor))

    @property
    def form(self) -> tuple[str, tuple[Any, ...]]:
        return "numbers", tuple(map(decode, _written_out(self.tensor)))

    @property
    def leaves(self) -> tuple[Any, ...]:
        return ()


def _written_out(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Type, device, shape and numbers, which are told apart by all of their bits."""
    held = tuple(tensor.reshape(-1).tolist())
    return str(tensor.dtype).removeprefix("torch."), str(tensor.device), encode(tuple(tensor.shape)), encode(held)


@functools.lru_cache(maxsize=512)
def _numbers(dtype: str, device: str, shape: Any, held: Any) -> Numbers:
    made = torch.tensor(decode(held), dtype=getattr(torch, dtype), device=device)
    return Numbers(made.view(decode(shape)))


MAKERS["numbers"] = lambda constants, _: _numbers(*map(encode, constants))


def form_of(root: Expr) -> tuple[str, tuple[Any, ...]]:
    """(form, leaves) of a graph; equal graphs of different tensors have equal forms."""
    leaves: dict[Any, int] = {}
    names: dict[Any, str] = {}
    steps: list[tuple[Any, ...]] = []

    def step(*parts: Any) -> str:
        steps.append(parts)
        return f"x{len(steps) - 1}"

    def leaf(value: Any, key: Any) -> str:
        return f"t{leaves.setdefault((key, value), len(leaves))}"

    def tensor(capture: Capture) -> str:
        if not isinstance(capture, Formed):
            return leaf(_Same(capture.tensor), "tensor")
        if capture not in names:
            maker, constants = capture.form
            names[capture] = step("made", maker, encode(constants), *(leaf(_Same(t), "tensor") for t in capture.leaves))
        return names[capture]

    done: dict[Expr, Any] = {}
    for node in walk(root):
        arguments = [done[a] for a in node.args]
        if node.op == "index":
            done[node] = node.attr
        elif node.op == "score":
            done[node] = "score"
        elif node.op == "const":
            done[node] = step("op:const", encode(node.attr), node.dtype.value)
        elif node.op == "scalar":
            done[node] = step("op:scalar", leaf(_Same(node.attr), "scalar"))
        elif node.op in ("read", "size"):
            done[node] = step(f"op:{node.op}", tensor(node.attr), *arguments)
        else:
            done[node] = step(f"op:{node.op}", encode(node.attr), *arguments)
    return repr(("steps", len(leaves), tuple(steps), done[root])), tuple(value.held for _, value in leaves)


class _Same:
    """A key that compares what it holds by identity: tensors and scalars compare by value."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


def encode(value: Any) -> Any:
    """A constant as a form writes it."""
    if isinstance(value, float):
        return ("f", value.hex())
    if isinstance(value, tuple):
        return ("i", *map(encode, value))
    return value


def decode(value: Any) -> Any:
    """The constant that `encode` wrote."""
    if isinstance(value, tuple):
        return float.fromhex(value[1]) if value[0] == "f" else tuple(map(decode, value[1:]))
    return value


# --- back to a graph --------------------------------------------------------------------------------------------


def graph_of(form: str, leaves: Sequence[Any]) -> Expr:
    """The graph of a form and its leaves.

    Raises: what tracing raises, for a form that a compiled region wrote down and no kernel can say.
    """
    return graphs_of([form], leaves)[0]  # type: ignore[return-value]


def graphs_of(forms: Sequence[str | None], leaves: Sequence[Any]) -> list[Expr | None]:
    """The graphs of several forms; their leaves follow one another. None stays None.

    Raises: as `graph_of`; `UnreadableProgram` for a text that is no form, which a direct call of an operator may pass.
    """
    left = list(leaves)
    graphs: list[Expr | None] = []
    for form in forms:
        graph = None
        if form is not None:
            try:
                graph, left = _graph(parsed(form), left)
            except ComposattnError:
                raise
            except READING_FAILS as error:
                raise unreadable(form, error) from error
        graphs.append(graph)
    assert not left, f"{len(left)} leaves too many"
    return graphs


READING_FAILS = (
    SyntaxError, ValueError, TypeError, LookupError, AttributeError, AssertionError, OverflowError,
    RecursionError, MemoryError
)  # fmt: skip
"""What Python says of a text that is cut, of other words, or of other words than this version knows."""


def unreadable(form: str, why: Exception) -> UnreadableProgram:
    """The refusal of a text."""
    shown = form if len(form) <= 60 else form[:57] + "..."
    return UnreadableProgram(
        f"{shown!r} says no call that this version of composattn can read ({type(why).__name__}: {why}); operators "
        "take the text that ca.attention and ca.Attention write: call one of these, or export the program again"
    )


@functools.lru_cache(maxsize=512)
def parsed(form: str) -> Any:
    """A form as the tuples that it says. Raises: one of `READING_FAILS`."""
    return ast.literal_eval(form)


def leaf_count(form: str | None) -> int:
    """How many leaves a form speaks of."""
    return 0 if form is None else _counted(parsed(form))


def _counted(form: Any) -> int:
    if form[0] == "refused":
        return 0
    return int(form[1]) if form[0] == "steps" else sum(map(_counted, form[1:]))


def _graph(form: Any, leaves: list[Any]) -> tuple[Expr, list[Any]]:
    kind = form[0]
    if kind == "refused":
        _refuse(*form[1:])
    if kind == "steps":
        return _run(form, leaves[: form[1]]), leaves[form[1] :]
    graphs = []
    for part in form[1:]:
        graph, leaves = _graph(part, leaves)
        graphs.append(graph)
    return JOINS[kind](*graphs), leaves


def _run(form: Any, leaves: Sequence[Any]) -> Expr:
    _, _, steps, result = form
    done: list[Any] = []
    for name, *arguments in steps:
        if name.startswith("op:"):
            done.append(_op(name[3:], arguments, leaves, done))
        elif name == "made":
            maker, constants, *own = arguments
            done.append(MAKERS[maker](decode(constants), [_leaf(t, leaves) for t in own]))
        else:
            raise LookupError(f"a step named {name!r}")
    return as_graph(_argument(result, leaves, done))


def _op(op: str, arguments: Sequence[Any], leaves: Sequence[Any], done: Sequence[Any]) -> Expr:
    if op == "const":
        return const(decode(arguments[0]), DType(arguments[1]))
    if op == "scalar":
        return _leaf(arguments[0], leaves).expr  # type: ignore[no-any-return]
    first, *rest = arguments
    if op in ("read", "size"):
        capture = capture_of(_leaf(first, leaves)) if first[0] == "t" else done[int(first[1:])]
        where = [as_graph(_argument(a, leaves, done)) for a in rest]
        if op == "size":
            return size(capture, where[0].attr)
        _refuse_other_rank(capture, where)
        return read(capture, where)
    return apply(op, *(as_graph(_argument(a, leaves, done)) for a in rest), attr=decode(first))


def _refuse_other_rank(capture: Capture, where: Sequence[Expr]) -> None:
    """Raises `UnreadableProgram` for a tensor that a direct call of an operator gave in place of another."""
    if len(where) != capture.tensor.ndim or not all(i.dtype.is_integer for i in where):
        shape = tuple(capture.tensor.shape)
        raise UnreadableProgram(
            f"a captured tensor of shape {shape} is read at {list(where)}; give the operator the tensors that its text "
            "speaks of, in their order, or call ca.attention, which does"
        )


def _leaf(name: str, leaves: Sequence[Any]) -> Any:
    return leaves[int(name[1:])]


def _argument(value: Any, leaves: Sequence[Any], done: Sequence[Any]) -> Any:
    """What an argument of a step stands for: a graph, a leaf, or the value of an earlier step."""
    if not isinstance(value, str):
        return value
    if value == "score":
        return score()
    if value in INDICES:
        return index(value)
    return leaves[int(value[1:])] if value[0] == "t" else done[int(value[1:])]


def as_graph(value: Any) -> Expr:
    """A graph, a traced value or a number, as a graph."""
    if isinstance(value, Expr):
        return value
    return as_expr(value)


# --- refusals -----------------------------------------------------------------------------------------------------


def refused(error: ComposattnError) -> str:
    """The form of a mod that a compiled region can't read."""
    line = getattr(error, "line", None)
    message = str(error) if line is None else str(error).removesuffix(f"\n  at {line}")
    return repr(("refused", type(error).__name__, message, line))


def _refuse(kind: str, message: str, line: str | None) -> None:
    error = getattr(errors, kind)
    raise error(message, line) if issubclass(error, errors.TraceError) else error(message)


# --- forms joined -------------------------------------------------------------------------------------------------


def joined(kind: str, *forms: str) -> str:
    """The form of mods joined by one of `JOINS`; its leaves are theirs, one after the other."""
    if is_traced():
        return _written(kind, *forms)
    key = (kind, *forms)
    found = JOINED.get(key)
    if found is None:
        if len(JOINED) >= _JOINED_LIMIT:
            JOINED.clear()
        found = JOINED[key] = _written(kind, *forms)
    return found


JOINED: dict[tuple[str, ...], str] = {}
"""Forms that were joined, by their kind and parts: the same object is hashed once, 0.7 µs of 300 characters."""
_JOINED_LIMIT = 4096


def _written(kind: str, *forms: str) -> str:
    return f"({repr(kind)}, {', '.join(forms)},)"  # noqa: RUF010 - by repr() for Dynamo, see `dispatch.serialized`


def _plus(a: Expr, b: Expr) -> Expr:
    """a + (b - score), without the cancellation where b is `score + bias` (inf - inf, and lost bits)."""
    s = score()
    if b is s:
        return a
    if b.op in ("add", "sub") and b.args[0] is s and not b.args[1].deps & s.deps:
        return apply(b.op, a, b.args[1])
    if b.op == "add" and b.args[1] is s and not b.args[0].deps & s.deps:
        return apply("add", a, b.args[0])
    if b.op in ("add", "sub") and not b.args[1].deps & s.deps:
        return apply(b.op, _plus(a, b.args[0]), b.args[1])
    return apply("add", a, apply("sub", b, s))


JOINS: dict[str, Callable[..., Expr]] = {
    "and": lambda a, b: apply("and", a, b),
    "or": lambda a, b: apply("or", a, b),
    "not": lambda a: apply("not", a),
    "then": lambda a, b: substitute(b, {score(): a}),
    "plus": _plus,
}
"""How graphs join, by the name that forms give it."""
