"""Calls whose grouped heads share large tiles, and short sequences whose tiles are of 128 rows, on a GPU: all right."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.mods import alibi, causal, sliding_window, softcap
from composattn.testing import check, make_case
from tests.support import gpu_backend

MODS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask_mod": causal()},
    "window and a soft cap": {"mask_mod": causal() & sliding_window(100), "score_mod": softcap(20.0)},
    "alibi": {"mask_mod": causal(), "score_mod": alibi(16)},
}


@pytest.mark.parametrize("mods", MODS)
@pytest.mark.parametrize("heads", [(16, 2), (16, 4), (16, 1), (16, 16)], ids=str)
@pytest.mark.parametrize("dim", [40, 72, 96, 128, 160, 256])
@pytest.mark.parametrize("length", [158, 257, 577])
def test_rows_of_shared_and_of_short_tiles_are_right(length: int, dim: int, heads: tuple[int, int], mods: str) -> None:
    q_heads, kv_heads = heads
    case = make_case(
        length, batch=9, heads=q_heads, kv_heads=kv_heads, q_len=length, dim=dim, dtype=torch.bfloat16, device="cuda",
        gradients=False, **MODS[mods],
    )  # fmt: skip
    check(functools.partial(ca.attention, backend=gpu_backend()), case)
