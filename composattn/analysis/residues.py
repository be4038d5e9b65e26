"""Masks that let a query see only keys of its own residue, as dilated windows do: which step, and what else they ask.

Positions of one residue by a step are a sequence of their own. In it, such a mask is dense where the window is, while
among all positions only one pair of `step` is visible, in every tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..graph.expr import DType, Expr, const, index
from ..graph.linear import forget, linear
from ..graph.ops import all_of, apply
from ..graph.rebuilt import substitute


def residues(mask: Expr) -> tuple[int, Expr]:
    """(step, rest): the mask is "q and kv have the same residue by `step`" and `rest`; (1, mask) if it says nothing so.

    Looks for the terms `(q - kv) % step == 0` and `q % step == kv % step` of a conjunction; of several the least common
    multiple counts.
    """
    step, rest = 1, []
    for term in terms(mask):
        found = _step(term)
        if found is None:
            rest.append(term)
        else:
            step = math.lcm(step, found)
    forget()
    return (1, mask) if step == 1 else (step, all_of(rest))


def of_residue(graph: Expr, step: int, first: int) -> Expr:
    """`graph` for sequences of one residue each: place i of sequence b is position i * step + first + b."""
    offset = apply("add", index("b"), const(first)) if first else index("b")
    places = {index(name): apply("add", apply("mul", index(name), const(step)), offset) for name in ("q", "kv")}
    return substitute(graph, places)


def terms(node: Expr) -> Iterator[Expr]:
    """What a conjunction joins."""
    left = [node]
    while left:
        node = left.pop()
        if node.op == "and" and node.dtype is DType.BOOL:
            left += reversed(node.args)
        else:
            yield node


def _step(term: Expr) -> int | None:
    """The step of a term that says "q and kv have the same residue"; None for another term."""
    if term.op != "eq" or not all(a.dtype.is_integer for a in term.args):
        return None
    x, y = term.args
    if x.is_const:
        x, y = y, x
    step = _modulus(x)
    if step is None:
        return None
    if _modulus(y) == step:
        between = linear(x.args[0]).plus(linear(y.args[0]), -1)
    elif y is const(0, y.dtype):
        between = linear(x.args[0])
    else:
        return None
    slopes = {between.terms.get(index("q")), between.terms.get(index("kv"))}
    is_distance = len(between.terms) == 2 and slopes == {1, -1}
    return step if is_distance and between.constant % step == 0 else None


def _modulus(node: Expr) -> int | None:
    """m of `... % m` with a constant m above 1."""
    if node.op != "mod" or not node.args[1].is_const:
        return None
    step = node.args[1].attr
    return step if isinstance(step, int) and step > 1 else None
