"""64-bit numbers of masks in generated kernels, emulated: ends of int64, hashes, run-time numbers beyond 32 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca

MOST, LEAST = 2**63 - 1, -(2**63)
BATCH, S = 2, 200
LIMIT, LEAST_OR = torch.tensor([MOST, 50]), torch.tensor([LEAST, 30])
OF_ROWS = torch.where(torch.arange(S) < 150, MOST, torch.arange(S) // 2)
HASHES = torch.tensor([2**62 + 5, MOST, LEAST + 3])[torch.arange(S) // 70]
SPREAD = (torch.arange(S) * 0x5851F42D4C957F2D) ^ (torch.arange(S) << 52)
NOT_BEFORE = torch.where(torch.arange(S) % 9 < 4, 2**31 - 1, -(2**31)).int()
NOT_BEHIND = torch.where(torch.arange(S) % 7 < 3, -(2**31), 2**31 - 1).int()
SIXTEEN = torch.tensor([LEAST, LEAST + 1, -7, -1, 0, 5, 2**61 + 1, MOST]).repeat(S // 8)
TWO = torch.tensor([2, -2])
FAR, NEAR_IT = torch.tensor([2**62 + 40, 20]), torch.tensor([2**62 + 7, 3])

MASKS: dict[str, Callable[..., Any]] = {
    "no limit": lambda b, h, q, kv: kv <= LIMIT[b],
    "no limit of rows": lambda b, h, q, kv: ~(kv > OF_ROWS[q]) & (q - kv <= LIMIT[b]),
    "no least key": lambda b, h, q, kv: (kv > LEAST_OR[b]) & (kv // 16 <= LIMIT[b]),
    "documents by their hashes": lambda b, h, q, kv: (HASHES[q] == HASHES[kv]) & (q >= kv),
    "rows sampled by a hash": lambda b, h, q, kv: (SPREAD[q] > LEAST // 2) & (SPREAD[kv] <= 2**61),
    "far offsets near each other": lambda b, h, q, kv: kv <= q + FAR[b] - NEAR_IT[b],
    "ends of int32": lambda b, h, q, kv: (kv >= NOT_BEFORE[q]) & (kv < NOT_BEHIND[q]),
    "columns to the ends of int32": lambda b, h, q, kv: (q >= NOT_BEFORE[kv]) & (q < NOT_BEHIND[kv]),
    "divisions": lambda b, h, q, kv: (
        (torch.div(SIXTEEN[kv], 3, rounding_mode="trunc") % 5 < 3)
        & (torch.fmod(SIXTEEN[q], 7) > -3)
        & (SIXTEEN[kv] // 3 != -3074457345618258602)
        | (TWO[b] ** (kv % 63) >= 2**32 + 1 + 0 * q)
    ),
    "divisions by numbers that vary": lambda b, h, q, kv: (
        (SIXTEEN[q] % (kv + 1) > q % 40)
        | (torch.fmod(SIXTEEN[q], kv + 2) < -5)
        | (torch.div(SIXTEEN[kv], -3 - q, rounding_mode="trunc") % 7 == 3)
        | (SIXTEEN[q] // (kv + 1) % 7 > 5)
    ),
    "far shifts": lambda b, h, q, kv: (
        (((q * 0x9E3779B1 + kv) >> 33) % 2 == 0) | ((SIXTEEN[kv] >> 63) + (SIXTEEN[q] >> 70) == -1)
    ),
    "constants": lambda b, h, q, kv: torch.where(kv % 2 == 0, torch.where(q > 5, 2**40, MOST), kv) > 2**33 * (q >= 7),
}  # fmt: skip


def assert_kernel_agrees(mask: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(BATCH, 1, S, 64, generator=generator).half() for _ in range(3))
    expected = ca.attention(q, k, v, mask_mod=mask, backend="reference").float()
    for backend in ("streaming", "hopper-emulated"):
        out = ca.attention(q, k, v, mask_mod=mask, backend=backend).float()
        assert (out - expected).abs().max() < 4e-3, backend


SLOW = ("no limit", "no least key", "rows sampled by a hash", "columns to the ends of int32")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in MASKS])
def test_kernels_agree_at_the_ends_of_int64(name: str) -> None:
    assert_kernel_agrees(MASKS[name])


def test_a_run_time_number_that_begins_beyond_32_bits_has_64() -> None:
    reach = ca.scalar(2**40)
    attend = {
        b: ca.Attention(mask_mod=lambda b, h, q, kv: q - kv < reach, backend=b)
        for b in ("reference", "hopper-emulated")
    }
    q = torch.randn(1, 1, 130, 64, generator=torch.Generator().manual_seed(0)).half()
    for value in (2**40, MOST, 17, -(2**40)):
        reach.value = value
        expected, out = (attend[b](q, q, q).float() for b in ("reference", "hopper-emulated"))
        assert (out - expected).abs().max() < 4e-3, value


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no limit of rows", "ends of int32", "columns to the ends of int32"])
def test_gradients_agree_where_there_is_no_limit(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(BATCH, 1, S, 64, generator=generator).half().requires_grad_() for _ in range(3))
    grads = []
    for backend in ("reference", "hopper-emulated"):
        out = ca.attention(q, k, v, mask_mod=MASKS[name], backend=backend)
        grads.append(torch.autograd.grad(out.float().square().sum(), (q, k, v)))
    for found, expected in zip(*grads[::-1], strict=True):
        assert (found.float() - expected.float()).abs().max() < 2e-2
