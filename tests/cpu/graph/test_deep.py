"""Masks and score mods of thousands of nested operations, as loops in Python make them: right, no RecursionError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.analysis.bands import tile_intervals
from composattn.analysis.captured_gradient import fused_reads
from composattn.graph.balanced import balanced
from composattn.graph.expr import DEEP
from composattn.graph.gradient import derivative
from composattn.mods.mask import Mask
from tests.dense_tiles import tiles_of
from tests.support import count_calls

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


STEPS: dict[str, Mod] = {
    "count": lambda x, q, kv, i: torch.where(kv >= i, x + 1, x),
    "count of rows": lambda x, q, kv, i: torch.where(q >= i, x + 1, x * 2),
    "distance": lambda x, q, kv, i: (x - q).abs() - x // 2,
    "remainder": lambda x, q, kv, i: (x + x % 5) % 13,
    "least": lambda x, q, kv, i: torch.minimum(x + i, 40 - x),
    "bits": lambda x, q, kv, i: ((x & 7) << 1) + (x >> 2),
}  # fmt: skip
TWICE = 18  # steps that use a value twice: there are 2^18 ways through them


@pytest.mark.parametrize("name", STEPS)
def test_a_value_used_twice_at_each_step_is_looked_at_once(name: str) -> None:
    def number(q: Any, kv: Any) -> Any:
        x = kv if name == "bits" else q - kv if name == "least" else q
        for i in range(TWICE):
            x = STEPS[name](x, q, kv, i)
        return x

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return number(q, kv) <= q

    table = torch.randn(24, requires_grad=True)
    q = torch.randn(1, 1, 24, 64, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)

    def looked_at() -> None:
        assert str(ca.Attention(mask_mod=mask, backend="hopper-emulated").explain(q, q, q))
        assert (
            fused_reads(ca.Attention(score_mod=lambda s, b, h, i, j: s + table[number(i, j) % 24]).program) is not None
        )

    assert count_calls(looked_at) < 600_000
    at = torch.meshgrid(*map(torch.arange, (1, 1, 24, 24)), indexing="ij")
    wide = q.double()
    expected = (wide @ wide.mT / 8).masked_fill(~mask(*at), -torch.inf).softmax(-1).nan_to_num(0.0) @ wide
    assert torch.allclose(ca.attention(wide, wide, wide, mask_mod=mask), expected)


CURVES: dict[str, Mod] = {
    "greatest": lambda x, s: torch.maximum(x, 0.9 * x),
    "chosen": lambda x, s: torch.where(x > 0, 0.9 * x, 0.0) + 0.1 * x,
    "softplus": lambda x, s: torch.nn.functional.softplus(x) - 0.5,
    "mixed": lambda x, s: torch.lerp(x, s, x.sigmoid()),
}


@pytest.mark.parametrize("name", CURVES)
def test_derivatives_grow_with_the_steps_of_a_score_mod_and_not_with_ways_through_it(name: str) -> None:
    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        x = score
        for _ in range(TWICE):
            x = CURVES[name](x, score)
        return x

    graph = ca.score(mod).expr
    assert count_calls(lambda: derivative(graph)) < 100_000
    q = torch.randn(1, 1, 24, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    out = ca.attention(q, q, q, score_mod=mod)
    expected = mod(q @ q.mT / 8**0.5, *[None] * 4).softmax(-1) @ q
    (found,), (wanted,) = (torch.autograd.grad(x.sin().sum(), q) for x in (out, expected))
    assert torch.allclose(out, expected) and torch.allclose(found, wanted)


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
