"""Sums that the analysis derived, as a machine computes them: those that may leave 64 bits saturate.

The analysis adds and multiplies numbers that have no end: `kv <= limit[b]` becomes `kv < limit[b] + 1`, which wraps
where the limit is the largest int64 ("no limit"), though the mask computes nothing. Here every sum that may leave 64
bits, by the types of what it reads, is made to stop at their ends instead: of one wide value by clamping it before, of
several (`a[q] - t`) by asking the same sum in floating point, which can't wrap, on which side it left. Sums of 32-bit
values fit and stay as they are.
"""

from __future__ import annotations

from ..graph.expr import DType, Expr, const, walk
from ..graph.linear import INT64, Linear, added_up, bounds, linear
from ..graph.ops import apply
from ..graph.rebuilt import rebuild

_SUMS = ("add", "sub", "neg", "mul", "lshift")
_LEAST, _MOST = INT64
_ROOM = 2**61  # of the rest beside one wide value
_ROUNDING = 2.0**-21  # of a short sum in fp32, with room


def saturated(expr: Expr) -> Expr:
    """`expr` with the value that it has in integers without end, or with the end of int64 that is nearest to it."""
    return _among(expr, {})


def _among(expr: Expr, done: dict[Expr, Expr]) -> Expr:
    """`saturated`, which keeps in `done` what it found of all below."""
    for node in walk(expr):
        if node not in done:
            done[node] = _saturated(node, done)
    return done[expr]


def _saturated(node: Expr, done: dict[Expr, Expr]) -> Expr:
    if node.dtype is DType.INT64:
        if node.is_const:
            return const(max(_LEAST, min(_MOST, node.attr)), DType.INT64)
        if node.op in _SUMS:
            lin = linear(node)
            if lin.terms and node not in lin.terms and _size(lin) > _MOST:
                return _guarded(lin, done)
    args = tuple(done[a] for a in node.args)
    return node if all(x is y for x, y in zip(args, node.args, strict=True)) else rebuild(node, args)


def _size(lin: Linear) -> int:
    """What |lin| is never above."""
    return abs(lin.constant) + sum(abs(c) * _magnitude(t) for t, c in lin.terms.items())


def _magnitude(term: Expr) -> int:
    low, high = bounds(term)
    known = max(-low, high)
    # of arithmetic that does not overflow
    return int(known) if known != float("inf") else 2**31 if term.dtype is DType.INT32 else 2**63


def _guarded(lin: Linear, done: dict[Expr, Expr]) -> Expr:
    terms = [(_among(t, done), c, abs(c) * _magnitude(t)) for t, c in lin.terms.items()]
    wide = [n for n, (_, _, size) in enumerate(terms) if size > _ROOM]
    rest = _size(lin) - sum(terms[n][2] for n in wide)
    if len(wide) == 1 and rest <= _ROOM:
        term, c, size = terms[wide[0]]
        most = const((_MOST - rest) // abs(c), DType.INT64)
        clamped = apply("clamp_max", apply("clamp_min", term, const(-most.attr, DType.INT64)), most)
        terms[wide[0]] = clamped, c, size
        return _total(lin.constant, terms, DType.INT64)
    edge = max(2.0**61, 2.0**63 - _size(lin) * _ROUNDING)
    nearly = _total(lin.constant, terms, DType.FLOAT)
    whole = _total(lin.constant, terms, DType.INT64)
    below = apply("where", apply("le", nearly, const(-edge)), const(_LEAST), whole)
    return apply("where", apply("ge", nearly, const(edge)), const(_MOST), below)


def is_guarded(node: Expr) -> bool:
    """Whether this is a sum of several wide values, which is `node.args[2]` but for the ends of int64."""
    if node.op != "where" or node.args[1] not in (const(_LEAST), const(_MOST)):
        return False
    asked = node.args[0].args[-1] if node.args[0].op in ("ge", "le") else node
    return asked.is_const and asked.dtype is DType.FLOAT and abs(asked.attr) >= _ROOM


def _total(constant: int, terms: list[tuple[Expr, int, int]], dtype: DType) -> Expr:
    """The sum in 64 bits, which wraps, or in floating point."""

    def number(value: int) -> Expr:
        return const(float(value)) if dtype is DType.FLOAT else const((value - _LEAST) % 2**64 + _LEAST, DType.INT64)

    return added_up(constant, ((apply(f"cast_{dtype.value}", term), c) for term, c, _ in terms), number)
