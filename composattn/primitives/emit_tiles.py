"""Which tiles a work tile visits, found inside a kernel: from the mask's bands, or from lists on the device.

`kv_tiles_of` answers for the query tiles of a forward, `query_tiles_of` for the kv tiles of a backward. Lists are
captured tensors of the kernel like those that the mods read (`captured` of its plan).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from ..analysis.tile_lists import KeyLists, QueryLists
from ..graph.expr import walk
from .emit import Leaves, Mods
from .emit_backward import BackwardMods
from .interval_shape import IntervalShape
from .kv_tiles import WHOLE, KvPart, TileSequence, counted_from, intervals_around, listed_tiles, visit
from .q_tiles import ListedQueryRun, QueryRun, query_runs
from .stream_k import Portion
from .values import Fixed, choose, larger, smaller


@dataclasses.dataclass
class BandTiles(Fixed):
    """Tiles of the intervals that the mods compute at each work tile."""

    mods: Mods
    shapes: tuple[IntervalShape, ...]
    tile_n: int

    def of(self, leaves: Leaves, m: Any, some: KvPart | Portion = WHOLE, origin: Any = 0) -> TileSequence:
        """The kv tiles of query tile `m`, or a part of them, from `origin` on; `leaves` are those of the work tile."""
        intervals = counted_from(origin, self.mods.intervals(leaves))
        return visit(intervals, self.shapes, _less(leaves.kv_len, origin), self.tile_n, some)

    def alike(self) -> bool:
        """Whether all query tiles of a sequence visit the same tiles."""
        ends = (end for interval in self.mods.bounds for end in interval.ends)
        return not any(n.op == "index" and n.attr in ("first", "last") for end in ends for n in walk(end))

    def of_all(self, leaves: list[Leaves], some: KvPart | Portion = WHOLE) -> TileSequence:
        """The kv tiles of several neighbouring query tiles; what it says of tests means nothing."""
        intervals = intervals_around([self.mods.intervals(each) for each in leaves])
        shapes = tuple(dataclasses.replace(shape, full=False) for shape in self.shapes)
        return visit(intervals, shapes, leaves[0].kv_len, self.tile_n, some)


def _less(length: Any, origin: Any) -> Any:
    return length if isinstance(origin, int) and origin == 0 else length - origin


@dataclasses.dataclass
class ListedTiles(Fixed):
    """Tiles of `KeyLists`, which are the captured tensors `slot` and `slot + 1` of the kernel."""

    slot: int

    def of(self, leaves: Leaves, m: Any, some: KvPart | Portion = WHOLE) -> TileSequence:
        """The tiles that query tile `m` visits, see `BandTiles.of`."""
        counts, tiles = leaves.captured[self.slot], leaves.captured[self.slot + 1]
        b, h = _entry(tiles, leaves)
        m = smaller(m, tiles.shape[2] - 1)  # inside the list, whatever the lengths are
        return listed_tiles(tiles[b, h, m, None], counts[0, b, h, m], counts[1, b, h, m], some)


@dataclasses.dataclass
class Shared(Fixed):
    """The kv tiles that several query tiles go over together: `all`, and those that each one needs, in `own`.

    None: each needs all of them.
    """

    all: TileSequence
    own: list[TileSequence] | None = None

    def of(self, t: int) -> TileSequence:
        return self.all if self.own is None else self.own[t]

    def needs(self, t: int, tile: Any) -> Any:
        """Whether query tile `t` needs a tile of `all`; known when compiling where each needs all."""
        return True if self.own is None else self.own[t].has(tile)

    def together(self) -> tuple[Any, Any]:
        """[start, stop) of `all`, counted from 0, in which each query tile needs every tile and has begun before.

        Of masks with one interval; of others none, which is the end of all.
        """
        count = self.all.count
        if self.own is None or len(self.all.spans) > 1:
            return count, count
        spans = [own.spans[0] for own in self.own]
        low = functools.reduce(larger, (start for start, _ in spans))
        high = functools.reduce(smaller, (stop - 1 for _, stop in spans))
        there = high > low
        return choose(there, self.all.first + 1 - high, count), choose(there, self.all.first + 1 - low, count)


def kv_tiles_of(
    mods: Mods, lists: KeyLists | None, shapes: tuple[IntervalShape, ...], tile_n: int
) -> BandTiles | ListedTiles:
    """Who knows the kv tiles of a query tile."""
    return BandTiles(mods, shapes, tile_n) if lists is None else ListedTiles(mods.capture_slot[lists.captures[0]])


@dataclasses.dataclass
class BandQueries(Fixed):
    """Query tiles of the intervals that the mods compute at each tile of keys."""

    mods: BackwardMods
    tile_m: int

    def of(self, leaves: Leaves, n: Any, queries: Any) -> list[QueryRun]:
        """The tiles of `queries`, a `Sequence`, of kv tile `n`; `leaves` are those of the tile of keys and a head."""
        intervals = counted_from(queries.origin, self.mods.intervals(leaves))
        return query_runs(intervals, queries.rows, self.tile_m, padding_is_harmless=_padding_is_harmless(self.mods))


@dataclasses.dataclass
class ListedQueries(Fixed):
    """Query tiles of `QueryLists`, which are the captured tensors `slot` to `slot + 2` of the kernel."""

    mods: BackwardMods
    tile_m: int
    slot: int

    def of(self, leaves: Leaves, n: Any, queries: Any) -> list[ListedQueryRun]:
        """The runs of queries that key tile `n` visits, see `BandQueries.of`."""
        counts, tiles, before = leaves.captured[self.slot : self.slot + 3]
        b, h = _entry(tiles, leaves)
        n = smaller(n, tiles.shape[2] - 1)  # inside the list, whatever the lengths are
        harmless = _padding_is_harmless(self.mods)
        whole = tiles.shape[3] if harmless else leaves.q_len // self.tile_m
        return [ListedQueryRun(tiles[b, h, n, None], before[b, h, n, None], counts[b, h, n], whole)]


def query_tiles_of(mods: BackwardMods, lists: QueryLists | None, tile_m: int) -> BandQueries | ListedQueries:
    """Who knows the query tiles of a kv tile."""
    if lists is None:
        return BandQueries(mods, tile_m)
    return ListedQueries(mods, tile_m, mods.mods.capture_slot[lists.captures[0]])


def _padding_is_harmless(mods: BackwardMods) -> bool:
    """Rows beyond the last query are 0 in Q and dO and have P = 0; a score mod may turn their scores to NaN."""
    return mods.score is None


def _entry(lists: Any, leaves: Leaves) -> tuple[Any, Any]:
    """Batch and head of the list; one list serves all batches, or heads, where there is one."""
    return smaller(leaves.b, lists.shape[0] - 1), smaller(leaves.h, lists.shape[1] - 1)
