"""Which keys tiles of queries visit, and which queries tiles of keys: how many, all, the last ones, whole documents."""

from __future__ import annotations

import dataclasses

from ....analysis.bands import TileInterval
from ....analysis.program import Program
from ....analysis.tile_lists import QueryLists, reason_for_lists
from ....call.problem import DENSE, Problem
from ....graph.expr import Dep, index
from ....graph.rebuilt import substitute
from .segments import falls_apart
from .traits import bounds_queries, changes_weights, extent_of, has_costly_test, has_plain_part, padded
from .work import fixed_visits, visits_now


def all_are_seen(problem: Problem, program: Program) -> bool:
    """Whether each query tile is visited by some tile of keys: with no mask, or as each row sees the key of its number.

    The latter of causal masks, windows and documents alike, whatever their tensors say: `ids[q] == ids[q]`.
    """
    if not problem.layout.is_dense:
        return problem.layout.keys_lie_as_queries and _sees_own(program)
    return problem.kv_len > 0 if program.mask is None else problem.q_len <= problem.kv_len and _sees_own(program)


def _sees_own(program: Program) -> bool:
    """Whether each query sees the key of its number, where there is one."""
    if program.mask is None:
        return True
    own = substitute(program.mask, {index("kv"): index("q")})
    return bool(own.is_const and own.attr is True)


def end_together(problem: Problem, program: Program) -> bool:
    """Whether tiles of keys end with the last queries, the first one begins with the first, and none before another.

    Not where heads differ, as visits are their sums, nor where runs may share a tile of queries.
    """
    visited = exchanged(program.of_keys[0])
    if len(visited) != 1 or not problem.layout.is_dense or not problem.kv_len or not bounds_queries(program.mask):
        return False
    visits = (
        None
        if (visited[0].begin.deps | visited[0].end.deps) & Dep.H
        else fixed_visits(mirror(problem), visited, 128, 1)
    )
    return visits is not None and bool((visits[:, 0] == problem.q_len).all() and (visits.diff() <= 0).all())


def has_segments_apart(problem: Problem, program: Program) -> bool:
    """Whether tiles may begin with documents by ids: reads in pairs and words of dropout go by tiles of sequences."""
    return not changes_weights(program) and has_costly_test(program.mask) and falls_apart(problem, program)


def has_documents_apart(problem: Problem, program: Program) -> bool:
    """Whether tiles of keys may begin with documents by ids, whose test takes registers.

    Of ids that come again later lists say what is visited.
    """
    square = padded(problem.head_dim) == padded(problem.head_dim_v)
    if not (square and has_segments_apart(problem, program)):
        return False
    return reason_for_lists(QueryLists, program.mask, extent_of(problem), (128, 128)) is None


def has_whole_documents(problem: Problem, program: Program) -> bool:
    """Whether these are seen whole, of a call with a mask."""
    assert program.mask is not None
    return not has_plain_part(program.mask) and has_documents_apart(problem, program)


def mirror(problem: Problem) -> Problem:
    """With queries and keys exchanged."""
    return dataclasses.replace(problem, q_len=problem.kv_len, kv_len=problem.q_len, layout=problem.layout.mirrored)


def exchanged(intervals: tuple[TileInterval, ...]) -> tuple[TileInterval, ...]:
    """Intervals with queries and keys exchanged, as the mirrored problem has them."""
    return tuple(i.mapped({index("q_len"): index("kv_len"), index("kv_len"): index("q_len")}) for i in intervals)


def queries_of_a_key(problem: Problem, program: Program) -> float:
    """How many queries visit a tile of 128 keys, on average, see `keys_of_a_query`."""
    return _mean_visits(mirror(of_mean_length(problem)), exchanged(program.of_keys[0]))


def keys_of_a_query(problem: Problem, program: Program) -> float:
    """How many keys a tile of 128 queries visits, on average, with run-time numbers as they are now.

    As many as there are where captured tensors decide. Of packed sequences, if all were as long as their mean.
    """
    return _mean_visits(of_mean_length(problem), program.intervals)


def _mean_visits(problem: Problem, intervals: tuple[TileInterval, ...]) -> float:
    visits = visits_now(problem, intervals, 128, 1)
    return float(problem.kv_len if visits is None else visits.float().mean())


def of_mean_length(problem: Problem) -> Problem:
    """Packed sequences as a batch of their mean length."""
    if problem.layout.is_dense:
        return problem
    q_len, kv_len = (-(-length // problem.batch) for length in (problem.q_len, problem.kv_len))
    return dataclasses.replace(problem, q_len=q_len, kv_len=kv_len, layout=DENSE)
