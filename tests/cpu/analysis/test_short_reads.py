"""Captured tensors shorter than the call are refused where a visible pair reads beyond them, and nowhere else."""

from __future__ import annotations

import pytest
import torch

import composattn as ca
from composattn.errors import CapturedIndexOutOfRange

TWO, TEN = torch.tensor([3, 5]), torch.arange(10)

SERVES = {
    "as-long-as-the-call": (lambda s, b, h, q, kv: s + TWO[b], None),
    "a-branch-guards": (lambda s, b, h, q, kv: torch.where(h < 2, s + TWO[h], s), None),
    "the-mask-hides-those-heads": (lambda s, b, h, q, kv: s + TWO[h], lambda b, h, q, kv: (h < 2) & (q >= kv)),
    "the-mask-hides-those-keys": (lambda s, b, h, q, kv: s + TEN[kv], lambda b, h, q, kv: (kv < TWO[b]) | (kv == 9)),
    "the-rest-of-the-mask-hides-them": (None, lambda b, h, q, kv: (TEN[q] == TEN[kv]) & (q < 10) & (kv < 10)),
    "no-pair-is-left-there": (lambda s, b, h, q, kv: s + TEN[kv], lambda b, h, q, kv: (q * kv % 8 == 1) & (kv != 11)),
    "a-clamped-index": (lambda s, b, h, q, kv: s + TEN[q.clamp(max=9)], None),
}
REFUSED = {
    "heads": (lambda s, b, h, q, kv: s + TWO[h], None),
    "heads-that-a-mask-shows": (lambda s, b, h, q, kv: s + TWO[h], lambda b, h, q, kv: (h != 1) & (q >= kv)),
    "queries": (lambda s, b, h, q, kv: s * TEN[q], None),
    "keys-that-a-mask-shows": (lambda s, b, h, q, kv: s + TEN[kv], lambda b, h, q, kv: q >= kv),
    "keys-further-on": (lambda s, b, h, q, kv: s + TEN[kv], lambda b, h, q, kv: (kv != 10) & (q >= kv)),
    "keys-here-and-there": (lambda s, b, h, q, kv: s + TEN[kv], lambda b, h, q, kv: kv * kv % 8 == 1),
    "a-masks-own-reads": (None, lambda b, h, q, kv: TEN[kv] <= q),
}
INPUTS = [torch.ones(2, 4, 12, 8), torch.ones(2, 2, 12, 8), torch.ones(2, 2, 12, 8)]


@pytest.mark.parametrize("name", SERVES)
def test_serves(name: str) -> None:
    score, mask = SERVES[name]
    ca.attention(*INPUTS, score_mod=score, mask_mod=mask)


@pytest.mark.parametrize("backend", ["streaming", "reference"])
@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str, backend: str) -> None:
    score, mask = REFUSED[name]
    with pytest.raises(CapturedIndexOutOfRange):
        ca.attention(*INPUTS, score_mod=score, mask_mod=mask, backend=backend)


def test_packed_sequences_are_refused_by_their_number_and_heads() -> None:
    q, varlen = torch.ones(12, 4, 8), ca.Varlen(torch.tensor([0, 5, 5, 12]).int())
    ca.attention(q, q, q, mask_mod=lambda b, h, q, kv: TEN[q] >= TEN[kv], varlen=varlen)
    with pytest.raises(CapturedIndexOutOfRange, match="3 for batch"):
        ca.attention(q, q, q, mask_mod=lambda b, h, q, kv: kv < TWO[b], varlen=varlen)
