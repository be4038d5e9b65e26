"""Attention as one formula of plain torch operations, dense: what derivatives beyond the first are taken of.

No step looks at numbers, writes in place or has a backward of its own, so every transform of torch goes through:
forward mode (jvp, jacfwd, hessian), derivatives of gradients, each below vmap too. All pairs are kept, O(S²) memory.

Mods are evaluated at visible pairs only, as by the reference: a hidden pair gets the indices and the score of a visible
one, and its value is dropped. So what a mod gives at a hidden pair (a NaN, an infinite derivative) reaches nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..call.sequences import Sequences
from ..graph.evaluate import evaluate
from ..graph.expr import Expr
from .layouts import arrange
from .reference import Three, _Dense


def attention(call: Formula, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences) -> Three:
    """(out in q's dtype, lse, max_scores); shapes as of the backends, `sequences` hold no transformed tensors."""
    if sequences.is_dense:
        return call(q, k, v, 0, 0)
    form = arrange(sequences, q, k)
    q, k, v = form.queries(q), form.keys(k), form.keys(v)
    outs, lses, tops, end = [], [], [], 0
    for b, queries, keys in form.parts:
        out, lse, top = call(q[:, :, queries], k[:, :, keys], v[:, :, keys], b, 0)
        outs += [_unused(out, queries.start - end, 0.0), out]
        lses += [_unused(lse, queries.start - end, -torch.inf), lse]
        tops += [_unused(top, queries.start - end, -torch.inf), top]
        end = queries.stop
    rest = q.shape[2] - end
    outs.append(_unused(outs[-1], rest, 0.0))
    lses.append(_unused(lses[-1], rest, -torch.inf))
    tops.append(_unused(tops[-1], rest, -torch.inf))
    lse, top = (form.statistics_back(torch.cat(parts, 2)) for parts in (lses, tops))
    return form.queries_back(torch.cat(outs, 2)), lse, top


def _unused(like: torch.Tensor, rows: int, value: float) -> torch.Tensor:
    """What rows hold that no sequence uses."""
    return like.new_full((*like.shape[:2], rows, *like.shape[3:]), value)


class Formula(_Dense):
    """One call: the reference's steps, with no look at what is visible."""

    def modified(self, scores: torch.Tensor, b0: int, h0: int) -> torch.Tensor:
        if scores.numel() == 0:
            return scores
        visible = self.visible(scores, b0, h0)
        mod = self.score_mod
        if mod is None:
            return scores if visible is None else scores.masked_fill(~visible, -torch.inf)
        if visible is None:
            visible = torch.ones_like(scores, dtype=torch.bool)
        with torch.no_grad():  # where the mod itself says -inf, its derivative has no meaning: hidden as well
            visible = visible & (self.of_pairs(mod, scores, visible, b0, h0) != -torch.inf)
        values = self.of_pairs(mod, scores, visible, b0, h0)
        return torch.where(visible, values, -torch.inf)

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
        return evaluate(mod, env).to(scores.dtype).expand(scores.shape)

    @staticmethod
    def refuse_outside(env: object, visible: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Reads outside of a captured tensor are clamped, as by the kernels: finding them means to look."""
