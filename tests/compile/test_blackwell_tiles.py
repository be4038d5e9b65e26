"""How many tiles the Blackwell forward multiplies, counted in the emulator, against flash-attn-4's ranges of keys.

There a block's two query tiles of 128 rows go over the kv tiles that its 256 rows see; here each over its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from benchmarks.model.visits import visits
from composattn.backends.fused.running.emulated import random_run
from composattn.backends.fused.tiles.target import BLACKWELL
from composattn.call.problem import Problem
from composattn.emulator.counts import count
from composattn.mods import causal

D, TILE, WINDOW = 64, 128, 1024
STEPS = D // 16 + TILE // 16  # instructions of a tile's two products, each of 16 columns or keys


def in_a_window(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """The last 512 queries of 1536 whose window is 1024: the middle of a long sequence."""
    return (kv <= q + WINDOW) & (kv > q)


CASES = {"causal 1k": (causal(), 1024, 1024, 0, 36), "window 1024": (in_a_window, 512, 1536, WINDOW, 36)}


@pytest.mark.parametrize("name", CASES)
def test_each_query_tile_has_its_own_kv_tiles(name: str) -> None:
    mask, q_len, kv_len, ahead, wanted = CASES[name]
    whole = ca.Schedule(split_kv=1)  # one head alone would be cut along its keys
    problem = Problem(1, 1, 1, q_len, kv_len, D, D, torch.bfloat16, torch.device("cpu"), schedule=whole)
    result = random_run(problem, ca.Attention(mask_mod=mask).program, BLACKWELL)
    products = sum(role["matrix"] for role in count(result).roles.values())
    q = np.arange(q_len)
    first, behind = (q + 1 if ahead else 0 * q), q + ahead + 1
    ours, pairs = (visits(first, behind, kv_len, rows, TILE, by_keys=False) for rows in (TILE, 2 * TILE))
    executed, theirs = products / STEPS, 2 * int(pairs.plain.sum() + pairs.tested.sum())
    assert executed == ours.plain.sum() + ours.tested.sum() == wanted
    assert executed / theirs <= 0.92
