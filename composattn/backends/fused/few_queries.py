"""Work where queries are few: how many heads share the rows of a tile, and into how many parts the keys are cut."""

from __future__ import annotations

import abc
import math
from typing import ClassVar

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
    """Into how many parts the keys of a query tile are cut: as asked for, or so that the call takes least time."""
    if problem.schedule.batch_invariant or tiling.shares:
        return 1
    if problem.schedule.split_kv != "auto":
        return problem.schedule.split_kv
    return time_of(problem, tiling, target).best()


def time_of(problem: Problem, tiling: ForwardTiling, target: Target) -> Time:
    """Of a call that is so cut."""
    reads = tiling.tile_m < 128 and queries(problem) * tiling.slots <= tiling.tile_m
    return (TimeOfReading if reads else TimeOfComputing)(problem, tiling, target)


class Time(abc.ABC):
    """What a call takes by the number of parts its keys are cut into, in a unit of its own."""

    def __init__(self, problem: Problem, tiling: ForwardTiling, target: Target) -> None:
        self.problem, self.tiling, self.target = problem, tiling, target
        of_heads = -(-queries(problem) // tiling.queries) * (problem.q_heads // tiling.packed_heads)
        self.work = of_heads * problem.batch
        self.tiles = -(-keys(problem) // tiling.tile_n)

    @abc.abstractmethod
    def in_parts(self, n: int) -> float: ...

    @abc.abstractmethod
    def best(self) -> int:
        """The number of parts by which it is least."""

    def least(self) -> float:
        """By the number of parts that is asked for, or the best one."""
        wanted = self.problem.schedule.split_kv
        return self.in_parts(self.best() if wanted == "auto" else wanted)

    def least_of(self, most: int) -> int:
        """The number of parts, up to `most`, by which it is least."""
        return min(range(1, max(1, min(MOST_SPLITS, most)) + 1), key=self.in_parts)


class TimeOfComputing(Time):
    """In kv tiles (1.5 µs on an H200): all rounds of blocks over the multiprocessors, each block its tiles and two more
    to begin and end; where there are parts, the kernel that combines them, and what passes through memory.

    A small tile that is one of many takes as much less as it is smaller than 128 queries and keys.
    """

    def __init__(self, problem: Problem, tiling: ForwardTiling, target: Target) -> None:
        super().__init__(problem, tiling, target)
        few = queries(problem) * tiling.slots <= tiling.tile_m
        self.each = 1.0 if few or tiling.tile_m >= 128 else tiling.tile_m * tiling.tile_n / 128**2
        # fp32, written and read
        self.part = 8 * queries(problem) * problem.batch * problem.q_heads * tiling.dv / 5e6

    def in_parts(self, n: int) -> float:
        rounds = -(-self.work * n // self.target.sms)
        return rounds * (self.each * -(-self.tiles // n) + 2) + (0 if n == 1 else 3 + n * self.part)

    def best(self) -> int:
        whole = self.in_parts(1)
        if self.work * self.tiles * self.each >= 0.9 * whole * self.target.sms:  # what no division goes below
            return 1
        best = self.least_of(self.tiles // 2)
        return best if self.in_parts(best) < 0.9 * whole else 1


class TimeOfReading(Time):
    """In µs, of blocks of few rows, which take as long as their keys take from memory.

    Fitted to 1,700 times of 122 calls (one H200, D 64 and 128, 8 to 768 tiles, 512 to 131,072 keys, up to 32 parts,
    tiles of `two blocks` and of `one`, see `hopper/tiling.py`): what it chooses takes 0.9 % more than the best of them,
    at most 8; counting rounds of whole tiles, as `TimeOfComputing`, chose 3.7 % more, at most 19.
    """

    # of the time of idle places in the last round that others' keys make up for, as they come faster
    MADE_UP = 0.56
    # of a round, that one takes at least which has fewer blocks than multiprocessors: by blocks a multiprocessor holds
    LEAST: ClassVar[dict[int, float]] = {1: 0.88, 2: 1.0}
    ROUND = 3.0  # until a block's first keys are there, and behind its last ones
    COMBINE = 5.0
    OF_RATE = 0.96  # of what memory can give

    def in_parts(self, n: int) -> float:
        tiling, target = self.tiling, self.target
        element = self.problem.dtype.itemsize
        tile = tiling.tile_n * (tiling.d + tiling.dv) * element / (self.OF_RATE * target.memory_rate * 1e3)
        part = -(-self.tiles // n) * tile * target.sms  # of each multiprocessor one block's
        filled = self.work * n / target.sms
        rounds = math.ceil(filled / tiling.blocks)
        if filled <= 1:
            reading = max(filled, self.LEAST[tiling.blocks])
        else:
            reading = tiling.blocks * rounds * (1 - self.MADE_UP) + filled * self.MADE_UP
        return reading * part + rounds * self.ROUND + (0 if n == 1 else self.COMBINE)

    def best(self) -> int:
        return self.least_of(self.tiles)
