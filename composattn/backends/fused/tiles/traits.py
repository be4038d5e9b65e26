"""The facts of a call that tilings depend on: what its mods read and test, how long its sequences are."""

from __future__ import annotations

from collections.abc import Iterable

from ....analysis.bands import mirrored, residual
from ....analysis.tile_lists import Extent
from ....call.problem import Problem
from ....graph.expr import Dep, Expr, Rate, walk

OF_HEADS = {Rate.CONSTANT, Rate.HEAD}  # alike for all pairs of a head
ALONG_KEYS = {Rate.COLUMN, Rate.ELEMENT}  # at each key, of all queries or of each


def padded(d: int) -> int:
    """Head dimension on chip: what a copy with at least 64-byte swizzle, as rows or as columns, and a product take."""
    return -(-d // 32) * 32


def reads(graph: Expr | None, rates: Iterable[Rate] = Rate) -> list[Expr]:
    """Reads of tensors, whose positions change so."""
    nodes = () if graph is None else walk(graph)
    return [n for n in nodes if n.op == "read" and n.rate in rates]


def depends(graph: Expr | None, on: Dep) -> bool:
    """Whether it has other values where these have."""
    return graph is not None and bool(graph.deps & on)


def has_costly_test(mask: Expr | None) -> bool:
    """Whether a test of the mask reads tensors at a query or a key, or looks at a remainder."""
    return residual(mask).step > 1 or bool(reads(mask, set(Rate) - OF_HEADS))


def has_plain_part(mask: Expr) -> bool:
    """Whether it is a condition on positions, and others, as of causal documents."""
    return any(map(has_plain_part, mask.args)) if mask.op == "and" else not reads(mask)


def bounds_queries(mask: Expr | None) -> bool:
    """Whether bounds on queries say which of them see a key; documents have such, a table of pairs has none."""
    return mask is None or not residual(mirrored(mask)).opaque


def extent_of(problem: Problem) -> Extent:
    """What lists of tiles are made for: the longest sequence there can be, all rows where nothing else is said."""
    p, layout = problem, problem.layout
    q_len, q_unbounded = _longest(layout.q, p.q_len, layout.max_q_len)
    kv_len, kv_unbounded = _longest(layout.kv, p.kv_len, layout.max_kv_len)
    unbounded = q_unbounded or kv_unbounded
    return Extent(max(1, q_len), max(1, kv_len), p.batch, p.q_heads, p.device, not layout.is_dense, unbounded)


def _longest(lies: str, rows: int, most: int | None) -> tuple[int, bool]:
    """Rows that a sequence has at most, and whether nothing but all rows together says so."""
    packed = lies == "packed"
    return (min(rows, most), False) if packed and most else (rows, packed)
