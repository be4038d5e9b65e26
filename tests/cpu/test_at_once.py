"""Tiles of 64 queries that all run at once on Hopper: where calls are cut so, from shapes alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.hopper.tiling import HopperTiling
from composattn.call.problem import Layout, Problem
from composattn.mods import causal


def tiling(heads: int, length: int, d: int, schedule: Any = None, layout: Any = None, **mods: Any) -> HopperTiling:
    problem = Problem(1, heads, heads, length, length, d, d, torch.bfloat16, torch.device("cpu"))
    problem = dataclasses.replace(problem, schedule=schedule or ca.Schedule(), layout=layout or problem.layout)
    chosen = plan_forward(problem, ca.Attention(**mods).program, HOPPER).tiling
    assert isinstance(chosen, HopperTiling)
    return chosen


def is_alone(chosen: HopperTiling) -> bool:
    return (chosen.warpgroups, chosen.blocks) == (1, 1)


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_one_short_sequence_fills_twice_as_many_sms(d: int) -> None:
    assert is_alone(tiling(16, 512, d)), "128 tiles of 64 queries"
    assert not is_alone(tiling(17, 512, d)), "136, of which 4 would begin when others have ended"
    assert not is_alone(tiling(2, 4096, d)), "64 keys at a time, or parts of them, are many then"


def test_tiles_of_half_visible_keys_may_wait_for_a_place_at_wide_heads() -> None:
    assert is_alone(tiling(21, 512, 192, mask_mod=causal())) and not is_alone(tiling(21, 512, 192))
    assert not is_alone(tiling(21, 512, 128, mask_mod=causal()))


def test_few_keys_come_in_tiles_of_64() -> None:
    assert tiling(16, 128, 128).tile_n == 64 and tiling(16, 256, 128).tile_n == 128
    assert tiling(16, 512, 256).tile_n == 64, "of D 256 always"


@pytest.mark.parametrize(
    "asked",
    [
        {"schedule": ca.Schedule(batch_invariant=True)},
        {"schedule": ca.Schedule(persistent=True)},
        {"layout": Layout(q="packed", kv="packed")},
    ],
    ids=str,
)
def test_other_calls_are_cut_as_ever(asked: dict[str, Any]) -> None:
    """Bits would hang on how many sequences there are; blocks were asked to stay; tensors say how many queries."""
    assert not is_alone(tiling(4, 512, 128, **asked))
