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

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ..analysis.bands import TileInterval
from ..analysis.derived import refresh
from ..analysis.program import Program
from ..call.autograd import BackwardInputs, Grads, Results, attend
from ..call.inputs import Asked, Inputs
from ..call.problem import Problem
from ..call.sequences import NO_SEQUENCES, Sequences
from ..call.strides import in_order_of
from ..graph.evaluate import Env, evaluate_all
from ..graph.expr import Expr, const
from ..graph.gradient import derivative, partials
from ..graph.lent import Lending
from .gathered import accumulate, total_for
from .rows import Part, arrange

Pair = tuple[torch.Tensor, torch.Tensor]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    score: Expr | None = None,
    mask: Expr | None = None,
    scale: float,
) -> Pair:
    """Attention in tiles.

    q (B, Hq, Sq, D), k (B, Hkv, Skv, D), v (B, Hkv, Skv, Dv) → out (B, Hq, Sq, Dv) in q's dtype, lse (B, Hq, Sq),
    natural logarithm, fp32 (fp64 for fp64 tensors). `score` and `mask` are graphs over the leaves of
    `composattn.graph`. Differentiable, twice too, in q, k, v and captured float tensors, through out and lse.
    """
    return _attention(Mods(Program(score, mask), scale), q, k, v)[:2]


def prepare(problem: Problem, program: Program, scale: float) -> StreamingCall:
    """A call of this backend with its derivatives kept for the next; see `composattn.backends.Prepare`."""
    return StreamingCall(Mods(program, scale))


def _attention(
    mods: Mods, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences = NO_SEQUENCES
) -> Results:
    refresh(mods.program.captures)
    out, lse, max_scores = attend(Streaming(mods, sequences=sequences), q, k, v)
    return out.to(q.dtype), lse, max_scores


# Scores of one step, over all its heads: on a CPU about what its caches hold, on a GPU enough to fill it.
SCORES_AT_ONCE = {"cpu": 1 << 19, "cuda": 1 << 24}
SMALLEST_TILE, LARGEST_TILE = 64, 512


@dataclass(frozen=True)
class Mods:
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


class StreamingCall:
    """One form of inputs."""

    plan = captured_sums = ""

    def __init__(self, mods: Mods) -> None:
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
    lending: Lending | None = None

    def __init__(
        self, mods: Mods, scalars: Sequence[float | int] | None = None, sequences: Sequences = NO_SEQUENCES
    ) -> None:
        self.sequences = sequences
        self.mods, self.scale, self.captures = mods, mods.scale, mods.captures
        self.score, self.mask = mods.program.score, mods.program.mask
        # of now, unless given: the backward must see no later ones
        numbers = [s.value for s in mods.program.scalars] if scalars is None else scalars
        self.scalars = {id(s): number for s, number in zip(mods.program.scalars, numbers, strict=True)}
        self.visited: list[list[list[_Tile]]] = []  # by step and query tile: what the forward saw, for the backward

    def steps(
        self, parts: Sequence[Part], q: torch.Tensor, k: torch.Tensor, captured: Sequence[torch.Tensor]
    ) -> Iterator[_Step]:
        """The sequences cut into groups of heads whose tiles are not too large together."""
        batch, kv_heads, group = q.shape[:3]
        budget = SCORES_AT_ONCE.get(q.device.type, SCORES_AT_ONCE["cuda"])
        for part in parts:
            q_len, kv_len = (s.stop - s.start for s in (part.queries, part.keys))
            tile = min(SMALLEST_TILE, q_len) * min(SMALLEST_TILE, kv_len) * group
            at_once = max(1, budget // max(1, tile))
            heads = min(kv_heads, at_once)
            batches = max(1, min(batch, at_once // kv_heads))
            for b in range(0, batch, batches):
                for h in range(0, kv_heads, heads):
                    at = slice(b, min(b + batches, batch)), slice(h, min(h + heads, kv_heads))
                    yield _Step(self, part, *at, q, k, captured)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, captured: Sequence[torch.Tensor]) -> Results:
        """(out, lse, max_scores), all in the working precision."""
        form, given = arrange(self.sequences, q, k), q
        q, k, v = _grouped(form.queries(q), form.keys(k), form.keys(v))
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        lse, top = (q.new_full(q.shape[:-1], -math.inf) for _ in range(2))
        for step in self.steps(form.parts, q, k, captured):
            here, v_here = [step.queries(x) for x in (out, lse, top)], step.keys(v)
            visited = []
            for rows in step.query_tiles:
                tiles, *found = _forward_rows(step, rows, v_here)
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

    def backward(self, known: BackwardInputs) -> Grads:
        """(dq, dk, dv, *d captured), each in the type of its tensor."""
        q, k, v, out, lse, dout, dlse, captured, wanted = known
        if not self.visited:
            self.visit(q, k, v, captured)
        given = q, k, v
        form = arrange(self.sequences, q, k)
        q, k, v = _grouped(form.queries(q), form.keys(k), form.keys(v))
        heads = q.shape[1:3]
        out, dout = (form.queries(x).to(q.dtype).unflatten(1, heads) for x in (out, dout))
        lse = form.statistics(lse).unflatten(1, heads)
        # dS = P (dP - delta): rowsum(dO·O) is rowsum(P·dP), and d lse / dS is P.
        delta = (dout * out).sum(-1)
        delta = delta if dlse is None else delta - form.statistics(dlse).unflatten(1, heads)
        lse = lse.masked_fill(lse == -math.inf, 0.0)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        asked = {id(t): t for t, w in zip(self.captures, wanted[3:], strict=True) if w and t.is_floating_point()}
        totals = {key: total_for(t, q.dtype, q.device) for key, t in asked.items()}
        slopes = [(read, d) for read, d in self.mods.read_slopes if id(read.attr.tensor) in asked]
        for step, visited in zip(self.steps(form.parts, q, k, captured), self.visited, strict=True):
            dq_here, dk_here, dv_here = step.queries(dq), step.keys(dk), step.keys(dv)
            k_here, v_here = step.keys(k), step.keys(v)
            for rows, tiles in zip(step.query_tiles, visited, strict=True):
                q_tile, do_tile, lse_tile, delta_tile = (step.queries(x)[:, :, :, rows] for x in (q, dout, lse, delta))
                q_tile, do_tile = step.stack(q_tile) * self.scale, step.stack(do_tile)
                dq_tile = torch.zeros_like(q_tile)
                for tile in tiles:
                    columns = tile.columns
                    dp = do_tile @ v_here[:, :, columns].mT
                    p, ds = _backward_tile(step, tile, q_tile, dp, lse_tile, delta_tile, slopes, totals)
                    dv_here[:, :, columns].add_(p.mT @ do_tile)
                    dk_here[:, :, columns].add_(ds.mT @ q_tile)
                    dq_tile = dq_tile + ds @ k_here[:, :, columns]
                dq_here[:, :, :, rows] = (dq_tile * self.scale).unflatten(2, (step.shape[2], -1))
        dq, dk, dv = form.queries_back(dq.flatten(1, 2)), form.keys_back(dk), form.keys_back(dv)
        grads = [in_order_of(t, g.to(t.dtype)) for t, g in zip(given, (dq, dk, dv), strict=True)]
        sums = [totals[id(t)].to(t.device, t.dtype) if id(t) in totals else None for t in self.captures]
        return (*grads, *sums)


Visited = tuple[list["_Tile"], torch.Tensor, torch.Tensor, torch.Tensor]


def _forward_rows(step: _Step, rows: slice, v: torch.Tensor) -> Visited:
    """(tiles visited, out, lse, max_scores) of one query tile, by online softmax."""
    q_tile = step.stack(step.q[:, :, :, rows]) * step.call.scale
    shape = (*step.shape, rows.stop - rows.start)
    top = q_tile.new_full((*shape, 1), -math.inf)
    total = q_tile.new_zeros((*shape, 1))
    acc = q_tile.new_zeros((*q_tile.shape[:-1], v.shape[-1]))
    visited = []
    for tile, visible in step.seen_from(rows):
        visited.append(tile)
        scores = step.scores(q_tile, tile)
        if step.call.score is not None:
            scores = step.evaluate([step.call.score], tile, scores)[0].expand(scores.shape)
        if visible is not None:
            scores = scores.masked_fill(~visible, -math.inf)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        base = higher.masked_fill(higher == -math.inf, 0.0)
        p = (scores - base).exp_()
        fade = torch.exp(top - base)
        total = total * fade + p.sum(-1, keepdim=True)
        acc = acc * step.stack(fade) + step.stack(p) @ v[:, :, tile.columns]
        top = higher
    seen = total.masked_fill(total == 0, 1.0)
    return visited, acc.view(*shape, -1) / seen, (top + seen.log()).squeeze(-1), top.squeeze(-1)


def _backward_tile(
    step: _Step,
    tile: _Tile,
    q_tile: torch.Tensor,
    dp: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    slopes: list[tuple[Expr, Expr]],
    totals: dict[int, torch.Tensor],
) -> Pair:
    """(P, d score) of one tile, the rows of a group stacked; gradients of captured reads are added to `totals`."""
    call = step.call
    raw = step.scores(q_tile, tile)
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
    ds = p * (dp.view(p.shape) - delta.unsqueeze(-1))
    if call.score is not None:
        # Nothing is seen where P is 0: the derivative there, which may be infinite or NaN, has no say.
        unseen = p == 0
        for (read, _), by in zip(slopes, by_read, strict=True):
            indices = step.evaluate(list(read.args), tile)
            accumulate(totals[id(read.attr.tensor)], ds * torch.where(unseen, 0.0, by), indices)
        if call.mods.slope is not const(1.0):
            ds = ds * torch.where(unseen, 0.0, slope)
    return step.stack(p), step.stack(ds)


@dataclass(frozen=True)
class _Tile:
    """Rows and columns of one tile; `full` where every pair is visible, so that nothing is tested."""

    rows: slice
    columns: slice
    full: bool


class _Step:
    """What one step needs to know: its sequence (or all of a dense call's), heads and tiles, and the mods on them."""

    def __init__(
        self,
        call: Streaming,
        part: Part,
        batches: slice,
        kv_heads: slice,
        q: torch.Tensor,
        k: torch.Tensor,
        captured: Sequence[torch.Tensor],
    ) -> None:
        self.call, self.part = call, part
        self.heads = (batches, kv_heads)
        self.q, self.k = self.queries(q), self.keys(k)
        self.shape = tuple(self.q.shape[:3])
        self.q_len, self.kv_len = self.q.shape[3], self.k.shape[2]
        self.tensors = {id(t): given for t, given in zip(call.captures, captured, strict=True)}
        group = self.shape[2]
        self.index = {
            "b": self.arange(slice(part.b + batches.start, part.b + batches.stop), -1, 1, 1, 1, 1),
            "h": self.arange(slice(kv_heads.start * group, kv_heads.stop * group), 1, -1, group, 1, 1),
            "q_len": self.arange(slice(self.q_len, self.q_len + 1), 1),
            "kv_len": self.arange(slice(self.kv_len, self.kv_len + 1), 1),
        }
        budget = SCORES_AT_ONCE.get(q.device.type, SCORES_AT_ONCE["cuda"]) // max(1, math.prod(self.shape))
        self.q_tile = min(_tile(math.isqrt(budget)), max(1, self.q_len))
        self.kv_tile = min(_tile(budget // self.q_tile), max(1, self.kv_len))

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """The step's of (B, kv head, group, rows, ...)."""
        return x[self.heads][:, :, :, self.part.queries]

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """The step's of (B, kv head, columns, ...)."""
        return x[self.heads][:, :, self.part.keys]

    @cached_property
    def query_tiles(self) -> list[slice]:
        return [slice(r, min(r + self.q_tile, self.q_len)) for r in range(0, self.q_len, self.q_tile)]

    def arange(self, positions: slice, *shape: int) -> torch.Tensor:
        return torch.arange(positions.start, positions.stop, device=self.q.device).view(shape)

    @staticmethod
    def stack(x: torch.Tensor) -> torch.Tensor:
        """(b, kv head, group, rows, n) → (b, kv head, group · rows, n)."""
        return x.flatten(2, 3)

    def scores(self, q_tile: torch.Tensor, tile: _Tile) -> torch.Tensor:
        """scale·q·kᵀ of a tile, (b, kv head, group, rows, columns)."""
        return (q_tile @ self.k[:, :, tile.columns].mT).unflatten(2, (self.shape[2], -1))

    def evaluate(self, exprs: list[Expr], tile: _Tile, score: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Values of graphs on a tile, broadcastable to its scores."""
        index = {
            **self.index,
            "q": self.arange(tile.rows, 1, 1, 1, -1, 1),
            "kv": self.arange(tile.columns, 1, 1, 1, 1, -1),
        }
        return evaluate_all(exprs, self.env(index, score))

    def env(self, index: dict[str, torch.Tensor], score: torch.Tensor | None = None) -> Env:
        q, scalars = self.q, self.call.scalars
        return Env(index, score, float_dtype=q.dtype, device=q.device, tensors=self.tensors, scalars=scalars)

    def seen_from(self, rows: slice) -> Iterator[tuple[_Tile, torch.Tensor | None]]:
        """Tiles with a visible pair, in ascending order, with what is visible of them; None: all."""
        for columns, full in self.candidates[rows.start // self.q_tile]:
            tile = _Tile(rows, columns, full)
            if full or self.call.mask is None:
                yield tile, None
                continue
            visible = self.evaluate([self.call.mask], tile)[0]
            if bool(visible.all()):
                yield _Tile(rows, columns, True), None
            elif bool(visible.any()):
                yield tile, visible

    @cached_property
    def candidates(self) -> list[list[tuple[slice, bool]]]:
        """For every query tile the columns of the kv tiles that its intervals touch, and which need no test."""
        all_columns = [slice(c, min(c + self.kv_tile, self.kv_len)) for c in range(0, self.kv_len, self.kv_tile)]
        if self.call.mask is None:
            return [[(columns, True) for columns in all_columns] for _ in self.query_tiles]
        spans = [self.span(interval) for interval in self.call.mods.program.intervals]
        found = []
        for i in range(len(self.query_tiles)):
            touched = []
            for columns in all_columns:
                begins = [s[i] for s in spans if s[i][0] < columns.stop and s[i][1] > columns.start]
                if begins:
                    full = any(fb <= columns.start and columns.stop <= fe for _, _, fb, fe in begins)
                    touched.append((columns, full))
            found.append(touched)
        return found

    def span(self, interval: TileInterval) -> list[tuple[int, int, int, int]]:
        """Ends of an interval for every query tile: begin and end cover every head, full ends hold for every head."""
        first = torch.tensor([r.start for r in self.query_tiles], device=self.q.device).view(1, 1, 1, -1, 1)
        last = torch.tensor([r.stop - 1 for r in self.query_tiles], device=self.q.device).view(1, 1, 1, -1, 1)
        env = self.env({**self.index, "first": first, "last": last})
        ends = evaluate_all([interval.begin, interval.end, interval.full_begin, interval.full_end], env)
        shape = (*self.shape, len(self.query_tiles), 1)
        begin, end, full_begin, full_end = (e.expand(shape).transpose(3, 0).flatten(1) for e in ends)
        nothing = begin >= end
        columns = (
            begin.masked_fill(nothing, self.kv_len).amin(1), end.masked_fill(nothing, 0).amax(1),
            full_begin.amax(1), full_end.amin(1),
        )  # fmt: skip
        return list(zip(*(c.tolist() for c in columns), strict=True))


def _grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In the working precision, contiguous, q as (B, Hkv, group, Sq, D)."""
    working = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.to(working).contiguous() for x in (q, k, v))
    return q.unflatten(1, (k.shape[1], q.shape[1] // k.shape[1])), k, v


def _tile(size: int) -> int:
    """The power of two at or below `size`, within bounds."""
    return max(SMALLEST_TILE, min(LARGEST_TILE, 1 << max(0, size.bit_length() - 1)))
