"""The query tiles of a call and the order in which they are computed, as a table on the device.

Longest first: the tiles that visit most keys start first, so that none of them is left over at the end (Graham 1969).
Or the longest sequences first, each with all its tiles, so that those which run together meet the same rows in L2.
How many keys a tile visits comes from the mask's intervals; nothing here waits for the device, and nothing is computed
again while the tensors that it comes from are the same and unwritten. Results never depend on the order.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.functional import pad

from ....analysis.bands import TileInterval
from ....analysis.derived import derives_anew, stamps, value_of
from ....analysis.refreshed import Refreshed, may_cache, version
from ....analysis.streams import has_streams, stream_handle
from ....analysis.strips import Strips
from ....call.problem import Problem
from ....call.schedule import Order
from ....call.sequences import NO_SEQUENCES, Sequences
from ....graph.evaluate import Env, Repeated
from ....graph.expr import Capture, Dep, Expr, captures, inputs
from .segments import Segments

TableOrder = Order | Literal["longest_sequences_first", "last_keys_first"]
WITHOUT_WORK = ("in_order", "longest_sequences_first", "last_keys_first")  # it does not matter what tiles visit


class QueryTiles(NamedTuple):
    """The query tiles of all sequences: tile `m` of sequence `b`, int64 (entries,).

    `q_lens`: how many queries each sequence has, int (B,), or one number for all. Of packed queries there may be fewer
    tiles than entries: `missing` says where, and `b` is the number of sequences there.
    """

    b: torch.Tensor
    m: torch.Tensor
    q_lens: torch.Tensor | int
    missing: torch.Tensor | None = None


def entries(problem: Problem, tile_m: int, rows: int | None = None) -> int:
    """How many query tiles there are, of packed queries at most, `rows` of them (None: as the problem says)."""
    if problem.layout.q == "dense":
        return problem.batch * -(-problem.q_len // tile_m)
    return (problem.q_len if rows is None else rows) // tile_m + problem.batch


def query_tiles(problem: Problem, sequences: Sequences, tile_m: int, rows: int | None = None) -> QueryTiles:
    """The query tiles of a call, by sequence."""
    at = torch.arange(entries(problem, tile_m, rows), device=problem.device)
    if sequences.cu_q is None:
        tiles = -(-problem.q_len // tile_m)
        return QueryTiles(at // tiles, at % tiles, problem.q_len)
    lengths = sequences.cu_q.diff() if sequences.used_q is None else sequences.used_q
    before = pad(((lengths + (tile_m - 1)) // tile_m).cumsum(0), (1, 0))
    b = torch.searchsorted(before[1:], at, right=True)
    return QueryTiles(b, at - before[b], lengths, b == problem.batch)


def kv_lengths(problem: Problem, sequences: Sequences) -> Any:
    """How many keys each sequence has: int (B,), or one number for all."""
    if sequences.used_k is not None:
        return sequences.used_k
    return problem.kv_len if sequences.cu_k is None else sequences.cu_k.diff()


class TileVisits:
    """How many tiles of keys each query tile visits, by the mask's intervals.

    Called again, it looks at captured tensors and run-time numbers again, not at `sequences`.
    """

    def __init__(
        self,
        problem: Problem,
        sequences: Sequences,
        tiles: QueryTiles,
        intervals: tuple[TileInterval, ...],
        tile_m: int,
        tile_n: int,
    ) -> None:
        self.tiles, self.tile_n = tiles, tile_n
        b = tiles.b if sequences.cu_q is None else tiles.b.clamp(max=problem.batch - 1)
        q_len = _of(tiles.q_lens, b)
        self.kv_len = q_len if sequences.keys_lie_as_queries else _of(kv_lengths(problem, sequences), b)
        first = tiles.m * tile_m
        index: dict[str, Any] = {
            "b": b, "first": first, "last": (first + (tile_m - 1)).clamp(max=q_len - 1), "h": 0,
            "q_len": q_len, "kv_len": self.kv_len,
        }  # fmt: skip
        if any(end.deps & Dep.H for end in _ends(intervals)):
            index["h"] = torch.arange(problem.q_heads, device=first.device).view(-1, *(1 for _ in tiles.m.shape))
        self.from_zero = [i.begin.is_const and i.begin.attr <= 0 for i in intervals]
        wanted = [e for i, zero in zip(intervals, self.from_zero, strict=True) for e in (i.begin, i.end)[zero:]]
        self.ends = Repeated(wanted, Env(index=index, device=first.device))

    def __call__(self) -> torch.Tensor:
        """Summed over the heads if they differ: int64, shaped as the tiles."""
        values = iter(self.ends())
        counts = [self._before(next(values)) if zero else self._between(*islice(values, 2)) for zero in self.from_zero]
        total = functools.reduce(torch.add, counts)
        total = total.sum(0) if total.ndim > self.tiles.m.ndim else total
        return total.expand_as(self.tiles.m)

    def _before(self, end: torch.Tensor) -> torch.Tensor:
        return _whole(end.clamp(max=self.kv_len) + (self.tile_n - 1), self.tile_n).clamp_(min=0)

    def _between(self, begin: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        begin, end = begin.clamp(min=0), end.clamp(max=self.kv_len)
        return (_whole(end + (self.tile_n - 1), self.tile_n) - _whole(begin, self.tile_n)).mul_(end > begin)


def _of(lengths: Any, b: torch.Tensor) -> Any:
    """The lengths of sequences `b`: int64, or one number for all."""
    return lengths if isinstance(lengths, int) else lengths[b].long()


def _whole(positions: torch.Tensor, tile: int) -> torch.Tensor:
    """How many whole tiles lie before the positions."""
    # a division takes five times as long as a shift: 17 µs of 8192 positions on a CPU
    return positions // tile if tile & (tile - 1) else positions >> (tile.bit_length() - 1)


def visited_by_lists(tiles: QueryTiles, counts: torch.Tensor) -> torch.Tensor:
    """Visited tiles from the counts of `KeyLists`, or of `QueryLists` for tiles of keys; see `TileVisits`."""
    of_all_heads = counts.sum((0, 2)) if counts.ndim == 4 else counts.sum(1)  # (B|1, Tq)
    return of_all_heads[tiles.b.clamp(max=of_all_heads.shape[0] - 1), tiles.m.clamp(max=of_all_heads.shape[1] - 1)]


def table_of(tiles: QueryTiles) -> torch.Tensor:
    """int32 (entries, 2): sequence and number of each query tile, in their own order; sequence -1: no tile."""
    b = tiles.b if tiles.missing is None else tiles.b.masked_fill(tiles.missing, -1)
    return torch.stack([b, tiles.m], 1).to(torch.int32)


def sorted_tiles(tiles: QueryTiles, work: torch.Tensor, order: TableOrder) -> torch.Tensor:
    """`table_of` the tiles, by their work."""
    work = work.amax() - work if order == "shortest_first" else work
    work = work if tiles.missing is None else work.masked_fill(tiles.missing, -1)
    # stable: tiles of equal work stay by sequence, whose keys are in L2 already
    return table_of(tiles)[work.argsort(descending=True, stable=True)]


def by_sequence(tiles: QueryTiles, order: TableOrder) -> torch.Tensor:
    """`table_of` the tiles in one of the orders `WITHOUT_WORK`."""
    if order == "last_keys_first" and isinstance(tiles.q_lens, int):  # those of all sequences, then those before them
        return table_of(tiles)[tiles.m.argsort(descending=True, stable=True)]
    if order == "in_order" or isinstance(tiles.q_lens, int):
        return table_of(tiles)
    rows = tiles.q_lens[tiles.b.clamp(max=len(tiles.q_lens) - 1)].long()
    if order == "last_keys_first":
        missing = None if tiles.missing is None else tiles.missing.flip(0)
        tiles, rows = QueryTiles(tiles.b.flip(0), tiles.m.flip(0), tiles.q_lens, missing), rows.flip(0)
    return sorted_tiles(tiles, rows, order)


class WorkTables:
    """The work tables of one form of calls, each made when its sequences are first seen or were written to since.

    Each thread has its own, as it does lists of tiles.
    `intervals` None: lists of tiles say what is visited, and their counts are given at each call.
    `strips`: whose sequences share gradients of keys.
    """

    def __init__(
        self,
        problem: Problem,
        intervals: tuple[TileInterval, ...] | None,
        tile_m: int,
        tile_n: int,
        order: TableOrder,
        strips: Strips | None = None,
    ) -> None:
        self.strips = strips
        self.problem, self.intervals, self.tile_m, self.tile_n, self.order = problem, intervals, tile_m, tile_n, order
        self.by_work = order not in WITHOUT_WORK
        self.captures, self.scalars = inputs(*_ends(intervals if self.by_work else None))
        self.dense: dict[
            int | None, TileVisits
        ] = {}  # by the stream, where neither the tiles nor the lengths ever change
        self.lying: dict[int | None, torch.Tensor] = {}  # by the stream
        self._own = _ThreadTables()
        self._streams_on = problem.device if has_streams(problem.device) else None

    @property
    def made(self) -> OrderedDict[Hashable, Refreshed[torch.Tensor | None]]:
        """The tables of this thread, by the sequences' tensors."""
        return self._own.made

    def __call__(
        self,
        sequences: Sequences = NO_SEQUENCES,
        counts: torch.Tensor | None = None,
        rows: int | None = None,
        given: Mapping[Capture, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The table for `sequences`: int32 (entries, 2), see `table_of`; of packed queries there are `rows`.

        `given`: for captured tensors, by the call.
        """
        if derives_anew():
            return self._make(sequences, counts, rows)
        if self.order == "in_order" and sequences.cu_q is None and not self.captures:
            return self._as_they_lie()
        sources: list[torch.Tensor] = []
        if sequences is not NO_SEQUENCES or counts is not None:
            read = (*sequences, counts) if self.by_work else sequences.queries
            sources = [t for t in read if t is not None]
        key = (rows, *[t._cdata for t in sources])  # which no others have as long as the table's entry holds these
        stamp: list[Hashable] = stamps(self.captures)
        if sources:
            stamp += map(version, sources)
        if self.scalars:
            stamp += [s.value for s in self.scalars]
        made = self._own.made
        kept = made.get(key)
        if kept is not None:
            if len(made) > 1:
                made.move_to_end(key)
            return kept(stamp, self._make, sources, sequences, counts, rows)  # type: ignore[return-value]
        kept = Refreshed(None, device=self.problem.device)
        table = kept(stamp, self._make, sources, sequences, counts, rows)
        if kept.value is not None:
            made[key] = kept
            if len(made) > MOST_TABLES:
                made.popitem(last=False)
        return table  # type: ignore[return-value]

    def hangs_on_tensors(self, counted: bool) -> bool:
        """Whether tables of dense calls are others where captured tensors hold others, `counted`: or lists do."""
        return self.by_work and (counted or bool(self.captures))

    def _stream(self) -> int | None:
        return None if self._streams_on is None else stream_handle(self._streams_on)

    def _as_they_lie(self) -> torch.Tensor:
        """Dense tiles in their own order, which hangs on no tensor: kept also by calls that keep nothing else."""
        stream = self._stream()
        found = self.lying.get(stream)
        if found is None:
            found = self.lying[stream] = self._make(NO_SEQUENCES, None, None)
        return found

    def _make(self, sequences: Sequences, counts: torch.Tensor | None, rows: int | None) -> torch.Tensor:
        with torch.no_grad():
            table = self._ordered(sequences, counts, rows)
            if self.strips is None:
                return table
            # whose gradients strips share: those that write before those that wait for them
            return table[self.strips.adds(table[:, 0] % self.strips.count).argsort(stable=True)]

    def _ordered(self, sequences: Sequences, counts: torch.Tensor | None, rows: int | None) -> torch.Tensor:
        if self.by_work and counts is None:
            visits = self._visits(sequences, rows)
            return sorted_tiles(visits.tiles, visits(), self.order)
        tiles = query_tiles(self.problem, sequences, self.tile_m, rows)
        if not self.by_work or counts is None:
            return by_sequence(tiles, self.order)
        return sorted_tiles(tiles, visited_by_lists(tiles, counts), self.order)

    def _visits(self, sequences: Sequences, rows: int | None) -> TileVisits:
        stream = self._stream()
        found = None if derives_anew() else self.dense.get(stream)
        if found is not None:
            return found
        tiles = query_tiles(self.problem, sequences, self.tile_m, rows)
        visits = TileVisits(self.problem, sequences, tiles, self.intervals or (), self.tile_m, self.tile_n)
        if may_cache() and not derives_anew() and all(t is None for t in sequences):
            self.dense[stream] = visits
        return visits


class SegmentTables(WorkTables):
    """`WorkTables` of tiles that begin with segments: int32 (entries, 6), see `Segments.tiles`.

    The work of a tile is how many keys its last row sees, or of keys how many queries see the last one.
    Of keys it has metadata of what they see too, see `Segments.tiles_of_keys`.
    """

    def __init__(self, problem: Problem, tile: int, order: TableOrder, segments: Segments, of_keys: bool) -> None:
        super().__init__(problem, None, tile, tile, order)
        self.captures = segments.layout.sources
        self.segments, self.of_keys = segments, of_keys
        self.tiles = segments.tiles_of_keys(tile) if of_keys else segments.tiles(tile)

    def hangs_on_tensors(self, counted: bool) -> bool:
        return True

    def __call__(
        self,
        sequences: Sequences = NO_SEQUENCES,
        counts: torch.Tensor | None = None,
        rows: int | None = None,
        given: Mapping[Capture, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The table; one for each call where copies hold what captured tensors held before, as a backward may get."""
        layout = None if given is None else value_of(self.segments.layout, given)
        if layout is None or layout is self.segments.layout.kept:
            return super().__call__()
        with torch.no_grad():
            return self._sorted(self.tiles.recipe(layout), layout)

    def _make(self, sequences: Sequences, counts: torch.Tensor | None, rows: int | None) -> torch.Tensor:
        self.tiles.refresh()
        return self._sorted(self.tiles.tensor, self.segments.layout.tensor)

    def _sorted(self, tiles: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        if self.order == "in_order":
            return tiles.clone()
        if self.order == "last_keys_first":
            tiles = tiles.flip(0)
        rows = tiles[:, 3] - tiles[:, 2]  # of the segment; none where there is no tile
        work = self.segments.seen(layout)[self.of_keys][tiles[:, 5]] if self.by_work else rows
        return tiles[work.argsort(descending=self.order != "shortest_first", stable=True)]


class _ThreadTables(threading.local):
    def __init__(self) -> None:
        self.made: OrderedDict[Hashable, Refreshed[torch.Tensor | None]] = OrderedDict()


_forms: weakref.WeakValueDictionary[Hashable, WorkTables] = weakref.WeakValueDictionary()
MOST_TABLES = 8  # of one form: as many micro-batches may be under way


def work_tables(
    problem: Problem,
    intervals: tuple[TileInterval, ...] | None,
    tile_m: int,
    tile_n: int,
    order: TableOrder,
    strips: Strips | None = None,
) -> WorkTables:
    """The `WorkTables` of this form: layers of one mask share them."""
    sizes = (problem.batch, problem.q_heads, problem.q_len, problem.kv_len, problem.device, problem.layout)
    key = (*sizes, intervals is None, *_ends(intervals), tile_m, tile_n, order, strips)
    found = _forms.get(key)
    if found is None:
        found = _forms[key] = WorkTables(problem, intervals, tile_m, tile_n, order, strips)
    return found


def segment_tables(problem: Problem, tile: int, order: TableOrder, segments: Segments, of_keys: bool) -> SegmentTables:
    """The `SegmentTables` of tiles of queries, or of keys, which layers of one mask share."""
    key = (segments.layout, tile, order, of_keys)
    found = _forms.get(key)
    if found is None:
        found = _forms[key] = SegmentTables(problem, tile, order, segments, of_keys)
    return found  # type: ignore[return-value]


def ascends(problem: Problem, intervals: tuple[TileInterval, ...], tile_m: int, tile_n: int) -> bool | None:
    """Whether later query tiles of dense queries never visit less; None where tensors or run-time numbers decide."""
    visits = fixed_visits(problem, intervals, tile_m, tile_n)
    return None if visits is None else bool((visits[:, 1:] >= visits[:, :-1]).all())


def descends(problem: Problem, intervals: tuple[TileInterval, ...], tile_m: int, tile_n: int) -> bool | None:
    """Whether later query tiles of dense queries never visit more; None where tensors or run-time numbers decide."""
    visits = fixed_visits(problem, intervals, tile_m, tile_n)
    return None if visits is None else bool((visits[:, 1:] <= visits[:, :-1]).all())


def fixed_visits(
    problem: Problem, intervals: tuple[TileInterval, ...], tile_m: int, tile_n: int
) -> torch.Tensor | None:
    """How many tiles of keys each query tile visits: (B|1, tiles), on the host; None where tensors decide."""
    return None if any(inputs(*_ends(intervals))) else visits_now(problem, intervals, tile_m, tile_n)


def visits_now(problem: Problem, intervals: tuple[TileInterval, ...], tile_m: int, tile_n: int) -> torch.Tensor | None:
    """Visited tiles with run-time numbers as they are now; None where captured tensors decide."""
    if captured_decide(intervals):
        return None
    ends = _ends(intervals)
    # of keys in pages each sequence may have less, and all its tiles with it
    batch = problem.batch if any(end.deps & Dep.B for end in ends) else 1
    b, m = (torch.arange(n, device="cpu") for n in (batch, -(-problem.q_len // tile_m)))
    b, m = b[:, None], m.expand(batch, -1)
    tiles = QueryTiles(b, m, problem.q_len)
    return TileVisits(problem, NO_SEQUENCES, tiles, intervals, tile_m, tile_n)()


def captured_decide(intervals: tuple[TileInterval, ...]) -> bool:
    """Whether captured tensors say what is visited, as documents do; run-time numbers move a mask, or set its width."""
    return bool(captures(*_ends(intervals)))


def _ends(intervals: tuple[TileInterval, ...] | None) -> list[Expr]:
    return [end for i in intervals or () for end in (i.begin, i.end)]
