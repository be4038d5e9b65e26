"""Keys move: queries stay where they are, and the keys that they see come, in parts; gradients return to their ranks.

The backward of each call runs with the merged output and LSE, of which the softmax of its keys is a part: nothing is
differentiated through the merge. Gradients of fetched keys are added in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from ..call.autograd import BackwardInputs, Grads
from . import part_call
from .exchange import PendingRows, Ranks
from .merged import Merged
from .movement import Movement, Part, SubCall
from .offset_mods import OffsetMods
from .part_call import Begun, Offsets
from .row_moves import Where, added, by_heads, by_rows, located, put, row_counts, taken, views
from .strategy import Given, with_sinks

T = torch.Tensor


class OnDevice:
    """A part with its rows on the device, and what the mods of its calls read.

    own: where the rank's own keys lie among the part's; sends, receives: of each rank, the rows that go to it among the
    own, and where those that come from it lie among the part's. mods: of rows that are runs, and of those that tables
    name.
    """

    def __init__(
        self, part: Part, own: T, seq_len: int, mods: tuple[OffsetMods, OffsetMods], device: torch.device
    ) -> None:
        self.part = part
        self.own = located(part.own, part.positions, device)
        self.sends = [located(rows, own, device) for rows in part.sends]
        self.receives = [located(rows, part.positions, device) for rows in part.receives]
        self.sub_calls: list[tuple[SubCall, OffsetMods, Offsets]] = []
        for sub in part.sub_calls:
            q, kv = own[sub.rows].to(device), part.positions[sub.keys].to(device)
            offset_mods = mods[sub.first is None]
            first = (0, 0) if sub.first is None else sub.first
            self.sub_calls.append((sub, offset_mods, Offsets(*first, seq_len, offset_mods.tables(q, kv))))

    def own_keys(self, x: T) -> T:
        """Keys or values of a part that fetches none: the rank's own as they lie, or none of them."""
        return x if len(self.part.own) else x[:, :, :0]


@dataclass
class ByKeys:
    """Queries stay where they are; the keys that they see come, in parts."""

    ranks: Ranks
    movement: Movement
    runs: OffsetMods
    tabled: OffsetMods
    options: tuple[Any, ...]
    seq_len: int
    device: torch.device
    keep: bool = True  # what was fetched, for the backward; else it is fetched again
    parts: list[OnDevice] = field(init=False)

    def __post_init__(self) -> None:
        own = self.movement.positions
        mods = self.runs, self.tabled
        self.parts = [OnDevice(part, own, self.seq_len, mods, self.device) for part in self.movement.parts]

    def forward(self, q: T, k: T, v: T, asked: Given) -> tuple[T, T, T | None, Any, list[T]]:
        merged = Merged(q, v.shape[-1], asked.max_scores)
        begun: list[list[Begun]] = []
        saved: list[T] = []
        for part, k_part, v_part in self._arriving(k, v):
            begun.append([])
            for sub, offset_mods, offsets in part.sub_calls:
                tensors = (q[:, :, sub.rows], k_part[:, :, sub.keys], v_part[:, :, sub.keys])
                (out, lse, top), call = part_call.forward(
                    offset_mods, self.options, offsets, tensors, asked.tensors, asked.max_scores
                )
                merged.add(sub.rows, out, lse, top)
                begun[-1].append(call)
                del out, lse, top  # or the next call's would lie beside them
            saved += [k_part, v_part] if self.keep and part.part.fetches else []
        out, lse, top = merged.result()
        return *with_sinks(out, lse, asked.sinks), top, begun, saved

    def _arriving(self, k: T, v: T) -> Iterator[tuple[OnDevice, T, T]]:
        """(part, k, v) as the keys of each part are there; all of them are on their way from the start."""
        coming = [[self._started(part, x) for x in (k, v)] for part in self.parts]
        for part in self.parts:
            k_part, v_part = (came() for came in coming.pop(0))
            yield part, k_part, v_part

    def _started(self, part: OnDevice, x: T) -> Callable[[], T]:
        """Sends and fetches the keys, or values, of a part: what gives all of them, in order of positions."""
        if not part.part.moves:
            return lambda: part.own_keys(x)
        own = by_rows(x)
        rows = own.new_empty((len(part.part.positions) if part.part.fetches else 0, *own.shape[1:]))
        arrived = (self._gathered if self.movement.gather else self._exchanged)(part, own, rows)
        if part.part.fetches and len(part.part.own):
            put(rows, part.own, own)

        def all_there() -> T:
            arrived()
            return by_heads(rows) if part.part.fetches else part.own_keys(x)

        return all_there

    def _exchanged(self, part: OnDevice, own: T, rows: T) -> Callable[[], None]:
        """Starts to fetch rows of a part into `rows`; what waits for them."""
        into = [_memory(rows, at) for at in part.receives]
        pending = self.ranks.exchange([views(own, at) for at in part.sends], into)

        def arrived() -> None:
            pending.arrived()
            for at, came in zip(part.receives, into, strict=True):
                if not isinstance(at, tuple):
                    put(rows, at, came[0])

        return arrived

    def _gathered(self, part: OnDevice, own: T, rows: T) -> Callable[[], None]:
        """Fetches all rows of all ranks into `rows`; returns what waits for them."""
        found, pending = self.ranks.gather(own)

        def arrived() -> None:
            pending.arrived()
            for at, came in zip(part.receives, found.split(len(own)), strict=True):
                if len(at):
                    put(rows, at, came)

        return arrived

    def backward(self, known: BackwardInputs, begun: Any, saved: Sequence[T]) -> list[T | None]:
        needs_keys = known.wanted[1] or known.wanted[2]
        dq = _RowSums(known.q, [sub.rows for part in self.parts for sub in part.part.sub_calls])
        of_given: list[T | None] = [None] * len(known.captured)
        coming: list[_Coming] = []
        fetched = self._known_again(known.k, known.v, list(saved))
        while fetched:
            part, k_part, v_part = fetched.pop()
            dk, dv = None, None
            for sub, call in zip(part.part.sub_calls, begun[len(fetched)], strict=True):
                grads = self._gradients_of(known, sub, call, k_part, v_part)
                dq.add(sub.rows, grads[0])
                dk, dv = _summed(dk, grads[1], k_part, sub.keys), _summed(dv, grads[2], v_part, sub.keys)
                for n, grad in enumerate(grads[3:]):
                    if grad is not None:
                        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
                        had = of_given[n]
                        of_given[n] = wide if had is None else had + wide
                del grads
            if needs_keys:
                dk, dv = (torch.zeros_like(x) if d is None else d for x, d in ((k_part, dk), (v_part, dv)))
                del k_part, v_part
                coming.append(self._returned(part, dk, dv))
        found: list[T | None] = [dq.total, None, None]
        if needs_keys:
            found[1:] = self._added(coming)
        return [*found, *of_given]

    def _known_again(self, k: T, v: T, saved: list[T]) -> list[tuple[OnDevice, T, T]]:
        """The keys of each part, as the forward saved them or fetched again."""
        if not self.keep:
            return list(self._arriving(k, v))
        found = []
        for part in self.parts:
            if part.part.fetches:
                found.append((part, saved.pop(0), saved.pop(0)))
            else:
                found.append((part, part.own_keys(k), part.own_keys(v)))
        return found

    def _gradients_of(self, known: BackwardInputs, sub: SubCall, call: Begun, k_part: T, v_part: T) -> Grads:
        rows, keys = sub.rows, sub.keys
        inputs = known._replace(
            q=known.q[:, :, rows],
            k=k_part[:, :, keys],
            v=v_part[:, :, keys],
            out=known.out[:, :, rows],
            lse=known.lse[:, :, rows],
            dout=known.dout[:, :, rows],
            dlse=None if known.dlse is None else known.dlse[:, :, rows],
            partial=len(self.parts) > 1,
        )
        return call.backward(inputs)

    def _returned(self, part: OnDevice, *grads: T) -> _Coming:
        """Gradients of a part's keys and values, on their way to the ranks that they belong to."""
        came, pending = [], []
        for rows in map(by_rows, grads):
            if part.part.moves:
                returned = [[rows.new_empty((n, *rows.shape[1:])) for n in row_counts(at)] for at in part.sends]
                pending.append(self.ranks.exchange([views(rows, at) for at in part.receives], returned))
                came.append(returned)
        own = [by_rows(x) for x in grads] if len(part.part.own) else []
        return _Coming(part, pending, own, came)

    def _added(self, coming: Sequence[_Coming]) -> list[T]:
        """The gradients of the rank's own keys, and values: its own share first, then part by part and rank by rank."""
        for one in coming:
            for pending in one.pending:
                pending.arrived()
        found = []
        for n in range(2):
            (mine,) = (taken(one.own.pop(0), one.part.own) for one in coming if one.own)
            total = mine.to(torch.promote_types(mine.dtype, torch.float32))
            total = total.clone() if total is mine else total
            for one in coming:
                for at, came in zip(one.part.sends, one.came[n] if one.came else (), strict=False):
                    added(total, at, came)
            found.append(by_heads(total.to(mine.dtype)))
        return found


@dataclass
class _Coming:
    """Gradients of a part: those of the rank's own keys and values, and of each rank what comes back for them."""

    part: OnDevice
    pending: list[PendingRows]
    own: list[T]
    came: list[list[list[T]]]


def _memory(rows: T, at: Where) -> list[T]:
    """Where what comes is received: where it belongs, or, of numbers, memory of its own."""
    return views(rows, at) if isinstance(at, tuple) else [rows.new_empty((len(at), *rows.shape[1:]))]


class _RowSums:
    """The gradient of q from calls on some of its rows each: added in fp32 only where calls share rows."""

    def __init__(self, q: T, runs: Sequence[slice]) -> None:
        ordered = sorted(runs, key=lambda run: run.start)
        self._shared = any(a.stop > b.start for a, b in pairwise(ordered))
        self._q, self._all = q, [slice(0, q.shape[2])]
        self._whole = not self._shared and sum(run.stop - run.start for run in runs) == q.shape[2]
        self.total: T | None = None

    def add(self, rows: slice, grad: T | None) -> None:
        if grad is None:
            return
        if self._whole and [rows] == self._all:
            self.total = grad
            return
        if self.total is None:
            self.total = self._begun()
        if self._shared:
            self.total[:, :, rows] += grad
        else:
            self.total[:, :, rows] = grad

    def _begun(self) -> T:
        if self._whole:
            return torch.empty_like(self._q)
        wide = torch.promote_types(self._q.dtype, torch.float32)
        return torch.zeros_like(self._q, dtype=wide if self._shared else self._q.dtype)


def _summed(total: T | None, grad: T | None, form: T, keys: slice) -> T | None:
    """`total` with the gradient of `keys`, in one memory for all keys of a part."""
    if grad is None:
        return total
    if total is None:
        if keys == slice(0, form.shape[2]):
            return grad
        total = torch.zeros_like(form)
    total[:, :, keys] += grad
    return total
