"""Keys and values of 8 bits beside 16-bit queries on a GPU: right, and the bits of the same kernel on 16-bit ones."""

from __future__ import annotations

import functools

import pytest
import torch

import composattn as ca
from composattn.testing import check
from tests.byte_keys import both, cases
from tests.support import gpu_backend

CASES = cases(3000, "cuda")


@pytest.mark.parametrize("name", CASES)
def test_as_close_as_plain_pytorch(name: str) -> None:
    case, options = CASES[name]()
    check(functools.partial(ca.attention, backend=gpu_backend(), **options), case)


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_the_same_kernel_on_the_bytes_as_16_bit_numbers(name: str) -> None:
    if gpu_backend() != "hopper":
        pytest.skip("other architectures' kernels read no bytes")
    case, options = CASES[name]()
    found, expected = both(case, "hopper", **options)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
