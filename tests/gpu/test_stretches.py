"""Long documents by ids, whose tiles begin with them, on a GPU: as the ids say now, in every sequence of a batch."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import composattn as ca
from composattn.mods import causal, document
from composattn.testing import Case, check
from composattn.testing.tolerance import run
from tests.support import gpu_backend, outlier_normal

pytestmark = pytest.mark.gpu
LENGTHS = 700, 1500, 300, 1105, 1, 1, 640


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("in_order", [False, True], ids=["any-order", "in-order"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_gradients_of_more_tiles_than_blocks(
    is_causal: bool, in_order: bool, kv_heads: int, dim: int, generator: torch.Generator
) -> None:
    """Three sequences, one of a single document and one whose last is short, in groups of two heads and of eight."""
    lie = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).cuda()
    ids = torch.stack([lie, torch.zeros_like(lie), (torch.arange(len(lie), device="cuda") - 177) // 1000])
    mask = causal() & document(ids) if is_causal else document(ids)
    draw = partial(outlier_normal, generator=generator, dtype=torch.bfloat16, device="cuda")
    q, k, v, dout = (draw(3, heads, len(lie), dim) for heads in (8, kv_heads, kv_heads, 8))
    attention = ca.Attention(mask_mod=mask, backend=gpu_backend(), deterministic=in_order)

    def planned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: bool = False, **_: object) -> object:
        return attention(q, k, v, return_lse=return_lse)

    case = Case(q, k, v, mask_mod=mask, dout=dout)
    check(planned, case)
    if in_order:
        first, again = run(planned, case), run(planned, case)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("kv_heads", [8, 1])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_packed_gradients_in_a_fixed_order_are_right_and_the_same_again(
    is_causal: bool, kv_heads: int, dim: int, generator: torch.Generator
) -> None:
    """Sequences of some hundred tokens, among them two of equal length, one of one token and an empty one."""
    lengths = torch.tensor([*LENGTHS, 0, 300, 1100], dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)]).cuda()
    total, mask = int(starts[-1]), causal() if is_causal else None
    draw = partial(outlier_normal, generator=generator, dtype=torch.bfloat16, device="cuda")
    q, k, v, dout = (draw(total, heads, dim) for heads in (8, kv_heads, kv_heads, 8))
    attention = ca.Attention(mask_mod=mask, backend=gpu_backend(), deterministic=True)

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: bool = False, **_: object) -> object:
        return attention(q, k, v, varlen=ca.Varlen(starts), return_lse=return_lse)

    case = Case(q, k, v, mask_mod=mask, dout=dout, varlen=ca.Varlen(starts))
    check(packed, case)
    first, again = run(packed, case), run(packed, case)
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_gradients_of_ids_that_are_written_to(is_causal: bool, generator: torch.Generator) -> None:
    """Plans and memory are kept from one batch of documents to the next."""
    lie = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).cuda()
    ids = torch.stack([lie, lie.flip(0)])
    mask = causal() & document(ids) if is_causal else document(ids)
    draw = partial(outlier_normal, generator=generator, dtype=torch.bfloat16, device="cuda")
    q, k, v, dout = (draw(2, heads, len(lie), 128) for heads in (2, 1, 1, 2))
    attention = ca.Attention(mask_mod=mask, backend=gpu_backend())

    def planned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: bool = False, **_: object) -> object:
        return attention(q, k, v, return_lse=return_lse)

    for now in (ids.clone(), ids.roll(333, 1), torch.zeros_like(ids), ids.clone()):
        ids.copy_(now)
        check(planned, Case(q, k, v, mask_mod=mask, dout=dout))
