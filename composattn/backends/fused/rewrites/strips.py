"""A forward whose mask is of positions of an image (`analysis.strips`), as one whose sequences are strips of it.

Nothing is copied: the kernel's bulk copies read and write boxes of the image. What is planned is a batch of strips.
"""

from __future__ import annotations

import dataclasses

from ....analysis.program import Program
from ....analysis.strips import KEYS, QUERIES, Strips, reads_image, strips_of
from ....call.problem import Problem
from ....graph.expr import Dep
from ..tiles.work import visits_now

LEAST = 8  # rows of an image, so that a strip's queries fill a tile
WIDEST = 256  # D and Dv whose tiles are copied whole
# Tiles of 128 x 128 that strips visit for each of the whole image, at most: each is copied in boxes and tested
FEWER = 0.75


@dataclasses.dataclass(frozen=True)
class InStrips:
    """The same call, of strips: `batch` counts those of each sequence, `b` in the mods likewise."""

    strips: Strips
    problem: Problem
    program: Program


def in_strips(problem: Problem, program: Program) -> InStrips | None:
    """The call in strips where that visits fewer tiles; None: it stays whole.

    It does where mods read tensors, numbers, lengths or the batch, or positions by more than their row and column.
    """
    if program.mask is None or not problem.layout.is_dense or max(problem.head_dim, problem.head_dim_v) > WIDEST:
        return None
    if problem.schedule.batch_invariant or problem.schedule.split_kv not in ("auto", 1):
        return None
    if program.sink is not None or program.keep is not None:
        return None
    mods = [graph for graph in (program.mask, program.score) if graph is not None]
    if any(graph.deps & (Dep.B | Dep.RUNTIME) for graph in mods):
        return None
    strips = strips_of(program.mask)
    if strips is None or not all(reads_image(graph, strips.columns) for graph in mods):
        return None
    columns, lengths = strips.columns, (problem.q_len, problem.kv_len)
    if any(length % columns or length // columns < LEAST for length in lengths):
        return None
    score = None if program.score is None else strips.of(program.score)
    of_each = dataclasses.replace(
        problem,
        batch=problem.batch * strips.count,
        q_len=problem.q_len // columns * QUERIES,
        kv_len=problem.kv_len // columns * KEYS,
    )
    found = InStrips(strips, of_each, Program(score, strips.mask(program.mask)))
    whole, cut = visited(problem, program), visited(of_each, found.program)
    return found if cut <= FEWER * whole else None


def visited(problem: Problem, program: Program) -> float:
    """Tiles of 128 keys that one of 128 queries visits, on average."""
    visits = visits_now(problem, program.intervals, 128, 128)
    assert visits is not None, "no tensors decide"
    return int(visits.sum()) / visits.numel()
