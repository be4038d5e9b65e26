"""Segments of rows that see only each other, as documents do: tiles begin with them, as with packed sequences.

Where no row before a place sees a key behind it, and none behind it one before, the mask falls apart there, whatever it
was made of. A mask of ids is split so on the device, by its contents: ids that come again later join all between.
Results never depend on it: a mask that does not fall apart is one segment, whose tiles are as ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ....analysis.derived import Derived, derive
from ....analysis.program import Program
from ....call.problem import Problem
from ....graph.evaluate import Env, evaluate_all
from ....graph.expr import Dep, Expr, index, inputs
from ....graph.rebuilt import substitute

# Rows that a sequence has at least, and all sequences together, where segments are looked for. Eight documents of 512
# rows lose 12 to 19 % by them, of 2,048 in eight sequences they gain 7 to 38 %. A backward of one sequence of 4k gains
# 20 to 70 µs (2 to 6 %), one of 2k 2 to 3 %, and each new mask has some 110 small kernels more
LONG, MANY = 2048, 4097
# Rows that a segment has at least, as shorter ones share tiles with what follows
SHORT = 64
BOX = 128  # rows before the end of the first one, at least: the largest copies of rows that end with a segment
# As many segments of a sequence as if they had so many rows each, but 8 at least; of more, some have several documents
MOST = 512


@dataclass(frozen=True, eq=False)
class Segments:
    """Segments of the sequences of a call; `layout`, int64, has parts one behind the other.

    Segments (5, B * most + 1): sequence, first row, row behind the last one, number in the sequence, where its rows
    begin in the other parts. Those that are not there have no rows; the last one is of no sequence.
    How many keys each row sees, or spans, (B|1 * S + 1,), and how many queries each key; a last one that sees fewest.
    Of each key the least of what a tile's keys say, (5 + 2 * reads, B|1 * S + 1), see `_of_keys`.
    """

    length: int
    batch: int
    layout: Derived
    reads: tuple[Expr, ...]  # of captured tensors, in where the queries that see a key begin and end

    def seen(self, layout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How many keys each row sees, and how many queries each key."""
        keys, queries = _rows(layout, _entries(self.length, self.batch), len(self.reads))[:2]
        return keys, queries

    def tiles(self, tile: int) -> Derived:
        """int32 (entries, 6): sequence, number in the segment, its first row, the row behind its last one, its number,
        where `seen` has the tile's last row. Sequence -1: no tile.
        """
        shape = _entries(self.length, self.batch), tile, self.batch * most_tiles(self.length, tile)
        return derive(("tiles of segments", *shape), _TilesOf(*shape), self.layout)

    def tiles_of_keys(self, tile: int) -> Derived:
        """`tiles` with metadata (`primitives.emit_metadata`) behind: int32 (entries, 6 + 4 + 1 + reads)."""
        shape = _entries(self.length, self.batch), tile, self.batch * most_tiles(self.length, tile)
        recipe = _TilesOfKeys(_TilesOf(*shape), len(self.reads))
        return derive(("tiles of keys of segments", *shape, recipe.reads), recipe, self.layout)


def falls_apart(problem: Problem, program: Program) -> bool:
    """Whether `segments_of` a call are some."""
    return _ends(problem, program) is not None


def segments_of(problem: Problem, program: Program) -> Segments | None:
    """Segments of a dense call whose mask leaves each row one run of keys, by tensors; None for other calls."""
    ends = _ends(problem, program)
    if ends is None:
        return None
    of_keys = program.of_keys[1]
    assert of_keys is not None, "tensors decide which queries see a key"
    reads = _reads(of_keys.begin, of_keys.end)
    recipe = _SegmentLayout(ends, _at_rows(*reads), of_keys.holds, problem.q_len, problem.batch)
    layout: Derived = derive(("segments", *recipe.all, recipe.length, recipe.batch), recipe, *inputs(*recipe.all)[0])
    return Segments(problem.q_len, problem.batch, layout, reads)


def _reads(*ends: Expr) -> tuple[Expr, ...]:
    """Whole numbers that captured tensors say of each key, in these ends of what sees it."""
    found: dict[Expr, None] = {}
    waiting = list(ends[::-1])
    while waiting:
        node = waiting.pop()
        if node.op == "read" and node.dtype.is_integer and node.deps & Dep.KV:
            found[node] = None
        else:
            waiting += node.args[::-1]
    return tuple(found)


def _ends(problem: Problem, program: Program) -> tuple[Expr, ...] | None:
    """Ends of the keys that a row sees, and of the queries that see it as a key; None where no tensors decide."""
    limits, of_keys = program.limits, program.of_keys[1]
    if limits is None or of_keys is None or not problem.layout.is_dense:
        return None
    ends = limits.begin, limits.end, *_at_rows(of_keys.begin, of_keys.end)
    captures, scalars = inputs(*ends, of_keys.holds)
    of_heads = any(e.deps & Dep.H for e in (*ends, of_keys.holds))
    sequences = 1 if problem.schedule.batch_invariant else problem.batch
    fits = problem.q_len == problem.kv_len >= LONG and sequences * problem.q_len >= MANY
    if not fits or not captures or scalars or of_heads:
        return None
    return ends


def _at_rows(*of_keys: Expr) -> tuple[Expr, ...]:
    """Ends `of_keys` at a row, seen as a key: what both read is read once."""
    at_row = {index("kv"): index("q"), index("q_len"): index("kv_len")}
    return tuple(substitute(e, at_row) for e in of_keys)


def most_segments(length: int) -> int:
    """The most segments of a sequence."""
    return min(max(8, length // MOST), max(1, length // SHORT))


def most_tiles(length: int, tile: int) -> int:
    """The most tiles of all segments of a sequence."""
    return (length + most_segments(length) * (tile - 1)) // tile


def most_places(length: int, tile: int) -> int:
    """The most tiles in an entry of a workspace, where a segment has its own; see `primitives.padded_tiles`."""
    return -(-length // tile) + most_segments(length) - 1


def _entries(length: int, batch: int) -> int:
    return batch * most_segments(length) + 1


def _rows(layout: torch.Tensor, entries: int, reads: int) -> torch.Tensor:
    """What `Segments.layout` has of rows, behind its entries: a number of each of them."""
    return layout[5 * entries :].view(7 + 2 * reads, -1)


def _of_keys(first: torch.Tensor, stop: torch.Tensor, holds: torch.Tensor, *reads: torch.Tensor) -> list[torch.Tensor]:
    """Numbers of each key, whose least is what a tile's keys say.

    The first query that sees the key and, less, the one behind the last; less, the first of those that all keys of a
    tile see, and the one behind the last of them; whether `holds`; what is read, and less that.
    """
    n = first.shape[-1]
    unseen, torn = first >= stop, holds.logical_not()
    begin, behind = first.masked_fill(unseen, n), (-stop).masked_fill(unseen, 0)
    full = (-first).masked_fill(torn, -n), stop.masked_fill(torn, -n)
    return [begin, behind, *full, holds, *reads, *(-r for r in reads)]


@dataclass(frozen=True, eq=False)
class _SegmentLayout:
    """What `Segments` follow from, from captured tensors: rows see keys, and keys are seen, from end to end.

    `holds`: where all between is seen.
    """

    ends: tuple[Expr, ...]
    reads: tuple[Expr, ...]
    holds: Expr
    length: int
    batch: int

    @property
    def all(self) -> tuple[Expr, ...]:
        return *self.ends, self.holds, *self.reads

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        n, batch, device = self.length, self.batch, tensors[0].device
        by_sequence = any(e.deps & Dep.B for e in self.all)
        row, b = torch.arange(n, device=device)[None], torch.arange(batch, device=device)[:, None]
        at = {"b": b if by_sequence else 0, "h": 0, "q": row, "q_len": n, "kv_len": n}
        read = {id(c.tensor): t for c, t in zip(inputs(*self.all)[0], tensors, strict=True)}
        found = evaluate_all(list(self.all), Env(index=at, device=device, tensors=read))
        every = batch if by_sequence else 1, n
        of_rows = [e.expand(every) if isinstance(e, torch.Tensor) else row.new_full(every, e) for e in found]
        begin, end, first, stop, *of_keys = of_rows
        seen = end.clamp(max=n) - begin, stop.clamp(max=n) - first
        rows = torch.stack([*seen, *_of_keys(first, stop, *of_keys)])
        entry = torch.arange(_entries(n, batch), device=device)
        b, number = entry // most_segments(n), entry % most_segments(n)
        place = b * n if by_sequence else b // batch * n
        segment = pad(runs(begin, end).expand(batch, -1, -1).reshape(-1, 2), (0, 0, 0, 1)).t()
        of_entries = torch.cat([b.masked_fill(b == batch, -1), segment.flatten(), number, place])
        return torch.cat([of_entries, pad(rows.flatten(1), (0, 1), value=-n).flatten()])


def runs(begin: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """(B, segments, 2) of the keys [begin, end) that each row sees, (B, S); of a row that sees none in any order.

    They follow each other and have all rows: the last one ends behind the last row.
    """
    n, most = begin.shape[-1], most_segments(begin.shape[-1])
    row = torch.arange(n, device=begin.device)
    # a row joins all from its first key, or itself, to its last one
    first, last = torch.minimum(begin, row).clamp_(min=0), torch.maximum(end - 1, row)
    ends_here = row.expand_as(first).scatter_reduce(-1, first, last, "amax").cummax(-1).values == row
    # where the mask falls apart once more may be an end again; the first segment needs rows, too
    again = torch.where(ends_here, row + SHORT, SHORT - 1).cummax(-1).values
    ends_here[:, 1:] &= again[:, :-1] <= row[1:]
    # as does the last one, which ends there in any case
    ends_here &= (row >= BOX - 1) & (row < n - SHORT)
    ends_here |= row == n - 1
    # of too many as many join as leaves the most, equally often everywhere
    number = ends_here.cumsum(-1)
    ends_here &= number * most % number[:, -1:].clamp(min=most) < most
    number = ends_here.cumsum(-1)
    # those behind the last one are empty, and what is no start goes to a place that nobody reads
    start = (torch.arange(most + 2, device=row.device).clamp(max=1) * n).expand(len(begin), -1)
    start = start.scatter(1, torch.where(ends_here, number, most + 1), (row + 1).expand_as(first))
    return start[:, : most + 1].unfold(1, 2, 1)


@dataclass(frozen=True, eq=False)
class _TilesOf:
    segments: int
    tile: int
    most: int

    def __call__(self, layout: torch.Tensor) -> torch.Tensor:
        table = layout[: 5 * self.segments].view(5, -1)
        _, start, stop, _, _ = table.unbind()
        after = ((stop - start + (self.tile - 1)) // self.tile).cumsum(0)
        at = torch.arange(self.most, device=layout.device)
        segment = torch.searchsorted(after[:-1], at, right=True)
        b, start, stop, number, place = table[:, segment].unbind()
        m = at - pad(after, (1, 0))[segment]
        last = torch.minimum(start + (m + 1) * self.tile, stop).sub_(1).clamp_(min=0)
        return torch.stack([b, m, start, stop, number, last + place], 1).to(torch.int32)


@dataclass(frozen=True, eq=False)
class _TilesOfKeys:
    tiles: _TilesOf
    reads: int

    def __call__(self, layout: torch.Tensor) -> torch.Tensor:
        tiles, of_keys = self.tiles(layout), _rows(layout, self.tiles.segments, self.reads)[2:]
        _, m, start, stop, _, last = tiles.unbind(1)
        n, first = of_keys.shape[1], start + m * self.tiles.tile
        key = first[:, None] + torch.arange(self.tiles.tile, device=layout.device)
        beyond = key - torch.minimum(first + self.tiles.tile, stop)[:, None]  # the last key of a tile is at -1
        there = of_keys[:, last[:, None] + (beyond + 1).clamp(max=0)].masked_fill(beyond >= 0, _NOBODY)
        of_tile = there.amin(2)
        # as kernels' arithmetic with them stays within 32 bits
        begin, behind, full_begin, full_end = of_tile[:4].clamp(-n, n).unbind()
        queries = torch.stack([begin, -behind, -full_begin, full_end], 1)
        least, less_most = of_tile[5:].chunk(2)
        agree = ((least == -less_most) & (least.int() == least)).all(0) & (of_tile[4] == 1)
        metadata = torch.cat([queries, agree[:, None], least.t()], 1).to(torch.int32)
        return torch.cat([tiles, metadata], 1)


_NOBODY = 1 << 62  # what is more than any key says
