"""Captured fp64 keeps its bits where it decides: times since 1970 differ by less than fp32 can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca

LENGTH, STEP = 200, 0.25
TIMES = 1.7e9 + STEP * torch.arange(LENGTH, dtype=torch.float64)
Mod = Callable[..., Any]


def recent(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (TIMES[q] >= TIMES[kv]) & (TIMES[q] - TIMES[kv] < 3.0)


def decayed(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return torch.where(TIMES[q] > TIMES[kv], s - 0.1 * (TIMES[q] - TIMES[kv]), s)


def same(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (STEP * (q - kv) < 3.0)


def same_decay(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return torch.where(q > kv, s - 0.1 * STEP * (q - kv), s)


@pytest.mark.parametrize("backend", ["streaming", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_times_in_fp64_decide_in_fp64(backend: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    x = [torch.randn(1, 2, LENGTH, 8, generator=generator).to(dtype).requires_grad_() for _ in range(3)]
    found, wanted = (
        ca.attention(*x, mask_mod=mask, score_mod=score, backend=backend, return_lse=True)
        for mask, score in ((recent, decayed), (same, same_decay))
    )
    gradients = [torch.autograd.grad([out.sum(), lse.sum()], x) for out, lse in (found, wanted)]
    for mine, exact in zip((*found, *gradients[0]), (*wanted, *gradients[1]), strict=True):
        torch.testing.assert_close(mine, exact)
        assert mine.dtype == exact.dtype


def test_the_pictures_of_a_mask_show_the_same() -> None:
    found, wanted = (ca.Mask.of(mask) for mask in (recent, same))
    assert torch.equal(found.dense(LENGTH, LENGTH), wanted.dense(LENGTH, LENGTH))
    tiles = [m.tiles(LENGTH, LENGTH, (16, 16), refine=True) for m in (found, wanted)]
    assert torch.equal(*tiles)


def test_a_learned_table_in_fp64_has_gradients_in_fp64(generator: torch.Generator) -> None:
    q = torch.randn(1, 2, 9, 8, generator=generator)
    wide = torch.randn(9, generator=generator, dtype=torch.float64).requires_grad_()
    narrow = wide.detach().float().requires_grad_()
    for table in (wide, narrow):
        ca.attention(q, q, q, score_mod=lambda s, b, h, i, j, t=table: s * t[j]).pow(2).sum().backward()
    assert wide.grad is not None and wide.grad.dtype is torch.float64
    torch.testing.assert_close(wide.grad.float(), narrow.grad)
