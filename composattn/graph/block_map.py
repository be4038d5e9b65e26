"""Lists of the tiles that a kernel visits, for masks of which bands tell too little; on the device, kept up to date.

A mask that `bands` understands needs no list: the kernel computes its loop bounds. What they leave is settled here
tile by tile: interval arithmetic at the kernel's own tile size (`intervals`), joined with the bands, in work and memory
of the tiles and of the captured tensors, by torch operations on the device, with no host synchronisation.

`KeyLists` are what a forward visits (the kv tiles of each query tile), `QueryLists` what a backward does (the query
tiles of each kv tile). Kernels receive them as two or three more captured tensors, `captures`, whose contents
`of_call` gives: computed when first asked for, and again, into the same memory, when a captured tensor, a run-time
number or the sequences' lengths changed since.
"""

from __future__ import annotations

import dataclasses
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch

from ..errors import UnknownLength
from .bands import UNKNOWN, TileInterval, mirrored, tile_intervals, untold
from .derived import Derived, refresh, value_of, version
from .evaluate import Env, evaluate_all
from .expr import Capture, Dep, Expr, captures, scalars
from .intervals import Tiles
from .keeping import may_keep
from .tiles import EMPTY, FULL, PARTIAL, kinds, useful_cuts

T = torch.Tensor

Places = tuple[T | None, T | None]
"""Where sequences lie: int (B + 1,) first rows of packed ones, int (B,) how many rows are used; None: not given."""

MOST_ENTRIES = 2**28  # of a list, 1 GiB: beyond it a mask is left to its bands
_AT_ONCE = 2**22  # tiles that are analysed together: some hundred MiB of bounds


Lists = TypeVar("Lists", bound="TileLists")


@dataclass(frozen=True)
class Extent:
    """What lists are made for: lengths (of the longest sequence, where there are several), batch, heads, device."""

    q_len: int
    kv_len: int
    batch: int
    heads: int
    device: torch.device
    ragged: bool = False  # sequences have lengths of their own
    unbounded: bool = False  # the lengths are those of all packed rows together

    def entries(self, mask: Expr, tile: tuple[int, int]) -> int:
        """Tiles of all batches and heads that `mask` tells apart."""
        b, h = (self.batch if self.ragged or mask.deps & Dep.B else 1), (self.heads if mask.deps & Dep.H else 1)
        return b * h * -(-self.q_len // tile[0]) * -(-self.kv_len // tile[1])


def reason_for_lists(kind: type[TileLists], mask: Expr | None, extent: Extent, tile: tuple[int, int]) -> str | None:
    """Why lists visit fewer tiles than the mask's bands do, in words; None where bands serve, or lists are too large.

    Bands serve where all of the mask is solved for kv (for `QueryLists`: for q). They don't where a condition on
    (q, kv) stays (a test in every tile of the band), where visible positions are a tile or more apart, or where equal
    values of a captured tensor lie apart: this looks at the tensor, once.

    Raises: `UnknownLength` where lists would be too large for want of an upper bound of the sequences' lengths.
    """
    if mask is None:
        return None
    if extent.entries(mask, tile) > MOST_ENTRIES:
        if extent.unbounded and kind.reason_for(mask, tile):
            raise UnknownLength(
                f"this mask needs lists of tiles, which would have {extent.entries(mask, tile)} entries for "
                f"{extent.batch} sequences of up to {extent.q_len} queries and {extent.kv_len} keys; say how long the "
                "longest ones are: Varlen(..., max_seqlen_q=, max_seqlen_k=)"
            )
        return None
    return kind.reason_for(mask, tile)


def _reason(mask: Expr, size: int, of: str) -> str | None:
    """Why the bands of `mask` tell too little to whoever visits tiles of `size` keys, which are called `of`."""
    left = untold(mask)
    if left.opaque:
        return f"a part of the mask has no bounds on {of}"
    if left.step >= size:
        return f"visible {of} lie tiles apart"
    ends = [e for i in tile_intervals(mask) for e in (i.begin, i.end, i.full_begin, i.full_end)]
    if any(_has_gaps(c) for c in captures(*ends)):
        return "equal values of a captured tensor lie apart"
    return None


def made_lists(kind: type[Lists], mask: Expr | None, extent: Extent, tile: tuple[int, int]) -> Lists | None:
    """Lists of this kind where there is a reason for them; the same ones as long as they are in use."""
    reason = reason_for_lists(kind, mask, extent, tile)
    if reason is None or mask is None:
        return None
    key = (kind, mask, extent, tile)
    found = _in_use.get(key)
    if found is None:
        found = _in_use[key] = kind(mask, extent, tile, reason)
    return found  # type: ignore[return-value]


_in_use: weakref.WeakValueDictionary[Any, TileLists] = weakref.WeakValueDictionary()


def _has_gaps(capture: Capture) -> bool:
    """Whether a table of `derived.matches` that this comes from gives ranges with columns between that don't match."""
    if not isinstance(capture, Derived):
        return False
    if capture.recipe.__name__ != "bounds_of_matches":
        return any(map(_has_gaps, capture.sources))
    capture.refresh()
    start, end, full_start, full_end = capture.tensor
    return bool(((start < end) & ((start != full_start) | (end != full_end))).any())


class TileLists(ABC):
    """Lists for one mask, tile size and extent; `captures` stand for the tensors among what a kernel reads."""

    ranks: ClassVar[tuple[int, ...]]
    dims: ClassVar[tuple[int, ...]]

    @staticmethod
    @abstractmethod
    def reason_for(mask: Expr, tile: tuple[int, int]) -> str | None:
        """Why the bands that would serve instead tell too little; None where they do."""

    def __init__(self, mask: Expr, extent: Extent, tile: tuple[int, int], reason: str = "asked for") -> None:
        self.mask, self.extent, self.tile, self.reason = mask, extent, tile, reason
        bands = tile_intervals(mask)
        self.bands: tuple[TileInterval, ...] = () if bands is UNKNOWN else bands
        self.ends = [e for i in self.bands for e in (i.begin, i.end, i.full_begin, i.full_end)]
        self.sources = captures(mask, *self.ends)
        self.scalars = scalars(mask, *self.ends)
        # placeholders: which tensor stands for them is said at the call
        self.captures = tuple(Capture(torch.empty((1,) * rank, dtype=torch.int32)) for rank in self.ranks)
        self._made: list[T] = []
        self._seen: tuple[Any, ...] | None = None
        self._held: list[T] = []

    def of_call(
        self,
        given: Mapping[Capture, T] | None = None,
        numbers: Mapping[Any, float | int] | None = None,
        queries: Places = (None, None),
        keys: Places = (None, None),
    ) -> list[T]:
        """The tensors, one for each of `captures`, up to date.

        given: tensors that are read in place of captured ones. numbers: values of run-time numbers, by default those
        of now. queries, keys: where those of several sequences lie.
        """
        given = {} if given is None else given
        values = [s.value if numbers is None else numbers.get(s, s.value) for s in self.scalars]
        refresh(self.sources)
        read = [value_of(c, given) for c in self.sources]
        places = [t for t in (*queries, *keys) if t is not None]
        held = [*read, *places]
        stamp = (*values, *(v for t in held for v in (t.data_ptr(), t.shape, t.stride(), version(t))))
        if stamp != self._seen or None in stamp or (places and _recording()):
            made = [t.contiguous() for t in self._compute(read, values, _lengths(*queries), _lengths(*keys))]
            if not may_keep():
                return made
            if self._made:
                for old, new in zip(self._made, made, strict=True):
                    old.copy_(new)
            else:
                self._made = made
            self._seen, self._held = stamp, held  # held: their memory is no one else's while the stamp speaks of it
        return self._made

    def _compute(self, read: Sequence[T], values: Sequence[Any], q_lens: T | None, kv_lens: T | None) -> tuple[T, ...]:
        x = self.extent
        b = x.batch if self.mask.deps & Dep.B or q_lens is not None or kv_lens is not None else 1
        h = x.heads if self.mask.deps & Dep.H else 1
        tensors = {id(c.tensor): t for c, t in zip(self.sources, read, strict=True)}
        numbers = {id(s): v for s, v in zip(self.scalars, values, strict=True)}
        cuts = useful_cuts(self.mask, x.q_len, x.kv_len, self.tile)
        grid = Tiles(x.q_len, x.kv_len, self.tile, b, h, x.device, q_lens, kv_lens, tensors, numbers, cuts=cuts)
        rows, columns = -(-x.q_len // self.tile[0]), -(-x.kv_len // min(self.tile[1], cuts[1] or self.tile[1]))
        step = max(1, _AT_ONCE // (b * h * columns * -(-self.tile[0] // (cuts[0] or self.tile[0]))))
        # never inference tensors: those could not be written to again from outside of inference mode
        with torch.inference_mode(False), torch.no_grad():
            parts = []
            for first in range(0, rows, step):
                part = dataclasses.replace(grid, rows=(first, min(first + step, rows)))
                parts.append(self.rows_of(self._joined(kinds(self.mask, part), part), part))
            return self.lists(*(torch.cat(p, dim) for p, dim in zip(zip(*parts, strict=True), self.dims, strict=True)))

    def _joined(self, found: T, grid: Tiles) -> T:
        """The kinds of tiles, with what the bands know besides."""
        if not self.bands:
            return found
        grid = dataclasses.replace(grid, cuts=(None, None))  # tiles again
        first, last = grid.leaf("q").low, grid.leaf("q").high
        start = grid.starts(1)
        kv_len = grid.leaf("kv_len").low
        stop = torch.minimum(start + self.tile[1], kv_len)
        leaves = {name: grid.leaf(name).low for name in ("b", "h", "q_len", "kv_len")}
        index = {**leaves, "first": first, "last": last}
        env = Env(index, device=grid.device, tensors=grid.tensors, scalars=grid.scalars)
        ends = evaluate_all(self.ends, env)
        touched = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=grid.device)
        inside = touched
        for begin, end, full_begin, full_end in zip(*(ends[n::4] for n in range(4)), strict=True):
            touched = touched | ((begin < stop) & (end > start) & (begin < end))
            inside = inside | ((full_begin <= start) & (full_end >= stop))
        return torch.where(touched, torch.where(inside & (found != EMPTY), FULL, found), EMPTY)

    @abstractmethod
    def rows_of(self, found: T, grid: Tiles) -> tuple[T, ...]:
        """What is kept of int8 (B|1, H|1, rows, Tkv) kinds of some query tiles."""

    @abstractmethod
    def lists(self, *kept: T) -> tuple[T, ...]:
        """The tensors, from what was kept, joined along `dims`."""


class KeyLists(TileLists):
    """The kv tiles that each query tile visits.

    counts: int32 (2, B|1, H|1, Tq): how many need a test, and how many don't.
    tiles: int32 (B|1, H|1, Tq, Tkv): those that need a test, descending, then those that don't, descending. A tile that
    reaches beyond the keys is among the first.
    """

    ranks = (4, 4)
    dims = (3, 2)

    @staticmethod
    def reason_for(mask: Expr, tile: tuple[int, int]) -> str | None:
        return _reason(mask, tile[1], "keys")

    def rows_of(self, found: T, grid: Tiles) -> tuple[T, T]:
        ragged = grid.starts(1) + self.tile[1] > grid.leaf("kv_len").low
        found = torch.where(ragged & (found == FULL), PARTIAL, found)
        counts = torch.stack([(found == kind).sum(-1, dtype=torch.int32) for kind in (PARTIAL, FULL)])
        columns = found.shape[-1]
        group = torch.where(found == EMPTY, 2, found.to(torch.int32) - PARTIAL)
        place = torch.arange(columns - 1, -1, -1, dtype=torch.int32, device=found.device)
        ordered = (group * columns + place).sort(-1).values
        return counts, columns - 1 - ordered % columns

    def lists(self, *kept: T) -> tuple[T, ...]:
        return kept


class QueryLists(TileLists):
    """The query tiles that each kv tile visits, ascending; tiles are (queries, keys) all the same.

    counts: int32 (B|1, H|1, Tkv).
    tiles: int32 (B|1, H|1, Tkv, Tq): 2 * query tile + (1 if it needs a test). The test is the mask's: rows and keys
    that a tile has beyond the last ones need none by this list.
    before: int32 (B|1, H|1, Tkv, Tq), entry for entry: how many kv tiles beyond visit the same query tile. In a fixed
    order of dQ they come before.
    """

    ranks = (3, 4, 4)
    dims = (2,)

    @staticmethod
    def reason_for(mask: Expr, tile: tuple[int, int]) -> str | None:
        return _reason(mirrored(mask), tile[0], "queries")

    def rows_of(self, found: T, grid: Tiles) -> tuple[T]:
        return (found,)

    def lists(self, *kept: T) -> tuple[T, ...]:
        found = kept[0].mT  # (B|1, H|1, Tkv, Tq)
        visited = found != EMPTY
        rows = found.shape[-1]
        place = torch.arange(rows, dtype=torch.int32, device=found.device)
        ordered = torch.where(visited, place, rows + place).sort(-1).values % rows
        tested = (found == PARTIAL).gather(-1, ordered.long())
        upto = visited.to(torch.int32).cumsum(-2, dtype=torch.int32)
        before = (upto[..., -1:, :] - upto).gather(-1, ordered.long())
        return visited.sum(-1, dtype=torch.int32), 2 * ordered + tested, before


def _lengths(starts: T | None, used: T | None) -> T | None:
    """How long each sequence is, int (B,); None where all are of one length."""
    return used if used is not None or starts is None else starts.diff()


def _recording() -> bool:
    """Whether a CUDA graph is being captured: lengths may then change at every replay."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


__all__ = ["Extent", "KeyLists", "QueryLists", "TileLists", "made_lists", "reason_for_lists"]
