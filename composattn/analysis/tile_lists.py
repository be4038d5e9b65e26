"""Lists of the tiles that a kernel visits, for masks where bands tell too little; on the device, kept up to date.

A mask that `bands` understands needs no list: the kernel computes its loop bounds. What they leave is settled here
tile by tile: interval arithmetic at the kernel's own tile size (`intervals`), joined with the bands. Torch operations
on the device do it, with no host synchronisation. Work and memory grow with the number of tiles and with the captured
tensors, not with the number of pairs.

`KeyLists` are what a forward visits (the kv tiles of each query tile), `QueryLists` what a backward does (the query
tiles of each kv tile). Kernels receive them as two or three more captured tensors, `captures`, whose contents
`of_call` gives: computed when first asked for, and again, into the same memory, when a captured tensor, a run-time
number or the sequences' lengths changed since. Each thread has its own: what one is told others may not be done with.
A call that derives anew (`analysis.derived.Anew`), as one that a CUDA graph records does, computes them for itself.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch

from ..errors import UnknownLength
from ..graph.borrowed import BorrowedCapture
from ..graph.evaluate import Env, evaluate_all
from ..graph.expr import Capture, Dep, Expr, captures, inputs, walk
from . import streams
from .bands import TileInterval, ends_of, mirrored, residual, tile_intervals
from .derived import Derived, RefreshedTogether, derives_anew, plain_tensors, sources_behind, value_of
from .intervals import Tiles
from .matches import Matches, without_gaps
from .refreshed import Refreshed, may_cache, version
from .rerun import ALL, Rerun
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
    (q, kv) stays (a test in every tile of the band), where visible positions are a tile or more apart, or where values
    of a captured tensor that match lie apart: this looks at the tensor, once.

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
    left = residual(mask)
    if left.opaque:
        return f"a part of the mask has no bounds on {of}"
    if left.step >= size:
        return f"visible {of} lie tiles apart"
    ends = ends_of(tile_intervals(mask))
    read = captures(*ends)
    if any(map(_has_gaps, dict.fromkeys(c for c in (*read, *sources_behind(read)) if isinstance(c, Matches)))):
        return "matching values of a captured tensor lie apart"
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


def _has_gaps(table: Matches) -> bool:
    """Whether its ranges have columns between that don't match; nobody can look while a CUDA graph records."""
    if streams.is_capturing():
        return False
    whole = without_gaps(table)
    whole.refresh()
    return not bool(whole.tensor.all())


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
        # blocks that were found pair by pair say what is visible better than bands do
        told = any(isinstance(c, Derived) and c.says_visible for c in captures(mask))
        self.bands: tuple[TileInterval, ...] = () if told or all(i.tells_nothing for i in bands) else bands
        self.ends = ends_of(self.bands)
        self.sources, self.scalars = inputs(mask, *self.ends)
        # placeholders: which tensor stands for them is said at the call
        self.captures = tuple(Capture(torch.empty((1,) * n, dtype=torch.int32, device="cpu")) for n in self.ranks)
        self._own = _OfThread(self._compute, extent.device)
        self._refresh = RefreshedTogether([c for c in self.sources if isinstance(c, Derived)])

    @property
    def content(self) -> dict[str, object]:
        """Nothing but their kind: kernels find what else there is in the tensors of a call."""
        return {}

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
        given = given or {}
        values = [s.value if numbers is None else numbers.get(s, s.value) for s in self.scalars]
        if not derives_anew():
            self._refresh()
        read = [value_of(c, given) for c in self.sources]
        if derives_anew():
            with plain_tensors():
                return list(self._compute([*read, _lengths(*queries), _lengths(*keys)], values))
        places = [t for t in (*queries, *keys) if t is not None]
        seen = [*values, *self._stamp([*read, *places])]
        # held: their memory is no one else's while the stamp speaks of it; that of borrowed ones ends with this plan
        borrowed = [isinstance(c, BorrowedCapture) and t is c.tensor for c, t in zip(self.sources, read, strict=True)]
        own = [t for t, is_borrowed in zip(read, borrowed, strict=True) if not is_borrowed]
        of_form = [*read, _lengths(*queries), _lengths(*keys)], (tuple(values),), self._standing(read)
        return self._own.kept(seen, self._own.made, [*own, *places], *of_form)

    def _standing(self, read: Sequence[T]) -> list[int]:
        """Which of what is read has the same memory in every call."""
        return [n for n, c in enumerate(self.sources) if isinstance(c, Derived) and read[n] is c.kept]

    def _stamp(self, tensors: Sequence[T]) -> list[Hashable]:
        """Changes when one of these does."""
        stamp: list[Hashable] = [v for t in tensors for v in (t.shape, t.stride(), version(t))]
        return stamp + [c.epoch for c in self.sources if isinstance(c, BorrowedCapture)]

    def _compute(self, inputs: Sequence[Any], values: Sequence[Any]) -> list[T]:
        """The lists for `inputs`: what is read of each source, and the lengths of the sequences or None."""
        *read, q_lens, kv_lens = inputs
        x = self.extent
        b = x.batch if self.mask.deps & Dep.B or q_lens is not None or kv_lens is not None else 1
        h = x.heads if self.mask.deps & Dep.H else 1
        tensors = {id(c.tensor): t for c, t in zip(self.sources, read, strict=True)}
        numbers = {id(s): v for s, v in zip(self.scalars, values, strict=True)}
        cuts = useful_cuts(self.mask, x.q_len, x.kv_len, self.tile)
        grid = Tiles(x.q_len, x.kv_len, self.tile, b, h, x.device, q_lens, kv_lens, tensors, numbers, cuts=cuts)
        rows, columns = -(-x.q_len // self.tile[0]), -(-x.kv_len // min(self.tile[1], cuts[1] or self.tile[1]))
        step = max(1, _AT_ONCE // (b * h * columns * -(-self.tile[0] // (cuts[0] or self.tile[0]))))
        parts = []
        for first in range(0, rows, step):
            part = dataclasses.replace(grid, rows=(first, min(first + step, rows)))
            parts.append(self.rows_of(self._joined(self.kinds_of(part), part), part))
        if len(parts) > 1:
            parts = [tuple(torch.cat(p, d) for p, d in zip(zip(*parts, strict=True), self.dims, strict=True))]
        return [t.contiguous() for t in self.lists(*parts[0])]

    def kinds_of(self, grid: Tiles) -> T:
        """The kinds of tiles without the bands, int8 (B, H, rows, Tkv)."""
        return kinds(self.mask, grid)

    def _joined(self, found: T, grid: Tiles) -> T:
        """The kinds of tiles, with what the bands know besides."""
        if not self.bands:
            return found
        grid = dataclasses.replace(grid, cuts=(None, None))  # tiles again
        q, kv = grid.leaf("q"), grid.leaf("kv")
        used = {node.attr for node in walk(*self.ends) if node.op == "index"} - {"first", "last"}
        index = {**{name: grid.leaf(name).low for name in used}, "first": q.low, "last": q.high}
        env = Env(index, device=grid.device, tensors=grid.tensors, scalars=grid.scalars)
        ends = evaluate_all(self.ends, env)
        touched, inside = [], []
        for n, band in enumerate(self.bands):
            begin, end, full_begin, full_end = ends[4 * n : 4 * n + 4]
            touched.append((begin <= kv.high) & (end * (begin < end) > kv.low))
            if not band.never_full:
                inside.append((full_begin <= kv.low) & (full_end > kv.high))
        found = found * functools.reduce(torch.bitwise_or, touched)
        if not inside:
            return found
        return torch.where(functools.reduce(torch.bitwise_or, inside) & (found != EMPTY), FULL, found)

    @abstractmethod
    def rows_of(self, found: T, grid: Tiles) -> tuple[T, ...]:
        """What is kept of int8 (B|1, H|1, rows, Tkv) kinds of some query tiles."""

    @abstractmethod
    def lists(self, *kept: T) -> tuple[T, ...]:
        """The tensors, from what was kept, joined along `dims`."""


class _OfThread(threading.local):
    """What a thread keeps of lists: they hang on lengths and numbers of its calls."""

    def __init__(self, compute: Callable[..., Sequence[T]], device: torch.device) -> None:
        self.run = Rerun(compute)
        self.kept: Refreshed[list[T]] = Refreshed([], device=device)

    def made(self, read: Sequence[T | None], constants: tuple[Hashable, ...], standing: Sequence[int]) -> list[T]:
        """The lists of what is read, in the memory that is kept, where a call may keep some."""
        kept, keeps = self.kept.value, may_cache()
        # for now: they are copied into what is kept, or a call reads them that keeps nothing
        with plain_tensors():
            made = list(self.run(read, constants, standing, for_now=ALL if kept or not keeps else 0))
        if not kept or not keeps:
            return made
        for old, new in zip(kept, made, strict=True):
            old.copy_(new)
        return kept


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
        if grid.kv_lens is not None or grid.kv_len % self.tile[1]:
            ragged = grid.starts(1) + self.tile[1] > grid.leaf("kv_len").low
            found = torch.minimum(found, FULL - ragged.view(torch.int8))
        counted = torch.arange(PARTIAL, FULL + 1, dtype=torch.int8, device=found.device).view(2, 1, 1, 1, 1)
        counts = (found == counted).sum(-1, dtype=torch.int32)
        column, above = _numbered(found)
        rank = -found & 3  # empty 0, full 2, partial 3
        ordered = torch.add(column, rank, alpha=above).sort(-1, descending=True).values
        return counts, ordered & (above - 1)

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
        row, above = _numbered(found)
        entry = 2 * row + (found & PARTIAL)
        entries = torch.add(entry, ~visited, alpha=2 * above).sort(-1).values & (2 * above - 1)
        upto = visited.cumsum(-2, dtype=torch.int32)
        before = (upto[..., -1:, :] - upto).gather(-1, (entries >> 1).long())
        return visited.sum(-1, dtype=torch.int32), entries, before


def _numbered(found: T) -> tuple[T, int]:
    """Numbers along the last dimension, int32, and a power of two above them: what is sorted by lies above that bit."""
    count = found.shape[-1]
    return torch.arange(count, dtype=torch.int32, device=found.device), 1 << count.bit_length()


def _lengths(starts: T | None, used: T | None) -> T | None:
    """How long each sequence is, int (B,); None where all are of one length."""
    return used if used is not None or starts is None else starts.diff()
