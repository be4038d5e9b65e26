"""Inputs of any strides, incoming gradients too; an output in the order of q."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import composattn as ca
from tests.cpu.flex_conformance.catalogue import slopes
from tests.cpu.flex_conformance.truth import Mods, attention, check, draw

B, H, S, D = 2, 4, 24, 16

# (strides, offset) of (B, H, S, D)
LAYOUTS: dict[str, tuple[tuple[int, ...], int]] = {
    "with an offset": ((H * S * D, S * D, D, 1), 97),
    "sequence first": ((H * D, D, B * H * D, 1), 49),
    "heads inside": ((H * S * D, D, H * D, 1), 0),
    "padded rows": ((S * (D + 1), B * S * (D + 1), D + 1, 1), 29),
    "columns apart": ((H * S * D, S * D, 1, S), 0),
    "one batch for all": ((0, S * D, D, 1), 5),
}


def laid_out(name: str, generator: torch.Generator, length: int = S) -> torch.Tensor:
    strides, offset = LAYOUTS[name]
    memory = torch.randn(2 * B * H * S * (D + 1), generator=generator)
    return torch.as_strided(memory, (B, H, length, D), strides, offset)


@pytest.mark.parametrize("of_q", list(LAYOUTS)[:5])
@pytest.mark.parametrize(
    ("of_k", "of_v"),
    [
        ("with an offset", "sequence first"),
        ("heads inside", "padded rows"),
        ("padded rows", "columns apart"),
        ("one batch for all", "one batch for all"),
    ],
)
def test_inputs_may_lie_anyhow(of_q: str, of_k: str, of_v: str, generator: torch.Generator) -> None:
    q, k, v = laid_out(of_q, generator, S // 2), laid_out(of_k, generator), laid_out(of_v, generator)
    check(Mods.of(slopes), q, k, v, generator)


@pytest.mark.parametrize("of_dout", LAYOUTS)
def test_incoming_gradients_may_lie_anyhow(of_dout: str, generator: torch.Generator) -> None:
    q, k, v = (t.requires_grad_() for t in draw(generator, B, H, S, dim=D))
    dout = laid_out(of_dout, generator)
    found = torch.autograd.grad(ca.flex_attention(q, k, v, slopes), (q, k, v), dout)
    wanted = torch.autograd.grad(attention(q, k, v, slopes, None)[0], (q, k, v), dout)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 20, 16), (4, 2, 10, 16)], ids=str)
def test_the_output_has_the_order_of_q(
    order: tuple[int, ...], shape: tuple[int, ...], generator: torch.Generator
) -> None:
    q, k, v = (torch.randn(shape, generator=generator).permute(*order, 3) for _ in range(3))
    out = ca.flex_attention(q, k, v)
    assert out.permute(*sorted(range(3), key=order.__getitem__), 3).is_contiguous()


def test_heads_of_one_projection(generator: torch.Generator) -> None:
    """Views of one (B, S, 3 H D): nothing is copied on the way out, and the gradient comes back in one piece."""
    x = torch.randn(2, 20, 3 * 4 * 8, generator=generator, requires_grad=True)
    q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in x.chunk(3, -1))
    out: Any = ca.flex_attention(q, k, v, slopes)
    flat = out.transpose(1, 2).reshape(2, 20, 32)
    assert flat.data_ptr() == out.data_ptr()
    (found,) = torch.autograd.grad(flat.square().sum(), x)
    (wanted,) = torch.autograd.grad(attention(q, k, v, slopes, None)[0].square().sum(), x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
