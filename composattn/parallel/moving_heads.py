"""Heads move: every rank computes some heads of the whole sequence (Jacobs et al. 2023, DeepSpeed-Ulysses)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..call.autograd import BackwardInputs
from . import part_call
from .exchange import PendingRows, Ranks
from .offset_mods import OffsetMods
from .part_call import Offsets
from .row_moves import by_heads, by_rows
from .strategy import Given, with_sinks

T = torch.Tensor


@dataclass
class ByHeads:
    """The rows of all ranks come for some heads each, and the output goes back."""

    ranks: Ranks
    runs: OffsetMods
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
        offsets = Offsets(0, 0, len(self.order), self.tables, self.ranks.rank * heads)
        (out, lse, top), call = part_call.forward(
            self.runs, self.options, offsets, moved, asked.tensors, asked.max_scores
        )
        sinks = asked.sinks
        out, lse = with_sinks(out, lse, None if sinks is None else sinks[offsets.first_head :][:heads])
        mine = [self._own_rows(x) for x in (out, lse.unsqueeze(-1))]
        tops = None if top is None or not asked.max_scores else self._own_rows(top.unsqueeze(-1)).squeeze(-1)
        return mine[0], mine[1].squeeze(-1), tops, call, [*moved, out, lse] if self.keep else []

    def backward(self, known: BackwardInputs, begun: Any, saved: Sequence[T]) -> list[T | None]:
        if self.keep:
            q, k, v, out, lse = saved
        else:
            q, k, v, out, lse = self._all_rows(known.q, known.k, known.v, known.out, known.lse.unsqueeze(-1))
            lse = lse.squeeze(-1)
        (dout,) = self._all_rows(known.dout)
        dlse = None if known.dlse is None else self._all_rows(known.dlse.unsqueeze(-1))[0].squeeze(-1)
        grads = begun.backward(known._replace(q=q, k=k, v=v, out=out, lse=lse, dout=dout, dlse=dlse))
        own = [
            self._own_rows(g) if g is not None and want else None
            for g, want in zip(grads, known.wanted[:3], strict=False)
        ]
        return [*own, *grads[3:]]

    def _all_rows(self, *tensors: T) -> tuple[T, ...]:
        """(B, H, rows, D) of this rank as (B, H / ranks, S, D), in order."""
        coming = []
        for x in tensors:
            rows = by_rows(x).unflatten(2, (self.ranks.size, -1)).permute(2, 0, 1, 3, 4).contiguous()
            coming.append((torch.empty_like(rows), rows))
        pending = [_shared(self.ranks, rows, into) for into, rows in coming]
        for one in pending:
            one.arrived()
        return tuple(by_heads(into.flatten(0, 1).index_select(0, self.back)) for into, _ in coming)

    def _own_rows(self, x: T) -> T:
        """(B, H / ranks, S, D) as (B, H, rows, D) of this rank."""
        rows = by_rows(x).index_select(0, self.order).unflatten(0, (self.ranks.size, -1))
        found = torch.empty_like(rows)
        _shared(self.ranks, rows, found).arrived()
        return found.permute(2, 0, 3, 1, 4).flatten(1, 2)


def _shared(ranks: Ranks, rows: T, into: T) -> PendingRows:
    """Row n of (ranks, ...) to rank n."""
    return ranks.exchange([[x] for x in rows], [[x] for x in into])
