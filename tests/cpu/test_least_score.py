"""Large negative scores, with which many write "hidden": beside others they weigh nothing, alone they are no row.

A row whose highest score is below `LEAST_SCORE` sees nothing, as one of -inf does, on every backend, and no NaN of it
reaches a gradient.
"""

from __future__ import annotations

import math

import pytest
import torch

import composattn as ca
from composattn.backends import tiles
from composattn.graph.least_score import LEAST_SCORE
from tests.least_score import BLIND, HIDING, LENGTH, hidden_by, hold


@pytest.mark.parametrize("as_bias", [False, True], ids=["chosen", "added"])
@pytest.mark.parametrize("number", HIDING)
@pytest.mark.parametrize("backend", ["streaming", "reference"])
def test_large_negative_scores_hide(backend: str, number: float, as_bias: bool, generator: torch.Generator) -> None:
    hold(backend, number, as_bias, generator)


@pytest.mark.parametrize("backend", ["streaming", "reference"])
def test_beside_a_sink_as_well(backend: str, generator: torch.Generator) -> None:
    for sink in (0.5, -math.inf):
        hold(backend, -1e9, True, generator, sinks=torch.full((2,), sink))


def test_under_a_transform_too(generator: torch.Generator) -> None:
    x = [torch.randn(2, 1, 2, LENGTH, 16, generator=generator) for _ in range(3)]
    mod = hidden_by(-1e9, True)
    out = torch.vmap(lambda q, k, v: ca.attention(q, k, v, score_mod=mod))(*x)
    each = torch.stack([ca.attention(*one, score_mod=mod) for one in zip(*x, strict=True)])
    torch.testing.assert_close(out, each)
    assert not out[:, :, :, :BLIND].any() and out[:, :, :, BLIND:].any()


def test_smaller_ones_are_scores(generator: torch.Generator) -> None:
    q, k, v = (torch.randn(1, 1, 20, 16, generator=generator) for _ in range(3))
    out = ca.attention(q, k, v, score_mod=lambda s, b, h, q, kv: s * 0 + LEAST_SCORE)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))


def at_the_least_score(backend: str, keys: int) -> None:
    """A row's largest score, behind its first keys, is the least one: of these keys none is lost."""
    table = torch.full((keys,), LEAST_SCORE - 4)
    table[keys * 5 // 8 :] = LEAST_SCORE
    q, k = torch.zeros(1, 1, 8, 64).half(), torch.zeros(1, 1, keys, 64).half()
    v = torch.randn(1, 1, keys, 64, generator=torch.Generator().manual_seed(0)).half()
    out = ca.attention(q, k, v, score_mod=lambda s, b, h, q, kv: s + table[kv], backend=backend)
    exact = (table.double().softmax(0) @ v[0, 0].double()).expand(8, 64)
    torch.testing.assert_close(out[0, 0].double(), exact, rtol=1e-3, atol=1e-3)


def test_a_row_at_the_least_score_is_whole_where_tiles_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (16, 64):
        monkeypatch.setitem(tiles.TILE_SIZES, "cpu", tiles.TileSizes(8, size, 8 * size))
        at_the_least_score("streaming", 64)


def test_weights_of_such_rows_are_none(generator: torch.Generator) -> None:
    q, k = (torch.randn(1, 2, LENGTH, 16, generator=generator) for _ in range(2))
    weights = ca.attention_weights(q, k, range(LENGTH), score_mod=hidden_by(-1e9, True)).sum(-1)
    torch.testing.assert_close(weights, (torch.arange(LENGTH) >= BLIND).float().expand_as(weights))


def test_weights_of_a_row_whose_largest_score_is_the_least_count_those_below_it(generator: torch.Generator) -> None:
    q, k = (torch.randn(1, 1, 2, 16, generator=generator) for _ in range(2))
    least = -(2.0**25)  # the next number below it is 4 less
    weights = ca.attention_weights(
        q, k, [0], score_mod=lambda s, b, h, q, kv: torch.where(kv == 0, least, least - 4) + 0 * s
    )
    torch.testing.assert_close(weights.flatten(), torch.tensor([0.0, -4.0]).softmax(0))
