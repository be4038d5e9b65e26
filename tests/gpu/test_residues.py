"""Dilated windows on a GPU, as sequences of one residue each."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.backends.fused.rewrites import residues
from composattn.mods import causal, dilated_window
from composattn.testing.tolerance import Case, check
from tests.support import gpu_backend, outlier_normal

MASKS: dict[str, Any] = {
    "window": dilated_window((150, 150), 3),
    "causal": dilated_window((700, 0), 4) & causal(),
    "remainders": lambda b, h, q, kv: (q >= kv) & (q % 2 == kv % 2) & (q - kv < 300 + 20 * h),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(1, 1536, 1536), (1, 1541, 1539), (2, 1200, 1200)])
@pytest.mark.parametrize("d", [64, 128])
def test_results_and_gradients_are_those_of_the_whole_sequence(
    d: int, batch: int, q_len: int, kv_len: int, mask: str, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    monkeypatch.setattr(residues, "LONG", 0)
    draw = partial(outlier_normal, generator=generator, dtype=torch.bfloat16, device="cuda")
    q, dout = (draw(batch, q_len, 4, d).transpose(1, 2) for _ in range(2))
    k, v = (draw(batch, 2, kv_len, d) for _ in range(2))
    check(partial(ca.attention, backend=gpu_backend()), Case(q, k, v, mask_mod=MASKS[mask], dout=dout, name=mask))
