"""What a score mod multiplies the score by, where it does nothing else, as scales of 8-bit tensors do."""

from __future__ import annotations

from collections.abc import Callable

from .expr import Expr, score


def score_factors(node: Expr, is_known: Callable[[Expr], bool]) -> tuple[Expr, ...] | None:
    """The factors of the score in `node`, each of which `is_known`; None where anything else is done to it."""
    if node is score():
        return ()
    if node.op != "mul":
        return None
    for x, y in (node.args, node.args[::-1]):
        if x.deps & score().deps and not y.deps & score().deps and is_known(y):
            before = score_factors(x, is_known)
            return None if before is None else (*before, y)
    return None
