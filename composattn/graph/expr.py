"""The typed expression tree that a mod is traced into: immutable, hash-consed, with its dependences.

An `Expr` is one operation (`op` names a row of `ops.OPS`), its arguments, its value type, and for a leaf what
it stands for (`attr`). Equal trees are the same object, so `is` compares and a walk visits shared parts once.
"""

from __future__ import annotations

import enum
import struct
import threading
import weakref
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch

from ..errors import TypeMismatch, UnsupportedLayout


class DType(enum.Enum):
    """Type of a value in the graph; `FLOAT` is fp32 in kernels and fp64 in the reference."""

    BOOL = "bool"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT = "float"

    def __repr__(self) -> str:
        return self.value

    __hash__ = object.__hash__  # members are singletons; Enum's own hash costs a microsecond per node

    @property
    def is_integer(self) -> bool:
        return self in (DType.INT32, DType.INT64)

    @staticmethod
    def of(dtype: torch.dtype) -> DType:
        """Value type that a tensor element of `dtype` has once read."""
        if dtype is torch.bool:
            return DType.BOOL
        if dtype.is_floating_point and dtype is not torch.float4_e2m1fn_x2:
            return DType.FLOAT
        if dtype.is_complex:
            raise TypeMismatch(f"complex values ({dtype}) have no order and no softmax; pass real tensors")
        if dtype is torch.uint64:
            raise TypeMismatch(
                "uint64 values do not all fit into the int64 that mods compute with; pass tensor.to(torch.int64) where "
                "they are below 2^63, or tensor.view(torch.int64) where they are only asked to be equal"
            )
        if dtype not in _INTEGERS:
            raise TypeMismatch(f"{dtype} holds no numbers that mods compute with; unpack it before: tensor.float()")
        return DType.INT64 if dtype in (torch.int64, torch.uint32) else DType.INT32


_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64)
_RANK = {DType.BOOL: 0, DType.INT32: 1, DType.INT64: 2, DType.FLOAT: 3}


def promote(*types: DType) -> DType:
    """The smallest type that holds all of `types`: bool < int32 < int64 < float."""
    return max(types, key=_RANK.__getitem__)


def has_no_shape(value: object) -> bool:
    """Whether `value` is a parameter or buffer of a lazy module that did not run yet."""
    return isinstance(value, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer))


def refuse_lazy(name: str, value: object) -> None:
    """Raises `UnsupportedLayout` for what `has_no_shape`."""
    if has_no_shape(value):
        raise UnsupportedLayout(f"{name} is a lazy parameter without a shape; run its module once before")


class Capture:
    """A tensor that a mod reads; two captures are equal when they hold the same tensor object."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def identity(self) -> int:
        """A number that equal captures share, as long as one of them lives."""
        return id(self.tensor)

    @property
    def kept(self) -> torch.Tensor:
        """What stands for it whatever a call makes of it: its form, and where nothing is made, its contents."""
        return self.tensor

    @property
    def range(self) -> tuple[int, int]:
        """Numbers that no element is beyond, of integers and bools; by the type, not by what it holds."""
        if self.tensor.dtype is torch.bool:
            return 0, 1
        held = torch.iinfo(self.tensor.dtype)
        return held.min, held.max

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Capture) and other.identity == self.identity)

    def __hash__(self) -> int:
        return self.identity

    def __repr__(self) -> str:
        return f"Capture({str(self.tensor.dtype).removeprefix('torch.')}{list(self.tensor.shape)})"


class Dep(enum.IntEnum):
    """What a value changes with; sums are plain ints (a flag's own & costs a microsecond and a half)."""

    NONE = 0
    B = 1
    H = 2
    Q = 4
    KV = 8
    SCORE = 16
    D = 64  # a channel of V
    RUNTIME = 32  # a scalar, a length or a captured tensor: known at the call, not at compile time


_INDEX_DEPS = {
    "b": Dep.B,
    "h": Dep.H,
    "q": Dep.Q,
    "kv": Dep.KV,
    "d": Dep.D,
    "q_len": Dep.B | Dep.RUNTIME,
    "kv_len": Dep.B | Dep.RUNTIME,
    # first and last row of the query tile at hand (key tile, in the transposed analysis): ends of loop bounds
    "first": Dep.RUNTIME,
    "last": Dep.RUNTIME,
}


class Rate(enum.Enum):
    """How often a value has to be computed, from rarely to always (the dependence classes of docs/design.md)."""

    CONSTANT = "constant"
    HEAD = "head-only"
    ROW = "row-only"
    COLUMN = "column-only"
    ELEMENT = "per element"

    @staticmethod
    def of(deps: int) -> Rate:
        """The rate of what changes with `deps`."""
        if deps & Dep.SCORE or (deps & Dep.Q and deps & Dep.KV):
            return Rate.ELEMENT
        if deps & Dep.Q:
            return Rate.ROW
        if deps & Dep.KV:
            return Rate.COLUMN
        return Rate.HEAD if deps else Rate.CONSTANT


class Expr:
    """One node. Build it with `ops.apply`, `const`, `index`, `score`, `scalar` or `read`, never directly."""

    __slots__ = ("__weakref__", "args", "attr", "deps", "depth", "dtype", "op")

    op: str
    args: tuple[Expr, ...]
    dtype: DType
    attr: Any
    deps: int  # what this value changes with, of `Dep`
    depth: int  # operations on the longest way to a leaf

    def __repr__(self) -> str:
        return "".join(_words(self, [_REPR_WORDS]))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are interned again; a deep copy of a module maps captured parameters to their copies."""
        return make, (self.op, self.args, self.dtype, self.attr, self.deps)

    @property
    def rate(self) -> Rate:
        return Rate.of(self.deps)

    @property
    def is_const(self) -> bool:
        return self.op == "const"


DEEP = 100
"""Nested deeper than this, graphs are not followed by functions that call themselves: Python's stack would end."""

# Nodes by what they are. Keys hold no object alive: attributes are keyed by content or by identity, and an identity
# can be taken over by another object only after the node itself is gone, when its entry is dead.
_REPR_WORDS = 400  # a shared part is written out at every use, so a large graph's text would grow without bound


def _words(node: Expr, left: list[int]) -> Iterator[str]:
    """The pieces of a node's text; `left` counts down the nodes that may still be written."""
    left[0] -= 1
    if left[0] < 0:
        yield "…"
    elif node.op == "const":
        yield repr(node.attr)
    elif not node.args:
        yield f"{node.attr}" if node.op == "index" else node.op if node.attr is None else f"{node.op}({node.attr})"
    else:
        yield node.op if node.attr is None else f"{node.op}[{node.attr}]"
        for i, argument in enumerate(node.args):
            yield ", " if i else "("
            yield from _words(argument, left)
        yield ")"


_interned: dict[Hashable, weakref.ref[Expr]] = {}
_lock = threading.RLock()
_sweep_at = 4096


def make(op: str, args: tuple[Expr, ...], dtype: DType, attr: Hashable = None, deps: int = 0) -> Expr:
    """The one node with these fields; `deps` is added to what the arguments depend on."""
    kind = attr.__class__
    part: Hashable
    if kind is float:
        part = struct.pack("d", attr)
    elif kind is Capture:
        part = id(attr.tensor)  # type: ignore[attr-defined]
    elif attr is None or kind is int or kind is str or kind is bool:
        part = attr
    else:
        part = id(attr)
    key = (op, dtype, part, kind, *map(id, args))
    entry = _interned.get(key)
    if entry is not None and (found := entry()) is not None:
        return found
    with _lock:
        entry = _interned.get(key)  # another thread may have been first
        if entry is not None and (found := entry()) is not None:
            return found
        node = Expr.__new__(Expr)
        node.op, node.args, node.dtype, node.attr = op, args, dtype, attr
        bits, depth = int(deps), 0
        for a in args:
            bits |= a.deps
            if a.depth >= depth:
                depth = a.depth + 1
        node.deps, node.depth = bits, depth
        _interned[key] = weakref.ref(node)
        if len(_interned) > _sweep_at:
            _sweep()
    return node


def _sweep() -> None:
    """Drop entries of nodes that are gone, at a size that doubles with what is alive."""
    global _sweep_at
    for key in [key for key, entry in _interned.items() if entry() is None]:
        del _interned[key]
    _sweep_at = max(4096, 2 * len(_interned))


def const(value: bool | int | float, dtype: DType | None = None) -> Expr:
    """A Python number; an int beyond 32 bits is int64."""
    if dtype is None:
        if isinstance(value, bool):
            dtype = DType.BOOL
        elif isinstance(value, int):
            dtype = DType.INT32 if -(2**31) <= value < 2**31 else DType.INT64
        else:
            dtype = DType.FLOAT
    if dtype is DType.FLOAT:
        return make("const", (), dtype, float(value))
    return make("const", (), dtype, bool(value) if dtype is DType.BOOL else int(value))


def index(name: str) -> Expr:
    """One of b, h, q, kv (logical positions), d (channel of V), q_len, kv_len (lengths), first, last (of a tile)."""
    return _INDICES[name]


def score() -> Expr:
    """The score that a score mod receives: scale * q·k."""
    return _SCORE


_INDICES = {name: make("index", (), DType.INT32, name, deps) for name, deps in _INDEX_DEPS.items()}
_SCORE = make("score", (), DType.FLOAT, None, Dep.SCORE)


def read(capture: Capture, indices: Iterable[Expr]) -> Expr:
    """One element of a captured tensor; as many int indices as the tensor has dimensions."""
    return make("read", tuple(indices), DType.of(capture.tensor.dtype), capture, Dep.RUNTIME)


def size(capture: Capture, dim: int) -> Expr:
    """How long a dimension of a captured tensor is, at the call: a kernel serves tensors of any length."""
    return make("size", (const(dim),), DType.INT32, capture, Dep.RUNTIME)


def walk(*roots: Expr) -> Iterator[Expr]:
    """Every node under `roots` once, arguments before users."""
    seen: set[Expr] = set()
    for root in roots:
        stack: list[tuple[Expr, bool]] = [(root, False)]
        while stack:
            node, done = stack.pop()
            if done:
                yield node
            elif node not in seen:
                seen.add(node)
                if not node.args:
                    yield node
                    continue
                stack.append((node, True))
                for a in node.args[::-1]:
                    if a not in seen:
                        stack.append((a, False))


def inputs(*roots: Expr) -> tuple[tuple[Capture, ...], tuple[Any, ...]]:
    """Captured tensors and `ca.scalar` values, each kind in order of first appearance, each once."""
    found = [n for n in walk(*roots) if n.op in ("read", "size", "scalar")]
    tensors = dict.fromkeys(n.attr for n in found if n.op != "scalar")
    return tuple(tensors), tuple(dict.fromkeys(n.attr for n in found if n.op == "scalar"))


def captures(*roots: Expr) -> tuple[Capture, ...]:
    """Captured tensors in order of first appearance, each once."""
    return inputs(*roots)[0]


def scalars(*roots: Expr) -> tuple[Any, ...]:
    """`ca.scalar` values in order of first appearance, each once."""
    return inputs(*roots)[1]


def content_key(*roots: Expr | None) -> tuple[Hashable, ...]:
    """What the graphs compute, without the tensors: equal keys mean one kernel serves both.

    Captures and scalars become slots numbered by first appearance (with dtype and rank), so two closures over
    different tensors share a kernel, and two different graphs never do.
    """
    number: dict[int, int] = {}
    slots: dict[Any, int] = {}
    rows: list[Hashable] = []
    for node in walk(*(r for r in roots if r is not None)):
        attr: Hashable = node.attr
        if node.op in ("read", "size"):
            tensor = node.attr.tensor
            attr = (slots.setdefault(node.attr, len(slots)), str(tensor.dtype), tensor.ndim)
        elif node.op == "scalar":
            attr = (slots.setdefault(node.attr, len(slots)), node.dtype.value)
        elif isinstance(attr, float):
            attr = struct.pack("d", attr)
        number[id(node)] = len(number)
        rows.append((node.op, node.dtype.value, attr, type(attr).__name__, *(number[id(a)] for a in node.args)))
    ends = tuple(-1 if r is None else number[id(r)] for r in roots)
    return (ends, *rows)
