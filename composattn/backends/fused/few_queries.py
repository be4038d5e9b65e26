"""Work where queries are few: how many heads share the rows of a tile, and into how many parts the keys are cut."""

from __future__ import annotations

from ...analysis.program import Program
from ...call.problem import Problem
from ...call.schedule import MOST_SPLITS
from ...errors import InvalidSchedule
from ...graph.expr import Dep
from .target import Target
from .tiling import ForwardTiling, slots
from .traits import keys, queries


def packed_heads(problem: Problem, program: Program, rows: int) -> int:
    """How many query heads of a key/value head share the rows of a tile, `rows` where queries are few, else twice them.

    1 where each has tiles of its own. Raises `InvalidSchedule` where packing is asked for and can't be done.
    """
    wanted, group = problem.schedule.pack_gqa, problem.group
    if wanted is False or group == 1:
        return 1
    heads = max(n for n in range(1, min(group, rows) + 1) if group % n == 0)
    # heads that see different keys visit different tiles
    by_head = program.mask is not None and bool(program.mask.deps & Dep.H)
    if by_head or heads == 1:
        if wanted:
            why = "the mask depends on the head" if by_head else f"{group} heads share no tile of {rows} rows"
            raise InvalidSchedule(f"pack_gqa=True, but {why}; leave pack_gqa=None")
        return 1
    return heads if wanted or _tiles(problem, heads, rows) * 2 <= _tiles(problem, 1, rows) else 1


def _tiles(problem: Problem, heads: int, rows: int) -> int:
    """Query tiles of all heads of a batch entry."""
    taken = queries(problem) * slots(heads)
    return -(-taken // (rows if taken <= rows else 2 * rows)) * (problem.q_heads // heads)


def splits(problem: Problem, tiling: ForwardTiling, target: Target) -> int:
    """Into how many parts the keys of a query tile are cut: as asked for, or so that the time below is least.

    Time is counted in kv tiles (1.5 µs on an H200): all rounds of blocks over the multiprocessors, each block its tiles
    and two more to begin and end; where there are parts, the kernel that combines them, and what passes through memory.
    A small tile that is one of many takes as much less as it is smaller than 128 queries and keys.
    """
    if problem.schedule.batch_invariant or tiling.shares:
        return 1
    if problem.schedule.split_kv != "auto":
        return problem.schedule.split_kv
    work = -(-queries(problem) // tiling.queries) * (problem.q_heads // tiling.packed_heads) * problem.batch
    tiles = -(-keys(problem) // tiling.tile_n)
    rows = queries(problem) * tiling.slots
    each = 1.0 if rows <= tiling.tile_m or tiling.tile_m >= 128 else tiling.tile_m * tiling.tile_n / 128**2
    part = 8 * queries(problem) * problem.batch * problem.q_heads * tiling.dv / 5e6  # fp32, written and read

    def time(n: int) -> float:
        rounds = -(-work * n // target.sms)
        return rounds * (each * -(-tiles // n) + 2) + (0 if n == 1 else 3 + n * part)

    if work * tiles * each >= 0.9 * time(1) * target.sms:  # what no division goes below
        return 1
    best = min(range(1, max(1, min(MOST_SPLITS, tiles // 2)) + 1), key=time)
    return best if time(best) < 0.9 * time(1) else 1
