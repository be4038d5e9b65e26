"""The oracle: attention by its definition, dense, in fp64, differentiated by torch's autograd; any device.

Every other backend is held to this one (`composattn.testing`). It is written to be read, and to have no rounding
and no NaN of its own: mods are evaluated at visible pairs only. A hidden pair gets the indices and the score of a
visible one, and its value is dropped, so what a mod gives there (a NaN, an infinite derivative, a read out of range)
can't leak into a result or a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch.utils.checkpoint import checkpoint

from ..analysis.cuda_graphs import refuse_in_graph
from ..analysis.derived import refresh, values
from ..analysis.program import Program
from ..analysis.symbolic import read_in_words
from ..call.autograd import BackwardInputs, Grads
from ..call.inputs import Asked, Inputs
from ..call.prepared import PreparedCall
from ..call.problem import Problem
from ..call.sequences import NO_SEQUENCES, Sequences
from ..call.strides import in_order_of
from ..errors import CapturedIndexOutOfRange, GradientUnsupported
from ..graph.borrowed import Borrowed, borrowed_again, current
from ..graph.evaluate import Env, evaluate
from ..graph.expr import Capture, Expr
from ..graph.least_score import LEAST_SCORE
from ..graph.philox import factor_of
from ..watched import in_range, range_name
from .layouts import arrange

Pair = tuple[torch.Tensor, torch.Tensor]
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # out, lse, max_scores

PAIRS_AT_ONCE = 1 << 24
"""(b, h, q, kv) pairs in one go: fp64 scores of 128 MiB. Above, heads are computed, and recomputed, in turn."""


class Rounding(Protocol):
    """Disturbs what a rounding would disturb: `composattn.testing` measures the conditioning of a case with it."""

    def score(self, score: torch.Tensor, q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
        """scale·q·kᵀ, before the score mod."""

    def modified(self, score: torch.Tensor) -> torch.Tensor:
        """The score after the score mod, -inf where hidden."""

    def output(
        self, out: torch.Tensor, p: torch.Tensor, weights: torch.Tensor, v: torch.Tensor, score: torch.Tensor
    ) -> torch.Tensor:
        """weights·V, which are P behind dropout; its backward may disturb what v and the modified score receive."""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    score: Expr | None = None,
    mask: Expr | None = None,
    sink: Expr | None = None,
    keep: Expr | None = None,
    values: Expr | None = None,
    scale: float,
    precision: torch.dtype = torch.float64,
    tensors: Mapping[int, torch.Tensor] | None = None,
    rounding: Rounding | None = None,
    sequences: Sequences = NO_SEQUENCES,
) -> Pair:
    """Attention by its definition.

    q (B, Hq, Sq, D), k (B, Hkv, Skv, D), v (B, Hkv, Skv, Dv) → out (B, Hq, Sq, Dv) in q's dtype; lse (B, Hq, Sq),
    natural logarithm, fp32 (fp64 for fp64 tensors). With `sequences` packed, or k and v in pages, see `ca.Varlen` and
    `ca.Paged`: each sequence is then computed alone.
    `score` and `mask` are graphs over the leaves of `composattn.graph`. A pair is visible where the mask is true and
    its modified score is above -inf; a row with no visible pair gives O = 0, LSE = -inf and zero gradients. `sink`
    depends on b and h: each row's sum of exponentials, and LSE, have exp(sink) more. `keep`: weights behind the softmax
    where it is false are 0, others times 1 / (1 - p); see `graph.philox`. `values`: the factor of v, of 8 bits, at
    b, h, kv and the channel d; k and v of 8 bits are widened, which is exact.

    `precision` is what tensors are multiplied in: fp64 makes the oracle; q's own dtype makes "plain PyTorch at the
    same precision", in which scores, softmax and statistics are fp32 between products in that dtype. `tensors` maps
    the id of a captured tensor to what is read, and gets the gradient, in its place. `rounding` disturbs the scores.

    Raises: `CapturedIndexOutOfRange` where a captured tensor is read outside its shape at a visible pair.
    """
    call = Dense(Program(score, mask, sink, keep, values), scale, precision, tensors or {}, rounding)
    return _attention(call, q, k, v, sequences)[:2]


def prepare(problem: Problem, program: Program, scale: float) -> ReferenceCall:
    """A call of this backend; see `composattn.call.prepared.Prepare`."""
    return ReferenceCall(program, scale)


class ReferenceCall(PreparedCall):
    """One form of inputs. torch differentiates it, any number of times."""

    def __init__(self, program: Program, scale: float) -> None:
        self.program, self.scale = program, scale

    def range_name(self, direction: str) -> str:
        """What profiles call it."""
        return range_name(direction, self.program.title, "reference")

    @in_range("forward")
    def __call__(self, inputs: Inputs, asked: Asked) -> Three:
        return _attention(Dense(self.program, self.scale), *inputs[:3], inputs.sequences)

    def begin(
        self, scalars: Sequence[float | int], sequences: Sequences = NO_SEQUENCES, return_max_scores: bool = False
    ) -> Recomputed:
        """One call with these run-time numbers and sequences."""
        return Recomputed(self, scalars, sequences)


class Recomputed:
    """One call where torch does not record: a `Differentiable` whose gradient computes the forward again."""

    differentiable_twice = False
    borrowed: Borrowed | None = None
    sources: Sequence[torch.Tensor] = ()  # nothing is made again behind a forward

    def __init__(self, call: ReferenceCall, scalars: Sequence[float | int], sequences: Sequences) -> None:
        self.call, self.scalars, self.sequences = call, scalars, sequences
        self.captures = [c.tensor for c in call.program.captures]

    def read(self, replaced: Mapping[Capture, torch.Tensor]) -> Sequence[torch.Tensor]:
        return values(self.call.program.captures, replaced)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, captured: Sequence[torch.Tensor]) -> Three:
        program = self.call.program
        dense = Dense(program, self.call.scale, tensors=dict(zip(map(id, self.captures), captured, strict=True)))
        dense.scalars = dict(zip(map(id, program.scalars), self.scalars, strict=True))
        return _attention(dense, q, k, v, self.sequences)

    def backward(self, known: BackwardInputs) -> Grads:
        with borrowed_again(self.borrowed):
            return self._gradients(known)

    def _gradients(self, known: BackwardInputs) -> Grads:
        given = (known.q, known.k, known.v, *known.captured)
        leaves = [t.detach().requires_grad_() if w else t for t, w in zip(given, known.wanted, strict=True)]
        q, k, v, *captured = leaves
        asked = [t for t, w in zip(leaves, known.wanted, strict=True) if w]
        with torch.enable_grad():
            out, lse, _ = self.forward(q, k, v, captured)
            records = known.dout.new_zeros(1).requires_grad_().neg().requires_grad
        if not records:  # below an operator
            raise GradientUnsupported(
                'this backend has no gradient inside torch.compile; use backend="streaming" there, or call it outside'
            )
        pairs = ((out, known.dout.to(out.dtype)), (lse, known.dlse))
        flows = [(y, dy) for y, dy in pairs if dy is not None and y.requires_grad]  # lse hangs on q and k alone
        if not flows:
            return (None,) * len(leaves)
        results, gradients = zip(*flows, strict=True)
        found = iter(torch.autograd.grad(results, asked, gradients, allow_unused=True))
        return tuple(next(found) if w else None for w in known.wanted)


def _attention(call: Dense, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences) -> Three:
    refuse_in_graph(
        "backend 'reference' looks at what masks hide", "call one with kernels: 'hopper', 'blackwell' or 'warp'"
    )
    out, lse, top = by_sequences(functools.partial(_batch, call), q, k, v, sequences)
    return in_order_of(q, out), lse, top


def by_sequences(
    compute: Callable[..., Three], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences
) -> Three:
    """What `compute` gives for q, k, v (B, H, S, D) of some sequences and the number of the first, for each in turn."""
    if sequences.is_dense:
        return compute(q, k, v, 0)
    form = arrange(sequences, q, k)
    q, k, v = form.queries(q), form.keys(k), form.keys(v)

    def unused(rows: int) -> Three:
        lse = q.new_full((*q.shape[:2], rows), -torch.inf, dtype=_lse_dtype(q.dtype))
        return q.new_zeros((*q.shape[:2], rows, v.shape[3])), lse, lse

    found, end = [], 0
    for b, queries, keys in form.parts:
        found += [unused(queries.start - end), compute(q[:, :, queries], k[:, :, keys], v[:, :, keys], b)]
        end = queries.stop
    found.append(unused(q.shape[2] - end))
    out, lse, top = (torch.cat(parts, 2) for parts in zip(*found, strict=True))
    return form.queries_back(out), form.statistics_back(lse), form.statistics_back(top)


def _lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _batch(call: Dense, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b0: int) -> Three:
    """Dense tensors of the sequences from number b0 on, so many heads at a time as memory holds."""
    batch, heads, q_len, _ = q.shape
    group = heads // k.shape[1]
    step = max(1, PAIRS_AT_ONCE // max(1, q_len * k.shape[2] * group))  # kv heads at once
    if step >= batch * k.shape[1]:
        return call(q, k, v, b0, 0)
    found: list[Three] = []
    for b in range(batch):
        for h in range(0, k.shape[1], step):
            kv_heads = slice(h, h + step)
            q_heads = slice(h * group, (h + step) * group)
            part = (q[b : b + 1, q_heads], k[b : b + 1, kv_heads], v[b : b + 1, kv_heads], b0 + b, h * group)
            found.append(checkpoint(call, *part, use_reentrant=False) if torch.is_grad_enabled() else call(*part))
    out, lse, top = (torch.cat([x.flatten(0, 1) for x in parts]) for parts in zip(*found, strict=True))
    shape = (batch, heads, q_len)
    return out.view(*shape, v.shape[-1]), lse.view(shape), top.view(shape)


def _largest(scores: torch.Tensor) -> torch.Tensor:
    """(..., 1): the largest score of each row, -inf where there is none; with no gradient."""
    if scores.shape[-1]:
        return scores.detach().amax(-1, keepdim=True)
    return scores.new_full((*scores.shape[:-1], 1), -torch.inf)


class Dense:
    """One call on a range of batches and heads that starts at (b0, h0).

    Unless it `looks` for reads outside of captured tensors at visible pairs, no step asks for numbers, writes in place
    or has a backward of its own, so every transform of torch goes through: forward mode, derivatives of gradients.
    """

    def __init__(
        self,
        program: Program,
        scale: float,
        precision: torch.dtype = torch.float64,
        tensors: Mapping[int, torch.Tensor] | None = None,
        rounding: Rounding | None = None,
        looks: bool = True,
    ) -> None:
        self.looks = looks
        self.score_mod, self.mask_mod, self.scale, self.rounding = program.score, program.mask, scale, rounding
        self.sink_mod, self.keep_mod, self.precision = program.sink, program.keep, precision
        self.values_mod = program.values
        self.working = torch.promote_types(precision, torch.float32)
        self.scalars = {id(s): s.value for s in program.scalars}  # a recomputation must not see later values
        self.borrowed = current()
        captures, _ = program.read_by_mods
        refresh(captures)
        # Widened once, before they are read, so that their gradients are summed in the working precision.
        given = tensors or {}
        self.held = {id(c.tensor): given.get(id(c.tensor), c.tensor) for c in captures}
        self.tensors = {
            key: t.to(self.working if t.dtype.itemsize == 1 else torch.promote_types(t.dtype, self.working))
            if t.is_floating_point()
            else t
            for key, t in self.held.items()
        }

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b0: int, h0: int) -> Three:
        with borrowed_again(self.borrowed):  # a recomputation runs when the call is over
            return self.computed(q, k, v, b0, h0)

    def computed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b0: int, h0: int) -> Three:
        """(out, lse, largest scores)."""
        out_dtype, lse_dtype = q.dtype, _lse_dtype(q.dtype)
        q, k, v = (x.to(self.precision) for x in (q, k, v))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        if self.values_mod is not None:
            v = v * self.factors(self.values_mod, v, b0, h0)
        scores = (q @ k.transpose(-1, -2)).to(self.working) * self.scale
        if self.rounding is not None:
            scores = self.rounding.score(scores, q, k, self.scale)
        scores = self.modified(scores, b0, h0)
        top = _largest(scores)
        if self.score_mod is not None:
            scores = scores.masked_fill(top < LEAST_SCORE, -torch.inf)
        largest = _largest(scores)
        if self.sink_mod is not None:  # a key with no value
            scores = torch.cat((scores, self.sink(self.sink_mod, scores, b0, h0)), -1)
            v, largest = torch.nn.functional.pad(v, (0, 0, 0, 1)), _largest(scores)
        if self.rounding is not None:
            scores = self.rounding.modified(scores)
        shift = largest.masked_fill(largest == -torch.inf, 0.0)
        weight = torch.exp(scores - shift)
        total = weight.sum(-1, keepdim=True)
        empty = total == 0
        p = weight / total.masked_fill(empty, 1.0)
        weights = p if self.keep_mod is None else p * self.kept(self.keep_mod, p, b0, h0)
        out = weights.to(self.precision) @ v
        if self.rounding is not None:
            out = self.rounding.output(out, p, weights, v, scores)
        lse = (shift + total.masked_fill(empty, 1.0).log()).masked_fill(empty, -torch.inf)
        return out.to(out_dtype), lse.squeeze(-1).to(lse_dtype), top.squeeze(-1).to(lse_dtype)

    def sink(self, mod: Expr, scores: torch.Tensor, b0: int, h0: int) -> torch.Tensor:
        """(B, H, Sq, 1): the logit of each head's sink."""
        batch, heads = (torch.arange(n, device=scores.device) for n in scores.shape[:2])
        index: dict[str, torch.Tensor | int] = {"b": (batch + b0).view(-1, 1, 1, 1), "h": (heads + h0).view(-1, 1, 1)}
        value = evaluate(mod, self.env(index, scores.device)).to(scores.dtype)
        return value.expand(*scores.shape[:-1], 1)

    def kept(self, mod: Expr, weights: torch.Tensor, b0: int, h0: int) -> torch.Tensor:
        """What weights are multiplied by; of a sink, which comes behind the keys, it has no say."""
        kept = evaluate(mod, self.env(self.index(weights, b0, h0), weights.device))
        return kept.to(weights.dtype) * factor_of(mod)

    def factors(self, mod: Expr, v: torch.Tensor, b0: int, h0: int) -> torch.Tensor:
        """What V, which has the heads of Q, is multiplied by."""
        at = self.index(v, b0, h0)  # rows and columns of V are keys and channels
        at["kv"], at["d"], at["kv_len"] = at["q"], at["kv"], v.shape[2]
        return evaluate(mod, self.env(at, v.device)).to(v.dtype)

    def index(self, scores: torch.Tensor, b0: int, h0: int) -> dict[str, torch.Tensor | int]:
        """Positions of all pairs."""
        nb, nh, q_len, kv_len = scores.shape
        at = lambda n, start, *dims: torch.arange(start, start + n, device=scores.device).view(dims)  # noqa: E731
        return {
            "b": at(nb, b0, -1, 1, 1, 1), "h": at(nh, h0, 1, -1, 1, 1), "q": at(q_len, 0, 1, 1, -1, 1),
            "kv": at(kv_len, 0, 1, 1, 1, -1), "q_len": q_len, "kv_len": kv_len,
        }  # fmt: skip

    def modified(self, scores: torch.Tensor, b0: int, h0: int) -> torch.Tensor:
        """Scores after the score mod, -inf where hidden."""
        visible = None if self.mask_mod is None else self.visible(self.mask_mod, scores, b0, h0)
        mod = self.score_mod
        if mod is None or not scores.numel():
            return scores if visible is None else scores.masked_fill(~visible, -torch.inf)
        if visible is None:
            visible = torch.ones_like(scores, dtype=torch.bool)
        with torch.no_grad():  # where the mod itself says -inf, its derivative has no meaning: hidden as well
            visible = visible & (self.of_pairs(mod, scores, visible, b0, h0) != -torch.inf)
        return torch.where(visible, self.of_pairs(mod, scores, visible, b0, h0), -torch.inf)

    def visible(self, mask: Expr, scores: torch.Tensor, b0: int, h0: int) -> torch.Tensor:
        env = self.env(self.index(scores, b0, h0), scores.device)
        with torch.no_grad():
            visible = evaluate(mask, env).expand(scores.shape)
            self.refuse_outside(env, visible)
        return visible

    def of_pairs(self, mod: Expr, scores: torch.Tensor, visible: torch.Tensor, b0: int, h0: int) -> torch.Tensor:
        """What `mod` gives, at hidden pairs what it gives at the first visible one."""
        first = visible.flatten().to(torch.int8).argmax()
        index: dict[str, torch.Tensor | int] = {"q_len": scores.shape[2], "kv_len": scores.shape[3]}
        left = first
        for axis, (name, begin) in reversed(list(enumerate({"b": b0, "h": h0, "q": 0, "kv": 0}.items()))):
            size = scores.shape[axis]
            at = torch.arange(size, device=scores.device).view(-1, *(1,) * (3 - axis))
            index[name] = torch.where(visible, at, left % size) + begin
            left = left // size
        env = self.env(index, scores.device)
        there = scores.detach().flatten().gather(0, first.unsqueeze(0))
        env.score = torch.where(visible, scores, there)
        values = evaluate(mod, env).to(scores.dtype).expand(scores.shape)
        self.refuse_outside(env, visible)
        return values

    def env(self, index: dict[str, torch.Tensor | int], device: torch.device) -> Env:
        kind, scalars = self.working, self.scalars
        return Env(index, None, kind, device, self.tensors, reads=[], scalars=scalars, deciding=self.held)

    def refuse_outside(self, env: Env, visible: torch.Tensor) -> None:
        for node, outside in env.reads or () if self.looks else ():
            count = int((outside & visible).sum())
            if count:
                raise CapturedIndexOutOfRange(
                    f"{read_in_words(node)}, which leaves that shape at {count} visible pairs; "
                    "make the tensor larger, clamp the index, or hide those pairs with the mask"
                )
