"""Which keys tiles of queries visit, and which queries tiles of keys: how many, all, the last ones, whole documents."""

from __future__ import annotations

import dataclasses

from ....analysis.bands import TileInterval, exchanged
from ....analysis.program import Program
from ....analysis.tile_lists import QueryLists, reason_for_lists
from ....call.problem import DENSE, Problem
from ....graph.expr import Dep, index
from ....graph.rebuilt import substitute
from .segments import falls_apart
from .traits import bounds_queries, extent_of, has_costly_test, padded
from .work import fixed_visits, visits_now


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


def queries_of_a_key(problem: Problem, program: Program) -> float:
    """How many queries visit a tile of 128 keys, on average, see `keys_of_a_query`."""
    return keys_of_a_query(problem.mirrored, exchanged(program.of_keys[0]))


def keys_of_a_query(problem: Problem, intervals: tuple[TileInterval, ...]) -> float:
    """How many keys a tile of 128 queries visits, on average, with run-time numbers as they are now.

    As many as there are where captured tensors decide. Of packed sequences, if all were as long as their mean.
    """
    if not problem.layout.is_dense:
        q_len, kv_len = (-(-length // problem.batch) for length in (problem.q_len, problem.kv_len))
        problem = dataclasses.replace(problem, q_len=q_len, kv_len=kv_len, layout=DENSE)
    visits = visits_now(problem, intervals, 128, 1)
    return float(problem.kv_len if visits is None else visits.float().mean())
