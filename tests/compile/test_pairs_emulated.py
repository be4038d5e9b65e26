"""Biases and masks that are tensors of pairs, read two numbers at a time where these lie side by side."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.testing import check, make_case

LENGTH = 170


def bias(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def square(dtype: torch.dtype) -> torch.Tensor:
    return bias(LENGTH, LENGTH, dtype=dtype)


# a tensor of a type, and where it is read
READS: dict[str, tuple[Callable[[torch.dtype], torch.Tensor], Callable[..., Any]]] = {
    "one for all heads": (square, lambda h, q, kv: (q, kv)),
    "one for each head": (lambda t: bias(2, LENGTH, LENGTH, dtype=t), lambda h, q, kv: (h, q, kv)),
    "rows of odd length": (lambda t: bias(LENGTH, LENGTH + 1, dtype=t), lambda h, q, kv: (q, kv)),
    "from an odd number on": (
        lambda t: bias(LENGTH**2 + 1, dtype=t)[1:].view(LENGTH, LENGTH),
        lambda h, q, kv: (q, kv),
    ),
    "part of its rows": (lambda t: bias(LENGTH, 2 * LENGTH, dtype=t)[:, 30:], lambda h, q, kv: (q, kv)),
    "keys first": (square, lambda h, q, kv: (kv, q)),
    "columns side by side": (lambda t: square(t).T, lambda h, q, kv: (q, kv)),
    "backwards": (square, lambda h, q, kv: (LENGTH - 1 - q, LENGTH - 1 - kv)),
    "from the end": (lambda t: bias(LENGTH, LENGTH + 3, dtype=t), lambda h, q, kv: (q - 9, kv + 3)),
    "every other one": (lambda t: bias(LENGTH, 2 * LENGTH, dtype=t), lambda h, q, kv: (q, 2 * kv)),
    "sums of both": (lambda t: bias(LENGTH, 2 * LENGTH, dtype=t), lambda h, q, kv: (q, q + kv)),
}


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(64, torch.bfloat16), (128, torch.float32), pytest.param(96, torch.float16, marks=pytest.mark.slow)],
    ids=lambda given: str(given).removeprefix("torch."),
)
@pytest.mark.parametrize("name", READS)
def test_biases_at_pairs_are_right_however_they_lie(
    name: str, dim: int, dtype: torch.dtype, deterministic: bool, generator: torch.Generator
) -> None:
    make, place = READS[name]
    table = make(dtype)
    case = make_case(
        int(torch.randint(1000, (), generator=generator)), batch=1, q_len=LENGTH,
        score_mod=lambda score, b, h, q, kv: score + table[place(h, q, kv)],
        mask_mod=lambda b, h, q, kv: q >= kv, heads=2, kv_heads=1, dim=dim, dtype=torch.bfloat16,
    )  # fmt: skip
    check(partial(ca.attention, backend="hopper-emulated", deterministic=deterministic), case)


def test_two_biases_at_pairs_are_right(generator: torch.Generator) -> None:
    """Registers do for the numbers of one to wait in."""
    one, other = square(torch.float32), bias(2, LENGTH, LENGTH, dtype=torch.bfloat16)
    case = make_case(
        5, batch=1, q_len=LENGTH, score_mod=lambda s, b, h, q, kv: s * one[q, kv] + other[h, q, kv], heads=2, dim=128,
        dtype=torch.bfloat16,
    )  # fmt: skip
    check(partial(ca.attention, backend="hopper-emulated"), case)


@pytest.mark.parametrize("dim", [64, 128, pytest.param(192, marks=pytest.mark.slow)])
@pytest.mark.parametrize("length", [LENGTH, pytest.param(171, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["one for all heads", "one for each head, causal", "columns side by side"])
def test_masks_that_are_tables_are_right(name: str, length: int, dim: int, generator: torch.Generator) -> None:
    one, each = (torch.rand(*shape, length, length, generator=generator) < 0.6 for shape in ((), (2,)))
    turned = one.T
    masks: dict[str, Any] = {
        "one for all heads": lambda b, h, q, kv: one[q, kv],
        "one for each head, causal": lambda b, h, q, kv: each[h, q, kv] & (q >= kv),
        "columns side by side": lambda b, h, q, kv: turned[q, kv] | (q == kv),
    }
    case = make_case(
        6, batch=1, q_len=length, mask_mod=masks[name], heads=2, kv_heads=1, dim=dim, dtype=torch.bfloat16
    )  # fmt: skip
    check(partial(ca.attention, backend="hopper-emulated"), case)
