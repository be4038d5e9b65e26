"""Sinks: a logit per query head beside those of the keys, with no value, on the PyTorch backends."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import composattn as ca
from composattn import errors
from composattn.dispatch import plan_cache
from composattn.integrations.flash_attn import flash_attn_func
from composattn.mods import causal
from composattn.testing import Case, check, make_case, make_paged_case, make_varlen_case, random_case
from tests.support import qkv

BACKENDS = ["reference", "streaming"]


def seen(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q != 5)


def by_definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> Any:
    """(out, lse): softmax with a column more, which is then left out."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    rows, columns = (torch.arange(n) for n in scores.shape[2:])
    scores = scores.masked_fill(~seen(0, 0, rows[:, None], columns), -torch.inf)
    scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v, scores.logsumexp(-1)


def inputs(generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Any:
    q = torch.randn(2, 4, 70, 16, generator=generator, dtype=dtype).requires_grad_()
    k, v = (torch.randn(2, 2, 70, n, generator=generator, dtype=dtype).requires_grad_() for n in (16, 8))
    return q, k, v, (2 * torch.randn(4, generator=generator, dtype=dtype)).requires_grad_()


WAYS: dict[str, Any] = {
    "attention": lambda *x, **options: ca.attention(*x[:3], sinks=x[3], **options),
    "an Attention": lambda *x, return_lse, **options: ca.Attention(sinks=x[3], **options)(
        *x[:3], return_lse=return_lse
    ),
    "compiled": torch.compile(
        lambda *x, **options: ca.attention(*x[:3], sinks=x[3], **options), fullgraph=True, backend="aot_eager"
    ),
}


@pytest.mark.parametrize("way, backend", [("attention", "reference"), *((way, "streaming") for way in WAYS)])
def test_they_are_a_column_without_a_value(way: str, backend: str, generator: torch.Generator) -> None:
    x = inputs(generator)
    found = WAYS[way](*x, mask_mod=seen, return_lse=True, backend=backend)
    wanted = by_definition(*x)
    torch.testing.assert_close(found, wanted)
    loss = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in wanted]
    gradients = [torch.autograd.grad(y, x, loss) for y in (found, wanted)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_that_sees_no_key_gives_0_and_the_sink(backend: str, generator: torch.Generator) -> None:
    q, k, v, sinks = inputs(generator)
    out, lse = ca.attention(q, k, v, mask_mod=seen, sinks=sinks, backend=backend, return_lse=True)
    assert not bool(out[:, :, 5].any())
    assert torch.equal(lse[:, :, 5], sinks.expand(2, 4))
    nothing = k[:, :, :0], v[:, :, :0]
    out, lse = ca.attention(q, *nothing, sinks=sinks, backend=backend, return_lse=True)
    assert not bool(out.any()) and torch.equal(lse, sinks[:, None].expand(2, 4, 70))


@pytest.mark.parametrize("backend", BACKENDS)
def test_minus_infinity_is_no_sink(backend: str, generator: torch.Generator) -> None:
    q, k, v, sinks = inputs(generator, torch.float32)
    options: Any = {"mask_mod": seen, "backend": backend, "return_lse": True}
    found = ca.attention(q, k, v, sinks=torch.full_like(sinks, -torch.inf), **options)
    torch.testing.assert_close(found, ca.attention(q, k, v, **options))


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_and_paged_calls_have_them(backend: str) -> None:
    def attend(*tensors: Any, **options: Any) -> Any:
        return ca.attention(*tensors, backend=backend, **options)

    sinks = torch.randn(4).requires_grad_()
    packed = make_varlen_case(1, (9, 0, 33), (12, 3, 20), used_q=(7, 0, 33), heads=4, kv_heads=2, mask_mod=causal())
    for case in (packed, make_paged_case(2, [50, 17, 0], heads=4, kv_heads=2, q_len=3)):
        check(attend, with_sinks(case, sinks))


def with_sinks(case: Case, sinks: torch.Tensor) -> Case:
    return dataclasses.replace(case, sinks=sinks)


def test_one_tensor_may_be_sink_and_bias(generator: torch.Generator) -> None:
    q, k, v, both = inputs(generator)

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + both[h] * kv_idx / 70

    results = [ca.attention(q, k, v, score_mod=biased, sinks=both, backend=name) for name in BACKENDS]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), both) for out in results))


def test_their_derivatives_have_derivatives(generator: torch.Generator) -> None:
    q, k, v, sinks = (x.detach() for x in inputs(generator))
    q, k, v = (x[:1, :, :5, :4] for x in (q, k, v))

    def attend(sinks: torch.Tensor, k: torch.Tensor) -> Any:
        return ca.attention(q, k, v, sinks=sinks, mask_mod=causal(), return_lse=True)

    leaves = (sinks.requires_grad_(), k.requires_grad_())
    assert torch.autograd.gradcheck(attend, leaves)
    assert torch.autograd.gradgradcheck(attend, leaves)


def test_each_call_of_a_vmap_has_its_own(generator: torch.Generator) -> None:
    q, k, v, _ = (x.detach() for x in inputs(generator))
    sinks = torch.randn(3, 4, generator=generator, dtype=q.dtype)

    def loss(sinks: torch.Tensor) -> torch.Tensor:
        return ca.attention(q, k, v, sinks=sinks, mask_mod=seen).square().sum()

    def wanted(sinks: torch.Tensor) -> torch.Tensor:
        return by_definition(q, k, v, sinks)[0].square().sum()

    found = torch.func.vmap(torch.func.grad(loss))(sinks)
    torch.testing.assert_close(found, torch.stack([torch.func.grad(wanted)(x) for x in sinks]))
    torch.testing.assert_close(
        torch.func.jvp(loss, (sinks[0],), (sinks[1],)), torch.func.jvp(wanted, (sinks[0],), (sinks[1],))
    )


def test_a_module_owns_them(generator: torch.Generator) -> None:
    q, k, v, sinks = (x.detach().float() for x in inputs(generator))
    layer = ca.nn.Attention(mask_mod=causal(), sinks=torch.nn.Parameter(sinks))
    assert [name for name, _ in layer.named_parameters()] == ["sinks"]
    assert "sinks=(4,)" in repr(layer)
    layer.load_state_dict({"sinks": sinks + 1}, assign=True)
    assert torch.equal(layer(q, k, v), ca.attention(q, k, v, mask_mod=causal(), sinks=sinks + 1))

    class Own(ca.nn.Attention):
        def __init__(self) -> None:
            super().__init__(mask_mod=causal())
            self.sinks = torch.nn.Parameter(sinks)

    own = Own()
    own(q, k, v).sum().backward()
    assert own.sinks.grad is not None and bool(own.sinks.grad.any())


def test_other_sinks_plan_nothing_again(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, sinks = inputs(generator)
    made, plans = plan_cache.made_plan, []
    monkeypatch.setattr(plan_cache, "made_plan", lambda *a: (plans.append(a[0]), made(*a))[1])
    plan_cache._plans.clear()
    for _ in range(3):
        ca.attention(q, k, v, sinks=torch.nn.Parameter(sinks.detach().clone()))
    assert len(plans) == 1


def test_flash_attns_argument(generator: torch.Generator) -> None:
    q, k, v = qkv(generator=generator, heads=2, q_len=20)
    sinks = torch.tensor([0.5, -1.0])
    found = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, learnable_sink=sinks)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found.transpose(1, 2), ca.attention(q, k, v, mask_mod=causal(), sinks=sinks))


def test_explain_names_them(generator: torch.Generator) -> None:
    q, k, v, sinks = inputs(generator)
    assert "sinks" in str(ca.Attention(sinks=sinks).explain(q, k, v))


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "a number": (0.5, errors.NotATensor, r"\(Hq,\)"),
    "rank 2": (torch.zeros(1, 4), errors.WrongRank, r"\(Hq,\)"),
    "integers": (torch.zeros(4, dtype=torch.int32), errors.UnsupportedDType, "floats"),
    "of key heads": (torch.zeros(2), errors.ShapeMismatch, "4 query heads"),
    "on meta": (torch.zeros(4, device="meta"), errors.DeviceMismatch, "meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sink_is_refused_by_name(name: str, generator: torch.Generator) -> None:
    given, error, words = REFUSED[name]
    q, k, v, _ = inputs(generator)
    with pytest.raises(error, match=words):
        ca.attention(q, k, v, sinks=given)


def test_random_calls_draw_them() -> None:
    assert sum(random_case(seed).sinks is not None for seed in range(100)) in range(10, 35)


def test_a_gradient_through_the_sum_alone(generator: torch.Generator) -> None:
    case = make_case(3, heads=2, q_len=40)
    check(ca.attention, with_sinks(case, torch.zeros(2).requires_grad_()))
