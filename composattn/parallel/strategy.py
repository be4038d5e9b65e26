"""Strategies of sharing an attention: what a forward is given and returns, and what a backward returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..call.autograd import BackwardInputs
from .exchange import Ranks

T = torch.Tensor


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


class Strategy(Protocol):
    """How the ranks share the work of one attention: by moving keys (`ByKeys`), or heads (`ByHeads`)."""

    ranks: Ranks

    def forward(self, q: T, k: T, v: T, asked: Given) -> tuple[T, T, T | None, Any, list[T]]:
        """(out, lse, max_scores, what was begun, tensors that the backward needs besides)."""

    def backward(self, known: BackwardInputs, begun: Any, saved: Sequence[T]) -> list[T | None]:
        """Gradients of q, k, v and of each given tensor, `known.captured`, those of this rank's rows."""


def with_sinks(out: T, lse: T, sinks: T | None) -> tuple[T, T]:
    """out and lse with one more exponential in the sum of each row, that of its head's sink."""
    if sinks is None:
        return out, lse
    sinks = sinks.detach().to(lse.dtype)[:, None]
    share = torch.sigmoid(lse - sinks).nan_to_num(0.0).unsqueeze(-1)  # 0 where both are -inf, as of their difference
    return (out * share).to(out.dtype), torch.logaddexp(lse, sinks)
