"""Which grouped heads share the rows of Hopper's tiles, and how large those of short sequences are: from shapes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.hopper.tiling import HopperTiling
from composattn.call.problem import Problem
from composattn.mods import alibi, causal, dilated_window, sliding_window, softcap

TABLE = torch.zeros(8, 4096)


def tiling(length: int, heads: int, kv_heads: int, d: int, *, keys: int = 0, batch: int = 64, **asked: Any) -> Any:
    schedule = ca.Schedule(pack_gqa=asked.pop("pack_gqa", None))
    dtype, device = torch.bfloat16, torch.device("cpu")
    problem = Problem(batch, heads, kv_heads, length, keys or length, d, d, dtype, device)
    chosen = plan_forward(dataclasses.replace(problem, schedule=schedule), ca.Attention(**asked).program, HOPPER).tiling
    assert isinstance(chosen, HopperTiling)
    return chosen


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "d", "why"),
    [
        (158, 8, 1, 256, "10 tiles of 16 queries of 8 heads, of 16 with empty rows"),
        (257, 24, 3, 256, "a third of each head's last tile is empty"),
        (135, 24, 3, 128, "9 tiles of 16"),
        (305, 16, 2, 80, "13 tiles of 192 rows, of 16"),
        (208, 16, 2, 88, "7 tiles of 128 rows, of 16 of 192 that would be half empty"),
        (4096, 8, 4, 256, "as many tiles, of fewer keys behind a window"),
    ],
)
def test_heads_share_tiles_where_these_get_fewer(length: int, heads: int, kv_heads: int, d: int, why: str) -> None:
    mask = causal() & sliding_window(1024)
    assert tiling(length, heads, kv_heads, d, mask_mod=mask).packed_heads == heads // kv_heads, why
    assert tiling(length, heads, kv_heads, d, mask_mod=mask, pack_gqa=False).packed_heads == 1


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "d", "mods"),
    [
        (2048, 32, 8, 128, {}),  # as many tiles as apart
        (700, 40, 8, 128, {}),  # five heads leave three of eight rows empty
        (300, 16, 2, 128, {"score_mod": lambda score, b, h, q, kv: score + TABLE[h, (q - kv) % 4096]}),
        (300, 16, 2, 128, {"mask_mod": dilated_window(100, 4)}),
        (1030, 16, 2, 64, {"mask_mod": causal()}),  # packed rows guess no maximum behind a mask
        (1030, 16, 16, 128, {}),
    ],
)
def test_heads_have_tiles_of_their_own_where_sharing_loses(
    length: int, heads: int, kv_heads: int, d: int, mods: dict[str, Any]
) -> None:
    assert tiling(length, heads, kv_heads, d, **mods).packed_heads == 1


@pytest.mark.parametrize("score", [None, alibi(16), softcap(20.0)], ids=["plain", "alibi", "softcap"])
def test_short_sequences_get_tiles_that_they_fill(score: Any) -> None:
    rows = {n: tiling(n, 16, 16, 72, score_mod=score, mask_mod=causal()).tile_m for n in (192, 197, 256, 384, 577)}
    assert rows == {192: 192, 197: 128, 256: 128, 384: 192, 577: 128}
    assert tiling(577, 16, 16, 72, score_mod=score).tile_m == 192, "128 lose 10 % with no mask"
