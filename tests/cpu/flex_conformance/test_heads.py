"""Shared heads, keys of one batch for all, head dimensions of every size."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.flex_conformance.catalogue import BASIC, by_head, causal, identity, slopes, squared
from tests.cpu.flex_conformance.truth import Mod, Mods, check, draw


@pytest.mark.parametrize("mask", [None, causal], ids=["none", "causal"])
@pytest.mark.parametrize("heads", [(4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("batches", [(3, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("score", BASIC)
def test_shared_heads_and_batches(
    score: Mod, batches: tuple[int, int], heads: tuple[int, int], mask: Mod | None, generator: torch.Generator
) -> None:
    q, k, v = draw(generator, batches[0], heads[0], 20, dim=8, kv_heads=heads[1], kv_batch=batches[1])
    check(Mods.of(score, mask), q, k, v, generator)


@pytest.mark.parametrize("mask", [causal, by_head])
@pytest.mark.parametrize("score", BASIC)
def test_four_heads_share_one_of_other_length(score: Mod, mask: Mod, generator: torch.Generator) -> None:
    check(Mods.of(score, mask), *draw(generator, 1, 8, 12, 40, kv_heads=2), generator)


@pytest.mark.parametrize(
    "dims", [(1, 1), (8, 8), (17, 17), (24, 40), (32, 16), (94, 94), (121, 7), (576, 512)], ids=str
)
@pytest.mark.parametrize("score", [identity, slopes, squared])
def test_head_dimensions(score: Mod, dims: tuple[int, int], generator: torch.Generator) -> None:
    q, k, v = draw(generator, 1, 2, 24, dim=dims[0], v_dim=dims[1])
    check(Mods.of(score, causal), q, k, v, generator)
