"""flash-attn's arguments mean here what they mean there: (B, S, H, D), positions aligned at the end."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from composattn import errors
from composattn.integrations import flash_attn
from composattn.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    softmax_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) from a matrix of scores, with a row and a column for each position."""
    groups = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(groups, 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    columns = torch.arange(k.shape[1])
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.reshape(-1, q.shape[2], 1, 1) * (rows - columns).abs()
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    left, right = window_size
    if causal:
        seen &= columns <= rows
    if left >= 0:
        seen &= columns >= rows - left
    if right >= 0:
        seen &= columns <= rows + right
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = scores.logsumexp(-1)
    return torch.einsum("bhqk,bkhd->bqhd", (scores - lse[..., None]).exp().nan_to_num(), v), lse


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 2)},
    "causal window": {"causal": True, "window_size": (3, 0)},
    "right only": {"window_size": (-1, 1)},
    "soft cap": {"softcap": 2.0, "causal": True},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1, 0.3, 0.2])},
    "alibi of each sequence": {"alibi_slopes": torch.rand(2, 4), "causal": True},
    "all": {"softcap": 2.0, "alibi_slopes": torch.rand(2, 4), "window_size": (5, 1), "softmax_scale": 0.2},
}


@pytest.mark.parametrize("lengths", [(9, 9), (5, 9), (9, 5)])
@pytest.mark.parametrize("name", OPTIONS)
def test_arguments_mean_what_they_mean_there(name: str, lengths: tuple[int, int]) -> None:
    q, k, v = torch.randn(2, lengths[0], 4, 8), torch.randn(2, lengths[1], 2, 8), torch.randn(2, lengths[1], 2, 6)
    out, lse, weights = flash_attn_func(q, k, v, **OPTIONS[name], return_attn_probs=True)
    wanted, wanted_lse = dense(q, k, v, **OPTIONS[name])
    assert weights is None
    torch.testing.assert_close(out, wanted, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, wanted_lse, atol=2e-6, rtol=1e-5)
    assert torch.equal(flash_attn_func(q, k, v, **OPTIONS[name]), out)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["plain", "causal", "causal window", "alibi"])
def test_packed_sequences_are_as_each_alone(name: str) -> None:
    q_lengths, kv_lengths = [3, 7, 4], [5, 7, 6]
    q, k, v = torch.randn(14, 4, 8), torch.randn(18, 2, 8), torch.randn(18, 2, 8)
    begins = [
        torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32) for n in (q_lengths, kv_lengths)
    ]
    out, lse, _ = flash_attn_varlen_func(q, k, v, *begins, 7, 7, **OPTIONS[name], return_attn_probs=True)
    alone = [
        dense(a[None], b[None], c[None], **OPTIONS[name])
        for a, b, c in zip(q.split(q_lengths), k.split(kv_lengths), v.split(kv_lengths), strict=True)
    ]
    torch.testing.assert_close(out, torch.cat([o[0] for o, _ in alone]), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, torch.cat([one[0] for _, one in alone], -1), atol=2e-6, rtol=1e-5)


def test_gradients_reach_all_inputs_and_slopes() -> None:
    q, k, v = (torch.randn(2, 6, 4, 8, requires_grad=True) for _ in range(3))
    slopes = torch.rand(4, requires_grad=True)
    tensors = (q, k, v, slopes)
    loss = torch.randn(2, 6, 4, 8)
    out = flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, deterministic=True)
    found = torch.autograd.grad((out * loss).sum(), tensors)  # type: ignore[operator]
    wanted = torch.autograd.grad((dense(q, k, v, causal=True, alibi_slopes=slopes)[0] * loss).sum(), tensors)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_what_is_not_there_is_refused_by_name() -> None:
    q = torch.randn(1, 4, 2, 8)
    begins = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(errors.UnsupportedOption, match="dropout"):
        flash_attn_func(q, q, q, dropout_p=1.5)
    with pytest.raises(errors.WrongRank, match=r"\(B, S, H, D\)"):
        flash_attn_func(q[0], q, q)
    with pytest.raises(errors.UnsupportedOption, match="Paged"):
        flash_attn_varlen_func(q[0], q[0], q[0], begins, begins, 4, 4, block_table=torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(errors.InvalidModArgument, match="slopes"):
        flash_attn_func(q, q, q, alibi_slopes=torch.rand(1, 1, 2))


@pytest.mark.parametrize("varlen", [False, True])
def test_arguments_that_are_not_taken_are_refused_by_name(varlen: bool) -> None:
    q, begins = torch.randn(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    call = functools.partial(flash_attn_varlen_func, q, q, q, begins, begins, 4, 4)
    call = call if varlen else functools.partial(flash_attn_func, q[None], q[None], q[None])
    with pytest.raises(errors.UnknownKeyword, match=r"attention_chunk is not taken here; .*chunked"):
        call(attention_chunk=4)
    with pytest.raises(errors.UnknownKeyword, match="q_descale"):
        call(q_descale=torch.ones(1))
    for window in (3, (1, 2, 3), (1.5, 0)):
        with pytest.raises(errors.UnsupportedOption, match="left, right"):
            call(window_size=window)
    assert torch.equal(call(window_size=(None, 0), q_descale=None), call(causal=True))


def test_what_is_no_tensor_is_refused_by_name() -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(errors.NotATensor, match="k is a list"):
        flash_attn_func(q, q.tolist(), q)
    with pytest.raises(errors.UnsupportedLayout, match=r"v is torch\.sparse_coo"):
        flash_attn_func(q, q, q.to_sparse())


def test_tensors_that_are_packed_in_one_are_those_apart() -> None:
    q, k, v = torch.randn(3, 2, 12, 4, 8).unbind(0)
    options = {"causal": True, "window_size": (5, 0), "softmax_scale": 0.3}
    qkv = torch.stack([q, k, v], 2).requires_grad_()
    apart, packed = flash_attn_func(q, k, v, **options), flash_attn.flash_attn_qkvpacked_func(qkv, **options)
    assert torch.equal(packed, apart)
    (gradient,) = torch.autograd.grad(packed.sum(), qkv)
    assert gradient.shape == qkv.shape and bool(gradient[:, :, 2].abs().sum() > 0)
    kv = torch.stack([k, v], 2)[:, :, :, :2]
    assert torch.equal(
        flash_attn.flash_attn_kvpacked_func(q, kv, 0.0, 0.3, True), flash_attn_func(q, *kv.unbind(2), 0.0, 0.3, True)
    )


def test_sequences_that_are_packed_in_one_tensor_are_those_apart() -> None:
    q, k, v = torch.randn(3, 12, 4, 8).unbind(0)
    begins = torch.tensor([0, 5, 12], dtype=torch.int32)
    apart = flash_attn_varlen_func(q, k, v, begins, begins, 7, 7, causal=True)
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], 1), begins, 7, causal=True)
    assert torch.equal(packed, apart)
    of_keys = torch.stack([k, v], 1)
    assert torch.equal(flash_attn.flash_attn_varlen_kvpacked_func(q, of_keys, begins, begins, 7, 7, causal=True), apart)


def test_what_is_packed_otherwise_is_refused_by_name() -> None:
    with pytest.raises(errors.WrongRank, match=r"qkv needs \(B, S, 3, H, D\)"):
        flash_attn.flash_attn_qkvpacked_func(torch.randn(2, 12, 4, 8))
    with pytest.raises(errors.ShapeMismatch, match="2 tensors are packed before the heads"):
        flash_attn.flash_attn_kvpacked_func(torch.randn(2, 12, 4, 8), torch.randn(2, 12, 3, 4, 8))
