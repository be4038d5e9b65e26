"""Which kv positions a query tile can see, as expressions that a kernel evaluates once per tile.

The contract with every backend is `TileInterval`: four int32 expressions in the leaves `b`, `h`, `first`, `last`
(first and last query row of the tile, both inside the sequence), `q_len`, `kv_len`, scalars and captured tensors:

    begin, end              every visible kv of the tile lies in [begin, end)
    full_begin, full_end    every kv in [full_begin, full_end) is visible from every row of the tile: no test

Ends may lie outside [0, kv_len], and ranges may be inverted (empty: end <= begin): whoever loops clamps. A mask is a
tuple of such intervals; in every tile, begins ascend and so do ends (as clamped), empty intervals included. A kv tile
that two intervals touch is visited once, and partial tiles are tested with the whole mask, so overlaps cost nothing
and are never wrong. Captures in the ends may be `Derived` from those of the mask: `derived.refresh` them before a
launch.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from ..graph.expr import Expr, const, index
from ..graph.linear import at_most, build, forget, interval_end, larger, linear, smaller
from ..graph.ops import all_of, apply
from ..graph.rebuilt import substitute
from .row_limits import ALL_KEYS, RowLimits, most_keys, without_gaps
from .row_range import ROW, TILE, RowRange
from .saturated import saturated
from .solve import Conjunction, Conjunctions, Opaque, Residue, RowCondition, conjunctions, rows_where, tightened


@dataclass(frozen=True, eq=False)
class TileInterval:
    """One run of kv positions that a query tile visits; see the module's page for the four ends."""

    begin: Expr
    end: Expr
    full_begin: Expr
    full_end: Expr

    def __repr__(self) -> str:
        return f"[{self.begin}, {self.end}) full [{self.full_begin}, {self.full_end})"

    @property
    def ends(self) -> tuple[Expr, Expr, Expr, Expr]:
        return self.begin, self.end, self.full_begin, self.full_end

    @property
    def never_full(self) -> bool:
        """Whether no kv is known to be visible from all rows of any tile."""
        ends = self.full_begin, self.full_end
        return all(e.is_const for e in ends) and ends[1].attr <= ends[0].attr

    @property
    def tells_nothing(self) -> bool:
        return self.begin is _ZERO and self.end is _KV_LEN and self.never_full

    def mapped(self, leaves: dict[Expr, Expr]) -> TileInterval:
        """With leaves replaced."""
        return TileInterval(*(substitute(e, leaves) for e in self.ends))


def exchanged(intervals: tuple[TileInterval, ...]) -> tuple[TileInterval, ...]:
    """With queries and keys exchanged, as the mirrored problem has them."""
    return tuple(i.mapped({index("q_len"): index("kv_len"), index("kv_len"): index("q_len")}) for i in intervals)


_ZERO, _Q, _KV_LEN = const(0), index("q"), index("kv_len")

EVERYTHING = (TileInterval(_ZERO, _KV_LEN, _ZERO, _KV_LEN),)
"""No mask: all of kv, all of it without a test."""

EVERY_QUERY = tuple(i.mapped({_KV_LEN: index("q_len")}) for i in EVERYTHING)
"""The same for a tile of keys."""

NOTHING = (TileInterval(_ZERO, _ZERO, _ZERO, _ZERO),)
"""A mask that no pair passes."""

MOST_INTERVALS = 4  # loops that a kernel unrolls; more are joined, the parts between them tested


@dataclass(frozen=True)
class Residual:
    """What bounds on kv leave to be tested: a condition that nothing is known of? And the largest step of kv."""

    opaque: bool
    step: int


class _Solved:
    """What is kept of a mask: no part of the mask itself, which it would keep alive; hence no test that is left."""

    def __init__(self, solved: Conjunctions) -> None:
        left = [c for p in solved for c in p.constraints if isinstance(c, (Opaque, Residue))]
        steps = [c.step for c in left if isinstance(c, Residue)]
        self.residual = Residual(any(isinstance(c, Opaque) for c in left), max(steps, default=1))
        self.exact = None if left else solved
        self.intervals = tuple(map(_saturated, _union([_lifted(p) for p in solved])))

    @functools.cached_property
    def limits(self) -> RowLimits | None:
        try:
            return None if self.exact is None else _limits_of(self.exact)
        finally:
            forget()


_cache: weakref.WeakKeyDictionary[Expr, _Solved] = weakref.WeakKeyDictionary()


def tile_intervals(mask: Expr) -> tuple[TileInterval, ...]:
    """What a query tile visits under `mask`: sound for every mask; all of kv with the test, where nothing is known."""
    return _solved(mask).intervals


def residual(mask: Expr | None) -> Residual:
    """What of `mask` no bounds on kv say."""
    return Residual(opaque=False, step=1) if mask is None else _solved(mask).residual


def row_limits(mask: Expr | None) -> RowLimits | None:
    """Where the keys that a row sees begin and end, if they are one run; None where that can't be told."""
    return ALL_KEYS if mask is None else _solved(mask).limits


def _solved(mask: Expr) -> _Solved:
    found = _cache.get(mask)
    if found is None:
        try:
            found = _Solved(conjunctions(mask))
        finally:
            forget()
        if mask.op != "read":  # a value of the row, which stands in the ends as it is
            _cache[mask] = found
    return found


def transposed(mask: Expr) -> tuple[tuple[TileInterval, ...], RowLimits | None]:
    """The mirror image of `tile_intervals` and `row_limits`, for the backward, of a mask that is solved once.

    Which q positions see a tile of keys `first`..`last`, and where those that see a key begin and end.
    """
    mirror = mirrored(mask)
    back = {index("q_len"): _KV_LEN, _KV_LEN: index("q_len")}
    limits = row_limits(mirror)
    if limits is not None:
        limits = dataclasses.replace(limits, begin=mirrored(limits.begin), end=mirrored(limits.end))
    return tuple(i.mapped(back) for i in tile_intervals(mirror)), limits


def mirrored(mask: Expr) -> Expr:
    """`mask` with queries and keys exchanged."""
    mirror = {index("q"): index("kv"), index("kv"): index("q"), index("q_len"): _KV_LEN, _KV_LEN: index("q_len")}
    return substitute(mask, mirror)


# --- from rows to a tile -------------------------------------------------------------------------------------


def _rows(conjunction: Conjunction, tile: RowRange) -> tuple[RowRange, list[Expr], list[Expr]]:
    """(rows that its conditions leave, conditions under which any row, and every row of the tile satisfies them)."""
    rows, some, every = tile, [], []
    for row in (c for c in conjunction.constraints if isinstance(c, RowCondition)):
        span = None if tile.is_one else rows_where(row)
        if span is None:
            some.append(_some_row(row, tile))
            every.append(_every_row(row, tile))
            continue
        low, high = span
        rows = RowRange(
            rows.first if low is None else larger(rows.first, low),
            rows.last if high is None else smaller(rows.last, build(linear(high).shifted(-1))),
        )
        every += [apply("ge", tile.first, low)] if low is not None else []
        every += [apply("lt", tile.last, high)] if high is not None else []
    return rows, some, every


def _lifted(conjunction: Conjunction, tile: RowRange = TILE) -> TileInterval:
    """What the rows of a tile see together, and what all of them see."""
    rows, some, every = _rows(conjunction, tile)
    if not at_most(rows.first, rows.last):
        some.append(apply("le", rows.first, rows.last))
    lows, highs = tightened(conjunction)
    begin = tile.joined(larger, _ZERO, [rows.lowest(b.outer) for b in lows])
    end = tile.joined(smaller, _KV_LEN, [rows.highest(b.outer) for b in highs])
    from_here, to_here = [tile.highest(b.inner) for b in lows], [tile.lowest(b.inner) for b in highs]
    full_begin, full_end = tile.joined(larger, _ZERO, from_here), tile.joined(smaller, _KV_LEN, to_here)
    exact = conjunction.exact and None not in (*from_here, *to_here)
    end = _only_if(some, end)
    full_end = _only_if(every, full_end) if exact else _ZERO
    full_begin = full_begin if exact and full_end is not _ZERO else _ZERO
    return TileInterval(begin, end, full_begin, full_end)


def _limits_of(found: Conjunctions) -> RowLimits | None:
    """What a row sees as a tile of one, if this is one run and all of it is seen."""
    tables: dict[Expr, None] = {}
    lifted = [_lifted(without_gaps(conjunction, tables), ROW) for conjunction in found]
    first, *others = [run for run in lifted if not _is_empty(run)] or NOTHING
    run: TileInterval | None = first
    for other in others:
        run = run and _joined(run, other)
    if run is None or run.begin is not run.full_begin or run.end is not run.full_end:
        return None
    begin, end = saturated(interval_end(run.begin)), saturated(interval_end(run.end))
    return RowLimits(begin, end, all_of(apply("ne", t, _ZERO) for t in tables), most_keys(run.begin, run.end))


def _only_if(conditions: list[Expr], end: Expr) -> Expr:
    """`end`, or 0 (an empty range: positions start there) unless all conditions hold."""
    return apply("where", all_of(conditions), end, _ZERO)


def _some_row(row: RowCondition, rows: RowRange) -> Expr:
    """A condition that holds if any row satisfies `row`."""
    low, high = rows.lowest(row.value), rows.highest(row.value)
    if low is not None and low is high:
        return apply(row.kind, low, _ZERO)
    up, down = (const(True) if e is None else apply(op, e, _ZERO) for e, op in ((high, "ge"), (low, "le")))
    if row.kind == "ge":
        return up
    if row.kind == "eq":
        return apply("and", up, down)
    if low is None or high is None:
        return const(True)
    return apply("or", apply("ne", low, _ZERO), apply("ne", high, _ZERO))


def _every_row(row: RowCondition, rows: RowRange) -> Expr:
    """A condition that holds only if every row satisfies `row`."""
    low, high = rows.lowest(row.value), rows.highest(row.value)
    if low is not None and low is high:
        return apply(row.kind, low, _ZERO)
    if row.kind == "ge":
        return const(False) if low is None else apply("ge", low, _ZERO)
    if row.kind == "eq":
        both = low is not None and high is not None
        return apply("and", apply("eq", low, _ZERO), apply("eq", high, _ZERO)) if both else const(False)  # type: ignore[arg-type]
    above = const(False) if low is None else apply("gt", low, _ZERO)
    below = const(False) if high is None else apply("lt", high, _ZERO)
    return apply("or", above, below)


# --- the union, in order -------------------------------------------------------------------------------------


def _union(intervals: list[TileInterval]) -> tuple[TileInterval, ...]:
    """Intervals whose begins and ends ascend in every tile."""
    intervals = [i for i in map(_finished, intervals) if not _is_empty(i)]
    if len(intervals) < 2:
        return tuple(intervals) or NOTHING
    merged: list[TileInterval] = []
    for interval in intervals:
        for n, other in enumerate(merged):
            joined = _joined(other, interval)
            if joined is not None:
                merged[n] = joined
                break
        else:
            merged.append(interval)
    while len(merged) > MOST_INTERVALS:
        x, y = merged.pop(), merged.pop()
        merged.append(TileInterval(smaller(x.begin, y.begin), larger(x.end, y.end), *_longer_full(x, y)))
    if len(merged) > 1:
        merged = _sorted([TileInterval(larger(_ZERO, i.begin), i.end, i.full_begin, i.full_end) for i in merged])
    return tuple(_finished(i) for i in merged)


def _finished(i: TileInterval) -> TileInterval:
    ends = [interval_end(e) for e in i.ends]
    begin, end, full_begin, full_end = ends
    begin = _ZERO if at_most(begin, _ZERO) else begin
    full_begin = _ZERO if at_most(full_begin, _ZERO) else full_begin
    end = _KV_LEN if at_most(_KV_LEN, end) else end
    full_end = _KV_LEN if at_most(_KV_LEN, full_end) else full_end
    if at_most(full_end, full_begin):
        full_begin = full_end = _ZERO
    return TileInterval(begin, end, full_begin, full_end)


def _saturated(i: TileInterval) -> TileInterval:
    ends = tuple(map(saturated, i.ends))
    return i if ends == i.ends else TileInterval(*ends)


def _is_empty(i: TileInterval) -> bool:
    return at_most(i.end, i.begin)


def _joined(x: TileInterval, y: TileInterval) -> TileInterval | None:
    """One interval for both, where they begin or end together."""
    if x.begin is y.begin:
        begin, end = x.begin, larger(x.end, y.end)
        if x.full_begin is y.full_begin:
            return TileInterval(begin, end, x.full_begin, larger(x.full_end, y.full_end))
        return TileInterval(begin, end, *_longer_full(x, y))
    if x.end is y.end:
        begin, end = smaller(x.begin, y.begin), x.end
        if x.full_end is y.full_end:
            return TileInterval(begin, end, smaller(x.full_begin, y.full_begin), x.full_end)
        return TileInterval(begin, end, *_longer_full(x, y))
    return None


def _longer_full(x: TileInterval, y: TileInterval) -> tuple[Expr, Expr]:
    """The longer of two full ranges."""
    if at_most(y.full_end, y.full_begin):
        return x.full_begin, x.full_end
    if at_most(x.full_end, x.full_begin):
        return y.full_begin, y.full_end
    # clamped first: ends beyond the sequence must not count, nor their difference overflow
    lengths = [apply("sub", smaller(_KV_LEN, i.full_end), larger(_ZERO, i.full_begin)) for i in (x, y)]
    longer = apply("ge", *lengths)
    return apply("where", longer, x.full_begin, y.full_begin), apply("where", longer, x.full_end, y.full_end)


def _sorted(intervals: list[TileInterval]) -> list[TileInterval]:
    """In order of their begins, by exchanges a tile decides where the order is not the same in all; ends made to rise.

    Raising an end to that of an interval that begins before covers nothing new.
    """
    ordered = list(intervals)
    for last in range(len(ordered) - 1, 0, -1):
        for n in range(last):
            x, y = ordered[n], ordered[n + 1]
            if at_most(x.begin, y.begin):
                continue
            if at_most(y.begin, x.begin):
                ordered[n], ordered[n + 1] = y, x
                continue
            keep = apply("le", x.begin, y.begin)
            ordered[n], ordered[n + 1] = _chosen(keep, x, y), _chosen(keep, y, x)
    for n in range(1, len(ordered)):
        before, i = ordered[n - 1], ordered[n]
        ordered[n] = TileInterval(i.begin, larger(before.end, i.end), i.full_begin, i.full_end)
    return ordered


def _chosen(condition: Expr, x: TileInterval, y: TileInterval) -> TileInterval:
    pairs = ((x.begin, y.begin), (x.end, y.end), (x.full_begin, y.full_begin), (x.full_end, y.full_end))
    return TileInterval(*(apply("where", condition, a, b) for a, b in pairs))


def ends_of(intervals: Iterable[TileInterval], limits: RowLimits | None = None) -> list[Expr]:
    """All that a kernel computes of these, besides the mods."""
    ends = [end for i in intervals for end in i.ends]
    return ends if limits is None else [*ends, limits.begin, limits.end, limits.holds]
