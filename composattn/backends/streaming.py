"""Attention in plain PyTorch, tile by tile: O(S) extra memory, hidden tiles skipped, gradients recomputed; any device.

    forward    for every query tile: for every kv tile it sees: scores, score mod, mask, online softmax, += P·V
    backward   the same loop; P comes back from LSE, dS from the derivative that `graph.gradient` gives

Heads are vectorised: one step works on the tile of every (batch, head) at once, the query heads of a group stacked
as rows over their one K/V head, which is never expanded. Sums run in fp32 (fp64 for fp64 tensors) and in a fixed
order. The backward is written in differentiable operations, so double backward works; only then autograd keeps what
every tile computes, which is O(S²).

Packed sequences are computed one after the other, and keys in pages gathered before: their lengths are read on the
host, which waits for the device.

Source: Milakov and Gimelshein 2018 (online softmax); Dao et al. 2022, FlashAttention, algorithms 1 and 4.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ..analysis.cuda_graphs import refuse_in_graph
from ..analysis.derived import refresh, values
from ..analysis.program import Program
from ..call.autograd import BackwardInputs, Grads, Results, attend
from ..call.eight_bits import EIGHT_BITS
from ..call.inputs import Asked, Inputs
from ..call.prepared import PreparedCall
from ..call.problem import Problem
from ..call.sequences import NO_SEQUENCES, Sequences
from ..call.strides import in_order_of
from ..graph.borrowed import Borrowed, borrowed_again
from ..graph.evaluate import evaluate
from ..graph.expr import Capture, Expr, const
from ..graph.gradient import derivative, partials
from ..graph.least_score import LEAST_SCORE
from ..graph.philox import factor_of
from ..watched import in_range, range_name
from .gathered import accumulate, total_for
from .layouts import SequenceRows, arrange
from .sinks import add_sink_gradients
from .tiles import BoundMask, Tile, TileStep, steps

Pair = tuple[torch.Tensor, torch.Tensor]


def prepare(problem: Problem, program: Program, scale: float) -> StreamingCall:
    """A call of this backend with its derivatives kept for the next; see `composattn.call.prepared.Prepare`."""
    return StreamingCall(DerivedMods(program, scale))


def _attention(
    mods: DerivedMods, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences = NO_SEQUENCES
) -> Results:
    refresh(mods.program.captures)
    out, lse, max_scores = attend(Streaming(mods, sequences=sequences), q, k, v)
    return out.to(q.dtype), lse, max_scores


@dataclass(frozen=True)
class DerivedMods:
    """What is known of a call before it has tensors: its graphs and their derivatives, derived when first asked for."""

    program: Program
    scale: float

    @property
    def captures(self) -> list[torch.Tensor]:
        """The captured tensors as the mods hold them now."""
        return [c.tensor for c in self.program.captures]

    @cached_property
    def slope(self) -> Expr:
        """d modified score / d score."""
        return const(1.0) if self.program.score is None else derivative(self.program.score)

    @cached_property
    def read_slopes(self) -> list[tuple[Expr, Expr]]:
        """(read, d modified score / d read) for every float read of the score mod."""
        found = {} if self.program.score is None else partials(self.program.score)
        return [(leaf, d) for leaf, d in found.items() if leaf.op == "read"]


class StreamingCall(PreparedCall):
    """One form of inputs."""

    def __init__(self, mods: DerivedMods) -> None:
        self.mods = mods

    def __call__(self, inputs: Inputs, asked: Asked) -> Results:
        return _attention(self.mods, *inputs[:3], inputs.sequences)

    def begin(
        self, scalars: Sequence[float | int], sequences: Sequences = NO_SEQUENCES, return_max_scores: bool = False
    ) -> Streaming:
        """One call with these run-time numbers and sequences."""
        return Streaming(self.mods, scalars, sequences)


class Streaming:
    """One call. A `Differentiable` in the sense of `composattn.call.autograd`."""

    differentiable_twice = True
    borrowed: Borrowed | None = None
    sources: Sequence[torch.Tensor] = ()  # nothing is made again behind a forward

    def __init__(
        self, mods: DerivedMods, scalars: Sequence[float | int] | None = None, sequences: Sequences = NO_SEQUENCES
    ) -> None:
        self.sequences = sequences
        self.mods, self.scale, self.captures = mods, mods.scale, mods.captures
        self.score, self.mask, self.sink, self.keep, self.values = mods.program.mods
        # of now, unless given: the backward must see no later ones
        numbers = [s.value for s in mods.program.scalars] if scalars is None else scalars
        self.scalars = {id(s): number for s, number in zip(mods.program.scalars, numbers, strict=True)}
        self.visited: list[list[list[Tile]]] = []  # by step and query tile: what the forward saw, for the backward

    def read(self, replaced: Mapping[Capture, torch.Tensor]) -> Sequence[torch.Tensor]:
        return values(self.mods.program.captures, replaced)

    def steps(
        self, parts: list[SequenceRows], q: torch.Tensor, k: torch.Tensor, captured: Sequence[torch.Tensor]
    ) -> Iterator[TileStep]:
        """The steps of the call, for the tensors that autograd gave."""
        refuse_in_graph(
            "backend 'streaming', and gradients of captured tensors that no kernel sums, look at what tiles hold",
            "call a backend with kernels, 'hopper', 'blackwell' or 'warp', and leave those gradients out or let "
            "explain() say which are summed",
        )
        tensors = {id(t): given for t, given in zip(self.captures, captured, strict=True)}
        return steps(parts, BoundMask(self.mods.program, tensors, self.scalars), q, k)

    def range_name(self, direction: str) -> str:
        """What profiles call it."""
        return range_name(direction, self.mods.program.title, "streaming")

    @in_range("forward")
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, captured: Sequence[torch.Tensor]) -> Results:
        """(out, lse, max_scores), all in the working precision."""
        form, given = arrange(self.sequences, q, k), q
        q, k, v = _grouped(form.queries(q), form.keys(k), form.keys(v))
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        lse, top = (q.new_full(q.shape[:-1], -math.inf) for _ in range(2))
        for step in self.steps(form.parts, q, k, captured):
            here, v_here = [step.queries(x) for x in (out, lse, top)], step.keys(v)
            visited = []
            memory = q.new_empty(math.prod(step.shape) * step.q_tile * step.kv_tile)
            for rows in step.query_tiles:
                tiles, *found = _forward_rows(self, step, rows, v_here, memory)
                for x, of_rows in zip(here, found, strict=True):
                    x[:, :, :, rows] = of_rows
                visited.append(tiles)
            self.visited.append(visited)
        out = in_order_of(given, form.queries_back(out.flatten(1, 2)))
        return out, form.statistics_back(lse.flatten(1, 2)), form.statistics_back(top.flatten(1, 2))

    def visit(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, captured: Sequence[torch.Tensor]) -> None:
        """Finds the tiles to visit, where the forward was another object's."""
        form = arrange(self.sequences, q, k)
        q, k, v = _grouped(form.queries(q), form.keys(k), form.keys(v))
        for step in self.steps(form.parts, q, k, captured):
            self.visited.append([[tile for tile, _ in step.seen_from(rows)] for rows in step.query_tiles])

    @in_range("backward")
    def backward(self, known: BackwardInputs) -> Grads:
        """(dq, dk, dv, *d captured), each in the type of its tensor."""
        with borrowed_again(self.borrowed):
            found = self._gradients(known)
            return _of_all(found, known) if torch.is_grad_enabled() else found

    def _totals(self, wanted: Sequence[bool], q: torch.Tensor) -> dict[int, torch.Tensor]:
        """Where gradients of captured tensors are summed, by the tensors' ids."""
        asked = [t for t, w in zip(self.captures, wanted, strict=True) if w and t.is_floating_point()]
        return {id(t): total_for(t, q.dtype, q.device) for t in asked}

    def _gradients(self, known: BackwardInputs) -> Grads:
        q, k, v, out, lse, dout, dlse, captured, wanted, _ = known
        if not self.visited:
            self.visit(q, k, v, captured)
        form = arrange(self.sequences, q, k)
        q, k, v = _grouped(form.queries(q), form.keys(k), form.keys(v))
        heads = q.shape[1:3]
        out, dout = (form.queries(x).to(q.dtype).unflatten(1, heads) for x in (out, dout))
        lse = form.statistics(lse).unflatten(1, heads)
        # dS = P (dP - delta): rowsum(dO·O) is rowsum(P·dP), and d lse / dS is P.
        delta = (dout * out).sum(-1)
        delta = delta if dlse is None else delta - form.statistics(dlse).unflatten(1, heads)
        lse = lse.masked_fill(lse == -math.inf, 0.0)
        dq, dk, dv = map(functools.partial(torch.zeros_like, dtype=q.dtype), (q, k, v))
        totals = self._totals(wanted[3:], q)
        slopes = [(read, d) for read, d in self.mods.read_slopes if id(read.attr.tensor) in totals]
        for step, visited in zip(self.steps(form.parts, q, k, captured), self.visited, strict=True):
            dq_here, dk_here, dv_here = step.queries(dq), step.keys(dk), step.keys(dv)
            k_here, v_here = step.keys(k), step.keys(v)
            for rows, tiles in zip(step.query_tiles, visited, strict=True):
                q_tile, do_tile, lse_tile, delta_tile = (step.queries(x)[:, :, :, rows] for x in (q, dout, lse, delta))
                if self.sink is not None:
                    add_sink_gradients(self.sink, step.of_rows, lse_tile, delta_tile, totals)
                q_tile, do_tile = _stack(q_tile) * self.scale, _stack(do_tile)
                dq_tile = torch.zeros_like(q_tile)
                for tile in tiles:
                    columns = tile.columns
                    dp = do_tile @ _values(self, step, v_here, columns).mT
                    p, ds = _backward_tile(self, step, tile, q_tile, dp, lse_tile, delta_tile, slopes, totals)
                    dv_here[:, :, columns].add_(p.mT @ do_tile)
                    dk_here[:, :, columns].add_(ds.mT @ q_tile)
                    dq_tile = dq_tile + ds @ k_here[:, :, columns].to(ds.dtype)
                dq_here[:, :, :, rows] = (dq_tile * self.scale).unflatten(2, (step.shape[2], -1))
        dq, dk, dv = form.queries_back(dq.flatten(1, 2)), form.keys_back(dk), form.keys_back(dv)
        made = zip(known[:3], (dq, dk, dv), wanted[:3], strict=True)
        grads = [in_order_of(t, g.to(t.dtype)) if w else None for t, g, w in made]
        sums = [totals[id(t)].to(t.device, t.dtype) if id(t) in totals else None for t in self.captures]
        return (*grads, *sums)


def _of_all(grads: Grads, known: BackwardInputs) -> Grads:
    """Each gradient as a function of all that is known, so that its own are 0, and no error, where no tile is seen."""
    tensors = (known.q, known.k, known.v, known.out, known.dout, *known.captured)
    nothing = sum(t.expand(0, *t.shape).sum() for t in tensors if t.requires_grad)
    return tuple([None if g is None else (g + nothing).to(g.dtype) for g in grads])


Visited = tuple[list[Tile], torch.Tensor, torch.Tensor, torch.Tensor]
Of = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""What is known of a part of the keys: its output, the largest score of each row, its exponentials' sum below that."""


def _forward_rows(call: Streaming, step: TileStep, rows: slice, v: torch.Tensor, memory: torch.Tensor) -> Visited:
    """(tiles visited, out, lse, max_scores) of one query tile: each kv tile's own softmax, merged.

    A part of the keys is its output, its largest score, and the sum of its exponentials below that one.
    """
    q_tile = _stack(step.q[:, :, :, rows]) * call.scale
    shape = (*step.shape, rows.stop - rows.start)
    top, total = q_tile.new_full((*shape, 1), -math.inf), q_tile.new_zeros((*shape, 1))
    out = q_tile.new_zeros((*q_tile.shape[:-1], v.shape[-1]))
    visited = []
    for tile, visible in step.seen_from(rows):
        visited.append(tile)
        raw = scores = _scores(q_tile, step, tile, memory)
        if call.score is not None:
            scores = step.evaluate([call.score], tile, raw)[0].expand(raw.shape)
        scores, highest = _hidden(scores, visible, raw)
        # one operation where exponentials and their sum take three; the largest probability is 1 / sum
        p = torch.softmax(scores, -1, out=raw)
        sums = p.amax(-1, keepdim=True).reciprocal_()
        unseen = highest == -math.inf
        if bool(unseen.any()):
            p.masked_fill_(unseen, 0.0)
            sums.masked_fill_(unseen, 0.0)
        if call.keep is not None:
            p = p * _kept(call.keep, step, tile)
        of_tile = _stack(p) @ _values(call, step, v, tile.columns)
        if len(visited) == 1:
            out, top, total = of_tile, highest, sums
        else:
            out, top, total = _merged((out, top, total), (of_tile, highest, sums))
    largest = top
    if call.score is not None:  # decided by whole rows, so that it does not hang on where tiles end
        hidden = top < LEAST_SCORE
        if bool(hidden.any()):
            out.masked_fill_(_stack(hidden), 0.0)
            largest, total = top.masked_fill(hidden, -math.inf), total.masked_fill(hidden, 0.0)
    if call.sink is not None:
        sink = evaluate(call.sink, step.of_rows).unsqueeze(-1).to(top.dtype).expand(top.shape)
        out, largest, total = _merged((out, largest, total), (torch.zeros_like(out), sink, torch.ones_like(sink)))
    lse = largest + total.log()
    return visited, out.view(*shape, -1), lse.squeeze(-1), top.squeeze(-1)


def _hidden(scores: torch.Tensor, visible: torch.Tensor | None, memory: torch.Tensor) -> Pair:
    """(scores with -inf where they are not visible, in `memory` where it pays; the highest of each row)."""
    if visible is None:
        return scores, scores.amax(-1, keepdim=True)
    if visible.numel() < scores.numel():
        # one mask for all heads: a minimum takes 29 µs where masked_fill takes 300, but leaves a hidden NaN
        bound = torch.full_like(visible, math.inf, dtype=scores.dtype).masked_fill_(~visible, -math.inf)
        scores = torch.minimum(scores, bound, out=memory)
        highest = scores.amax(-1, keepdim=True)
        if not bool(highest.isnan().any()):
            return scores, highest
    scores = scores.masked_fill(~visible, -math.inf)
    return scores, scores.amax(-1, keepdim=True)


def _merged(one: Of, other: Of) -> Of:
    """Two parts of the keys as one; the first one's output is written to.

    Each weight has all its digits, however small: as 1 less the other one, or by an LSE that is rounded, it has not.
    """
    (out, top, total), (other_out, other_top, other_total) = one, other
    highest = torch.maximum(top, other_top)
    # where both saw nothing, or both have an infinite score, the difference is NaN and not 0
    mine, others = (
        sums * torch.exp((largest - highest).masked_fill_(largest == highest, 0.0))
        for largest, sums in ((top, total), (other_top, other_total))
    )
    whole = mine + others
    sure = whole.clamp_min(1.0)  # it is 1 or more, but in rows that see nothing
    return out.mul_(_stack(mine / sure)).addcmul_(other_out, _stack(others / sure)), highest, whole


def _backward_tile(
    call: Streaming,
    step: TileStep,
    tile: Tile,
    q_tile: torch.Tensor,
    dp: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    slopes: list[tuple[Expr, Expr]],
    totals: dict[int, torch.Tensor],
) -> Pair:
    """(P that V was multiplied by, d score) of one tile, a group stacked; gradients of captured reads to `totals`."""
    raw = _scores(q_tile, step, tile)
    visible = None if tile.full or call.mask is None else step.evaluate([call.mask], tile)[0]
    if visible is not None and torch.is_grad_enabled():
        raw = raw.masked_fill(~visible, 0.0)  # keeps the NaN of a hidden pair out of the second derivative
    scores = slope = raw
    by_read: list[torch.Tensor] = []
    if call.score is not None:
        scores, slope, *by_read = step.evaluate([call.score, call.mods.slope, *(d for _, d in slopes)], tile, raw)
        scores = scores.expand(raw.shape)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    p = torch.exp(scores - lse.unsqueeze(-1))
    dp, used = dp.view(p.shape), p
    if call.keep is not None:
        kept = _kept(call.keep, step, tile)
        dp, used = dp * kept, p * kept
    ds = p * (dp - delta.unsqueeze(-1))
    if call.score is not None:
        # Nothing is seen where P is 0: the derivative there, which may be infinite or NaN, has no say.
        unseen = p == 0
        for (read, _), by in zip(slopes, by_read, strict=True):
            indices = step.evaluate(list(read.args), tile, raw)
            accumulate(totals[id(read.attr.tensor)], ds * torch.where(unseen, 0.0, by), indices)
        if call.mods.slope is not const(1.0):
            ds = ds * torch.where(unseen, 0.0, slope)
    return _stack(used), _stack(ds)


def _kept(keep: Expr, step: TileStep, tile: Tile) -> torch.Tensor:
    """What weights of a tile are multiplied by: 0 where dropped."""
    return step.evaluate([keep], tile)[0].to(step.q.dtype) * factor_of(keep)


def _values(call: Streaming, step: TileStep, v: torch.Tensor, columns: slice) -> torch.Tensor:
    """V of a tile, of the step's `v`; of 8 bits times its scales. Nothing flows back to it then."""
    found = v[:, :, columns].to(step.q.dtype)
    if call.values is None:
        return found
    index = {name: step.index[name][:, :, 0] for name in ("b", "h")}  # any query head of the group
    at = {"kv": step.arange(columns, -1, 1), "d": step.arange(slice(0, v.shape[-1]), -1)}
    return found * evaluate(call.values, step.env({**index, **at})).to(found.dtype)


def _stack(x: torch.Tensor) -> torch.Tensor:
    """(b, kv head, group, rows, n) → (b, kv head, group · rows, n)."""
    return x.flatten(2, 3)


def _scores(q_tile: torch.Tensor, step: TileStep, tile: Tile, memory: torch.Tensor | None = None) -> torch.Tensor:
    """scale·q·kᵀ of a tile, (b, kv head, group, rows, columns), written to `memory` where given."""
    keys, shape = (
        step.k[:, :, tile.columns].to(q_tile.dtype).mT,
        (*q_tile.shape[:-1], tile.columns.stop - tile.columns.start),
    )
    given = None if memory is None else memory[: math.prod(shape)].view(shape)
    return torch.matmul(q_tile, keys, out=given).unflatten(2, (step.shape[2], -1))


def _grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In the working precision, contiguous, q as (B, Hkv, group, Sq, D); k and v of 8 bits stay as they are."""
    working = torch.promote_types(q.dtype, torch.float32)
    q, k, v = ((x if x.dtype in EIGHT_BITS else x.to(working)).contiguous() for x in (q, k, v))
    return q.unflatten(1, (k.shape[1], q.shape[1] // k.shape[1])), k, v
