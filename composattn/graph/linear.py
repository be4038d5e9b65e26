"""Integer expressions as sums `c + Σ cᵢ·tᵢ`, and what can be proven of their size; the ground of the band analysis.

A mask's own integer arithmetic is taken not to overflow (kernels compute in int64 what a call's positions take beyond
int32: `backends.fused.rewrites.widened`). What the analysis derives must not overflow where the mask does not: its
numbers have no end, and sums that could leave 32 bits are built in int64. `interval_end` clamps such a sum to ±2^30,
beyond every position, and so brings it back to int32. Sums that could leave 64 bits too are made to saturate, once all
is derived (`saturated`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from .expr import DEEP, Dep, DType, Expr, const, index
from .ops import apply

POSITIONS = 2**29  # lengths are at most this
HEADS = 2**20  # and heads this many
FAR = 2**30  # beyond every position, and far from where int32 ends
_INT32 = 2**31 - 1
INT64 = (-(2**63), 2**63 - 1)
MOST = {"q_len": POSITIONS, "kv_len": POSITIONS, "heads": HEADS, "batch": _INT32}
"""What sizes of a call may be: what is proven of a mask is proven up to there."""

_MOST_TERMS = 64  # of a sum that is followed

_FIRST, _LAST, _LENGTH = index("first"), index("last"), index("q_len")
_Q, _KV, _POSITIONS = index("q"), index("kv"), Dep.Q | Dep.KV

Found = TypeVar("Found")

# lower and upper bound of the index leaves
_LEAF = {
    "b": (0, _INT32), "h": (0, HEADS), "q": (0, POSITIONS), "kv": (0, POSITIONS), "d": (0, POSITIONS),
    "q_len": (0, POSITIONS), "kv_len": (0, POSITIONS), "first": (0, POSITIONS), "last": (0, POSITIONS),
}  # fmt: skip


@dataclass(slots=True)
class Linear:
    """constant + Σ coefficient · term; terms are int expressions that are no sums themselves."""

    constant: int
    terms: dict[Expr, int]

    def plus(self, other: Linear, factor: int = 1) -> Linear:
        constant = self.constant + factor * other.constant
        if not other.terms:
            return Linear(constant, self.terms)
        terms = dict(self.terms)
        for t, c in other.terms.items():
            terms[t] = terms.get(t, 0) + factor * c
            if not terms[t]:
                del terms[t]
        return _tidy(Linear(constant, terms))

    def shifted(self, by: int) -> Linear:
        return Linear(self.constant + by, self.terms)

    def times(self, factor: int) -> Linear:
        return Linear(self.constant * factor, {t: c * factor for t, c in self.terms.items()} if factor else {})

    def without(self, term: Expr) -> Linear:
        return Linear(self.constant, {t: c for t, c in self.terms.items() if t is not term})

    @property
    def is_const(self) -> bool:
        return not self.terms


@dataclass(frozen=True, slots=True)
class Affine:
    """q * `q` + kv * `kv` + `constant`: an integer in positions, with whole coefficients that are known."""

    q: int
    kv: int
    constant: int

    def minus(self, other: Affine) -> Affine:
        return Affine(self.q - other.q, self.kv - other.kv, self.constant - other.constant)


# One analysis asks the same of shared parts again and again. Plain dictionaries, emptied by `forget` when it is done:
# kept, they would hold captured tensors alive.
_answers: list[dict[Any, Any]] = []


def answers() -> dict[Any, Any]:
    """A dictionary for what an analysis finds out of expressions, empty after it."""
    _answers.append({})
    return _answers[-1]


def forget() -> None:
    """End of an analysis: let go of its expressions."""
    _ANYWHERE.known.clear()
    for known in _answers:
        known.clear()


_linear: dict[Expr, Linear] = answers()
_at_most: dict[tuple[Expr, Expr], bool] = answers()


def linear(expr: Expr) -> Linear:
    """`expr`, an int (or bool as 0 and 1), as a sum."""
    found = _linear.get(expr)
    if found is None:
        if expr.depth > DEEP:
            _from_below(expr, _linear, _sum)
        found = _linear[expr] = _sum(expr)
    return found


def slopes(expr: Expr) -> tuple[int, int] | None:
    """(a, b) where `expr` is an integer a·q + b·kv + something that changes with neither."""
    if not expr.deps & _POSITIONS:
        return 0, 0
    if not expr.dtype.is_integer:
        return None
    terms = linear(expr).terms
    forget()  # asked by plans and kernels, outside of any analysis
    if any(t.deps & _POSITIONS for t in terms if t not in (_Q, _KV)):
        return None
    return terms.get(_Q, 0), terms.get(_KV, 0)


def affine(expr: Expr) -> Affine | None:
    """`expr` where it is an integer of positions and constants alone."""
    if expr not in _affine:
        lin = linear(expr) if expr.dtype.is_integer else Linear(0, {expr: 1})
        forget()
        known = lin.terms.keys() <= {_Q, _KV}
        _affine[expr] = Affine(lin.terms.get(_Q, 0), lin.terms.get(_KV, 0), lin.constant) if known else None
    return _affine[expr]


_affine: weakref.WeakKeyDictionary[Expr, Affine | None] = weakref.WeakKeyDictionary()  # a kernel asks at every element


def _from_below(expr: Expr, known: dict[Expr, Found], of: Callable[[Expr], Found]) -> None:
    """`of` all integers below a deep one, into `known`: then what asks for those calls itself no more."""
    waiting = [a for a in expr.args if a.dtype.is_integer]
    while waiting:
        node = waiting[-1]
        missing = [a for a in node.args if a.dtype.is_integer and a not in known]
        if node not in known and missing:
            waiting += missing
            continue
        waiting.pop()
        if node not in known:
            known[node] = of(node)


def _sum(expr: Expr) -> Linear:
    rule = _SUMS.get(expr.op)
    found = None if rule is None else rule(expr, *expr.args)
    return Linear(0, {expr: 1}) if found is None else found


def _added(e: Expr, x: Expr, y: Expr) -> Linear | None:
    total = linear(x).plus(linear(y), 1 if e.op == "add" else -1) if e.dtype.is_integer else None
    return total if total is not None and len(total.terms) <= _MOST_TERMS else None


def _multiplied(e: Expr, x: Expr, y: Expr) -> Linear | None:
    if not e.dtype.is_integer or not (x.is_const or y.is_const):
        return None
    return linear(y).times(int(x.attr)) if x.is_const else linear(x).times(int(y.attr))


def _floored(e: Expr, x: Expr, y: Expr) -> Linear | None:
    """Division towards zero by a positive constant, and its remainder, where nothing is negative."""
    if not (y.is_const and y.attr > 0 and bounds(x)[0] >= 0):
        return None
    return linear(apply("floordiv" if e.op == "truncdiv" else "mod", x, y))


# of each operation that has a sum: (node, *arguments) → it, None where it has none
_SUMS: dict[str, Callable[..., Linear | None]] = {
    "const": lambda e: Linear(int(e.attr), {}),
    "add": _added, "sub": _added, "mul": _multiplied, "neg": lambda e, x: linear(x).times(-1),
    "truncdiv": _floored, "fmod": _floored,
    "lshift": lambda e, x, y: linear(x).times(1 << int(y.attr)) if y.is_const else None,
    "rshift": lambda e, x, y: linear(apply("floordiv", x, const(1 << int(y.attr)))) if y.is_const else None,
    "cast_int32": lambda e, x: linear(x) if x.dtype in (DType.INT32, DType.BOOL) else None,
    "cast_int64": lambda e, x: linear(x) if x.dtype is not DType.FLOAT else None,
}  # fmt: skip


def _tidy(lin: Linear) -> Linear:
    """x - x % c is c · (x // c): of the two, only the latter moves one way with x."""
    for t, c in lin.terms.items():
        if t.op == "mod" and lin.terms.get(t.args[0]) == -c and t.args[1].is_const and t.args[1].attr > 0:
            x, n = t.args
            rest = {u: k for u, k in lin.terms.items() if u is not t and u is not x}
            whole = apply("floordiv", x, n)
            return Linear(lin.constant, rest).plus(Linear(0, {whole: -c * int(n.attr)}))
    return lin


def build(lin: Linear) -> Expr:
    """The expression of a sum: int32 where it provably fits, else int64."""
    if not lin.terms:
        return const(lin.constant)
    if lin.constant == 0 and len(lin.terms) == 1:
        ((term, c),) = lin.terms.items()
        if c == 1:
            return apply("cast_int32", term) if term.dtype is DType.BOOL else term
    wide = _needs_int64(lin)

    def fitted(t: Expr) -> Expr:
        return apply("cast_int64", t) if wide else apply("cast_int32", t) if t.dtype is DType.BOOL else t

    return added_up(lin.constant, ((fitted(t), c) for t, c in lin.terms.items()), const)


def added_up(constant: int, terms: Iterable[tuple[Expr, int]], number: Callable[[int], Expr]) -> Expr:
    """constant + Σ coefficient · term as an expression; `number` makes a constant of its type."""
    total: Expr | None = None
    for term, c in sorted(terms, key=lambda tc: tc[1] < 0):  # positive ones first, else in order
        part = term if abs(c) == 1 else apply("mul", number(abs(c)), term)
        if total is None:
            total = part if c > 0 else apply("neg", part)
        else:
            total = apply("add" if c > 0 else "sub", total, part)
    assert total is not None
    if not constant:
        return total
    return apply("add" if constant > 0 else "sub", total, number(abs(constant)))


def _needs_int64(lin: Linear) -> bool:
    size: float = abs(lin.constant)
    for t, c in lin.terms.items():
        if t.dtype is DType.INT64:
            return True
        low, high = bounds(t)
        size += abs(c) * max(-low, high)
    return size > _INT32


def interval_end(expr: Expr) -> Expr:
    """`expr` as the end of an interval: tidied, int32, within ±`FAR`; positions keep their side of it."""
    expr = build(linear(expr))
    if expr.is_const:
        return const(max(-FAR, min(FAR, expr.attr)))
    low, high = bounds(expr)
    wide = expr.dtype is DType.INT64
    if wide or low < -FAR:
        expr = apply("clamp_min", expr, const(-FAR))
    if wide or high > FAR:
        expr = apply("clamp_max", expr, const(FAR))
    return apply("cast_int32", expr)


class Ranges:
    """Numbers that integers and bools never leave; infinite where nothing is known.

    `leaves`: those that index leaves never leave. A mask's own arithmetic is taken not to overflow.
    """

    def __init__(self, leaves: Mapping[str, Bounds]) -> None:
        self.leaves = leaves
        self.known: dict[Expr, Bounds] = {}

    def of(self, expr: Expr) -> Bounds:
        found = self.known.get(expr)
        if found is None:
            if expr.depth > DEEP:
                _from_below(expr, self.known, self.find)
            found = self.known[expr] = self.find(expr)
        return found

    def find(self, expr: Expr) -> Bounds:
        """Bounds of `expr` from the bounds of its arguments."""
        if expr.dtype is DType.BOOL and not expr.is_const:
            return 0, 1
        rule = self.rule(expr.op)
        found = None if rule is None or not (expr.dtype.is_integer or expr.is_const) else rule(self, expr, *expr.args)
        return UNKNOWN if found is None else found

    def rule(self, op: str) -> Callable[..., Bounds | None] | None:
        return _RANGES.get(op)


Bounds = tuple[float, float]
UNKNOWN = (-math.inf, math.inf)
OF_TYPE = {DType.INT32: (-_INT32 - 1, _INT32), DType.INT64: INT64}


def _divided(r: Ranges, e: Expr, x: Expr, y: Expr) -> Bounds | None:
    if not (y.is_const and y.attr > 0):
        return None
    low, high = (v if math.isinf(v) else v // y.attr for v in r.of(x))
    return low, high


def _remainder(r: Ranges, e: Expr, x: Expr, y: Expr) -> Bounds | None:
    if not (y.is_const and y.attr > 0):
        return None
    low, high = r.of(x)
    return 0, (min(high, y.attr - 1) if low >= 0 else y.attr - 1)


def _each(pick: Callable[..., float], other: Callable[..., float]) -> Callable[..., Bounds]:
    """`pick` of the lower ends of the last two arguments, `other` of the upper ones."""

    def rule(r: Ranges, e: Expr, *args: Expr) -> Bounds:
        (a, b), (c, d) = r.of(args[-2]), r.of(args[-1])
        return pick(a, c), other(b, d)

    return rule


def _size(r: Ranges, e: Expr, x: Expr) -> Bounds:
    low, high = r.of(x)
    return max(0, low, -high), max(abs(low), abs(high))


def _widened(r: Ranges, e: Expr, x: Expr) -> Bounds | None:
    return None if x.dtype is DType.FLOAT else r.of(x)


def _of_sum(r: Ranges, e: Expr, *args: Expr) -> Bounds:
    lin = linear(e)
    low: float = lin.constant
    high: float = lin.constant
    for t, c in lin.terms.items():
        if t is e:
            return UNKNOWN
        a, b = r.of(t)
        low, high = low + min(a * c, b * c), high + max(a * c, b * c)
    return low, high


# of each operation of which something is known: (ranges, node, *arguments) → least and most
_RANGES: dict[str, Callable[..., Bounds | None]] = {
    "const": lambda r, e: (e.attr, e.attr), "index": lambda r, e: r.leaves[e.attr],
    "scalar": lambda r, e: OF_TYPE[e.dtype], "read": lambda r, e, *at: e.attr.range,
    "size": lambda r, e, dim: (1, _INT32),  # a tensor without elements is no capture
    "cast_int32": _widened, "cast_int64": _widened, "floordiv": _divided, "mod": _remainder, "abs": _size,
    "maximum": _each(max, max), "clamp_min": _each(max, max), "minimum": _each(min, min), "clamp_max": _each(min, min),
    "where": _each(min, max), **dict.fromkeys(("add", "sub", "neg", "mul", "lshift", "rshift"), _of_sum),
}  # fmt: skip

_ANYWHERE = Ranges(_LEAF)
bounds = _ANYWHERE.of
"""Numbers that hold at every position of every call."""


def at_most(x: Expr, y: Expr) -> bool:
    """Whether x <= y is proven, from the structure alone, for every position, tile and length."""
    if x is y:
        return True
    found = _at_most.get((x, y))
    if found is None:
        found = _at_most[x, y] = _proven(x, y)
    return found


def _proven(x: Expr, y: Expr) -> bool:
    if x.op in ("maximum", "clamp_min"):
        return all(at_most(a, y) for a in x.args)
    if y.op in ("minimum", "clamp_max"):
        return all(at_most(x, a) for a in y.args)
    if x.op in ("minimum", "clamp_max") and any(at_most(a, y) for a in x.args):
        return True
    if y.op in ("maximum", "clamp_min") and any(at_most(x, a) for a in y.args):
        return True
    return _smallest(linear(y).plus(linear(x), -1)) >= 0


def _smallest(lin: Linear) -> float:
    """A lower bound of a sum that knows first <= last < q_len."""
    low: float = lin.constant
    first, last, length = (lin.terms.get(leaf, 0) for leaf in (_FIRST, _LAST, _LENGTH))
    # last = first + d and q_len = last + 1 + e, with d, e >= 0
    low += length + POSITIONS * (min(0, length) + min(0, length + last) + min(0, length + last + first))
    for t, c in lin.terms.items():
        if t not in (_FIRST, _LAST, _LENGTH):
            a, b = bounds(t)
            low += min(a * c, b * c)
    return low


def larger(x: Expr, y: Expr) -> Expr:
    """max(x, y), one of them where it is proven."""
    return y if at_most(x, y) else x if at_most(y, x) else apply("maximum", x, y)


def smaller(x: Expr, y: Expr) -> Expr:
    """min(x, y), one of them where it is proven."""
    return x if at_most(x, y) else y if at_most(y, x) else apply("minimum", x, y)


def difference(x: Expr, y: Expr) -> int | None:
    """x - y where it is a constant."""
    lin = linear(x).plus(linear(y), -1)
    return lin.constant if lin.is_const else None
