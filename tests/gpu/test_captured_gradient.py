"""Gradients of captured tensors on a GPU: bitwise repeatable by every pattern, and right over many tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.mods import causal
from tests.support import gpu_backend, needs_backward

BACKEND = gpu_backend()
LENGTH = 1000
Mod = Callable[..., Any]
MODS: dict[str, Callable[[dict[str, torch.Tensor]], Mod]] = {
    "relative": lambda t: lambda s, b, h, q, kv: s + t["relative"][h, q - kv + LENGTH],
    "shared-relative": lambda t: lambda s, b, h, q, kv: s + t["shared"][q - kv + LENGTH],
    "buckets": lambda t: lambda s, b, h, q, kv: s + t["buckets"][torch.clamp((q - kv).abs() // 4, max=31), h],
    "slopes": lambda t: lambda s, b, h, q, kv: s - t["slopes"][h] * (q - kv),
    "row": lambda t: lambda s, b, h, q, kv: s + 0.01 * t["row"][h, q] * (q - kv),
    "column": lambda t: lambda s, b, h, q, kv: s + t["column"][kv],
    "pair": lambda t: lambda s, b, h, q, kv: s + t["pair"][h, q, kv],
    "several": lambda t: (
        lambda s, b, h, q, kv: (
            s + t["relative"][h, q - kv + LENGTH] + 0.5 * t["relative"][h, kv] + t["number"] * 0.01 * (q - kv)
        )
    ),
}


@pytest.fixture(autouse=True)
def backward() -> None:
    needs_backward(BACKEND)


def tables(heads: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    sizes: dict[str, tuple[int, ...]] = {
        "relative": (heads, 2 * LENGTH + 1), "shared": (2 * LENGTH + 1,), "buckets": (32, heads), "slopes": (heads,),
        "row": (heads, LENGTH), "column": (LENGTH,), "pair": (heads, LENGTH, LENGTH), "number": (),
    }  # fmt: skip
    return {n: (0.1 * torch.randn(s, generator=generator)).cuda().requires_grad_() for n, s in sizes.items()}


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("mods", MODS)
def test_repeatable_and_equal_to_the_streaming_backend(mods: str, d: int, generator: torch.Generator) -> None:
    heads, kv_heads = 4, 2
    captured = tables(heads, generator)
    score = MODS[mods](captured)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(2, heads, LENGTH, d, generator=generator).cuda().bfloat16().requires_grad_()

    inputs, dout = [draw(heads), draw(kv_heads), draw(kv_heads)], draw(heads).detach()
    attention = ca.Attention(score_mod=score, mask_mod=causal(), backend=BACKEND)
    read = [c.tensor for c in attention.program.captures if c.tensor.requires_grad]
    first = torch.autograd.grad(attention(*inputs), read, dout)
    for _ in range(20):
        again = torch.autograd.grad(attention(*inputs), read, dout)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    exact = ca.Attention(score_mod=score, mask_mod=causal(), backend="streaming")
    wide = [t.detach().float().requires_grad_() for t in inputs]
    wanted = torch.autograd.grad(exact(*wide), read, dout.float())
    for got, want in zip(first, wanted, strict=True):
        if got.ndim and mods != "slopes":
            assert float((got - want).norm()) <= 4 * torch.finfo(torch.bfloat16).eps * float(want.norm())
        assert torch.isfinite(got).all()


def test_a_gradient_that_is_not_finite_says_so(generator: torch.Generator) -> None:
    column = torch.zeros(200, device="cuda", requires_grad=True)
    q, k, v = (torch.randn(1, 1, 200, 64, generator=generator).cuda().bfloat16().requires_grad_() for _ in range(3))
    out = ca.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + column[j], backend=BACKEND)
    assert isinstance(out, torch.Tensor)
    (grad,) = torch.autograd.grad(out, column, torch.full_like(out, torch.inf))
    assert not torch.isfinite(grad).any()
