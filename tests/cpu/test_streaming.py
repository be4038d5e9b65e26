"""The streaming backend: exact gradients of every order, O(S) memory, skipped tiles, and what PyTorch expects."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import composattn as ca
from composattn.analysis.program import Program
from composattn.backends import streaming, tiles
from composattn.backends.tiles import TileSizes
from composattn.mods import (
    alibi,
    bias,
    causal,
    document,
    relative_bias,
    scale_by_head,
    sliding_window,
    softcap,
    t5_bucket_bias,
    temperature,
)
from composattn.testing import Case, check
from tests.support import qkv

attend = functools.partial(ca.attention, backend="streaming")


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 4 × 4, so that small inputs have many."""
    monkeypatch.setitem(tiles.TILE_SIZES, "cpu", TileSizes(4, 4, 1 << 19))


def leaf(*shape, generator, positive=False):
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (drawn.abs() + 0.5 if positive else drawn).requires_grad_()


# name → (shapes of learned tensors, the score mod of those tensors); q 9 × kv 7, 4 heads on 2
LEARNED: dict[str, tuple[list[tuple[int, ...]], Callable[..., Any]]] = {
    "a temperature": ([()], temperature),
    "a slope a head": ([(4,)], alibi),
    "a factor a head": ([(4,)], scale_by_head),
    "a bias by distance": ([(4, 5)], relative_bias),
    "a bias by bucket": ([(8, 4)], functools.partial(t5_bucket_bias, max_distance=6)),
    "a bias a row": ([(9,)], lambda t: ca.score(lambda s, b, h, q, kv: s * t[q])),
    "a bias a column": ([(2, 7)], lambda t: ca.score(lambda s, b, h, q, kv: s + t[b, kv])),
    "a bias a pair": ([(1, 4, 9, 7)], bias),
    "one tensor read twice": ([(4, 9)], lambda t: ca.score(lambda s, b, h, q, kv: s + t[h, q] * t[h, kv])),
    "a gather": ([(3,)], lambda t: ca.score(lambda s, b, h, q, kv: s + t[(q * q + kv * h) % 3])),
    "two tensors": ([(5,), (4,)], lambda t, u: (relative_bias(t) >> softcap(2.0)) + alibi(u)),
}


def test_rows_of_many_tiles_err_little_more_than_rows_of_one(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LSE of 20 is rounded to 1e-6: weights of two tiles, each made of it, erred by that from tile to tile."""
    q, k, v = qkv(batch=4, heads=8, kv_heads=8, q_len=40, kv_len=256, dim=8, dtype=torch.float32, generator=generator)
    q[..., 0], k[..., 0] = 20.0 * 8**0.5, 1.0  # so that scores are 20 and a little
    exact = torch.softmax(q.double() @ k.double().mT / 8**0.5, -1) @ v.double()

    def error(keys: int) -> float:
        monkeypatch.setitem(tiles.TILE_SIZES, "cpu", TileSizes(4, keys, 1 << 19))
        return float((attend(q, k, v) - exact).square().mean().sqrt())

    assert error(4) < 2.5 * error(256)  # 1.3 to 1.6; was 4.5 to 13


@pytest.mark.parametrize("kind", LEARNED)
def test_gradients_are_those_of_finite_differences_for(kind, generator, small_tiles):
    shapes, make = LEARNED[kind]
    learned = [leaf(*shape, generator=generator, positive=kind == "a temperature") for shape in shapes]
    q, k, v = qkv(
        generator=generator, batch=2, heads=4, kv_heads=2, q_len=9, kv_len=7, dim=3, v_dim=2,
        dtype=torch.float64, requires_grad=True,
    )  # fmt: skip

    def call(q, k, v, *learned):
        return attend(q, k, v, score_mod=make(*learned), mask_mod=causal() | sliding_window(2), return_lse=True)

    assert gradcheck(call, (q, k, v, *learned), fast_mode=True)


@pytest.mark.parametrize("kind", ["a bias by distance", "one tensor read twice", "two tensors", "a temperature"])
def test_second_derivatives_are_those_of_finite_differences_for(kind, generator, small_tiles):
    shapes, make = LEARNED[kind]
    learned = [leaf(*shape, generator=generator, positive=kind == "a temperature") for shape in shapes]
    q, k, v = qkv(
        generator=generator, batch=1, heads=4, kv_heads=2, q_len=9, kv_len=7, dim=2,
        dtype=torch.float64, requires_grad=True,
    )  # fmt: skip

    def call(q, k, v, *learned):
        return attend(q, k, v, score_mod=make(*learned) >> softcap(3.0), mask_mod=causal(), return_lse=True)

    assert gradgradcheck(call, (q, k, v, *learned), fast_mode=True)


def test_every_single_derivative_of_a_small_call_is_that_of_finite_differences(generator):
    q, k, v = qkv(
        generator=generator, batch=1, heads=2, kv_heads=1, q_len=3, kv_len=2, dim=2,
        dtype=torch.float64, requires_grad=True,
    )  # fmt: skip
    table = leaf(2, 3, generator=generator)

    def call(q, k, v, table):
        return attend(q, k, v, score_mod=relative_bias(table) >> softcap(2.0), mask_mod=causal(), return_lse=True)

    assert gradcheck(call, (q, k, v, table))
    assert gradgradcheck(call, (q, k, v, table))


def test_second_derivatives_are_0_where_a_call_sees_nothing(generator):
    q, k, v = qkv(generator=generator, q_len=5, kv_len=4, dim=3, dtype=torch.float64, requires_grad=True)
    table = leaf(q.shape[1], 9, generator=generator)
    out = attend(q, k, v, score_mod=relative_bias(table), mask_mod=lambda b, h, q, kv: kv < 0)
    for first in torch.autograd.grad(out.cos().sum(), (q, k, v, table), create_graph=True):
        assert not any(second.any() for second in torch.autograd.grad(first.sum(), (q, k, v, table), retain_graph=True))


def test_second_derivatives_are_finite_where_the_mod_is_nan_at_hidden_pairs(generator, small_tiles):
    q, k, v = qkv(generator=generator, q_len=9, dim=3, dtype=torch.float64, requires_grad=True)

    def score(s, b, h, q, kv):
        return s * torch.log((q - kv + 2).float()) + s * s * torch.sqrt((q - kv).float())

    out = attend(q, k, v, score_mod=score, mask_mod=causal())
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    assert all(g.isfinite().all() for g in torch.autograd.grad(dq.square().sum(), (q, k, v)))


def test_a_gradient_penalty_trains(generator):
    q, k, v = qkv(generator=generator, q_len=70, dim=8, dtype=torch.float64, requires_grad=True)
    out = attend(q, k, v, mask_mod=causal())
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    dq.square().sum().backward()
    expected = ca.attention(q, k, v, mask_mod=causal(), backend="reference")
    (dq,) = torch.autograd.grad(expected.sum(), q, create_graph=True)
    (ddq,) = torch.autograd.grad(dq.square().sum(), q)
    torch.testing.assert_close(q.grad, ddq, rtol=1e-9, atol=1e-12)


# --- tiles and memory ----------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Sees every tensor that is made; remembers the elements of the largest."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


def test_no_tensor_grows_with_the_square_of_the_length_nor_with_the_query_heads(generator, monkeypatch):
    monkeypatch.setitem(tiles.TILE_SIZES, "cpu", dataclasses.replace(tiles.CPU, scores=1 << 15))
    # 16 query heads share one K/V head: expanding it would take 16 · 8192 · 16 elements
    q, k, v = qkv(generator=generator, batch=1, heads=16, kv_heads=1, q_len=1, kv_len=8192, dim=16, requires_grad=True)
    with Largest() as seen:
        attend(q, k, v).sum().backward()
    assert seen.elements <= 8192 * 16

    q, k, v = qkv(generator=generator, batch=1, heads=2, q_len=1000, dim=8, requires_grad=True)
    slopes = torch.rand(2, requires_grad=True)
    with Largest() as seen:
        attend(q, k, v, score_mod=alibi(slopes), mask_mod=causal()).sum().backward()
    assert seen.elements <= 2 * (1 << 15) < 2 * 1000 * 1000 / 16


@pytest.mark.parametrize(
    ("mask", "visited", "full"),
    [
        (None, 64, 64),
        (causal(), 36, 28),
        (causal() & sliding_window(16), 15, 0),
        (document(torch.arange(128) // 32), 16, 16),
        (ca.mask(lambda b, h, q, kv: q < 0), 0, 0),
    ],
    ids=["nothing hidden", "causal", "a window", "documents", "everything hidden"],
)
def test_only_tiles_with_a_visible_pair_are_visited_and_full_ones_not_tested_with(
    mask, visited, full, generator, monkeypatch
):
    monkeypatch.setitem(tiles.TILE_SIZES, "cpu", TileSizes(16, 16, 1 << 19))
    q, k, v = qkv(generator=generator, q_len=128, dim=4)
    call = streaming.Streaming(streaming.DerivedMods(Program(mask=None if mask is None else mask.expr), 1.0))
    call.forward(q, k, v, call.captures)
    found = [tile for step in call.visited for row in step for tile in row]
    assert (len(found), sum(tile.full for tile in found)) == (visited, full)


def test_what_a_score_mod_returns_is_not_written_to(generator):
    q, k, v = qkv(generator=generator, q_len=5, kv_len=7, dim=4)
    table = torch.randn(5, 7, generator=generator)
    before = table.clone()
    attend(q, k, v, score_mod=lambda s, b, h, q, kv: table[q, kv], mask_mod=causal("bottom_right"))
    assert torch.equal(table, before)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize(
    "mask", [causal(), ca.mask(lambda b, h, q, kv: kv <= q + 0 * h)], ids=["of all heads", "a head"]
)
def test_hidden_keys_may_hold_anything(mask, poison, generator):
    q, k, v = qkv(generator=generator, batch=1, heads=2, q_len=9, dim=4)
    known = attend(q, k, v, mask_mod=mask)
    k[:, :, 8] = poison
    found = attend(q, k, v, mask_mod=mask)
    assert torch.equal(found[:, :, :8], known[:, :, :8])
    assert found[:, :, 8].isnan().all()


def test_columns_that_no_row_sees_are_left_out_in_quarters_of_a_tile(generator, monkeypatch):
    monkeypatch.setitem(tiles.TILE_SIZES, "cpu", TileSizes(16, 16, 1 << 19))
    q, k, v = qkv(generator=generator, q_len=16, dim=4)
    hashed = ca.mask(lambda b, h, q, kv: (3 * kv) % 8 == 3)  # kv 1 and 9
    call = streaming.Streaming(streaming.DerivedMods(Program(mask=hashed.expr), 1.0))
    call.forward(q, k, v, call.captures)
    assert [tile.columns for step in call.visited for row in step for tile in row] == [slice(0, 4), slice(8, 12)]


@pytest.mark.parametrize("tile", [1, 3, 16, 64])
@pytest.mark.parametrize("budget", [1, 1 << 20], ids=["a head at a time", "all heads at once"])
def test_tile_sizes_do_not_change_the_result(tile, budget, generator, monkeypatch):
    q, k, v = qkv(generator=generator, batch=2, heads=4, kv_heads=2, q_len=19, kv_len=23, dim=8, dtype=torch.float64)
    table = leaf(4, 9, generator=generator)
    monkeypatch.setitem(tiles.TILE_SIZES, "cpu", TileSizes(tile, tile, budget))
    dout, dlse = torch.randn(2, 4, 19, 8, generator=generator), torch.randn(2, 4, 19, generator=generator)
    check(attend, Case(q, k, v, relative_bias(table), causal("bottom_right"), None, dout, dlse))


def test_no_queries_and_no_keys_are_ordinary(generator):
    q, k, v = qkv(generator=generator, q_len=5, dim=4, requires_grad=True)
    out, lse = attend(q, k[:, :, :0], v[:, :, :0], mask_mod=causal(), return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()
    assert (torch.autograd.grad(out.sum(), q)[0] == 0).all()
    out = attend(q[:, :, :0], k, v, score_mod=softcap(2.0), mask_mod=causal())
    assert out.shape == (2, 4, 0, 4)


# --- what peers get wrong without a word ---------------------------------------------------------------------


SILENT = {
    "causal combined with another mask": (None, lambda t: causal() & document(torch.arange(37) // 9)),
    "grouped heads and a mod that uses the head": (lambda t: alibi(t[:4, 0]) >> softcap(5.0), lambda t: causal()),
    "a window and a plain mask": (None, lambda t: sliding_window(5) & (lambda b, h, q, kv: (q + kv) % 3 != 0)),
    "a captured tensor read twice": (
        lambda t: ca.score(lambda s, b, h, q, kv: s + t[h, q] - t[h, kv]),
        lambda t: causal(),
    ),
    "a score mod on ragged lengths": (lambda t: relative_bias(t[:, :31]), lambda t: causal("bottom_right")),
    "a bound that differs from head to head": (None, lambda t: ca.mask(lambda b, h, q, kv: q - kv < 3 * h)),
}


@pytest.mark.parametrize("situation", SILENT)
@pytest.mark.parametrize("kv_len", [37, 53], ids=["self", "cross"])
def test_right_with(situation, kv_len, generator, small_tiles):
    score, mask = SILENT[situation]
    table = torch.randn(4, 64, generator=generator)
    if situation.startswith("causal combined") and kv_len != 37:
        mask = lambda t: causal() & document(torch.arange(37) // 9, torch.arange(53) // 9)  # noqa: E731
    q, k, v = qkv(generator=generator, heads=4, kv_heads=2, q_len=37, kv_len=kv_len, dim=8)
    dout = torch.randn(2, 37, 4, 8, generator=generator).transpose(1, 2)  # not contiguous
    check(attend, Case(q, k, v, score and score(table), mask(table), None, dout, torch.randn(2, 4, 37)))


# --- as PyTorch expects it -----------------------------------------------------------------------------------


def test_gradients_repeat_bit_by_bit(generator):
    q, k, v = qkv(generator=generator, q_len=131, dim=8, requires_grad=True)
    table, where = torch.randn(5, requires_grad=True), torch.randint(0, 5, (131,), generator=generator)

    def gradients():
        out = attend(q, k, v, score_mod=lambda s, b, h, q, kv: s + table[(where[q] + where[kv]) % 5], mask_mod=causal())
        return torch.autograd.grad(out.square().sum(), (q, k, v, table))

    first = gradients()
    assert all(torch.equal(a, b) for _ in range(3) for a, b in zip(first, gradients(), strict=True))


def test_transposed_views_pass_and_their_gradients_come_back_in_shape(generator):
    packed = torch.randn(2, 33, 3, 4, 8, generator=generator, requires_grad=True)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    out = attend(q, k, v, mask_mod=causal())
    (g,) = torch.autograd.grad(out.square().sum(), packed)
    expected = ca.attention(q, k, v, mask_mod=causal(), backend="reference")
    torch.testing.assert_close(g, torch.autograd.grad(expected.square().sum(), packed)[0])


def test_only_gradients_that_are_asked_for_are_returned(generator):
    q, k, v = qkv(generator=generator, q_len=9, dim=4)
    table = torch.randn(9, requires_grad=True)
    attend(q, k, v, score_mod=lambda s, b, h, q, kv: s + table[q] * table[kv]).sum().backward()
    assert table.grad is not None and q.grad is None
    assert not attend(q, k, v).requires_grad
    with torch.no_grad():
        assert not attend(q, k, v, score_mod=bias(table[None])).requires_grad


def test_a_narrow_learned_tensor_gets_a_gradient_of_its_own_dtype(generator):
    q, k, v = qkv(generator=generator, q_len=17, dim=8, dtype=torch.bfloat16)
    slopes = torch.rand(4, generator=generator).bfloat16().requires_grad_()
    attend(q, k, v, score_mod=alibi(slopes)).float().sum().backward()
    assert slopes.grad.dtype == torch.bfloat16 and slopes.grad.abs().sum() > 0


def test_a_scalar_changed_after_the_call_does_not_change_its_gradients(generator):
    q, k, v = qkv(generator=generator, q_len=9, dim=4, requires_grad=True)
    factor = ca.scalar(2.0)
    out = attend(q, k, v, score_mod=lambda s, b, h, q, kv: s * factor)
    expected = torch.autograd.grad(attend(q, k, v, score_mod=lambda s, b, h, q, kv: s * 2.0).sum(), q)[0]
    factor.value = 5.0
    torch.testing.assert_close(torch.autograd.grad(out.sum(), q)[0], expected)


def test_captured_tensors_written_to_between_calls_are_read_anew(generator, small_tiles):
    q, k, v = qkv(generator=generator, q_len=33, dim=8)
    ids, table = torch.arange(33) // 5, torch.randn(4, 9, generator=generator)
    planned = ca.Attention(score_mod=relative_bias(table), mask_mod=document(ids) & causal(), backend="streaming")
    planned(q, k, v)
    ids.copy_(torch.arange(33) // 11)
    table.neg_()
    expected = attend(q, k, v, score_mod=relative_bias(table.clone()), mask_mod=document(ids.clone()) & causal())
    assert torch.equal(planned(q, k, v), expected)


def test_a_captured_tensor_written_to_before_the_backward_is_refused(generator):
    q, k, v = qkv(generator=generator, q_len=9, dim=4, requires_grad=True)
    table = torch.randn(4, 9, generator=generator)
    out = attend(q, k, v, score_mod=relative_bias(table))
    table.neg_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_autocast_rounds_the_inputs_and_does_not_reach_inside(generator):
    q, k, v = qkv(generator=generator, q_len=33, dim=8, requires_grad=True)
    plain = attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask_mod=causal())
    with torch.autocast("cpu", torch.bfloat16):
        inside = attend(q, k, v, mask_mod=causal())
        grads = torch.autograd.grad(inside.sum(), (q, k, v))
    assert torch.equal(plain, inside)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(plain.sum(), (q, k, v)), grads, strict=True))


def test_activation_checkpointing_gives_the_same_gradients(generator):
    q, k, v = qkv(generator=generator, q_len=33, dim=8, requires_grad=True)
    table = torch.randn(4, 9, requires_grad=True)

    def layer(q, k, v):
        return attend(q, k, v, score_mod=relative_bias(table), mask_mod=causal())

    grads = [
        torch.autograd.grad(out.square().sum(), (q, k, v, table))
        for out in (layer(q, k, v), checkpoint(layer, q, k, v, use_reentrant=False))
    ]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_torch_func_grad_gives_the_same_gradients(generator):
    q, k, v = qkv(generator=generator, q_len=9, dim=4)
    slopes = torch.rand(4, generator=generator)

    def loss(q, slopes):
        return attend(q, k, v, score_mod=alibi(slopes), mask_mod=causal()).square().sum()

    functional = torch.func.grad(loss, (0, 1))(q, slopes)
    inputs = [x.clone().requires_grad_() for x in (q, slopes)]
    for a, b in zip(functional, torch.autograd.grad(loss(*inputs), inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_ids_written_in_place_between_calls_are_seen(generator, small_tiles):
    ids = torch.zeros(24, dtype=torch.int64)
    q, k, v = qkv(generator=generator, q_len=24, dim=8)
    attention = ca.Attention(mask_mod=document(ids), backend="streaming")
    attention(q, k, v)
    ids[9:] = 1
    ids[17:] = 0  # document 0 in two parts
    expected = ca.attention(q, k, v, mask_mod=document(ids.clone()), backend="reference")
    torch.testing.assert_close(attention(q, k, v), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["streaming", "reference"])
def test_a_mask_of_a_flag_alone_hides_all_or_nothing(backend):
    x = torch.tensor(0.3)
    q, k, v = (torch.randn(1, 2, 9, 4) for _ in range(3))
    for mask, seen in ((lambda *_: torch.isnan(x), False), (lambda *_: torch.reciprocal(x) > 5, False),
                       (lambda *_: torch.reciprocal(x) > 2, True)):  # fmt: skip
        out, lse = ca.attention(q, k, v, mask_mod=mask, backend=backend, return_lse=True)
        assert bool(out.any()) is seen and bool(lse.isfinite().all()) is seen
        assert bool(ca.mask(mask).tiles(9, 9, tile=(16, 16)).any()) or not seen
