"""Rewrites that make a mod cheaper: exact ones (`simplify`), and two that change the last bits of a score."""

from __future__ import annotations

import math
from collections import Counter

from .expr import DEEP, Dep, DType, Expr, const, rebuild, score, walk
from .ops import apply

# --- exact ------------------------------------------------------------------------------------------------------


def simplify(expr: Expr) -> Expr:
    """An expression with the same value for every input, infinities, NaN and signed zeros included, that costs less."""
    done: dict[Expr, Expr] = {}
    for node in walk(expr):
        args = tuple(done[a] for a in node.args)
        new = node if all(x is y for x, y in zip(args, node.args, strict=True)) else rebuild(node, args)
        done[node] = _cheaper(new)
    return done[expr]


def _cheaper(node: Expr) -> Expr:
    rule = _EXACT.get(node.op)
    new = rule(node) if rule is not None else None
    return node if new is None or new.dtype is not node.dtype else new


def _power(node: Expr) -> Expr | None:
    """Exponents that torch itself computes so."""
    x, y = node.args
    if not y.is_const or x.dtype is not DType.FLOAT:
        return None
    if y.attr == 1:
        return x
    if y.attr == 2:
        return apply("mul", x, x)
    return apply("div", const(1.0), x) if y.attr == -1 else None


def _quotient(node: Expr) -> Expr | None:
    """Division by a power of two is multiplication by its reciprocal, to the last bit."""
    x, y = node.args
    if not y.is_const or not 2.0**-100 <= abs(y.attr) <= 2.0**100 or math.frexp(abs(y.attr))[0] != 0.5:
        return None
    return apply("mul", x, const(1.0 / float(y.attr)))


def _product(node: Expr) -> Expr | None:
    for x, y in (node.args, node.args[::-1]):
        if x.is_const and x.attr == -1:
            return apply("neg", y)
    return None


def _choice(node: Expr) -> Expr | None:
    """A choice inside a choice by the same condition is made."""
    condition, yes, no = node.args
    if condition.op == "not":
        return apply("where", condition.args[0], no, yes)
    inner_yes = yes.args[1] if yes.op == "where" and yes.args[0] is condition else yes
    inner_no = no.args[2] if no.op == "where" and no.args[0] is condition else no
    return apply("where", condition, inner_yes, inner_no) if inner_yes is not yes or inner_no is not no else None


def _floors(node: Expr) -> Expr | None:
    """(x // m) // n = x // (m n) for positive constants."""
    x, n = node.args
    if node.dtype.is_integer and n.is_const and n.attr > 0 and x.op == "floordiv":
        m = x.args[1]
        if m.is_const and m.attr > 0 and m.attr * n.attr < 2**31:
            return apply("floordiv", x.args[0], const(m.attr * n.attr))
    return None


def _offsets(node: Expr) -> Expr | None:
    """(x + m) + n = x + (m + n) for integers, which wrap alike either way."""
    x, n = node.args
    if not (node.dtype is DType.INT32 and n.is_const and x.op in ("add", "sub") and x.args[1].is_const):
        return None
    total = (x.args[1].attr if x.op == "add" else -x.args[1].attr) + (n.attr if node.op == "add" else -n.attr)
    if abs(total) >= 2**31:
        return None
    return apply("add" if total >= 0 else "sub", x.args[0], const(abs(total)))


_EXACT = {
    "pow": _power, "div": _quotient, "mul": _product, "where": _choice, "floordiv": _floors,
    "add": _offsets, "sub": _offsets,
}  # fmt: skip


def balanced(expr: Expr) -> Expr:
    """Long chains of one logical operation (documents joined in a loop) as trees, of a graph that is deep; else itself.

    Exact: `&`, `|` and `^` of bools don't mind in which order they are joined.
    """
    if expr.depth <= DEEP:
        return expr
    nodes = list(walk(expr))
    users = Counter(a for node in nodes for a in node.args)
    inside = {a for n in nodes if _is_logic(n) for a in n.args if a.op == n.op and users[a] == 1}
    done: dict[Expr, Expr] = {}
    chains: dict[Expr, list[Expr]] = {}  # what those inside of a longer chain join
    for node in nodes:
        if not _is_logic(node):
            done[node] = rebuild(node, tuple(done[a] for a in node.args)) if node.args else node
            continue
        parts: list[Expr] = []
        for a in node.args:
            more = chains.pop(a) if a in inside else [done[a]]
            parts = parts + more if parts else more
        if node in inside:
            chains[node] = parts
        else:
            done[node] = _tree(node.op, parts)
    return done[expr]


def _is_logic(node: Expr) -> bool:
    return node.op in ("and", "or", "xor") and node.dtype is DType.BOOL


def _tree(op: str, parts: list[Expr]) -> Expr:
    while len(parts) > 1:
        joined = [apply(op, x, y) for x, y in zip(parts[::2], parts[1::2], strict=False)]
        parts = joined + parts[len(parts) - len(parts) % 2 :]
    return parts[0]


# --- what softmax does not see ----------------------------------------------------------------------------------


def split_row_constant(expr: Expr) -> tuple[Expr, Expr]:
    """(rest, row) with score = rest + row, where `row` does not change along a row and is provably finite.

    Softmax of `rest` is softmax of the score; LSE of the score is that of `rest` plus `row`. Reassociates the sum (the
    last bits of a score may differ). A float captured tensor may hold an infinity, which must stay: a row of
    -inf is a masked row; so terms that read one are not split off.
    """
    rest, row = const(0.0), const(0.0)
    for sign, term in _summands(expr):
        off = not term.deps & (Dep.KV | Dep.SCORE) and is_finite(term)
        target = row if off else rest
        first = target is const(0.0) and sign < 0
        joined = apply("neg", term) if first else apply("add" if sign > 0 else "sub", target, term)
        rest, row = (rest, joined) if off else (joined, row)
    if row is const(0.0):
        return expr, row
    return rest, row if row.dtype is DType.FLOAT else apply("cast_float", row)


def _summands(expr: Expr, sign: int = 1) -> list[tuple[int, Expr]]:
    if expr.dtype is DType.FLOAT and expr.op in ("add", "sub"):
        right = sign if expr.op == "add" else -sign
        return _summands(expr.args[0], sign) + _summands(expr.args[1], right)
    return [(sign, expr)]


_BOUNDED = {"tanh", "sigmoid", "erf", "sin", "cos", "sign"}  # by 1, for a finite argument
_KEEPS_FINITE = {
    "neg", "abs", "floor", "ceil", "round", "trunc", "maximum", "minimum", "clamp_min", "clamp_max", "where",
    "cast_float",
}  # fmt: skip
_LARGEST = 1e30  # sums and products of values below it are followed only up to here


def is_finite(expr: Expr) -> bool:
    """Whether the value is proven to be a finite number, whatever captured floats hold."""
    sizes: dict[Expr, float] = {}
    for node in walk(expr):
        sizes[node] = _magnitude(node, [sizes[a] for a in (node.args[1:] if node.op == "where" else node.args)])
    return sizes[expr] < _LARGEST


def _magnitude(expr: Expr, sizes: list[float]) -> float:
    """A bound of |value|, given those of the arguments; infinite where none is known, and then it may be NaN."""
    op, unknown = expr.op, math.inf
    if op == "const":
        return unknown if math.isnan(expr.attr) else abs(float(expr.attr))
    if expr.dtype is not DType.FLOAT:
        return 2.0**63
    if op in _BOUNDED:
        return 1.0 if sizes[0] < _LARGEST else unknown
    if op in _KEEPS_FINITE:
        return max(sizes) + 1.0  # rounding to a whole number adds less than 1
    if op in ("add", "sub"):
        return sum(sizes)
    return sizes[0] * sizes[1] if op == "mul" and all(s < _LARGEST for s in sizes) else unknown


# --- one multiply-add an element ---------------------------------------------------------------------------------


def affine_in_score(expr: Expr) -> tuple[Expr, Expr] | None:
    """(scale, offset), both without the score, with expr = score * scale + offset; None where it is no such form.

    Reassociates and turns division into multiplication by the reciprocal: the last bits of a score may differ, and
    factors whose product leaves the range of floats are no longer rescued by their order. Infinite offsets and
    factors give what they gave. A `where` is never taken apart (a hidden score times 0 would be NaN where it is
    infinite), and a sum of two scores is none (inf - inf).
    """
    found = _affine(expr)
    return None if found is None or found[0] is None else (found[0], _float(found[1]))


_Affine = tuple["Expr | None", Expr]  # scale (None: the score is absent) and offset


def _affine(expr: Expr) -> _Affine | None:
    if not expr.deps & Dep.SCORE:
        return None, expr
    if expr is score():
        return const(1.0), const(0.0)
    parts = [_affine(a) for a in expr.args]
    if any(p is None for p in parts):
        return None
    if expr.op == "neg":
        return _scaled(parts[0], lambda x: apply("neg", x))  # type: ignore[arg-type]
    if expr.op in ("add", "sub"):
        (a, b), (c, d) = parts  # type: ignore[misc]
        if a is not None and c is not None:
            return None  # inf - inf is NaN, which one product with inf is not
        scale = c if a is None else a
        return (apply("neg", scale) if a is None and expr.op == "sub" else scale), apply(expr.op, b, d)  # type: ignore[arg-type]
    if expr.op == "mul":
        for x, y in ((parts[0], parts[1]), (parts[1], parts[0])):
            if y is not None and y[0] is None:
                return _scaled(x, lambda v, by=y[1]: apply("mul", v, by))  # type: ignore[misc,arg-type]
    if expr.op == "div" and parts[1] is not None and parts[1][0] is None:
        by = apply("div", const(1.0), _float(parts[1][1]))
        return _scaled(parts[0], lambda v: apply("mul", v, by))  # type: ignore[arg-type]
    return None


def _float(x: Expr) -> Expr:
    return x if x.dtype is DType.FLOAT else apply("cast_float", x)


def _scaled(x: _Affine, by: object) -> _Affine:
    scale, offset = x
    zero = offset.is_const and offset.attr == 0
    return (None if scale is None else by(scale)), (offset if zero else by(offset))  # type: ignore[operator]
