"""Gradients of what the score is multiplied by before all else, as of a learned temperature: from dQ.

Where a score mod sees the score times m alone, its derivatives by both are one: m dS'/dm = S dS'/dS (Euler, of
functions that are homogeneous in both). Of a row, whose m is one number, the sum over keys is q·dQ, so

    d m = q·dQ / m

and takes no pass of its own. Where m is 0, as of a gate when training begins, dQ is 0 too. There kernels of the
backward take `LEAST` for it: no weight changes by that, dQ and dK are below 1e-20 in place of 0, and q·dQ / `LEAST` is
the gradient.
"""

from __future__ import annotations

from typing import NamedTuple

from ..graph.expr import Capture, Dep, Expr, captures, const, score, walk
from ..graph.factors import products
from ..graph.gradient import partials
from ..graph.ops import apply
from ..graph.rebuilt import substitute
from .program import Program

LEAST = 2.0**-80  # in fp32 and bf16, whose least normal number is 2^-126: what is left is for P and dP
_POSITIONS = ("b", "h", "q")


class ScoreFactor(NamedTuple):
    """What a score mod multiplies the score by before all else, the same for all keys of a row: `value`.

    `product`: the score times that. `learned`: captured tensors that nothing else in the mods reads.
    """

    value: Expr
    product: Expr
    learned: tuple[Capture, ...]

    def away_from_zero(self, program: Program) -> Program:
        """`program`, whose factor this is, with factors of `LEAST` in place of smaller ones."""
        assert program.score is not None
        small = apply("lt", apply("abs", self.value), const(LEAST))
        product = apply("mul", score(), apply("where", small, const(LEAST), self.value))
        mods = substitute(program.score, {self.product: product}), *program.mods[1:]
        found = Program(*mods)
        found.forms = program.forms
        found.__dict__["intervals"] = program.intervals
        return found


def score_factor(program: Program) -> ScoreFactor | None:
    """That of a program, if there is one and a captured tensor of floats is in it alone."""
    if program.score is None:
        return None
    value, product = _split(program.score)
    if value is None:
        return None
    others = substitute(program.score, {product: score()}), *(mod for mod in program.mods[1:] if mod is not None)
    elsewhere = captures(*others)
    read = dict.fromkeys(leaf.attr for leaf in partials(value) if leaf.op == "read")
    learned = tuple(c for c in read if c not in elsewhere)
    return ScoreFactor(value, product, learned) if learned else None


def _split(mod: Expr) -> tuple[Expr | None, Expr]:
    """(what the score is multiplied by before all else, the product)."""
    value, product = None, score()
    for user, factor in products(mod):
        divides = user.op == "div"
        if (divides and factor is user.args[0]) or not _is_of_rows(factor):
            break
        value = apply(user.op, const(1.0) if value is None else value, factor) if divides or value else factor
        product = user
    return value, product


def _is_of_rows(factor: Expr) -> bool:
    """Whether it is the same for all keys of a row, and known from the row and captured tensors."""
    if factor.deps & (Dep.KV | Dep.SCORE | Dep.D):
        return False
    return all(node.op != "scalar" and (node.op != "index" or node.attr in _POSITIONS) for node in walk(factor))
