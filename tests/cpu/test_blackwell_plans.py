"""Plans of the Blackwell forward, with no kernel language: what they put where fits, for every call that is taken."""

from __future__ import annotations

import dataclasses
import runpy

import pytest
import torch

import composattn as ca
from composattn.analysis.program import Program
from composattn.backends.blackwell.roles import ONE_TILE, TWO_TILES, Roles
from composattn.backends.blackwell.tensor_memory import COLUMNS, Columns, TensorMemory
from composattn.backends.blackwell.tiling import BlackwellTiling
from composattn.backends.fused.planning.plan import ForwardPlan, plan_forward
from composattn.backends.fused.tiles.target import BLACKWELL
from composattn.call.problem import DENSE, Layout, Problem
from composattn.mods import causal
from tests.rooms import ROOT

PAGED = Layout("dense", "paged", page_size=64, used_kv=True)


def plan(d: int, dv: int, q_len: int = 4096, layout: Layout = DENSE) -> ForwardPlan[BlackwellTiling]:
    problem = Problem(2, 8, 2, q_len, 4096, d, dv, torch.bfloat16, torch.device("cpu"), layout=layout)
    return plan_forward(problem, Program(), BLACKWELL)  # type: ignore[return-value]


@pytest.mark.parametrize("q_len", [1, 4096])
@pytest.mark.parametrize("layout", [DENSE, PAGED], ids=["dense", "paged"])
def test_every_head_dimension_has_a_tiling_that_fits(q_len: int, layout: Layout) -> None:
    for d in (8, 32, 64, 72, 96, 128, 136, 192, 200, 256):
        for dv in (8, 32, 64, 72, 96, 128, 136, 192, 200, 256):
            made = plan(d, dv, q_len, layout)
            assert made.shared_memory <= BLACKWELL.shared_memory
            tiling = made.tiling
            assert max(c.stop for c in tiling.tensor_memory.regions.values()) <= tiling.tensor_memory.allocated <= 512
            assert min(tiling.k_stages, tiling.v_stages) >= 1
            assert 0 < tiling.early_keys < tiling.tile_n and tiling.early_keys % 16 == tiling.tile_n % 16 == 0
            assert layout is DENSE or 64 % tiling.tile_n == 0 or tiling.tile_n % 64 == 0


def test_regions_of_tensor_memory_never_overlap() -> None:
    with pytest.raises(ValueError, match=r"S0 \(columns 0-127\) lies over O0 \(columns 100-163\)"):
        TensorMemory(((Columns(0, 128),),), (Columns(100, 64),))
    with pytest.raises(ValueError, match=r"O1 \(columns 448-639\) leaves tensor memory, which has 512 columns"):
        TensorMemory.of(2, 1, 128, 192)
    with pytest.raises(ValueError, match="leaves tensor memory"):
        dataclasses.replace(plan(128, 128).tiling, dv=192)


def test_tensor_memory_is_asked_for_in_powers_of_two() -> None:
    assert TensorMemory.of(1, 1, 16, 8).allocated == 32
    assert TensorMemory.of(2, 1, 64, 64).allocated == 256
    assert TensorMemory.of(2, 1, 128, 64).allocated == 512 == COLUMNS


def test_a_plan_prints_where_everything_lies() -> None:
    said = str(plan(128, 128))
    assert "S0 0-127, S1 128-255, O0 256-383, O1 384-511, P over S; 512 of 512" in said
    assert "softmax 2 x 128 threads, a row each" in said and "early_keys 96" in said
    assert "S0a 0-95, S0b 96-191, O0 192-447, P over S" in str(plan(256, 256))


def test_roles_get_the_registers_there_are() -> None:
    for roles in (TWO_TILES, ONE_TILE):
        assert roles.threads * roles.launched <= 65536
    with pytest.raises(ValueError, match="registers of a thread of each warpgroup, launched with 128 each"):
        Roles(tiles=2, softmax_registers=200, correction_registers=80, other_registers=64)


def test_explain_leaves_out_a_backward_that_there_is_not() -> None:
    q = torch.zeros(1, 2, 256, 192, dtype=torch.bfloat16)
    said = str(ca.Attention(mask_mod=causal(), backend="blackwell").explain(q, q, q))
    assert "forward on blackwell (sm_100a)" in said and "columns S0" in said
    assert "forward, any order, dense, D 192, no score mod" in said and "no device has timed it" in said
    assert "backward on blackwell" not in said


def test_the_page_prints_the_plans_and_counts_of_today() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_blackwell.py"))
    assert made["PAGE"].read_text() == made["page"](), "run: python docs/make_blackwell.py"
