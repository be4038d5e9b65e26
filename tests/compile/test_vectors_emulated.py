"""Mods with short vectors as kernels, in the emulator against fp64: forward and backward, captured gradients too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from tests.support import qkv

pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

LENGTH = 130
Mod = Callable[..., Any]


def distance(means: torch.Tensor, picked: torch.Tensor) -> dict[str, Mod]:
    return {"score_mod": lambda s, b, h, q, kv: s - (means[q] - means[kv]).pow(2).sum(-1)}


def product(means: torch.Tensor, picked: torch.Tensor) -> dict[str, Mod]:
    return {"score_mod": lambda s, b, h, q, kv: s + torch.dot(means[q], means[kv])}


def picked_tiles(means: torch.Tensor, picked: torch.Tensor) -> dict[str, Mod]:
    return {"mask_mod": lambda b, h, q, kv: (picked[b, h, q // 32] == (kv // 32).unsqueeze(-1)).any(-1)}


@pytest.mark.parametrize("make", [distance, picked_tiles, pytest.param(product, marks=pytest.mark.slow)])
def test_emulated_vectors_match_fp64(make: Callable[..., dict[str, Mod]], generator: torch.Generator) -> None:
    means = torch.randn(LENGTH, 3, generator=generator).requires_grad_()
    mods = make(means, torch.randint(0, 5, (1, 2, 5, 3), generator=generator))
    inputs = qkv(
        generator=generator, batch=1, heads=2, q_len=LENGTH, dim=64, dtype=torch.float16, requires_grad=True
    )  # fmt: skip
    exact = [t.detach().double().requires_grad_() for t in inputs]
    dout = torch.randn(inputs[0].shape, generator=generator).half()
    out = ca.attention(*inputs, **mods, backend="hopper-emulated")
    wanted = ca.attention(*exact, **mods, backend="reference")
    read = [means] if "score_mod" in mods else []
    found = torch.autograd.grad(out, [*inputs, *read], dout)
    right = torch.autograd.grad(wanted, [*exact, *read], dout.double())
    for got, want in zip([out, *found], [wanted, *right], strict=True):
        assert float((got.detach().double() - want).norm()) <= 2 * torch.finfo(torch.float16).eps * float(want.norm())
