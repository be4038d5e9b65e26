"""Which kv tiles a q tile visits, in which order, and which of them need a test.

Comes in as runs of kv positions (`TileInterval` of the graph, evaluated for the q tile at hand) and goes out as
tiles: from the highest to the lowest, so that the one tile that may reach beyond the sequence comes first. That
first tile is always tested and stands apart, as pipelines start with it; what follows are loops whose tiles are all
tested or all free of tests. Takes Python ints as well as kernel values, so the rule is checked with no GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .interval_shape import IntervalShape
from .values import Fixed, choose, larger, smaller


@dataclasses.dataclass
class Segment(Fixed):
    """`count` neighbouring tiles, `first` and downwards; `tested`: whether an element of them may be invisible."""

    first: Any
    count: Any
    tested: bool


@dataclasses.dataclass
class Run(Fixed):
    """The tiles of one interval after the first tile of all was taken out: `first` and `count - 1` below it.

    Those in [full_start, full_stop) need no test.
    """

    first: Any
    count: Any
    full_start: Any
    full_stop: Any
    shape: IntervalShape

    def segments(self) -> list[Segment]:
        if not self.shape.full:
            return [Segment(self.first, self.count, True)]
        right = Segment(self.first, self.first + 1 - self.full_stop, True)
        full = Segment(self.full_stop - 1, self.full_stop - self.full_start, False)
        left = Segment(self.full_start - 1, self.full_start - (self.first + 1 - self.count), True)
        return [right] * self.shape.right + [full] + [left] * self.shape.left


@dataclasses.dataclass
class TileSequence(Fixed):
    """`first` is the first tile visited, if `count` (all tiles) is above 0; the rest follows in `runs`."""

    first: Any
    count: Any
    runs: list[Run]


def visit(
    intervals: list[tuple[Any, Any, Any, Any]],
    shapes: tuple[IntervalShape, ...],
    kv_len: Any,
    tile_n: int,
) -> TileSequence:
    """Tiles for `intervals` (begin, end, full_begin, full_end), ascending; each tile at most once."""
    bound = (kv_len + (tile_n - 1)) // tile_n  # tiles from here on have been visited
    first, total, runs = 0, 0, []
    for (begin, end, full_begin, full_end), shape in reversed(list(zip(intervals, shapes, strict=True))):
        start = larger(begin, 0) // tile_n
        stop = smaller((larger(end, 0) + (tile_n - 1)) // tile_n, bound)
        count = larger(stop - start, 0)
        some = count > 0
        bound = choose(some, start, bound)
        # the first tile of all is taken out of the first interval that has any
        taken = choose(some & (total == 0), 1, 0)
        first = choose(taken == 1, stop - 1, first)
        total = total + count
        stop, count = start + count - taken, count - taken
        full_stop, full_start = stop, start
        if shape.full:
            if shape.right:
                full_stop = smaller(larger(smaller(full_end, kv_len), 0) // tile_n, stop)
                full_stop = larger(full_stop, start)
            if shape.left:
                full_start = larger((larger(full_begin, 0) + (tile_n - 1)) // tile_n, start)
                full_start = smaller(full_start, full_stop)
        runs.append(Run(stop - 1, count, full_start, full_stop, shape))
    return TileSequence(first, total, runs)
