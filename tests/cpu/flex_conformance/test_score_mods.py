"""Score mods of torch's own suite, in every dtype, length and block size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cpu.flex_conformance.catalogue import BASIC, MORE, causal, everything
from tests.cpu.flex_conformance.truth import Mod, Mods, blocks_of, check, draw

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("score", [*BASIC, *MORE])
def test_of_every_dtype(score: Mod, dtype: torch.dtype, generator: torch.Generator) -> None:
    check(Mods.of(score), *draw(generator, dtype=dtype), generator)


@pytest.mark.parametrize("lengths", [(24, 48), (48, 24), (1, 40), (40, 1), (67, 71)], ids=str)
@pytest.mark.parametrize("score", BASIC)
def test_of_queries_and_keys_of_other_lengths(score: Mod, lengths: tuple[int, int], generator: torch.Generator) -> None:
    check(Mods.of(score), *draw(generator, q_len=lengths[0], kv_len=lengths[1]), generator)


@pytest.mark.parametrize("mask", [causal, everything])
@pytest.mark.parametrize("score", BASIC)
def test_beside_a_mask(score: Mod, mask: Mod, generator: torch.Generator) -> None:
    check(Mods.of(score, mask), *draw(generator), generator)


@pytest.mark.parametrize("size", [32, 64, 128, (32, 64), (128, 32)], ids=str)
@pytest.mark.parametrize("score", BASIC)
def test_beside_blocks_of_any_size(score: Mod, size: Any, generator: torch.Generator) -> None:
    """Blocks larger than the tensors too."""
    q, k, v = draw(generator, q_len=70)
    check(Mods.of(score, everything), q, k, v, generator, block_mask=blocks_of(everything, q, k, size))


def test_calls_may_follow_each_other(generator: torch.Generator) -> None:
    import composattn as ca
    from tests.cpu.flex_conformance.catalogue import distance, only_past
    from tests.cpu.flex_conformance.truth import attention

    q, *keys = (torch.randn(1, 2, 40, 16, generator=generator) for _ in range(4))
    found = ca.flex_attention(ca.flex_attention(q, *keys[:2], distance), keys[2], keys[0], only_past)
    q, *wide = (t.double() for t in (q, *keys))
    exact = attention(attention(q, *wide[:2], distance, None)[0], wide[2], wide[0], only_past, None)[0]
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.4, 3.0])
def test_of_any_scale(scale: float, generator: torch.Generator) -> None:
    check(Mods.of(BASIC[3], causal), *draw(generator), generator, scale=scale)


def test_what_a_closure_holds_now_is_what_counts(generator: torch.Generator) -> None:
    """A condition and a number of Python, changed between calls of the same function."""
    adding, amount = True, 2.0

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + amount * kv if adding else s * amount

    q, k, v = draw(generator)
    check(Mods.of(score), q, k, v, generator)
    amount = 0.5
    check(Mods.of(score), q, k, v, generator)
    adding = False
    check(Mods.of(score), q, k, v, generator)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [(256, 256), (130, 257)], ids=str)
@pytest.mark.parametrize("score", [*BASIC, *MORE])
def test_of_longer_sequences(
    score: Mod, lengths: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> None:
    q, k, v = draw(generator, q_len=lengths[0], kv_len=lengths[1], dim=64, dtype=dtype)
    check(Mods.of(score, causal), q, k, v, generator)
