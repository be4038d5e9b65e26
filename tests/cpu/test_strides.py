"""Outputs and gradients lie in memory as what they belong to, on every backend that runs here."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.backends.fused.running.bulk import tidy
from composattn.backends.fused.running.launch import memory_like
from composattn.call.strides import in_order_of, ordered
from composattn.mods import causal
from tests.support import has_kernel_toolchain

EMULATED = pytest.param(
    "hopper-emulated", marks=pytest.mark.skipif(not has_kernel_toolchain(), reason="no kernel toolchain")
)
BACKENDS = ["reference", "streaming", EMULATED]


def packed_heads(generator: torch.Generator, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(B, S, H, D), as projections give it."""
    return torch.randn(2, 20, 4, 16, generator=generator).to(dtype).requires_grad_()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_b_s_h_d_caller_gets_b_s_h_d_memory_back(backend: str, generator: torch.Generator) -> None:
    dtype = torch.float32 if backend != "hopper-emulated" else torch.bfloat16
    x = [packed_heads(generator, dtype).transpose(1, 2) for _ in range(3)]
    out = ca.attention(*x, mask_mod=causal(), backend=backend)
    assert isinstance(out, torch.Tensor)
    assert out.transpose(1, 2).is_contiguous()
    if backend != "reference":  # whose gradients are torch's
        assert all(g.transpose(1, 2).is_contiguous() for g in torch.autograd.grad(out.sum(), x))


@pytest.mark.parametrize("backend", ["reference", "streaming"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_any_order_of_q_is_that_of_out(backend: str, order: tuple[int, ...], generator: torch.Generator) -> None:
    q = torch.randn(4, 2, 6, 8, generator=generator).permute(*order, 3)
    k = torch.randn(q.shape, generator=generator)
    out: Any = ca.attention(q, k, k[..., :5], backend=backend)
    back = sorted(range(3), key=lambda d: order[d])
    assert out.permute(*back, 3).is_contiguous()
    torch.testing.assert_close(out, ca.attention(q.contiguous(), k, k[..., :5], backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_rows_keep_the_order_of_q(backend: str, generator: torch.Generator) -> None:
    q = torch.randn(2, 11, 8, generator=generator).bfloat16().transpose(0, 1).requires_grad_()
    packed = ca.Varlen(torch.tensor([0, 4, 11], dtype=torch.int32))
    out: Any = ca.attention(q, q, q, backend=backend, varlen=packed)
    assert out.transpose(0, 1).is_contiguous()
    exact = ca.attention(*[q.detach().double().contiguous()] * 3, backend="reference", varlen=packed)
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)
    (dq,) = torch.autograd.grad(out.square().sum(), q)
    assert not bool(dq.isnan().any())


@pytest.mark.skipif(not has_kernel_toolchain(), reason="no kernel toolchain")
def test_kernels_write_into_any_order(generator: torch.Generator) -> None:
    """Sequence first, as (S, B, H, D)."""
    q, k, v = (torch.randn(20, 2, 2, 16, generator=generator).bfloat16().permute(1, 2, 0, 3) for _ in range(3))
    out: Any = ca.attention(q, k, v, backend="hopper-emulated")
    assert out.permute(2, 0, 1, 3).is_contiguous()
    torch.testing.assert_close(out, ca.attention(q, k, v, backend="reference"), rtol=1e-2, atol=1e-2)


def test_a_tensor_that_repeats_a_row_has_no_order_of_its_own() -> None:
    assert ordered(torch.zeros(1, 3, 5, 4).expand(2, 3, 5, 4).transpose(1, 2), 7).is_contiguous()


def test_memory_in_order_and_a_copy_in_order_agree(generator: torch.Generator) -> None:
    form = torch.randn(2, 3, 4, 5, generator=generator).permute(2, 0, 1, 3)
    t = torch.randn(4, 2, 3, 6, generator=generator)
    assert in_order_of(form, t).stride() == ordered(form, 6).stride()
    assert torch.equal(in_order_of(form, t), t)


def test_memory_for_a_kernel_lies_in_order_whatever_the_strides_of_single_rows() -> None:
    rows = torch.zeros(2, 3, 5, 8)[:1].as_strided((1, 3, 5, 8), (7, 40, 8, 1))  # torch calls it contiguous
    assert rows.is_contiguous() and rows.stride(0) == 7
    assert memory_like(rows).stride() == (120, 40, 8, 1)
    turned = torch.zeros(2, 5, 3, 8).transpose(1, 2)
    assert memory_like(turned).stride() == turned.stride()
    assert memory_like(turned[..., :4]).stride() == (60, 4, 12, 1)


@pytest.mark.parametrize("unit", [8, 4])
def test_bulk_copies_read_whole_16_bytes_alone(unit: int) -> None:
    memory = torch.zeros(4096, dtype=torch.bfloat16 if unit == 8 else torch.float32)
    for strides in itertools.product((0, 4, 8, 12, 24, 100), repeat=3):
        given = memory.as_strided((2, 3, 4, 16), (*strides, 1))
        if all(s and s % unit == 0 for s in strides):
            assert tidy(given) is given
        elif any(s % unit for s in strides):
            assert tidy(given) is None
        else:
            assert 0 in strides
    assert tidy(memory[1:].as_strided((2, 3, 16), (48, 16, 1), 1)) is None
    single = tidy(memory.as_strided((2, 1, 4, 16), (64, 3, 16, 1)))
    assert single is not None and single.stride() == (64, unit, 16, 1)
