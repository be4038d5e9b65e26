"""Plans of the Blackwell backward, with no kernel language: what they put where fits, or is refused by name."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import composattn as ca
from composattn.analysis.captured_gradient import GradientProgram, fused_reads
from composattn.analysis.program import Program
from composattn.backends.blackwell.backward_tiling import BackwardRoles, BlackwellBackwardTiling
from composattn.backends.blackwell.tensor_memory import BackwardTensorMemory, Columns, WideBackwardTensorMemory
from composattn.backends.fused.plan_backward import BackwardPlan, plan_backward
from composattn.backends.fused.target import BLACKWELL
from composattn.call.problem import Problem

LEARNED = torch.randn(8, 8192, requires_grad=True)


def plan(d: int, dv: int, program: Program | None = None) -> BackwardPlan[BlackwellBackwardTiling]:
    problem = Problem(2, 8, 2, 4096, 4096, d, dv, torch.bfloat16, torch.device("cpu"))
    return plan_backward(problem, program or Program(), BLACKWELL).main  # type: ignore[return-value]


def learning_distances() -> Program:
    bare = ca.Attention(score_mod=lambda s, b, h, q, kv: s + LEARNED[h, q - kv + 4096]).program
    return GradientProgram(bare, fused_reads(bare))


@pytest.mark.parametrize("program", [None, learning_distances()], ids=["plain", "by distance"])
def test_every_head_dimension_has_a_tiling_that_fits(program: Program | None) -> None:
    for d in range(8, 257, 8):
        for dv in range(8, 257, 8):
            made = plan(d, dv, program)
            assert made.shared_memory <= BLACKWELL.shared_memory
            tiling = made.tiling
            assert max(c.stop for c in tiling.columns.regions.values()) <= tiling.columns.allocated <= 512
            assert tiling.d >= d and tiling.dv >= dv and tiling.d == sum(part.count for part in tiling.columns.dq_parts)
            assert tiling.d % tiling.dq_part == tiling.dq_at_once % tiling.dq_part == 0
            assert all(part.count % tiling.dq_part == 0 for part in tiling.columns.dq_parts)
            assert (tiling.distances > 0) == (program is not None)


@pytest.mark.parametrize(("d", "dv"), [(136, 64), (64, 136), (192, 128), (192, 192), (256, 256)])
def test_wide_heads_take_one_kernel_that_has_each_column_of_dk_and_dv_once(d: int, dv: int) -> None:
    made = plan(d, dv)
    assert made.step == "backward_wide"
    columns = made.tiling.columns
    assert isinstance(columns, WideBackwardTensorMemory)
    for width, region in ((made.tiling.d, columns.dk), (made.tiling.dv, columns.dv)):
        products = columns.lane_columns(width)
        assert [c for first, lane in products for c in range(first + lane, first + 128)] == list(range(width))
        assert all(first % 64 == 0 for first, _ in products), "columns that lie together in shared memory"
        assert region.count == made.tiling.tile_n * len(products)


def test_regions_of_tensor_memory_never_overlap() -> None:
    with pytest.raises(ValueError, match=r"dP \(columns 100-227\) lies over|S \(columns 0-127\) lies over dP"):
        BackwardTensorMemory(*(Columns(n, 128) for n in (0, 100, 256, 384, 100)))
    with pytest.raises(ValueError, match="leaves tensor memory"):
        dataclasses.replace(plan(128, 128).tiling, dv=192)


def test_dq_has_columns_of_its_own_where_some_are_left() -> None:
    assert plan(64, 64).tiling.columns.dq_is_apart and plan(64, 128).tiling.columns.dq_is_apart
    assert not plan(128, 128).tiling.columns.dq_is_apart


def test_a_block_has_registers_for_its_roles() -> None:
    with pytest.raises(ValueError, match="registers of a thread of each"):
        BackwardRoles(compute_registers=200, dq_registers=96, other_registers=64)


def test_a_plan_prints_where_everything_lies() -> None:
    said = str(plan(128, 128))
    assert "S 0-127, dP 128-255, dV 256-383, dK 384-511, P over S, dS and dQ over dP; 512 of 512" in said
    assert "dV 256-319, dK 320-383, dQ 384-447, P over S, dS over dP; 512 of 512" in str(plan(64, 64))
    assert "P and dS 2 x 128 threads" in said and "stages: 2 of Q, 1 of dO" in said
    said = str(plan(256, 256))
    assert "S 0-63, dP 64-127, dVt 128-255, dKt 256-383, dQ 384-511, dQ in 128 and 128 columns; 512 of 512" in said
    assert "dVt 128-191, dKt 192-319, dQ 320-511, dQ at once; 512 of 512" in str(plan(192, 128))
