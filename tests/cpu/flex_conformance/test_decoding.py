"""Few queries over many keys, as generation asks for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import composattn as ca
from tests.cpu.flex_conformance.catalogue import BASIC, MORE, by_head, by_score
from tests.cpu.flex_conformance.truth import Mod, Mods, attention, check, draw

HEADS = [(4, 4), (8, 2), (8, 1)]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("score", [*BASIC, *MORE])
def test_one_query(score: Mod, heads: tuple[int, int], generator: torch.Generator) -> None:
    check(Mods.of(score), *draw(generator, 2, heads[0], 1, 100, kv_heads=heads[1]), generator)


@pytest.mark.parametrize("q_len", [2, 5, 16])
@pytest.mark.parametrize("score", BASIC)
def test_few_queries(score: Mod, q_len: int, generator: torch.Generator) -> None:
    check(Mods.of(score), *draw(generator, 1, 8, q_len, 100, kv_heads=2), generator)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_position_in_the_cache(dtype: torch.dtype, heads: tuple[int, int], generator: torch.Generator) -> None:
    """Keys from the cache's end on are hidden by a number that the mask captures."""
    at = torch.tensor(61)
    mods = Mods.of(lambda s, b, h, q, kv: s + 0.1 * (kv - at), lambda b, h, q, kv: kv <= q + at)
    check(mods, *draw(generator, 2, heads[0], 1, 128, kv_heads=heads[1], dtype=dtype), generator)


def test_the_position_moves_and_nothing_else(generator: torch.Generator) -> None:
    q, k, v = draw(generator, 1, 4, 1, 64, kv_heads=2)
    at = torch.tensor(0)
    made = create_block_mask(lambda b, h, q, kv: kv <= q + 63, None, None, 1, 64, "cpu", 16)

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where(kv <= q + at, s, -torch.inf)

    for position in (0, 15, 16, 40, 63):
        at.fill_(position)
        found = ca.flex_attention(q, k, v, score, made, enable_gqa=True)
        exact = attention(q, k, v, None, lambda b, h, i, j, here=position: j <= i + here)[0]
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_masks_by_head(heads: tuple[int, int], generator: torch.Generator) -> None:
    check(Mods.of(None, by_head), *draw(generator, 2, heads[0], 3, 40, kv_heads=heads[1]), generator)


def test_a_query_that_sees_nothing(generator: torch.Generator) -> None:
    check(Mods.of(by_score, lambda b, h, q, kv: (kv < 30) & (b > 0)), *draw(generator, 2, 4, 1, 64), generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_learned_bias_of_a_batch(dtype: torch.dtype, generator: torch.Generator) -> None:
    bias = torch.randn(2, 100, generator=generator).to(dtype).requires_grad_()
    mods = Mods(lambda t: lambda s, b, h, q, kv: s + t[b, kv], tensors=(bias,))
    check(mods, *draw(generator, 2, 8, 2, 100, kv_heads=2, dtype=dtype), generator)


@pytest.mark.parametrize("size", [16, 128])
@pytest.mark.parametrize("lengths", [(1, 65), (2, 2), (8, 100)], ids=str)
def test_blocks_larger_than_the_queries(lengths: tuple[int, int], size: int, generator: torch.Generator) -> None:
    offset = torch.tensor(40)

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q + offset >= kv

    q, k, v = draw(generator, 2, 4, *lengths, kv_heads=2)
    made = create_block_mask(mask, 1, 1, *lengths, "cpu", size)
    check(Mods.of(None, mask), q, k, v, generator, block_mask=made)


def test_tables_of_the_length_of_each_side(generator: torch.Generator) -> None:
    """One query reads a table with one element."""
    of_query, of_key = torch.randn(1, generator=generator), torch.randn(100, generator=generator)
    check(Mods.of(lambda s, b, h, q, kv: s + of_query[q] + of_key[kv]), *draw(generator, 2, 4, 1, 100), generator)


def test_a_mask_that_torch_cut_to_shorter_lengths(generator: torch.Generator) -> None:
    whole = create_block_mask(lambda b, h, q, kv: kv <= q + 20, 1, 1, 64, 64, "cpu", 16)
    part = whole._adjust(3, 40)
    part.seq_lengths = (3, 40)
    mods = Mods.of(None, lambda b, h, q, kv: kv <= q + 20)
    check(mods, *draw(generator, 2, 4, 3, 40), generator, block_mask=part)
