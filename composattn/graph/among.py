"""Indices that say among how many they count, so that a mod made for another call is found.

`among(h, 8)` is h where a call has 8 heads, as in slopes that are computed for 8; `among(h, None)` is h of a call that
has some of more, as after `shifted`. Neither computes anything: `without_counts` takes both out again.
"""

from __future__ import annotations

from .expr import Expr, walk
from .ops import apply
from .rebuilt import transform


def among(index: Expr, count: int | None) -> Expr:
    """`index`, one of `count`; None: of more than the call has."""
    return apply("among", index, attr=count)


def among_form(name: str, count: int | None) -> str:
    """The form of `among`, which code that Dynamo follows can't make a graph for."""
    return f"('steps', 0, (('op:among', {count!r}, {name!r}),), 'x0')"


def without_counts(root: Expr) -> Expr:
    """`root`, whose indices say nothing of how many they are among."""
    if all(node.op != "among" for node in walk(root)):
        return root
    return transform(root, lambda node: without_counts(node.args[0]) if node.op == "among" else None)
