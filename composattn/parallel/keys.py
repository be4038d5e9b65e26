"""Keys move: queries stay where they are, and the keys that they see come, in parts; gradients return the same way.

The backward of each piece runs with the merged output and LSE, of which the softmax of its keys is a part: nothing is
differentiated through the merge. Gradients of fetched keys are added in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from ..call.autograd import BackwardInputs
from . import pieces
from .exchange import Pending, Ranks
from .merged import Merged
from .movement import Movement, Part, Piece
from .pieces import Begun, Place
from .placed import Placed
from .rows import added, by_heads, by_rows, put, taken, where
from .way import Given, Known, sunk

T = torch.Tensor


class OnDevice:
    """A part with its row numbers on the device, and what the mods of its pieces read.

    mods: of rows that are runs, and of those that tables name.
    """

    def __init__(self, part: Part, own: T, seq_len: int, mods: tuple[Placed, Placed], device: torch.device) -> None:
        self.part = part
        self.send = where(part.send, device)
        self.mine, self.fetched = where(part.mine, device), where(part.fetched, device)
        self.returned = [where(rows, device) for rows in part.send.split(part.sends)]
        self.pieces: list[tuple[Piece, Placed, Place]] = []
        for piece in part.pieces:
            q, kv = own[piece.rows].to(device), part.positions[piece.keys].to(device)
            placed = mods[piece.first is None]
            first = (0, 0) if piece.first is None else piece.first
            self.pieces.append((piece, placed, Place(*first, seq_len, placed.tables(q, kv))))


@dataclass
class ByKeys:
    """Queries stay where they are; the keys that they see come, in parts."""

    ranks: Ranks
    movement: Movement
    runs: Placed
    tabled: Placed
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
        kept: list[T] = []
        for part, k_part, v_part, fetched in self._arriving(k, v):
            begun.append([])
            for piece, placed, place in part.pieces:
                tensors = (q[:, :, piece.rows], k_part[:, :, piece.keys], v_part[:, :, piece.keys])
                (out, lse, top), call = pieces.forward(
                    placed, self.options, place, tensors, asked.tensors, asked.max_scores
                )
                merged.add(piece.rows, out, lse, top)
                begun[-1].append(call)
            kept += [fetched] if self.keep and fetched is not None else []
        out, lse, top = merged.result()
        return *sunk(out, lse, asked.sinks), top, begun, kept

    def _arriving(self, k: T, v: T) -> Iterator[tuple[OnDevice, T, T, T | None]]:
        """(part, k, v, memory) of each part as its keys are there; all of them are on their way from the start."""
        coming = [self._started(part, k, v) for part in self.parts]
        for part, came in zip(self.parts, coming, strict=True):
            if came is None:
                yield part, k, v, None
            else:
                memory = came()
                yield part, *_keys_of(memory, k.shape[-1]), memory

    def _started(self, part: OnDevice, k: T, v: T) -> Callable[[], T] | None:
        """Sends and fetches the rows of a part: what gives them all, in order; None where only the rank's own are."""
        if not part.part.moves:
            return None
        own_k, own_v = by_rows(k), by_rows(v)
        width = k.shape[-1]
        memory = k.new_empty((len(part.part.positions), *own_k.shape[1:3], width + v.shape[-1]))
        in_place = False
        if self.movement.gather:
            pending = self.ranks.gather(torch.cat([own_k, own_v], -1))
        else:
            send = torch.cat([taken(own_k, part.send), taken(own_v, part.send)], -1)
            in_place = isinstance(part.fetched, slice)
            into = memory[part.fetched] if in_place else None
            pending = self.ranks.exchange(send, part.part.sends, part.part.receives, into)
        if len(part.part.mine):
            put(memory[..., :width], part.mine, own_k)
            put(memory[..., width:], part.mine, own_v)

        def arrived() -> T:
            rows = pending.arrived()
            if self.movement.gather:
                mine = self.ranks.rank * k.shape[2]
                rows = torch.cat([rows[:mine], rows[mine + k.shape[2] :]])
            if not in_place:
                put(memory, part.fetched, rows)
            return memory

        return arrived

    def backward(self, known: Known, begun: Any, kept: Sequence[T]) -> list[T | None]:
        q, k, v, *_ = known
        needs_keys = known.wanted[1] or known.wanted[2]
        dq = _RowSums(q, [piece.rows for part in self.parts for piece in part.part.pieces])
        of_given: list[T | None] = [None] * len(known.given)
        coming: list[tuple[OnDevice, Pending | None, T | None]] = []
        fetched = self._known_again(k, v, list(kept))
        for (part, k_part, v_part), calls in reversed(list(zip(fetched, begun, strict=True))):
            dk, dv = None, None
            for piece, call in zip(part.part.pieces, calls, strict=True):
                grads = self._of_piece(known, piece, call, k_part, v_part)
                dq.add(piece.rows, grads[0])
                dk, dv = _summed(dk, grads[1], k_part, piece.keys), _summed(dv, grads[2], v_part, piece.keys)
                for n, grad in enumerate(grads[3:]):
                    if grad is not None:
                        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
                        had = of_given[n]
                        of_given[n] = wide if had is None else had + wide
            if needs_keys:
                coming.append(self._returned(part, k_part, v_part, dk, dv))
        found: list[T | None] = [dq.total, None, None]
        if needs_keys:
            found[1:] = _keys_of(self._added(coming, k, v), k.shape[-1])
        return [*found, *of_given]

    def _known_again(self, k: T, v: T, kept: list[T]) -> list[tuple[OnDevice, T, T]]:
        """The keys of each part, as the forward kept them or fetched again."""
        if not self.keep:
            return [found[:3] for found in self._arriving(k, v)]
        found = []
        for part in self.parts:
            found.append((part, *_keys_of(kept.pop(0), k.shape[-1])) if part.part.moves else (part, k, v))
        return found

    def _of_piece(self, known: Known, piece: Piece, call: Begun, k_part: T, v_part: T) -> Sequence[T | None]:
        rows, keys = piece.rows, piece.keys
        inputs = BackwardInputs(
            q=known.q[:, :, rows],
            k=k_part[:, :, keys],
            v=v_part[:, :, keys],
            out=known.out[:, :, rows],
            lse=known.lse[:, :, rows],
            dout=known.dout[:, :, rows],
            dlse=None if known.dlse is None else known.dlse[:, :, rows],
            captured=(),
            wanted=known.wanted,
            partial=len(self.parts) > 1,
        )
        return call.backward(inputs, len(known.given))

    def _returned(
        self, part: OnDevice, k_part: T, v_part: T, dk: T | None, dv: T | None
    ) -> tuple[OnDevice, Pending | None, T | None]:
        """Gradients of a part: on their way to the ranks they belong to, and those of the rank's own keys."""
        dk = torch.zeros_like(k_part) if dk is None else dk
        dv = torch.zeros_like(v_part) if dv is None else dv
        rows = torch.cat([by_rows(dk), by_rows(dv)], -1)
        if not part.part.moves:
            return part, None, rows
        own = taken(rows, part.mine) if len(part.part.mine) else None
        back = self.ranks.exchange(taken(rows, part.fetched), part.part.receives, part.part.sends)
        return part, back, own

    def _added(self, coming: Sequence[tuple[OnDevice, Pending | None, T | None]], k: T, v: T) -> T:
        """The gradients of the rank's own keys and values, (rows, B, H, D + Dv).

        Its own share first, then what comes back, part by part and rank by rank.
        """
        wide = torch.promote_types(k.dtype, torch.float32)
        (mine,) = (own for *_, own in coming if own is not None)
        total = mine.to(wide) if mine.dtype is not wide else mine.clone()
        for part, back, _ in coming:
            returned = [] if back is None else back.arrived().split(part.part.sends)
            for rank, rows in enumerate(returned):
                if len(rows):
                    added(total, part.returned[rank], rows)
        return total


def _keys_of(rows: T, width: int) -> tuple[T, T]:
    """(B, H, S, D) keys and values of rows (S, B, H, D + Dv) in which they lie side by side; views."""
    return by_heads(rows[..., :width]), by_heads(rows[..., width:])


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
