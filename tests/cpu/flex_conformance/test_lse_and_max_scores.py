"""What a call returns beside its output: lse, the largest scores, their types and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

import composattn as ca
from tests.cpu.flex_conformance.catalogue import causal, first_rows, identity, only_past, squared
from tests.cpu.flex_conformance.truth import Mod, attention, blocks_of, draw

BACKENDS = ["streaming", "reference"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", [None, causal, first_rows], ids=["none", "causal", "first rows"])
@pytest.mark.parametrize("score", [identity, only_past, squared])
def test_statistics_are_natural_and_at_least_fp32(
    score: Mod, mask: Mod | None, dtype: torch.dtype, backend: str, generator: torch.Generator
) -> None:
    q, k, v = draw(generator, dtype=dtype)
    request = AuxRequest(lse=True, max_scores=True)
    blocks = mask and blocks_of(mask, q, k)
    _, aux = ca.flex_attention(q, k, v, score, blocks, return_aux=request, backend=backend)
    _, lse, top = attention(*(t.double() for t in (q, k, v)), score, mask)
    for found, wanted in ((aux.lse, lse), (aux.max_scores, top)):
        assert found.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("top", [False, True])
def test_only_what_was_asked_for_is_there(lse: bool, top: bool, generator: torch.Generator) -> None:
    q, k, v = draw(generator)
    out, aux = ca.flex_attention(q, k, v, return_aux=AuxRequest(lse=lse, max_scores=top))
    assert isinstance(aux, AuxOutput)
    assert [aux.lse is not None, aux.max_scores is not None] == [lse, top]
    assert torch.equal(out, ca.flex_attention(q, k, v))


def test_the_largest_score_takes_no_gradient(generator: torch.Generator) -> None:
    q, k, v = (t.requires_grad_() for t in draw(generator))
    out, aux = ca.flex_attention(q, k, v, return_aux=AuxRequest(lse=True, max_scores=True))
    assert out.requires_grad
    assert aux.lse.requires_grad
    assert not aux.max_scores.requires_grad


def test_the_older_word_for_it(generator: torch.Generator) -> None:
    q, k, v = draw(generator)
    out, lse = ca.flex_attention(q, k, v, return_lse=True)
    again, aux = ca.flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
    assert torch.equal(lse, aux.lse)
    assert torch.equal(out, again)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_query_and_one_key(backend: str) -> None:
    q, k, v = (torch.ones(1, 1, 1, 16, requires_grad=True) for _ in range(3))
    request: Any = AuxRequest(lse=True, max_scores=True)
    out, aux = ca.flex_attention(q, k, v, return_aux=request, backend=backend)
    assert torch.equal(out, v)
    assert math.isclose(aux.lse.item(), 4.0, rel_tol=1e-6)
    assert math.isclose(aux.max_scores.item(), 4.0, rel_tol=1e-6)
    assert [float(g.sum()) for g in torch.autograd.grad(out.sum(), (q, k, v))] == [0.0, 0.0, 16.0]


def test_an_output_that_nobody_uses_costs_lse_no_gradient(generator: torch.Generator) -> None:
    q, k, v = (t.requires_grad_() for t in draw(generator, dtype=torch.float64))
    weight = torch.randn(q.shape[:3], generator=generator, dtype=torch.float64)
    _, lse = ca.flex_attention(q, k, v, only_past, return_lse=True)
    found = torch.autograd.grad((lse * weight).sum(), (q, k))
    wanted = torch.autograd.grad((attention(q, k, v, only_past, None)[1] * weight).sum(), (q, k))
    torch.testing.assert_close(found, wanted)
