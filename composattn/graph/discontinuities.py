"""Values whose last bit may decide something: whether a pair is visible, which block it is in, what is read."""

from __future__ import annotations

from .expr import Dep, Expr, walk
from .ops import MIRRORED

_STEPS = {"floor", "ceil", "round", "trunc", "floordiv", "truncdiv", "mod", "fmod", "sign"}
_STEPS |= {"cast_bool", "cast_int32", "cast_int64", *MIRRORED}


def deciding(*roots: Expr | None) -> set[Expr]:
    """All that a comparison, a rounding or a cast to an integer below `roots` is computed from.

    Without what changes with the score, which has errors of its own.
    """
    found: set[Expr] = set()
    for node in reversed(list(walk(*(r for r in roots if r is not None)))):
        if node in found or node.op in _STEPS:
            found.update(a for a in node.args if not a.deps & Dep.SCORE)
    return found
