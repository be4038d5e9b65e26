"""torch's own `PagedAttention`: masks and score mods that it translates to the pages of a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import create_block_mask

import composattn as ca
from tests.cpu.flex_conformance.catalogue import BASIC, causal, everything, window
from tests.cpu.flex_conformance.truth import Mod, attention, draw

PAGE = 16
Cache = tuple[PagedAttention, torch.Tensor, torch.Tensor]


def cached(k: torch.Tensor, v: torch.Tensor, more: int = 0) -> Cache:
    """Keys and values in pages that the sequences took in turns, so that none has neighbouring ones.

    more: sequences that the cache takes, and this call has not.
    """
    batch, heads, length, _ = k.shape
    pages = batch * (length // PAGE) + 3
    paged = PagedAttention(pages, PAGE, batch + more, device="cpu")
    for filled in range(PAGE, length + 1, PAGE):
        for b in range(batch):
            paged.reserve(torch.tensor(b), torch.tensor(filled))
    caches = [torch.zeros(1, heads, pages * PAGE, t.shape[-1], dtype=t.dtype) for t in (k, v)]
    paged.assign(torch.arange(batch), torch.arange(length).expand(batch, -1), k, v, *caches)
    return paged, caches[0], caches[1]


@pytest.mark.parametrize("mask", [everything, causal, window])
@pytest.mark.parametrize("score", BASIC)
def test_a_translated_call_gives_what_the_plain_one_means(score: Mod, mask: Mod, generator: torch.Generator) -> None:
    q, k, v = draw(generator, 3, 4, 32, 48, kv_heads=2)
    paged, *caches = cached(k, v)
    made = create_block_mask(mask, 3, 1, 32, 48, "cpu", (32, PAGE))
    found: Any = ca.flex_attention(
        q, *caches, paged.get_score_mod(score), paged.convert_logical_block_mask(made), enable_gqa=True, return_lse=True
    )
    wanted = attention(*(t.double() for t in (q, k, v)), score, mask)[:2]
    for mine, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_cache_of_more_sequences_than_a_call_has(compiled: bool, generator: torch.Generator) -> None:
    """Their tables have a row for each that the cache takes, and the call has the first of them."""
    q, k, v = draw(generator, 2, 2, 32, 48)
    paged, *caches = cached(k, v, more=3)
    made = create_block_mask(causal, 2, 1, 32, 48, "cpu", (32, PAGE))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return ca.flex_attention(q, k, v, paged.get_score_mod(doubled), paged.convert_logical_block_mask(made))

    found = (torch.compile(call, backend="eager", fullgraph=True) if compiled else call)(q, *caches)
    wanted = attention(*(t.double() for t in (q, k, v)), doubled, causal)[0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def doubled(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s * 2 + b


def test_a_step_of_generation(generator: torch.Generator) -> None:
    """One query of each sequence, whose keys end at different places of their last page."""
    q, k, v = draw(generator, 3, 4, 1, 48, kv_heads=2)
    ends = torch.tensor([48, 5, 17])
    paged, *caches = cached(k, v)
    made = create_block_mask(everything, 3, 1, 1, 48, "cpu", PAGE)
    found = ca.flex_attention(q, *caches, None, paged.convert_logical_block_mask(made, kv_len=ends), enable_gqa=True)
    wanted, *_ = attention(*(t.double() for t in (q, k, v)), None, lambda b, h, i, j: j < ends[b])
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_calls_over_two_caches_may_follow_each_other(generator: torch.Generator) -> None:
    q, *tensors = (torch.randn(2, 2, 32, 16, generator=generator) for _ in range(5))
    out, exact = q, q.double()
    for k, v in (tensors[:2], tensors[2:]):
        paged, *caches = cached(k, v)
        made = create_block_mask(causal, 2, 1, 32, 32, "cpu", PAGE)
        out = ca.flex_attention(out, *caches, None, paged.convert_logical_block_mask(made))
        exact = attention(exact, k.double(), v.double(), None, causal)[0]
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("score", BASIC)
def test_sequences_at_different_positions(score: Mod, generator: torch.Generator) -> None:
    """Four requests, filled to different lengths, their pages taken as they grew; each has one new query."""
    lengths = torch.tensor([5, 48, 23, 34])
    q = torch.randn(4, 2, 1, 16, generator=generator)
    paged, caches = PagedAttention(16, PAGE, 4, device="cpu"), [torch.zeros(1, 2, 16 * PAGE, 16) for _ in range(2)]
    for share in (1, 2, 3):
        for b, length in enumerate(lengths.tolist()):
            paged.reserve(torch.tensor(b), torch.tensor(-(-length * share // 3)))
    filled = []
    for b, length in enumerate(lengths.tolist()):
        k, v = torch.randn(2, 1, 2, length, 16, generator=generator)
        paged.assign(torch.tensor([b]), torch.arange(length)[None], k, v, *caches)
        filled.append((k, v))
    made = paged.convert_logical_block_mask(create_block_mask(everything, 4, 1, 1, 48, "cpu", PAGE), kv_len=lengths)
    found = ca.flex_attention(q, *caches, paged.get_score_mod(score), made)
    for b, (k, v) in enumerate(filled):
        one = q[b : b + 1].double(), k.double(), v.double()
        wanted, *_ = attention(*one, score, None)
        torch.testing.assert_close(found[b : b + 1].double(), wanted, rtol=1e-4, atol=1e-4)
