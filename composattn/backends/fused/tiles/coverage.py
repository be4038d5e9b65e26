"""Which queries tiles of keys visit, as far as a plan knows: all, up to the last ones, those of whole documents."""

from __future__ import annotations

import functools

import torch

from ....analysis.program import Program
from ....analysis.tile_lists import QueryLists, reason_for_lists
from ....call.problem import Problem
from ....graph.expr import Dep, index
from ....graph.rebuilt import substitute
from .order import exchanged, mirror
from .segments import falls_apart
from .tiling import BackwardTiling
from .traits import bounds_queries, changes_weights, extent_of, has_costly_test, has_plain_part, padded
from .work import fixed_visits


def all_are_seen(tiling: BackwardTiling, problem: Problem, program: Program) -> bool:
    """Whether each query tile is visited by some tile of keys: one visits all, or each row sees the key of its number.

    The latter of causal masks, windows and documents alike, whatever their tensors say: `ids[q] == ids[q]`.
    """
    dense = problem.layout.is_dense
    if (problem.q_len <= problem.kv_len if dense else problem.layout.keys_lie_as_queries) and _sees_own(program):
        return True
    if not dense or not bounds_queries(program.mask):
        return False
    visits = _visits(problem, program, tiling.tile_n, tiling.tile_m)
    return visits is not None and bool((visits.amax(1) == -(-problem.q_len // tiling.tile_m)).all())


def _sees_own(program: Program) -> bool:
    """Whether each query sees the key of its number, where there is one."""
    if program.mask is None:
        return True
    own = substitute(program.mask, {index("kv"): index("q")})
    return bool(own.is_const and own.attr is True)


def end_together(problem: Problem, program: Program) -> bool:
    """Whether tiles of keys end with the last queries, the first one begins with the first, and none before another."""
    if not problem.layout.is_dense or (program.mask is not None and not differ(problem, program)):
        return False
    visits = _visits(problem, program, 128, 1)
    return visits is not None and bool((visits[:, 0] == problem.q_len).all() and (visits.diff() <= 0).all())


def differ(problem: Problem, program: Program) -> bool:
    """Whether a mask of bounds leaves tiles of keys one run of queries each, of different lengths."""
    if program.mask is None or not problem.layout.is_dense or not bounds_queries(program.mask):
        return False
    return len(program.of_keys[0]) == 1 and not has_costly_test(program.mask)


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
    """Whether these are seen whole."""
    mask = program.mask
    return mask is not None and not has_plain_part(mask) and has_documents_apart(problem, program)


def _visits(problem: Problem, program: Program, tile_n: int, tile_m: int) -> torch.Tensor | None:
    """How many query tiles each tile of keys visits in one run, at most: (B|1, tiles); None where tensors decide.

    Nor are there numbers where there are no keys, nor for heads that differ, as they would be sums over these; and runs
    of one tile of keys may share a query tile, which would count twice.
    """
    intervals = exchanged(program.of_keys[0])
    if not problem.kv_len or any((i.begin.deps | i.end.deps) & Dep.H for i in intervals):
        return None
    found = [fixed_visits(mirror(problem), (i,), tile_n, tile_m) for i in intervals]
    counts = [f for f in found if f is not None]
    if not counts or len(counts) < len(found):
        return None
    return functools.reduce(torch.maximum, counts)
