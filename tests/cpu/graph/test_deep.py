"""Masks and score mods of thousands of nested operations, as loops in Python make them: right, no RecursionError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.analysis.bands import tile_intervals
from composattn.graph.balanced import balanced
from composattn.graph.expr import DEEP
from composattn.mods.mask import Mask
from tests.dense_tiles import tiles_of

Mod = Callable[..., Any]


def documents(count: int, join: str) -> Mod:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        visible = q < 0
        for i in range(count):
            pair = (q // 2 == i) & (kv // 2 == i)
            visible = {"|": visible | pair, "^": visible ^ pair, "&": visible & ~pair}[join]
        return visible

    return mask


def nested(count: int) -> Mod:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        visible = q >= kv
        for i in range(count):
            visible = torch.where(kv == i % 50, visible, ~visible if i % 2 else visible)
        return visible

    return mask


def integers(count: int) -> Mod:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        x = q
        for i in range(count):
            x = torch.where(kv == i % 50, x + 1, x - 1) if i % 2 else abs(x - kv)
        return x >= 3

    return mask


MASKS = {
    "600 documents": documents(600, "|"), "1500 terms of xor": documents(1500, "^"), "600 hidden": documents(600, "&"),
    "5000 choices": nested(5000), "3000 integers": integers(3000),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_deep_masks_are_followed(name: str) -> None:
    mod = MASKS[name]
    q = torch.randn(1, 1, 24, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    at = torch.meshgrid(*map(torch.arange, (1, 1, 24, 24)), indexing="ij")
    visible = mod(*at)
    expected = (q @ q.mT / 8**0.5).masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0) @ q
    attend = ca.Attention(mask_mod=mod)
    out = attend(q, q, q)
    assert torch.allclose(out, expected, atol=1e-5)
    out.sum().backward()
    assert str(attend.explain(q, q, q))
    exact, found = tiles_of(visible, (4, 4)), Mask.of(mod).tiles(24, 24, (4, 4))
    assert ((found == 1) | (found == exact)).all()


def test_a_deep_score_mod_is_followed() -> None:
    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        for i in range(400):
            score = torch.tanh(score + 0.01 * kv) if i % 2 else score * 1.1 + 0.1
        return score

    q = torch.randn(1, 1, 24, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    out = ca.attention(q, q, q, score_mod=mod)
    assert torch.allclose(out, ca.attention(q, q, q, score_mod=mod, backend="reference"))
    out.sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()


def test_long_chains_are_joined_as_trees_and_short_ones_are_left() -> None:
    deep = Mask.of(documents(600, "|")).expr
    assert deep.depth > 600 and balanced(deep).depth < 20
    assert tile_intervals(deep) is not None
    short = Mask.of(documents(DEEP // 2, "|")).expr
    assert balanced(short) is short


@pytest.mark.slow
def test_a_kernel_takes_a_deep_mask() -> None:
    mod = documents(160, "|")
    q = torch.randn(1, 1, 40, 64, generator=torch.Generator().manual_seed(0)).half()
    out, expected = (ca.attention(q, q, q, mask_mod=mod, backend=b).float() for b in ("hopper-emulated", "reference"))
    assert (out - expected).abs().max() < 4e-3
