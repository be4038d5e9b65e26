"""Gradients: against finite differences, twice, of learned biases by every kind of index, and of those alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from tests.cpu.flex_conformance.catalogue import causal, doubled, identity, only_past, squared, waves, waves_that_meet
from tests.cpu.flex_conformance.truth import Mod, Mods, blocks_of, check, draw

B, H = 2, 4


def small(generator: torch.Generator) -> list[torch.Tensor]:
    return [t.requires_grad_() for t in draw(generator, 2, 2, 5, dim=3, dtype=torch.float64)]


@pytest.mark.parametrize("score", [identity, only_past, doubled, squared, waves, waves_that_meet])
def test_as_finite_differences_say(score: Mod, generator: torch.Generator) -> None:
    assert torch.autograd.gradcheck(lambda *x: ca.flex_attention(*x, score), small(generator), fast_mode=True)


def test_through_lse_as_finite_differences_say(generator: torch.Generator) -> None:
    inputs = small(generator)
    assert torch.autograd.gradcheck(lambda *x: ca.flex_attention(*x, return_lse=True)[1], inputs, fast_mode=True)


def test_of_a_captured_factor_once_and_twice(generator: torch.Generator) -> None:
    factor = torch.rand(2, generator=generator, dtype=torch.float64).requires_grad_()

    def call(q: Any, k: Any, v: Any, factor: Any) -> Any:
        return ca.flex_attention(q, k, v, lambda s, b, h, i, j: s * factor[h])

    given = (*small(generator), factor)
    assert torch.autograd.gradcheck(call, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, given, fast_mode=True)


# (shape of what is learned for length S, how the score reads it)
LEARNED: dict[str, tuple[Callable[[int], tuple[int, ...]], Callable[..., Any]]] = {
    "distance": (lambda n: (2 * n,), lambda t, s, b, h, q, kv: s + t[q - kv + t.shape[0] // 2]),
    "sum of positions": (lambda n: (2 * n,), lambda t, s, b, h, q, kv: s + t[q + kv]),
    "query": (lambda n: (n,), lambda t, s, b, h, q, kv: s + t[q]),
    "key": (lambda n: (n,), lambda t, s, b, h, q, kv: s + t[kv]),
    "pair": (lambda n: (n, n), lambda t, s, b, h, q, kv: s + t[q, kv]),
    "pair, turned": (lambda n: (n, n), lambda t, s, b, h, q, kv: s + t[kv, q]),
    "pair a head": (lambda n: (H, n, n), lambda t, s, b, h, q, kv: s + t[h, q, kv]),
    "pair a head, turned": (lambda n: (H, n, n), lambda t, s, b, h, q, kv: s + t[h, kv, q]),
    "pair a batch": (lambda n: (B, n, n), lambda t, s, b, h, q, kv: s + t[b, q, kv]),
    "all": (lambda n: (B, H, n, n), lambda t, s, b, h, q, kv: s + t[b, h, q, kv]),
    "head": (lambda n: (H,), lambda t, s, b, h, q, kv: s + t[h] * (kv - q)),
    "batch and head": (lambda n: (B, H), lambda t, s, b, h, q, kv: s * t[b, h]),
    "gate": (lambda n: (H, n), lambda t, s, b, h, q, kv: s * torch.sigmoid(t[h, kv])),
    "temperature": (lambda n: (1,), lambda t, s, b, h, q, kv: s * torch.exp(t[0])),
    "squares of 4": (lambda n: (n // 4 + 1, n // 4 + 1), lambda t, s, b, h, q, kv: s + t[q // 4, kv // 4]),
    "read twice": (lambda n: (n,), lambda t, s, b, h, q, kv: s + t[q] * t[kv]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [(20, 20), (33, 20)], ids=str)
@pytest.mark.parametrize("name", LEARNED)
def test_of_what_is_learned_by(
    name: str, lengths: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> None:
    shape, read = LEARNED[name]
    bias = torch.randn(shape(max(lengths)), generator=generator).to(dtype).requires_grad_()
    mods = Mods(lambda t: lambda *x: read(t, *x), lambda _: causal, (bias,))
    check(mods, *draw(generator, B, H, *lengths, dtype=dtype), generator)


@pytest.mark.parametrize("name", LEARNED)
def test_only_of_what_is_learned(name: str, generator: torch.Generator) -> None:
    shape, read = LEARNED[name]
    bias = torch.randn(shape(20), generator=generator, requires_grad=True)
    q, k, v = draw(generator, B, H, 20)
    dout = torch.randn(q.shape, generator=generator)

    def gradient(*tensors: torch.Tensor) -> torch.Tensor:
        out = ca.flex_attention(*tensors, lambda *x: read(bias, *x), blocks_of(causal, q, k))
        return torch.autograd.grad(out, bias, dout)[0]

    torch.testing.assert_close(gradient(q, k, v), gradient(*(t.requires_grad_() for t in (q, k, v))))


def test_parts_merged_by_their_lse_give_the_gradients_of_the_whole(generator: torch.Generator) -> None:
    """Near and far keys apart; rows that see nothing far weigh nothing."""
    from tests.cpu.flex_conformance.catalogue import beyond_the_window, window

    q, k, v = (t.requires_grad_() for t in draw(generator, dtype=torch.float64))
    dout = torch.randn(q.shape, generator=generator, dtype=torch.float64)
    parts = [ca.flex_attention(q, k, v, block_mask=blocks_of(m, q, k), return_lse=True)
             for m in (window, beyond_the_window)]  # fmt: skip
    weights = torch.stack([lse for _, lse in parts]).softmax(0).unsqueeze(-1)
    merged = sum(w * out for w, (out, _) in zip(weights, parts, strict=True))
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(merged, whole)
    found, wanted = (torch.autograd.grad(x, (q, k, v), dout) for x in (merged, whole))
    torch.testing.assert_close(found, wanted)
