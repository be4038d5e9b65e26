"""Batch-invariant calls: how keys are cut does not depend on what else a call holds, on any GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.tiles.target import TARGETS, Target
from composattn.call.problem import DENSE, Layout, Problem
from composattn.mods import causal, sliding_window, softcap

HEADS = 8
MODS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"mask_mod": causal()},
    "window": {"mask_mod": causal() & sliding_window(300)},
    "soft cap": {"mask_mod": causal(), "score_mod": softcap(30.0)},
}
LAYOUTS = DENSE, Layout("packed", "packed"), Layout("dense", "paged", page_size=64, used_kv=True)
LENGTHS = (1000, 3000)  # which tables tell apart
GPUS = [target for target in TARGETS.values() if target.arch in ("sm_80", "sm_86", "sm_90a", "sm_100a")]


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.arch)
def test_tiles_of_a_call_have_as_many_keys_whatever_it_holds(target: Target) -> None:
    """Sums of tiles of 48 keys have other bits than those of 64."""
    for (name, mods), d in itertools.product(MODS.items(), (64, 96, 128, 192, 256)):
        program, found = ca.Attention(**mods).program, set()
        for batch, queries, keys, layout in itertools.product((1, 16), (1, 1000), LENGTHS, LAYOUTS):
            sizes = batch, HEADS, 2, queries, keys, d, d
            problem = Problem(
                *sizes, torch.bfloat16, torch.device("cpu"), layout, schedule=ca.Schedule(batch_invariant=True)
            )
            found.add(plan_forward(problem, program, target).tiling.tile_n)
        assert len(found) == 1, (name, d, found)
