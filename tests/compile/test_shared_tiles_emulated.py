"""Large tiles whose rows grouped heads share on Hopper, emulated with no GPU: every row, its mods and its LSE."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Problem
from composattn.mods import alibi, causal, softcap
from composattn.testing import check, make_case
from tests.support import on_few_sms

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal, D 128": ({"dim": 128, "q_len": 158}, {"mask_mod": causal()}),
    "alibi, D 72": ({"dim": 72, "q_len": 210}, {"score_mod": alibi(8), "mask_mod": causal()}),
    "a soft cap, D 160": ({"dim": 160, "q_len": 137, "kv_len": 300}, {"score_mod": softcap(3.0)}),
}


@pytest.mark.parametrize("name", CASES)
def test_heads_that_share_large_tiles_are_right(name: str) -> None:
    shape, mods = CASES[name]
    case = make_case(7, batch=1, heads=8, kv_heads=1, dtype=torch.bfloat16, gradients=False, **shape, **mods)
    problem = Problem.of(case.q, case.k, case.v)
    tiling = plan_forward(problem, ca.Attention(**mods).program, dataclasses.replace(HOPPER, sms=2)).tiling
    assert tiling.packed_heads == 8 and tiling.tile_m >= 128
    with on_few_sms("hopper-emulated", 2):  # many rounds, as GPUs have of larger batches
        check(functools.partial(ca.attention, backend="hopper-emulated"), case)
