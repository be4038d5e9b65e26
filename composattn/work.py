"""The query tiles of a call and the order in which they are computed, as a table on the device.

Longest first: the tiles that visit most keys start first, so that none of them is left over at the end (Graham 1969).
How many keys a tile visits comes from the mask's intervals; nothing here waits for the device, and nothing is computed
again while the tensors that it comes from are the same and unwritten. Results never depend on the order.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch

from .graph.bands import TileInterval
from .graph.derived import Derived
from .graph.evaluate import Env, evaluate_all
from .graph.expr import Dep, Expr, inputs
from .graph.keeping import may_keep
from .problem import Problem
from .schedule import Order
from .sequences import Sequences


class QueryTiles(NamedTuple):
    """The query tiles of all sequences: tile `m` of sequence `b`, -1 where there are fewer tiles than entries.

    Each an int64 tensor (entries,), or a number where it is the same for all. (Or a grid of sequences and tiles.)
    """

    b: torch.Tensor
    m: torch.Tensor
    q_len: torch.Tensor | int
    kv_len: torch.Tensor | int


def query_tiles(problem: Problem, sequences: Sequences, tile_m: int) -> QueryTiles:
    """The query tiles of a call, by sequence; of packed queries as many entries as there can be at most."""
    q_lens, kv_lens = lengths(problem, sequences)
    if problem.layout.q == "dense":
        tiles = -(-problem.q_len // tile_m)
        at = torch.arange(problem.batch * tiles, device=problem.device)
        b = at // tiles
        return QueryTiles(b, at - b * tiles, q_lens, kv_lens if isinstance(kv_lens, int) else kv_lens[b])
    tiles = (q_lens + (tile_m - 1)) // tile_m
    stops = tiles.cumsum(0)
    at = torch.arange(problem.q_len // tile_m + problem.batch, device=problem.device)
    b = torch.searchsorted(stops, at, right=True).clamp_(max=problem.batch - 1)
    m = at - (stops - tiles)[b]
    kv_len = kv_lens if isinstance(kv_lens, int) else kv_lens[b]
    return QueryTiles(torch.where(at < stops[-1], b, -1), m, q_lens[b], kv_len)


def lengths(problem: Problem, sequences: Sequences) -> tuple[Any, Any]:
    """How many queries and how many keys each sequence has: int64 (B,), or one number for all."""
    cu_q, cu_k, used_q, used_k, _ = sequences
    q_lens = problem.q_len if cu_q is None else (cu_q.diff() if used_q is None else used_q).long()
    kv_lens = used_k.long() if used_k is not None else problem.kv_len if cu_k is None else cu_k.diff().long()
    return q_lens, kv_lens


def visited_by_bands(
    tiles: QueryTiles, intervals: Iterable[TileInterval], heads: int, tile_m: int, tile_n: int
) -> torch.Tensor:
    """How many tiles of keys each query tile visits, summed over the heads if they differ: int64, shaped as `tiles`."""
    ends = _ends(intervals)
    first = tiles.m * tile_m
    index: dict[str, Any] = {
        "b": tiles.b.clamp(min=0),
        "first": first,
        "last": (first + (tile_m - 1)).clamp(max=tiles.q_len - 1),
        "q_len": tiles.q_len,
        "kv_len": tiles.kv_len,
        "h": 0,
    }
    if any(end.deps & Dep.H for end in ends):
        index["h"] = torch.arange(heads, device=first.device).view(-1, *(1 for _ in tiles.m.shape))
    values = evaluate_all(ends, Env(index=index, device=first.device))
    total: Any = 0
    for begin, end in zip(values[::2], values[1::2], strict=True):
        begin, end = begin.clamp(min=0), end.clamp(max=tiles.kv_len)
        count = _whole(end + (tile_n - 1), tile_n) - _whole(begin, tile_n)
        total = total + count * (end > begin)
    total = total.sum(0) if total.ndim > tiles.m.ndim else total
    return total.expand_as(tiles.m)


def _whole(positions: torch.Tensor, tile: int) -> torch.Tensor:
    """How many whole tiles lie before the positions."""
    # a division takes five times as long as a shift: 17 µs of 8192 positions on a CPU
    return positions // tile if tile & (tile - 1) else positions >> (tile.bit_length() - 1)


def visited_by_lists(tiles: QueryTiles, counts: torch.Tensor) -> torch.Tensor:
    """The same, from the counts of `KeyLists`, or of `QueryLists` for tiles of keys."""
    of_all_heads = counts.sum((0, 2)) if counts.ndim == 4 else counts.sum(1)  # (B|1, Tq)
    b = tiles.b.clamp(min=0, max=of_all_heads.shape[0] - 1)
    return of_all_heads[b, tiles.m.clamp(max=of_all_heads.shape[1] - 1)]


def in_order(tiles: QueryTiles, work: torch.Tensor | None, order: Order) -> torch.Tensor:
    """int32 (entries, 2): sequence and number of each query tile, by `work` unless `in_order`; sequence -1: no tile."""
    table = torch.stack([tiles.b, tiles.m], 1).to(torch.int32)
    if work is None or order == "in_order":
        return table
    work = work.amax() - work if order == "shortest_first" else work
    # stable: tiles of equal work stay by sequence, whose keys are in L2 already
    return table[torch.where(tiles.b < 0, -1, work).argsort(descending=True, stable=True)]


class WorkTables:
    """The work tables of one form of calls, each made when its sequences are first seen or were written to since.

    `intervals` None: lists of tiles say what is visited, and their counts are given at each call.
    """

    def __init__(
        self, problem: Problem, intervals: tuple[TileInterval, ...] | None, tile_m: int, tile_n: int, order: Order
    ) -> None:
        self.problem, self.intervals, self.tile_m, self.tile_n, self.order = problem, intervals, tile_m, tile_n, order
        self.captures, self.scalars = inputs(*_ends(intervals))
        self.made: OrderedDict[tuple[int, ...], tuple[list[torch.Tensor], list[Hashable], torch.Tensor]] = OrderedDict()

    def __call__(self, sequences: Sequences, counts: torch.Tensor | None = None) -> torch.Tensor:
        """The table for `sequences`: int32 (entries, 2), see `in_order`."""
        if self.problem.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self._make(sequences, counts)  # a part of the graph: a replay must see the lengths of its time
        sources = [t for t in (*sequences, counts) if t is not None]
        key = tuple([id(t) for t in sources])  # which nothing else can have as long as `made` holds them
        stamp: list[Hashable] = [_version(t) for t in sources]
        if self.captures:
            stamp += [c.version if isinstance(c, Derived) else _version(c.tensor) for c in self.captures]
        if self.scalars:
            stamp += [s.value for s in self.scalars]
        found = self.made.get(key)
        if found is not None and found[1] == stamp:
            return found[2]
        table = self._make(sequences, counts)
        if not may_keep():
            return table
        self.made[key] = (sources, stamp, table)
        self.made.move_to_end(key)
        if len(self.made) > MOST_TABLES:
            self.made.popitem(last=False)
        return table

    def _make(self, sequences: Sequences, counts: torch.Tensor | None) -> torch.Tensor:
        with torch.no_grad():
            tiles = query_tiles(self.problem, sequences, self.tile_m)
            if self.order == "in_order":
                return in_order(tiles, None, self.order)
            if counts is not None:
                return in_order(tiles, visited_by_lists(tiles, counts), self.order)
            sizes = (self.problem.q_heads, self.tile_m, self.tile_n)
            return in_order(tiles, visited_by_bands(tiles, self.intervals or (), *sizes), self.order)


def _version(tensor: torch.Tensor) -> Hashable:
    # one unlike any other for a tensor that counts no writes: it is read every time
    return object() if tensor.is_inference() else tensor._version


_forms: weakref.WeakValueDictionary[Hashable, WorkTables] = weakref.WeakValueDictionary()
MOST_TABLES = 8  # of one form: as many micro-batches may be under way


def work_tables(
    problem: Problem, intervals: tuple[TileInterval, ...] | None, tile_m: int, tile_n: int, order: Order
) -> WorkTables:
    """The `WorkTables` of this form: layers of one mask share them."""
    sizes = (problem.batch, problem.q_heads, problem.q_len, problem.kv_len, problem.device, problem.layout)
    key = (*sizes, intervals is None, *_ends(intervals), tile_m, tile_n, order)
    found = _forms.get(key)
    if found is None:
        found = _forms[key] = WorkTables(problem, intervals, tile_m, tile_n, order)
    return found


def ascends(problem: Problem, intervals: tuple[TileInterval, ...], tile_m: int, tile_n: int) -> bool | None:
    """Whether later query tiles of dense queries never visit less; None where tensors or run-time numbers decide."""
    visits = _visits(problem, intervals, tile_m, tile_n)
    return None if visits is None else bool((visits[:, 1:] >= visits[:, :-1]).all())


def descends(problem: Problem, intervals: tuple[TileInterval, ...], tile_m: int, tile_n: int) -> bool | None:
    """Whether later query tiles of dense queries never visit more; None where tensors or run-time numbers decide."""
    visits = _visits(problem, intervals, tile_m, tile_n)
    return None if visits is None else bool((visits[:, 1:] <= visits[:, :-1]).all())


def _visits(problem: Problem, intervals: tuple[TileInterval, ...], tile_m: int, tile_n: int) -> torch.Tensor | None:
    """How many tiles of keys each query tile visits: (B|1, tiles), on the host."""
    ends = _ends(intervals)
    if any(inputs(*ends)):
        return None
    # of keys in pages each sequence may have less, and all its tiles with it
    batch = problem.batch if any(end.deps & Dep.B for end in ends) else 1
    b, m = torch.arange(batch)[:, None], torch.arange(-(-problem.q_len // tile_m)).expand(batch, -1)
    return visited_by_bands(QueryTiles(b, m, problem.q_len, problem.kv_len), intervals, problem.q_heads, tile_m, tile_n)


def _ends(intervals: Iterable[TileInterval] | None) -> list[Expr]:
    return [end for i in intervals or () for end in (i.begin, i.end)]
