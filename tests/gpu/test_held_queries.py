"""Forwards whose registers hold columns of Q, on a GPU: each head dimension that does so, of odd lengths."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

import composattn as ca
from composattn.mods import causal, document, sliding_window
from composattn.mods.mask import Mask
from composattn.testing import Case, check
from tests.support import gpu_backend, outlier_normal, poison_cuda_memory

pytestmark = pytest.mark.gpu

MASKS: dict[str, Callable[[], Mask | None]] = {
    "full": lambda: None,
    "causal": causal,
    "window": lambda: causal() & sliding_window(200),
    "documents": lambda: causal() & document(torch.arange(4100, device="cuda") // 700),
}
LENGTHS = (1, 1), (65, 300), (129, 127), (333, 333), (1023, 1500), (2047, 1021)


def drawn(dims: tuple[int, int], lengths: tuple[int, int], generator: torch.Generator, **kind: torch.dtype) -> Case:
    """Two sequences of four heads on two."""
    draw = functools.partial(outlier_normal, generator=generator, device="cuda", **kind)
    q_len, kv_len = lengths
    return Case(draw(2, 4, q_len, dims[0]), draw(2, 2, kv_len, dims[0]), draw(2, 2, kv_len, dims[1]))


@pytest.mark.parametrize("persistent", [False, True], ids=["a-block-a-tile", "blocks-stay"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", [(192, 192), (192, 128), (256, 256)])
def test_odd_lengths(dims: tuple[int, int], mask: str, persistent: bool, generator: torch.Generator) -> None:
    schedule = ca.Schedule(persistent=persistent)
    attention = functools.partial(ca.attention, backend=gpu_backend(), schedule=schedule)
    for lengths, dtype in zip(LENGTHS, (torch.bfloat16, torch.float16) * 3, strict=True):
        made = drawn(dims, lengths, generator, dtype=dtype)
        poison_cuda_memory()
        check(attention, Case(made.q, made.k, made.v, mask_mod=MASKS[mask]()))


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("dims", [(192, 192), (192, 128), (256, 256)])
def test_the_same_call_gives_the_same_bits(dims: tuple[int, int], mask: str, generator: torch.Generator) -> None:
    made = drawn(dims, (1999, 1999), generator, dtype=torch.bfloat16)
    attention = ca.Attention(mask_mod=MASKS[mask](), backend=gpu_backend())
    first = attention(made.q, made.k, made.v, return_lse=True)
    for _ in range(20):
        poison_cuda_memory()
        again = attention(made.q, made.k, made.v, return_lse=True)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


@pytest.mark.parametrize("rises", [1.0, 60.0])
def test_long_rows_of_d_128(rises: float, generator: torch.Generator) -> None:
    """Where scores rise from tile to tile, guesses fail, and scores are computed again from what registers hold."""
    keys = 16385
    draw = functools.partial(outlier_normal, generator=generator, dtype=torch.bfloat16, device="cuda")
    q, k, v = draw(1, 4, 4099, 128), draw(1, 2, keys, 128), draw(1, 2, keys, 128)
    k = (k * torch.linspace(rises, 1.0, keys, device="cuda")[:, None]).to(k.dtype)
    check(functools.partial(ca.attention, backend=gpu_backend()), Case(q, k, v))


def test_packed_sequences(generator: torch.Generator) -> None:
    cu = torch.tensor([0, 700, 700, 701, 1900, 2500], dtype=torch.int32, device="cuda")
    for dims in ((192, 192), (192, 128), (256, 256)):
        draw = functools.partial(outlier_normal, generator=generator, dtype=torch.bfloat16, device="cuda")
        q, k, v = draw(2500, 4, dims[0]), draw(2500, 2, dims[0]), draw(2500, 2, dims[1])
        poison_cuda_memory()
        made = Case(q, k, v, mask_mod=causal(), varlen=ca.Varlen(cu))
        check(functools.partial(ca.attention, backend=gpu_backend()), made)
