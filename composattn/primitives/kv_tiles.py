"""Which kv tiles a q tile visits, in which order, and which of them need a test.

Comes in as runs of kv positions (`visit`: `TileInterval` of the graph, evaluated for the q tile at hand) or as a list
of tiles (`listed_tiles`), and goes out as tiles. The first tile of all is always tested and stands apart, as pipelines
start with it; what follows are loops whose tiles are all tested or all free of tests, one for each `TileRange` or, in
`rounds`, one for all of a kind. Runs go from the highest tile to the lowest, so that the one tile that may reach beyond
the sequence comes first; in a list it stands among the tested ones. Takes Python ints as well as kernel values, so the
rule is checked with no GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

from .interval_shape import IntervalShape
from .stream_k import Portion
from .values import Fixed, choose, larger, smaller


@dataclasses.dataclass
class KvPart(Fixed):
    """The `index`-th of `count` parts of the tiles of each interval, or of a list."""

    index: Any
    count: Any

    def of(self, start: Any, count: Any) -> tuple[Any, Any]:
        """(start, count) of those among `count` tiles from `start` on."""
        low, high = count * self.index // self.count, count * (self.index + 1) // self.count
        return start + low, high - low


class AllKv(KvPart):
    """All of them."""

    def of(self, start: Any, count: Any) -> tuple[Any, Any]:
        return start, count


WHOLE = AllKv(0, 1)


@dataclasses.dataclass
class TileRange(Fixed):
    """`count` neighbouring tiles, `first` and downwards; `tested`: whether an element of them may be invisible."""

    first: Any
    count: Any
    tested: bool

    def tile(self, i: Any) -> Any:
        return self.first - i


NOTHING = TileRange(0, 0, False)


@dataclasses.dataclass
class TileRanges(Fixed):
    """Some that a loop at run time goes over, all `tested` or none."""

    every: list[TileRange]
    tested: bool

    def __len__(self) -> int:
        return len(self.every)

    def __getitem__(self, n: Any) -> TileRange:
        """The `n`-th one, for an `n` that only the kernel knows."""
        found = dataclasses.replace(self.every[0], tested=self.tested)
        for i, other in enumerate(self.every[1:], 1):
            first, count = (choose(n == i, *of) for of in ((other.first, found.first), (other.count, found.count)))
            found = TileRange(first, count, self.tested)
        return found


@dataclasses.dataclass
class Run(Fixed):
    """The tiles of one interval after the first tile of all was taken out: `first` and `count - 1` below it.

    Those in [full_start, full_stop) need no test. `taken`: whether the first tile was of this one, 0 or 1.
    """

    first: Any
    count: Any
    full_start: Any
    full_stop: Any
    shape: IntervalShape
    taken: Any = 0

    def tile(self, i: Any) -> Any:
        return self.first - i

    def whole(self) -> Run:
        """With the first tile of all, if that was taken out of this one: it is tested wherever it lies."""
        shape = dataclasses.replace(self.shape, right=True)
        return dataclasses.replace(self, first=self.first + self.taken, count=self.count + self.taken, shape=shape)

    def tile_ranges(self) -> list[TileRange]:
        if not self.shape.full:
            return [TileRange(self.first, self.count, True)]
        right = TileRange(self.first, self.first + 1 - self.full_stop, True)
        full = TileRange(self.full_stop - 1, self.full_stop - self.full_start, False)
        left = TileRange(self.full_start - 1, self.full_start - (self.first + 1 - self.count), True)
        return [right] * self.shape.right + [full] + [left] * self.shape.left


@dataclasses.dataclass
class ListedRun(Fixed):
    """`count` tiles of a list, `row[start]` and on; `tested` as of a `TileRange`, which a run of a list is as well."""

    row: Any
    start: Any
    count: Any
    tested: bool
    taken: Any = 0

    def tile(self, i: Any) -> Any:
        return self.row[self.start + i]

    def whole(self) -> ListedRun:
        """With the first tile of all, if that was taken out of this one."""
        return dataclasses.replace(self, start=self.start - self.taken, count=self.count + self.taken)

    def tile_ranges(self) -> list[ListedRun]:
        return [self]


@dataclasses.dataclass
class TileSequence(Fixed):
    """`first` is the first tile visited, if `count` (all tiles) is above 0; the rest follows in `runs`.

    `spans`: [start, stop) of the tiles of each interval, `first` among them, in the order of `runs`; none of a list.
    """

    first: Any
    count: Any
    runs: list[Run] | list[ListedRun]
    spans: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)

    def tile_ranges(self) -> list[TileRange] | list[ListedRun]:
        """The ranges of all runs."""
        return [tile_range for run in self.runs for tile_range in run.tile_ranges()]  # type: ignore[return-value]

    def whole(self) -> TileSequence:
        """With the first tile in its run, for kernels whose pipelines don't start with one that stands apart."""
        return dataclasses.replace(self, runs=[run.whole() for run in self.runs])  # type: ignore[arg-type]

    def rounds(self) -> tuple[TileRanges, TileRanges]:
        """(tested, free): those of `tile_ranges`, as many of each, to go over by turns; not of lists."""
        tested: list[TileRange] = []
        free: list[TileRange] = []
        for tile_range in self.tile_ranges():
            if tile_range.tested or not free or free[-1] is not NOTHING:
                tested.append(NOTHING)
                free.append(NOTHING)
            (tested if tile_range.tested else free)[-1] = tile_range  # type: ignore[assignment]
        return TileRanges(tested, True), TileRanges(free, False)

    def has(self, tile: Any) -> Any:
        """Whether it is visited; not where tiles are listed."""
        return functools.reduce(operator.or_, ((start <= tile) & (tile < stop) for start, stop in self.spans))

    # one loop over all, for kernels whose loops lose nothing by a branch

    def tile(self, i: Any) -> Any:
        """The i-th tile of all, for i from 0 to `count` - 1."""
        if not self.spans:
            tests, free = self._lists()
            listed = choose(i <= tests.count, tests.start + i - 1, free.start + (i - 1 - tests.count))
            return choose(i == 0, self.first, tests.row[choose(i == 0, 0, listed)])
        before: Any = 0
        tops = []
        for start, stop in self.spans:
            tops.append((before, stop - 1 + before))
            before = before + (stop - start)
        (_, top), *more = tops
        for begins, other in more:
            top = choose(i < begins, top, other)
        return top - i

    def _lists(self) -> list[ListedRun]:
        """The tested and the untested tiles behind the first one."""
        return [run for run in self.runs if isinstance(run, ListedRun)]

    def tested(self, i: Any, tile: Any) -> Any:
        """Whether an element of `tile`, the i-th, may be invisible; True where that holds for all."""
        if not self.spans:
            return i <= self._lists()[0].count
        runs = [run for run in self.runs if isinstance(run, Run) and run.shape.full]
        outside = [(tile < run.full_start) | (tile >= run.full_stop) for run in runs]
        return (i == 0) | functools.reduce(operator.and_, outside) if outside else True


def visit(
    intervals: list[tuple[Any, Any, Any, Any]],
    shapes: tuple[IntervalShape, ...],
    kv_len: Any,
    tile_n: int,
    some: KvPart | Portion = WHOLE,
) -> TileSequence:
    """Tiles for `intervals` (begin, end, full_begin, full_end), ascending; each tile at most once."""
    bound = (kv_len + (tile_n - 1)) // tile_n  # tiles from here on have been visited
    first, total, runs, spans = 0, 0, [], []
    for (begin, end, full_begin, full_end), shape in reversed(list(zip(intervals, shapes, strict=True))):
        begin, end = larger(begin, 0), smaller(end, kv_len)
        start = begin // tile_n
        stop = smaller((larger(end, 0) + (tile_n - 1)) // tile_n, bound)
        count = choose(end > begin, larger(stop - start, 0), 0)
        bound = choose(count > 0, start, bound)
        start, count = some.of(start, count)
        spans.append((start, start + count))
        # the first tile of all is taken out of the first interval that has any
        taken = choose((count > 0) & (total == 0), 1, 0)
        first = choose(taken == 1, start + count - 1, first)
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
        runs.append(Run(stop - 1, count, full_start, full_stop, shape, taken))
    return TileSequence(first, total, runs, spans)


def counted_from(origin: Any, intervals: list[tuple[Any, Any, Any, Any]]) -> list[tuple[Any, Any, Any, Any]]:
    """The intervals, none of which begins before `origin`, with positions counted from there; so is `kv_len` then.

    Tiles that begin where a query tile's keys do are fewer than tiles at multiples of their size, and the first one
    needs no test for its left end.
    """
    if isinstance(origin, int) and origin == 0:
        return intervals
    return [
        (larger(begin, 0) - origin, larger(end, 0) - origin, larger(full, 0) - origin, larger(full_end, 0) - origin)
        for begin, end, full, full_end in intervals
    ]


def intervals_around(intervals: list[list[tuple[Any, Any, Any, Any]]]) -> list[tuple[Any, Any, Any, Any]]:
    """What `visit` takes to visit all tiles of several query tiles, whose intervals these are: all in one order.

    A query tile's intervals are as many as another's; of each the smallest one is made that has those of all. Tiles
    come in one order, so that each query tile's own are visited in their order, with others between them.
    """
    found = []
    highest: Any = 0
    for same in zip(*intervals, strict=True):
        begin, end, *_ = same[0]
        for low, high, *_ in same[1:]:
            there, other = end > begin, high > low
            begin, end = (
                choose(there, choose(other, smaller(begin, low), begin), low),
                choose(there, choose(other, larger(end, high), end), high),
            )
        # where one query tile has no such interval, another's lower one may end above it
        there = end > begin
        end = choose(there, larger(end, highest), end)
        highest = choose(there, end, highest)
        found.append((begin, end, 0, 0))
    return found


def listed_tiles(row: Any, partial: Any, full: Any, some: KvPart | Portion = WHOLE) -> TileSequence:
    """Tiles of a list: `partial` ones that need a test, then `full` ones that don't. `row` has at least one entry."""
    tested, tests = some.of(0, partial)
    free, frees = some.of(partial, full)
    from_tested = choose(tests > 0, 1, 0)
    from_free = choose((frees > 0) & (from_tested == 0), 1, 0)
    first = row[choose(from_tested == 1, tested, choose(from_free == 1, free, 0))]
    return TileSequence(
        first,
        tests + frees,
        [
            ListedRun(row, tested + from_tested, tests - from_tested, True, from_tested),
            ListedRun(row, free + from_free, frees - from_free, False, from_free),
        ],
    )
