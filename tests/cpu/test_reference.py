"""The oracle itself: against the definition written out in loops, against torch, and at the edges."""

from __future__ import annotations

import math

import pytest
import torch

import composattn as ca
from composattn.backends import reference
from composattn.errors import CapturedIndexOutOfRange, TypeMismatch
from composattn.mods import bias, causal, padding, relative_bias, softcap
from tests.support import qkv


def attend(q, k, v, score_mod=None, mask_mod=None, **options):
    return ca.attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod, backend="reference", **options)


def by_loops(q, k, v, score_mod, mask_mod):
    """Attention one number at a time."""
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=q.dtype)
    group = q.shape[1] // k.shape[1]
    for b, h, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        seen = [j for j in range(k.shape[2]) if mask_mod(b, h, i, j)]
        scores = [score_mod(float(q[b, h, i] @ k[b, h // group, j]) / math.sqrt(q.shape[-1]), b, h, i, j) for j in seen]
        if seen:
            lse[b, h, i] = math.log(sum(map(math.exp, scores)))
            weights = [math.exp(s - lse[b, h, i]) for s in scores]
            out[b, h, i] = sum(w * v[b, h // group, j] for w, j in zip(weights, seen, strict=True))
    return out, lse


def test_it_is_the_definition_written_out_in_loops(generator):
    q, k, v = qkv(generator=generator, heads=4, kv_heads=2, q_len=7, kv_len=9, dim=5, v_dim=3, dtype=torch.float64)

    def score(s, b, h, i, j):
        return s * (1 + h) / 2 - 0.25 * abs(i - j) + b

    def mask(b, h, i, j):
        return (j <= i + h) & ((i + j) % 3 != 1) & (i != 4)

    def traced_score(s, b, h, i, j):
        return s * (1 + h) / 2 - 0.25 * torch.abs(i - j) + b

    out, lse = attend(q, k, v, traced_score, mask, return_lse=True)
    expected_out, expected_lse = by_loops(q, k, v, score, mask)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_it_agrees_with_torch_and_so_do_its_gradients(generator, is_causal):
    q, k, v = qkv(generator=generator, heads=4, kv_heads=2, q_len=33, dim=8, dtype=torch.float64, requires_grad=True)
    ours = attend(q, k, v, mask_mod=causal() if is_causal else None)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(ours, theirs)
    dout = torch.randn(ours.shape, generator=generator, dtype=ours.dtype)
    for a, b in zip(*(torch.autograd.grad(o, (q, k, v), dout) for o in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_its_lse_and_gradients_through_it_agree_with_logsumexp(generator):
    q, k, v = qkv(generator=generator, q_len=9, kv_len=14, dim=8, dtype=torch.float64, requires_grad=True)
    _, lse = attend(q, k, v, mask_mod=causal(), return_lse=True)
    hidden = torch.ones(9, 14, dtype=torch.bool).tril().logical_not()
    expected = (q @ k.mT / math.sqrt(8)).masked_fill(hidden, -math.inf).logsumexp(-1)
    torch.testing.assert_close(lse, expected)
    dlse = torch.randn(lse.shape, generator=generator, dtype=lse.dtype)
    for a, b in zip(*(torch.autograd.grad(x, (q, k), dlse) for x in (lse, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_half_precision_inputs_are_computed_in_fp64_and_rounded_once(generator):
    q, k, v = qkv(generator=generator, dim=8, q_len=20, dtype=torch.bfloat16)
    out, lse = attend(q, k, v, softcap(3.0), causal(), return_lse=True)
    exact, exact_lse = attend(q.double(), k.double(), v.double(), softcap(3.0), causal(), return_lse=True)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32 and exact_lse.dtype == torch.float64
    assert torch.equal(out, exact.bfloat16()) and torch.equal(lse, exact_lse.float())


def test_rows_that_see_nothing_give_zero_minus_infinity_and_zero_gradients(generator):
    q, k, v = qkv(generator=generator, batch=2, q_len=6, dim=4, requires_grad=True)
    lengths = torch.tensor([0, 3])
    out, lse = attend(q, k, v, mask_mod=padding(lengths), return_lse=True)
    assert (out[0] == 0).all() and (lse[0] == -math.inf).all() and lse[1].isfinite().all()
    grads = torch.autograd.grad(out.sum() + lse[1].sum(), (q, k, v))
    assert all(g.isfinite().all() and (g[0] == 0).all() for g in grads)
    assert all((g[1, :, 3:] == 0).all() for g in grads[1:])


def test_a_nan_of_the_mod_at_hidden_pairs_reaches_nothing(generator):
    q, k, v = qkv(generator=generator, q_len=12, dim=4, requires_grad=True)
    rate = torch.ones((), requires_grad=True)

    def nan_above_the_diagonal(score, b, h, q, kv):
        return score * torch.log((q - kv + 1).float()) * rate + torch.sqrt((q - kv).float())

    out = attend(q, k, v, nan_above_the_diagonal, causal())
    for g in torch.autograd.grad(out.square().sum(), (q, k, v, rate)):
        assert g.isfinite().all()


def test_a_score_of_minus_infinity_hides_a_pair_and_stops_its_gradients(generator):
    q, k, v = qkv(generator=generator, q_len=10, dim=4, requires_grad=True)
    keep = torch.ones(10)
    keep[3] = 0.0
    keep.requires_grad_()
    hidden, masked = (
        attend(q, k, v, score_mod=lambda s, b, h, q, kv: s + torch.log(keep[kv]), return_lse=True),
        attend(q, k, v, mask_mod=lambda b, h, q, kv: kv != 3, return_lse=True),
    )
    torch.testing.assert_close(hidden, masked)
    (g,) = torch.autograd.grad(hidden[0].sum() + hidden[1].sum(), keep)
    assert g.isfinite().all() and g[3] == 0


def test_a_read_out_of_range_is_refused_where_it_is_visible_and_only_there(generator):
    q, k, v = qkv(generator=generator, q_len=8, dim=4)
    table = torch.randn(8, generator=generator)

    def future(score, b, h, q, kv):
        return score + table[q - kv + 1]

    with pytest.raises(CapturedIndexOutOfRange, match=r"shape \(8,\) is read at"):
        attend(q, k, v, score_mod=lambda s, b, h, q, kv: s + table[q + 1])
    with pytest.raises(CapturedIndexOutOfRange, match="visible pairs"):
        attend(q, k, v, future, lambda b, h, q, kv: q >= kv)
    attend(q, k, v, future, lambda b, h, q, kv: (q >= kv) & (q - kv < 7))
    with pytest.raises(CapturedIndexOutOfRange):
        attend(q, k, v, mask_mod=lambda b, h, q, kv: table[kv + 1] < 100)
    attend(q, k, v, mask_mod=lambda b, h, q, kv: (kv < 7) & (table[kv + 1] < 100))


def test_no_queries_and_no_keys_are_ordinary(generator):
    q, k, v = qkv(generator=generator, q_len=5, dim=4, requires_grad=True)
    out, lse = attend(q, k[:, :, :0], v[:, :, :0], mask_mod=causal(), return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()
    assert (torch.autograd.grad(out.sum(), q)[0] == 0).all()
    out = attend(q[:, :, :0], k, v, softcap(2.0), causal())
    assert out.shape == (2, 4, 0, 4)


def test_heads_computed_in_turn_change_nothing(generator, monkeypatch):
    q, k, v = qkv(generator=generator, heads=6, kv_heads=3, q_len=11, dim=4, requires_grad=True)
    table, values = torch.randn(6, 7, requires_grad=True), torch.randn(2, 6, 11, 11, requires_grad=True)

    def results():
        out, lse = attend(q, k, v, relative_bias(table) + bias(values), causal(), return_lse=True)
        return out, lse, *torch.autograd.grad(out.sum() + lse.square().sum(), (q, k, v, table, values))

    together = results()
    monkeypatch.setattr(reference, "PAIRS_AT_ONCE", 2 * 11 * 11 + 5)
    for a, b in zip(together, results(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_scalar_changed_after_the_call_does_not_change_its_gradients(generator, monkeypatch):
    monkeypatch.setattr(reference, "PAIRS_AT_ONCE", 1)  # the backward recomputes
    q, k, v = qkv(generator=generator, q_len=6, dim=4, requires_grad=True)
    factor = ca.scalar(2.0)
    out = attend(q, k, v, score_mod=lambda s, b, h, q, kv: s * factor)
    expected = torch.autograd.grad(attend(q, k, v, score_mod=lambda s, b, h, q, kv: s * 2.0).sum(), q)[0]
    factor.value = 5.0
    torch.testing.assert_close(torch.autograd.grad(out.sum(), q)[0], expected)


def test_gradients_where_little_depends_on_what_is_wanted() -> None:
    q, k, v = (torch.randn(1, 2, 12, 8, dtype=torch.float64) for _ in range(3))
    limits = torch.full((12,), 6.0, dtype=torch.float64)

    def loss(v: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        mask = ca.mask(lambda b, h, q, kv: kv < limits[q])
        return ca.attention(q, k, v, mask_mod=mask, backend="reference").square().sum()

    of_v, of_limits = (torch.func.grad(loss, n)(v, limits) for n in (0, 1))
    leaf = v.clone().requires_grad_()
    torch.testing.assert_close(of_v, torch.autograd.grad(loss(leaf, limits), leaf)[0])
    assert torch.equal(of_limits, torch.zeros_like(limits))


BYTES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


@pytest.mark.parametrize("kind", BYTES, ids=str)
@pytest.mark.parametrize("backend", ["reference", "streaming"])
def test_captured_floats_of_8_bits_count_as_the_numbers_they_hold(backend: str, kind: torch.dtype, generator) -> None:
    q, k, v = qkv(generator=generator, q_len=6, dim=4)
    held = torch.rand(q.shape[1], 6, generator=generator).to(kind)

    def attended(table: torch.Tensor) -> torch.Tensor:
        return ca.attention(
            q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, j], mask_mod=lambda b, h, i, j: table[h, i] < 0.75,
            sinks=table[:, 0], backend=backend,
        )  # fmt: skip

    torch.testing.assert_close(attended(held), attended(held.float()))


def test_captured_numbers_that_share_a_byte_are_refused() -> None:
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    packed = torch.zeros(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(TypeMismatch, match="float4_e2m1fn_x2 holds no numbers that mods compute with"):
        attend(q, k, v, score_mod=lambda s, b, h, q, kv: s + packed[kv])
