"""The tolerance rule lets right results pass and finds wrong ones, however small the mistake."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import types

import pytest
import torch

import composattn as ca
from composattn import backends
from composattn.backends import reference, tiles
from composattn.mods import alibi, causal, padding, relative_bias, softcap
from composattn.testing import (
    Case,
    Space,
    assert_attention_close,
    check,
    make_case,
    make_varlen_case,
    poisoned,
    random_case,
    run,
)
from tests.support import qkv

streaming = functools.partial(ca.attention, backend="streaming")


def a_case(generator, dtype=torch.float32, **shape):
    shape = {"heads": 4, "kv_heads": 2, "q_len": 23, "kv_len": 31, "dim": 16, **shape}
    q, k, v = qkv(generator=generator, dtype=dtype, **shape)
    table = torch.randn(4, 17, generator=generator).requires_grad_()
    dout = torch.randn(*q.shape[:-1], v.shape[-1], generator=generator).to(dtype)
    dlse = torch.randn(q.shape[:-1], generator=generator)
    return Case(q, k, v, relative_bias(table) >> softcap(5.0), causal("bottom_right"), None, dout, dlse)


DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)


@DTYPES
def test_plain_pytorch_passes(dtype, generator):
    case = a_case(generator, dtype)

    def plain(q, k, v, *, score_mod, mask_mod, scale, return_lse):
        program = case.program
        return reference.attention(
            q, k, v, score=program.score, mask=program.mask, scale=q.shape[-1] ** -0.5, precision=dtype
        )

    check(plain, case)


def changed(**change):
    """The streaming backend with its arguments changed."""

    def attend(q, k, v, **arguments):
        for name, new in change.items():
            arguments[name] = new(arguments[name])
        return streaming(q, k, v, **arguments)

    return attend


def rounded_inside(q, k, v, **arguments):
    """Attention whose scores were rounded to bf16."""
    return streaming(q, k.bfloat16().to(k.dtype), v, **arguments)


def without_lse_gradient(q, k, v, **arguments):
    out, lse = streaming(q, k, v, **arguments)
    return out, lse.detach() + 0.0 * out.sum(-1)


def one_output_not_written(q, k, v, **arguments):
    out, lse = streaming(q, k, v, **arguments)
    hole = torch.empty_like(out)
    hole[:, :, 1:] = out[:, :, 1:]
    return hole, lse


MISTAKES = {
    "a scale that is off by a thousandth": changed(scale=lambda _: 1.001 * 16**-0.5),
    "a mask that is off by one": changed(mask_mod=lambda mask: lambda b, h, q, kv: mask(b, h, q, kv) | (kv == q + 9)),
    "a mask that hides one pair too many": changed(mask_mod=lambda m: m & (lambda b, h, q, kv: (q != 20) | (kv != 20))),
    "a score mod that is left out": changed(score_mod=lambda _: None),
    "a cap that is off by a thousandth": changed(score_mod=lambda s: s >> (lambda s, b, h, q, kv: s * 1.001)),
    "the wrong head": changed(mask_mod=lambda mask: lambda b, h, q, kv: mask(b, h, q, kv) & ((h != 3) | (kv != 0))),
    "a gradient through LSE that is forgotten": without_lse_gradient,
    "an output that is not written": one_output_not_written,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_finds(mistake, generator):
    case = a_case(generator)
    check(streaming, case)
    with pytest.raises(AssertionError, match=r"is off|NaN"):
        check(MISTAKES[mistake], case)


def merged_by_one_less_the_other_weight(one, other):
    """A merge that takes a part's weight as 1 less the other's: right near 1, with no digits of its own near 0."""
    (out, top, total), (other_out, other_top, other_total) = one, other
    lse, other_lse = top + total.log(), other_top + other_total.log()
    whole = torch.logaddexp(lse, other_lse)
    share = torch.sigmoid((other_lse - lse).masked_fill(whole == -torch.inf, 0.0)).flatten(2, 3)
    highest = torch.maximum(top, other_top)
    return out.lerp_(other_out, share), highest, (whole - highest).exp().masked_fill(whole == -torch.inf, 0.0)


@pytest.fixture
def merges_badly(monkeypatch):
    """Tiles of 4 keys; what it gives plants such a merge."""
    monkeypatch.setitem(tiles.TILE_SIZES, "cpu", tiles.TileSizes(4, 4, 1 << 19))
    return lambda: monkeypatch.setattr(backends.streaming, "_merged", merged_by_one_less_the_other_weight)


@pytest.mark.parametrize("light", ["beside a sink", "in the first tile"])
def test_it_finds_a_weight_that_is_one_less_the_other(light, merges_badly, generator):
    case = a_case(generator).without_gradients()
    if light == "beside a sink":
        case = dataclasses.replace(case, sinks=torch.full((4,), 18.0))
    else:
        case.v[:, :, :4] *= 1e5
        case = dataclasses.replace(case, score_mod=lambda s, b, h, q, kv: torch.where(kv < 4, s - 14, s))
    check(streaming, case)
    merges_badly()
    with pytest.raises(AssertionError, match="out is off"):
        check(streaming, case)


@pytest.mark.parametrize("light", ["of \\+", "keys lower by"])
def test_random_cases_find_it_too(light, merges_badly):
    space = Space(dtypes=(torch.float32,), shortest=13, gradients=False)
    cases = (case for case in (random_case(seed, space) for seed in range(300)) if re.search(light, case.name))
    some = list(itertools.islice(cases, 5))
    merges_badly()
    found = 0
    for case in some:
        try:
            check(streaming, case)
        except AssertionError as error:
            found += "out is off" in str(error)
    assert found


@DTYPES
def test_it_finds_one_element_that_is_off(dtype, generator):
    case = a_case(generator, dtype)
    results = run(streaming, case)
    assert_attention_close(results, case)
    assert list(results) == ["out", "lse", "dq", "dk", "dv", "d captured 0"]
    for key, right in results.items():
        value = right.clone()
        value.view(-1)[value.abs().argmax()] *= 1.05 if dtype.itemsize == 2 else 1.001
        with pytest.raises(AssertionError, match=f"{key} is off"):
            assert_attention_close({**results, key: value}, case)


def test_a_lower_precision_than_the_inputs_is_found(generator):
    check(rounded_inside, a_case(generator, torch.bfloat16))
    with pytest.raises(AssertionError, match="is off"):
        check(rounded_inside, a_case(generator, torch.float32))


def test_rows_that_see_nothing_must_be_exact(generator):
    case = a_case(generator)
    hidden = Case(case.q, case.k, case.v, None, padding(torch.tensor([0, 5])), None, case.dout, case.dlse)
    check(streaming, hidden)
    results = run(streaming, hidden)
    for key, tiny in (("out", 1e-30), ("dq", 1e-30)):
        off = results[key].clone()
        off[0, 0, 0, 0] = tiny
        with pytest.raises(AssertionError, match=f"{key} is not 0 in rows that see nothing"):
            assert_attention_close({**results, key: off}, hidden)
    low = results["lse"].clone()
    low[0, 0, 0] = -1e30
    with pytest.raises(AssertionError, match="lse is -inf in"):
        assert_attention_close({**results, "lse": low}, hidden)


def test_one_key_has_no_error_of_its_own_and_still_passes(generator):
    """With no gradient of lse those of q, k and slopes are 0; what a kernel leaves is how it sums."""
    slopes = torch.rand(4, generator=generator).requires_grad_()
    case = a_case(generator, torch.bfloat16, kv_len=1)
    case = Case(case.q, case.k, case.v, alibi(slopes), None, None, case.dout)
    check(streaming, case)
    results = run(streaming, case)
    assert results["dk"].abs().max() < 1e-4
    with pytest.raises(AssertionError, match="dk is off"):
        assert_attention_close({**results, "dk": results["dk"] + 1.0}, case)


def test_in_fp64_a_derivative_near_0_may_have_the_rounding_of_what_cancels_in_it(generator):
    """2 (σ + s σ') - 1 is about s, and of a small s little is left of its 16 digits."""
    gate = ca.score(lambda score, b, h, q, kv: score * torch.sigmoid(score))
    for _ in range(20):
        case = a_case(generator, torch.float64, heads=2, kv_heads=2, q_len=1, kv_len=1, dim=1)
        case = dataclasses.replace(case, q=case.q * 1e-3, score_mod=gate + gate, mask_mod=None)
        check(streaming, case)
        results = run(streaming, case)
        for key in ("dq", "dk"):
            off = {**results, key: results[key] * (1 + 1e-8)}
            with pytest.raises(AssertionError, match=f"{key} is off"):
                assert_attention_close(off, case)


def test_a_result_that_is_not_one_is_refused(generator):
    case = a_case(generator)
    with pytest.raises(KeyError, match="dw"):
        assert_attention_close({"dw": case.q}, case)
    with pytest.raises(AssertionError, match="shape"):
        assert_attention_close({"out": case.q[0]}, case)


def test_the_message_names_the_case_and_every_error(generator):
    case = a_case(generator)
    with pytest.raises(AssertionError) as error:
        check(MISTAKES["a scale that is off by a thousandth"], case)
    text = str(error.value)
    assert "B2 H4/2 S23x31 D16 float32" in text
    assert all(f"  {key} " in text for key in ("out", "lse", "dq", "dk", "dv", "d captured 0"))


def test_new_memory_is_poisoned_inside_only():
    some = torch.ones(3)
    with poisoned():
        learned = torch.empty(3, dtype=torch.bfloat16, requires_grad=True)
        like = torch.empty_like(some), torch.empty_strided((2, 3), (1, 2)), some.new_empty(4)
        for made in (torch.empty(7), learned, *like, some.new_empty_strided((2,), (1,))):
            assert made.isnan().all()
        assert torch.empty(2, dtype=torch.int32).tolist() == [2**31 - 1] * 2
        assert torch.empty(2, dtype=torch.bool).all()
        assert torch.ones(1) == 1
    assert isinstance(torch.empty, types.BuiltinFunctionType) and "new_empty" not in vars(torch.Tensor)


@pytest.mark.parametrize("deterministic", [False, True])
def test_poisoned_memory_leaves_torchs_settings(deterministic, generator):
    """In deterministic mode other kernels run: fixed orders of sums, where the user asked for none."""
    seen = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            seen.append((torch.are_deterministic_algorithms_enabled(), torch.empty(2).isnan().all().item()))
            return g

    def attention(q, k, v, **options):
        return ca.attention(Asks.apply(q), k, v, **options)

    torch.use_deterministic_algorithms(deterministic)
    try:
        check(attention, a_case(generator))
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [(deterministic, True)]


@pytest.mark.parametrize("make", [make_case, functools.partial(make_varlen_case, q_lens=[5])], ids=["dense", "varlen"])
def test_a_case_of_heads_that_cannot_share_is_refused(make):
    with pytest.raises(ca.errors.GroupMismatch, match="4 query heads can't share 3"):
        make(0, heads=4, kv_heads=3)


def test_the_gradient_of_a_sink_may_have_the_rounding_of_the_output_under_dropout_too():
    """rowsum(dO·O) is of P before dropout, and so what the sink gets of its rounding."""
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        q, k, v, dout = (torch.randn(1, 1, n, 64, generator=generator).bfloat16() for n in (1, 40, 40, 1))
        sinks = torch.zeros(1, requires_grad=True)
        case = Case(q, k, v, dout=dout, sinks=sinks, dropout=(0.5, seed))
        exact = run(functools.partial(ca.attention, backend="reference"), dataclasses.replace(
            case, q=q.double(), k=k.double(), v=v.double(), dout=dout.double()))  # fmt: skip
        rows = (dout.double() * exact["out"].bfloat16().double()).sum((0, 2, 3))
        found = -(torch.exp(-exact["lse"]).sum((0, 2)) * rows)
        assert_attention_close({"d captured 0": found.float()}, case)
