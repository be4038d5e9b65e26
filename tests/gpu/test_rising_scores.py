"""Rows whose scores rise from tile to tile, by little or beyond fp32's exponents, where kernels guess their maximum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import composattn as ca
from composattn.mods import causal
from tests.support import gpu_backend

KEYS = 3000  # so many that blocks are large


def factors(rises: str) -> torch.Tensor:
    """Factors of the keys; tiles are visited from the last one to the first."""
    number = torch.arange(KEYS, device="cuda")
    return {
        "not": torch.ones(KEYS, device="cuda"),
        "steadily": torch.linspace(60.0, 1.0, KEYS, device="cuda"),
        "beyond fp32's exponents": torch.linspace(3000.0, 1.0, KEYS, device="cuda"),
        "in steps": torch.where(number // 128 % 7 == 3, 30.0, 1.0),
        "at the first keys": torch.where(number < 3, 200.0, 1.0),
    }[rises]


@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rises", ["not", "steadily", "beyond fp32's exponents", "in steps", "at the first keys"])
def test_rising_rows_are_those_of_fp64(rises: str, dtype: torch.dtype, d: int) -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    q, k, v = (torch.randn(1, 2, KEYS, d, generator=generator, device="cuda") for _ in range(3))
    k = k * factors(rises)[:, None]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    out, lse = ca.attention(q, k, v, return_lse=True, backend=gpu_backend())
    wanted, wanted_lse = ca.attention(q.double(), k.double(), v.double(), return_lse=True, backend="reference")
    assert torch.equal(out, ca.attention(q, k, v, backend=gpu_backend()))
    torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), wanted_lse.double(), atol=1e-3, rtol=1e-5)


def mod(name: str) -> Callable[..., torch.Tensor]:
    slopes = torch.tensor([4.0, 0.25], device="cuda")
    down = torch.arange(KEYS, device="cuda") // 128 % 3 * -5e8  # to where a row counts as hidden, and back
    return {
        "alibi": lambda s, b, h, q, kv: s - slopes[h] * (q - kv),
        "alibi to both sides": lambda s, b, h, q, kv: s - slopes[h] * (q - kv).abs(),
        "hidden by large numbers": lambda s, b, h, q, kv: s + down[kv] + torch.where(q % 5 == 0, -1e9, 0.0),
    }[name]


@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["alibi", "alibi to both sides", "hidden by large numbers"])
def test_with_a_score_mod_rows_are_those_of_fp64(name: str, dtype: torch.dtype, d: int) -> None:
    generator = torch.Generator("cuda").manual_seed(4)
    q, k, v = (torch.randn(1, h, KEYS, d, generator=generator, device="cuda").to(dtype) for h in (2, 1, 1))
    mods = {"score_mod": mod(name), "mask_mod": causal() if name == "alibi" else None, "return_lse": True}
    out, lse = ca.attention(q, k, v, backend=gpu_backend(), **mods)
    wanted, wanted_lse = ca.attention(q.double(), k.double(), v.double(), backend="reference", **mods)
    torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), wanted_lse.double(), atol=1e-3, rtol=1e-5)
