"""Attention of one form on the rows of a rank, forward and backward: rows move, pieces are computed, sums return.

The backward of each piece runs with the merged output and LSE, of which the softmax of its keys is a part: nothing is
differentiated through the merge. Gradients of fetched keys go back the way the keys came and are added in the order of
ranks, those of captured tensors as 64-bit integers, so no result depends on who was first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

from ..call.autograd import BackwardInputs
from ..call.strides import in_order_of
from ..errors import GradientUnsupported
from . import pieces
from .exchange import Pending, Ranks
from .merged import Merged
from .movement import Movement, Part, Piece
from .pieces import Begun, Place
from .placed import Placed

T = torch.Tensor


class Known(NamedTuple):
    """What a backward is given: what the forward had and gave, and the gradients of what it gave."""

    q: T
    k: T
    v: T
    out: T
    lse: T
    dout: T
    dlse: T | None
    given: Sequence[T]
    wanted: Sequence[bool]


class Given(NamedTuple):
    """What a call has besides q, k and v: the tensors that its mods read, and whether largest scores are asked for.

    sink: which of the tensors has the sinks, (Hq,); None: there are none.
    """

    tensors: Sequence[T]
    max_scores: bool = False
    sink: int | None = None

    @property
    def sinks(self) -> T | None:
        return None if self.sink is None else self.tensors[self.sink]


class Way(Protocol):
    """How the ranks share the work of one attention: by moving keys (`ByKeys`), or heads (`ByHeads`)."""

    ranks: Ranks

    def forward(self, q: T, k: T, v: T, asked: Given) -> tuple[T, T, T | None, Any, list[T]]:
        """(out, lse, max_scores, what was begun, tensors that the backward needs besides)."""

    def backward(self, known: Known, begun: Any, kept: Sequence[T]) -> list[T | None]:
        """Gradients of q, k, v and of each given tensor, those of this rank's rows."""


# --- where rows lie -----------------------------------------------------------------------------------------


Where = slice | T


def where(rows: T, device: torch.device) -> Where:
    """Rows of some tensor: a slice where they are one run, else their numbers on `device`."""
    if len(rows) == 0:
        return slice(0, 0)
    first = int(rows[0])
    if torch.equal(rows, torch.arange(first, first + len(rows))):
        return slice(first, first + len(rows))
    return rows.to(device)


def taken(rows: T, at: Where) -> T:
    """`rows[at]` along the first dimension."""
    return rows[at] if isinstance(at, slice) else rows.index_select(0, at)


def put(into: T, at: Where, rows: T) -> None:
    """into[at] = rows."""
    if isinstance(at, slice):
        into[at].copy_(rows)
    else:
        into.index_copy_(0, at, rows)


def added(into: T, at: Where, rows: T) -> None:
    """into[at] += rows; no row is named twice, so there is no order to depend on."""
    if isinstance(at, slice):
        into[at].add_(rows)
    else:
        into.index_add_(0, at, rows.to(into.dtype))


def by_rows(x: T) -> T:
    """(B, H, S, D) as (S, B, H, D), a view; and `by_heads` the way back."""
    return x.permute(2, 0, 1, 3)


def by_heads(x: T) -> T:
    return x.permute(1, 2, 0, 3)


# --- keys that move -----------------------------------------------------------------------------------------


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


# --- heads that move ----------------------------------------------------------------------------------------


@dataclass
class ByHeads:
    """Every rank computes some heads of the whole sequence (Jacobs et al. 2023, DeepSpeed-Ulysses)."""

    ranks: Ranks
    runs: Placed
    options: tuple[Any, ...]
    order: T  # the global position of each row, rank after rank
    keep: bool = True

    def __post_init__(self) -> None:
        self.back = torch.empty_like(self.order)
        everyone = torch.arange(len(self.order), device=self.order.device)
        self.back[self.order] = everyone
        self.tables = self.runs.tables(everyone, everyone)

    def forward(self, q: T, k: T, v: T, asked: Given) -> tuple[T, T, T | None, Any, list[T]]:
        q_all, k_all, v_all = self._all_rows(q, k, v)
        moved = (q_all, k_all, v_all)
        heads = q.shape[1] // self.ranks.size
        place = Place(0, 0, len(self.order), self.tables, self.ranks.rank * heads)
        (out, lse, top), call = pieces.forward(self.runs, self.options, place, moved, asked.tensors, asked.max_scores)
        sinks = asked.sinks
        out, lse = sunk(out, lse, None if sinks is None else sinks[place.first_head :][:heads])
        mine = [self._own_rows(x) for x in (out, lse.unsqueeze(-1))]
        tops = None if top is None or not asked.max_scores else self._own_rows(top.unsqueeze(-1)).squeeze(-1)
        return mine[0], mine[1].squeeze(-1), tops, call, [*moved, out, lse] if self.keep else []

    def backward(self, known: Known, begun: Any, kept: Sequence[T]) -> list[T | None]:
        if self.keep:
            q, k, v, out, lse = kept
        else:
            q, k, v, out, lse = self._all_rows(known.q, known.k, known.v, known.out, known.lse.unsqueeze(-1))
            lse = lse.squeeze(-1)
        (dout,) = self._all_rows(known.dout)
        dlse = None if known.dlse is None else self._all_rows(known.dlse.unsqueeze(-1))[0].squeeze(-1)
        inputs = BackwardInputs(q, k, v, out, lse, dout, dlse, captured=(), wanted=known.wanted)
        grads = begun.backward(inputs, len(known.given))
        own = [
            self._own_rows(g) if g is not None and want else None
            for g, want in zip(grads, known.wanted[:3], strict=False)
        ]
        return [*own, *grads[3:]]

    def _all_rows(self, *tensors: T) -> tuple[T, ...]:
        """(B, H, rows, D) of this rank as (B, H / ranks, S, D), in order."""
        size, pending = self.ranks.size, []
        for x in tensors:
            rows = by_rows(x).unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4).contiguous()
            each = [rows.shape[1]] * size
            pending.append(self.ranks.exchange(rows.flatten(0, 1), each, each))
        return tuple(by_heads(p.arrived().index_select(0, self.back)) for p in pending)

    def _own_rows(self, x: T) -> T:
        """(B, H / ranks, S, D) as (B, H, rows, D) of this rank."""
        size = self.ranks.size
        rows = by_rows(x).index_select(0, self.order)
        each = [rows.shape[0] // size] * size
        found = self.ranks.exchange(rows, each, each).arrived()
        return found.unflatten(0, (size, -1)).permute(2, 0, 3, 1, 4).flatten(1, 2)


# --- autograd -----------------------------------------------------------------------------------------------


def attend(way: Way, q: T, k: T, v: T, given: Given, whole: bool) -> tuple[T, T, T | None]:
    """(out, lse, max_scores) of this rank's rows, differentiable in q, k, v and the given tensors.

    whole: gradients of given tensors are those of all ranks; else of this rank's rows, for who adds them up itself.
    """
    said = given.max_scores, given.sink
    out, lse, top = _Attend.apply(way, said, whole, q, k, v, *given.tensors)  # type: ignore[no-untyped-call]
    return out.to(q.dtype), lse, top


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: Way, said: tuple[bool, int | None], whole: bool, q: T, k: T, v: T, *given: T) -> Any:
        out, lse, top, ctx.begun, kept = way.forward(q, k, v, Given(given, *said))
        out = in_order_of(q, out)
        if top is not None:
            ctx.mark_non_differentiable(top)
        ctx.way, ctx.count, ctx.whole, ctx.sink = way, len(given), whole, said[1]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *given, *kept)
        return out, lse, top

    @staticmethod
    def backward(ctx: Any, dout: T | None, dlse: T | None, _: Any) -> Any:
        if torch.is_grad_enabled():
            raise GradientUnsupported(
                "the gradient of an attention that ranks share is not differentiable itself (create_graph=True)"
            )
        q, k, v, out, lse, *rest = ctx.saved_tensors
        given, kept = rest[: ctx.count], rest[ctx.count :]
        dout = torch.zeros_like(out) if dout is None else dout
        known = Known(q, k, v, out, lse, dout, dlse, given, ctx.needs_input_grad[3:])
        found = gradients(ctx.way, known, ctx.begun, kept, ctx.sink, ctx.whole)
        grads = [
            None if g is None else in_order_of(t, g.to(t.dtype)) if t.ndim == 4 else g.to(t.dtype)
            for t, g in zip((q, k, v, *given), found, strict=True)
        ]
        return None, None, None, *grads


def gradients(way: Way, known: Known, begun: Any, kept: Sequence[T], sink: int | None, whole: bool) -> list[T | None]:
    """Those of q, k, v and each given tensor that are wanted; `sink`: which of the given tensors has the sinks."""
    found = way.backward(known, begun, kept)
    if known.wanted[0] and found[0] is None:  # nothing is seen
        found[0] = torch.zeros_like(known.q)
    if sink is not None and known.wanted[3 + sink]:
        of_rows, before = _sink_gradient(known, known.given[sink]), found[3 + sink]
        found[3 + sink] = of_rows if before is None else before + of_rows
    if whole:
        found[3:] = [
            total_of(way.ranks, t, g) if want else None
            for t, g, want in zip(known.given, found[3:], known.wanted[3:], strict=True)
        ]
    return [g if want else None for g, want in zip(found, known.wanted, strict=True)]


def sunk(out: T, lse: T, sinks: T | None) -> tuple[T, T]:
    """out and lse with one more exponential in the sum of each row, that of its head's sink."""
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.detach().to(lse.dtype)[:, None])
    share = torch.exp(lse - total).nan_to_num(0.0).unsqueeze(-1)
    return (out * share).to(out.dtype), total


def _sink_gradient(known: Known, sinks: T) -> T:
    """Of this rank's rows: a sink is a key without a value, see `backends.sinks`."""
    delta = (known.dout.to(known.lse.dtype) * known.out.to(known.lse.dtype)).sum(-1)
    delta = delta if known.dlse is None else delta - known.dlse
    weight = torch.exp(sinks.to(known.lse.dtype)[:, None] - known.lse).nan_to_num(0.0)
    return -(weight * delta).sum((0, 2))


_BITS = 62  # of a sum in 64 bits


def total_of(ranks: Ranks, tensor: T, grad: T | None) -> T:
    """The gradient of `tensor` from the rows of all ranks: added as integers, so that no order matters.

    An element that is not finite on some rank makes all of them NaN.
    """
    mine = torch.zeros_like(tensor, dtype=torch.float64) if grad is None else grad.double()
    largest = ranks.total(mine.abs().amax().nan_to_num(nan=float("inf")).reshape(1), torch.distributed.ReduceOp.MAX)
    # |grad| < 2^exponent; that times the number of ranks fits
    exponent = torch.frexp(largest.nan_to_num(posinf=1.0)).exponent.double()
    shift = _BITS - (ranks.size - 1).bit_length() - exponent
    units = ranks.total(torch.ldexp(mine.nan_to_num(0.0, 0.0, 0.0), shift).round().to(torch.int64))
    found = torch.ldexp(units.double(), -shift)
    return torch.where(largest.isinf(), float("nan"), found)
