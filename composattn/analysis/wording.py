"""The analysis of a mask in words, for `Mask.bands()` and `explain()`."""

from __future__ import annotations

from ..graph.expr import Expr
from ..graph.linear import forget
from .bands import TileInterval, ends_of, tile_intervals
from .solve import Opaque, Residue, conjunctions
from .symbolic import Names, formula


def describe(mask: Expr) -> str:
    """Which kv a tile of query rows first..last visits, what every tile tests, and what the names stand for."""
    intervals = tile_intervals(mask)
    left = [c for p in conjunctions(mask) for c in p.constraints if isinstance(c, (Opaque, Residue))]
    forget()
    names = Names(mask, *ends_of(intervals))
    lines = visited(intervals, names)
    if left:
        tests = sorted({_test(c, names) for c in left})
        lines.append("tested in every tile: " + "; ".join(tests))
    legend = [f"{name} {what}" for name, what in names.legend().items()]
    return "\n".join([*lines, *([f"with {'; '.join(legend)}"] if legend else [])])


def visited(intervals: tuple[TileInterval, ...], names: Names) -> list[str]:
    """An interval per line."""
    return [f"{formula(i.begin, names)} <= kv < {formula(i.end, names)}; {_untested(i, names)}" for i in intervals]


def _untested(interval: TileInterval, names: Names) -> str:
    if interval.never_full:
        return "all of it tested"
    return f"no test from {formula(interval.full_begin, names)} to {formula(interval.full_end, names)}"


def _test(constraint: Opaque | Residue, names: Names) -> str:
    if isinstance(constraint, Opaque):
        return formula(constraint.condition, names)
    return f"kv = {formula(constraint.of, names)} mod {constraint.step}"
