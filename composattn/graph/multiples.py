"""Floating expressions as a constant times something: what a score mod multiplies scores by before it bends them."""

from __future__ import annotations

import math
from typing import TypeGuard

from .expr import DEEP, Dep, Expr, Rate, score, walk


def constant_factor(node: Expr) -> tuple[Expr | None, float]:
    """(x, c) where `node` is x times a finite number c other than 0; x None: it is no such product."""
    if not node.args:
        return None, 1.0
    x, *more = node.args
    if node.op == "neg":
        return x, -1.0
    if node.op == "mul" and x.is_const:
        x, more = more[0], [x]
    if node.op in ("mul", "div") and more[0].is_const:
        number = float(more[0].attr)
        number = number if node.op == "mul" else 1.0 / number if number else math.inf
        return (x, number) if number and math.isfinite(number) else (None, 1.0)
    return None, 1.0


def constants(node: Expr) -> tuple[Expr, float]:
    """(x, c): `node` is x times c, and x no such product."""
    number, rest = 1.0, constant_factor(node)
    while rest[0] is not None:
        node, number = rest[0], number * rest[1]
        rest = constant_factor(node)
    return node, number


def is_of_score(root: Expr | None) -> TypeGuard[Expr]:
    """Whether a score mod looks at nothing but the score."""
    return root is not None and not root.deps & ~Dep.SCORE


def steepest_tanh(root: Expr | None) -> float | None:
    """The largest |c| where each tanh of a score mod is of c times the score; None: it has none, or another.

    Also none of a "whole" score mod, whose bits must not depend on other scores.
    """
    if root is None or root.depth > DEEP or root.op == "whole":
        return None
    arguments = [node.args[0] for node in walk(root) if node.op == "tanh" and node.rate is Rate.ELEMENT]
    found = []
    for argument in arguments:
        x, number = constants(argument)
        if x is not score():
            return None
        found.append(abs(number))
    return max(found, default=None)
