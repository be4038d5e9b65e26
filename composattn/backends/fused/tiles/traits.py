"""What of a call tilings depend on: what mods read and test, how long sequences are, which pairs are visited."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ....analysis.bands import TileInterval, exchanged, mirrored, residual
from ....analysis.program import Program
from ....analysis.tile_lists import Extent, QueryLists, reason_for_lists
from ....call.problem import DENSE, Problem
from ....graph.expr import Dep, Expr, Rate, index, walk
from ....graph.rebuilt import substitute
from .segments import falls_apart
from .work import fixed_visits, visits_now

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


def all_are_seen(problem: Problem, program: Program) -> bool:
    """Whether each query tile is visited by some tile of keys: with no mask, or as each row sees the key of its number.

    The latter of causal masks, windows and documents alike, whatever their tensors say: `ids[q] == ids[q]`.
    """
    if problem.layout.is_dense:
        whole, lie_as_queries = problem.kv_len > 0, problem.q_len <= problem.kv_len
    else:
        whole = lie_as_queries = problem.layout.keys_lie_as_queries
    if program.mask is None:
        return whole
    own = substitute(program.mask, {index("kv"): index("q")})
    return lie_as_queries and own.is_const and own.attr is True


def end_together(problem: Problem, program: Program) -> bool:
    """Whether tiles of keys end with the last queries, the first one begins with the first, and none before another.

    Not where heads differ, as visits are their sums, nor where runs may share a tile of queries.
    """
    visited = exchanged(program.of_keys[0])
    by_head = any((run.begin.deps | run.end.deps) & Dep.H for run in visited)
    bound = bounds_queries(program.mask) and problem.layout.is_dense and problem.kv_len > 0
    if len(visited) != 1 or by_head or not bound:
        return False
    visits = fixed_visits(problem.mirrored, visited, 128, 1)
    return visits is not None and bool((visits[:, 0] == problem.q_len).all() and (visits.diff() <= 0).all())


def has_segments_apart(problem: Problem, program: Program) -> bool:
    """Whether tiles may begin with documents by ids: reads in pairs and words of dropout go by tiles of sequences."""
    keeps_weights = program.score is None and program.keep is None
    return keeps_weights and has_costly_test(program.mask) and falls_apart(problem, program)


def has_documents_apart(problem: Problem, program: Program) -> bool:
    """Whether tiles of keys may begin with documents by ids, whose test takes registers.

    Of ids that come again later lists say what is visited.
    """
    square = padded(problem.head_dim) == padded(problem.head_dim_v)
    if not (square and has_segments_apart(problem, program)):
        return False
    return reason_for_lists(QueryLists, program.mask, extent_of(problem), (128, 128)) is None


def keys_of_a_query(problem: Problem, intervals: tuple[TileInterval, ...]) -> float:
    """How many keys a tile of 128 queries visits, on average, with run-time numbers as they are now.

    As many as there are where captured tensors decide. Of packed sequences, if all were as long as their mean.
    """
    if not problem.layout.is_dense:
        q_len, kv_len = (-(-length // problem.batch) for length in (problem.q_len, problem.kv_len))
        problem = dataclasses.replace(problem, q_len=q_len, kv_len=kv_len, layout=DENSE)
    visits = visits_now(problem, intervals, 128, 1)
    return float(problem.kv_len if visits is None else visits.float().mean())
