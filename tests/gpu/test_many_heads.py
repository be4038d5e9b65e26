"""More heads or sequences than the second and third dimension of a grid take, and masks of columns, on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.mods.mask import Mask
from composattn.testing import check, make_case
from tests.support import gpu_backend

MANY = 70000  # the dimension takes 65,535


@pytest.mark.parametrize(("batch", "heads"), [(MANY, 1), (1, MANY)])
def test_results_and_gradients_of_many_are_those_of_each(batch: int, heads: int) -> None:
    make = torch.Generator("cuda").manual_seed(5)
    shape = (batch, heads, 16, 64)
    q, k, v, dout = (torch.randn(shape, generator=make, device="cuda").bfloat16() for _ in range(4))
    whole, last = ca.Attention(backend=gpu_backend()), slice(-3, None)
    found = [whole(*(x := [t.clone().requires_grad_() for t in (q, k, v)]))]
    found += torch.autograd.grad(found[0], x, dout)
    part = [t.flatten(0, 1)[last][None].clone().requires_grad_() for t in (q, k, v)]
    want = [whole(*part)]
    want += torch.autograd.grad(want[0], part, dout.flatten(0, 1)[last][None])
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a.flatten(0, 1)[last][None], b, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("heads", [1, MANY])
def test_keys_in_parts_are_combined_for_many_heads(heads: int) -> None:
    q, k, v = (torch.randn(1, heads, length, 64, device="cuda").bfloat16() for length in (2, 64, 64))
    out = ca.attention(q, k, v, schedule=ca.Schedule(split_kv=2), backend=gpu_backend())
    want = ca.attention(q[:, -3:], k[:, -3:], v[:, -3:], backend=gpu_backend())
    torch.testing.assert_close(out[:, -3:], want, rtol=2**-7, atol=2**-9)


MASKS: dict[str, Any] = {
    "every second key": lambda b, h, q, kv: kv % 2 == 0,
    "one key of 8": lambda b, h, q, kv: kv % 8 == 0,
    "one column of 16": lambda b, h, q, kv: q % 16 == kv % 16,
    "one column of 64": lambda b, h, q, kv: q % 64 == kv % 64,
    "columns apart": lambda b, h, q, kv: (q % 64 - kv % 64).abs() <= 3,
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dim", [64, 128])
def test_masks_of_columns_alone(name: str, dim: int) -> None:
    case = make_case(
        7, batch=1, q_len=4096, kv_len=4096, dim=dim, heads=4, kv_heads=2, dtype=torch.bfloat16, device="cuda",
        mask_mod=Mask.of(MASKS[name]),
    )  # fmt: skip
    check(partial(ca.attention, backend=gpu_backend()), case)
