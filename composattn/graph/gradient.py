"""The derivative of a traced score mod, as a graph: by the score, by each captured read, by each run-time scalar.

Forward mode, one pass per leaf (a mod has few). A branch that is not taken contributes nothing, so a `where` that hides
an infinity or a NaN has a finite derivative: where torch's backward multiplies a zero by that infinity and returns NaN
(`where(x > 0, log(x), 0)` at 0), this returns the derivative of the branch taken. Everywhere else the points where a
function has a kink are PyTorch's: a tie of maximum and minimum splits evenly, clamp keeps the gradient at its ends,
|x| has 0 at 0, floor, round and comparisons have none. A cast to fp16 or bf16 passes the gradient unrounded.

Constant factors are multiplied together on the way (a product of two constants and a value is rounded once less than
in the order of the chain rule).
"""

from __future__ import annotations

import math

from .expr import DType, Expr, const, score, walk
from .ops import OPS, apply

_ZERO, _ONE = const(0.0), const(1.0)


def derivative(expr: Expr, wrt: Expr | None = None) -> Expr:
    """d expr / d wrt as a float expression in the same leaves; `wrt` is a leaf, by default the score.

    A leaf is the score, a `scalar` node or a `read` node: two reads of one tensor are two leaves.
    """
    wrt = score() if wrt is None else wrt
    tangents: dict[int, Expr] = {}
    for node in walk(expr):
        tangents[id(node)] = _ONE if node is wrt else _tangent(node, [tangents[id(a)] for a in node.args])
    return tangents[id(expr)]


def differentiable_leaves(expr: Expr) -> tuple[Expr, ...]:
    """Float reads and float scalars that `expr` changes with, in order of first appearance.

    Whether one of them asks for its gradient is the caller's to know (`leaf.attr.tensor.requires_grad`).
    """
    return tuple(n for n in walk(expr) if n.op in ("read", "scalar") and n.dtype is DType.FLOAT)


def partials(expr: Expr) -> dict[Expr, Expr]:
    """{leaf: d expr / d leaf} of the `differentiable_leaves` whose derivative is not zero everywhere."""
    by_leaf = {leaf: derivative(expr, leaf) for leaf in differentiable_leaves(expr)}
    return {leaf: d for leaf, d in by_leaf.items() if not is_zero(d)}


def is_zero(expr: Expr) -> bool:
    """Whether `expr` is the constant 0."""
    return expr.is_const and expr.attr == 0


def _tangent(node: Expr, tangents: list[Expr]) -> Expr:
    row = OPS.get(node.op)
    moved = [a.dtype is DType.FLOAT and not is_zero(t) for a, t in zip(node.args, tangents, strict=True)]
    if row is None or row.partials is None or node.dtype is not DType.FLOAT or not any(moved):
        return _ZERO
    total = _ZERO
    for partial, tangent, moves in zip(row.partials(node, *node.args), tangents, moved, strict=True):
        if partial is not None and moves:
            total = plus(total, times(partial, tangent))
    return total


_DEEPEST = 6  # sums and choices that are looked through; a product is not multiplied out beyond


def times(partial: Expr, tangent: Expr, depth: int = _DEEPEST) -> Expr:
    """partial * tangent, where a choice of 0 on either side means that the other is not looked at at all."""
    if is_zero(partial) or is_zero(tangent):
        return _ZERO
    for choice, other in ((partial, tangent), (tangent, partial)):
        if other is _ONE and choice.op in ("where", "add"):
            return choice
        if choice.op == "where" and _may_hide(choice, depth):
            condition, yes, no = choice.args
            return apply("where", condition, times(yes, other, depth - 1), times(no, other, depth - 1))
        if choice.op == "add" and _may_hide(choice, depth):
            return plus(times(choice.args[0], other, depth - 1), times(choice.args[1], other, depth - 1))
    (c, x), (d, y) = _factor(partial), _factor(tangent)
    if math.isfinite(c * d) and c * d != 0:
        return _scaled(c * d, apply("mul", x, y) if x is not _ONE else y)
    return apply("mul", partial, tangent)


def _may_hide(expr: Expr, depth: int) -> bool:
    """Whether a choice between a constant and something else decides `expr`."""
    if not depth:
        return False
    if expr.op == "add":
        return any(_may_hide(a, depth - 1) for a in expr.args)
    return expr.op == "where" and any(branch.is_const or _may_hide(branch, depth - 1) for branch in expr.args[1:])


def _factor(expr: Expr) -> tuple[float, Expr]:
    """(c, x) with expr = c * x and c a constant."""
    if expr.is_const:
        return float(expr.attr), _ONE
    if expr.op == "mul" and expr.args[0].is_const:
        return float(expr.args[0].attr), expr.args[1]
    if expr.op == "mul" and expr.args[1].is_const:
        return float(expr.args[1].attr), expr.args[0]
    if expr.op == "neg":
        c, x = _factor(expr.args[0])
        return -c, x
    return 1.0, expr


def _scaled(factor: float, x: Expr) -> Expr:
    if x is _ONE:
        return const(factor)
    return apply("neg", x) if factor == -1.0 else apply("mul", const(factor), x)


def plus(x: Expr, y: Expr, depth: int = _DEEPEST) -> Expr:
    """x + y, in which an absent part is absent and two halves of one choice are one choice."""
    if is_zero(x):
        return y
    if is_zero(y):
        return x
    if depth and x.op == y.op == "where" and x.args[0] is y.args[0]:
        yes, no = (plus(a, b, depth - 1) for a, b in zip(x.args[1:], y.args[1:], strict=True))
        return apply("where", x.args[0], yes, no)
    return apply("add", x, y)
