"""Plans of the Blackwell backward, with no kernel language: what they put where fits, or is refused by name."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.analysis.captured_gradient import GradientProgram, fused_reads
from composattn.analysis.program import Program
from composattn.backends.blackwell.backward_tiling import (
    BlackwellBackwardTiling,
    BlackwellPairBackwardTiling,
    QueryPairTiling,
    WidePairBackwardTiling,
    choose_backward,
)
from composattn.backends.blackwell.roles import BackwardRoles
from composattn.backends.blackwell.tensor_memory import (
    BackwardTensorMemory,
    Columns,
    PairBackwardTensorMemory,
    QueryPairTensorMemory,
    WideBackwardTensorMemory,
    WidePairBackwardTensorMemory,
)
from composattn.backends.fused.planning.plan_backward import BackwardPlan, plan_backward
from composattn.backends.fused.tiles.target import BLACKWELL
from composattn.call.problem import DENSE, Layout, Problem
from composattn.mods.masks import causal, document, neighborhood, sliding_window
from tests.pairs import sharing

LEARNED = torch.randn(8, 8192, requires_grad=True)
ONE, TWO = "one block per tile of keys", "2 blocks per tile of keys"


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
            assert tiling.d >= d and tiling.dv >= dv
            halved = tiling.sharing if isinstance(tiling, BlackwellPairBackwardTiling) else 1
            assert tiling.d == halved * sum(part.count for part in tiling.columns.dq_parts)
            assert tiling.d % tiling.dq_part == tiling.dq_at_once % tiling.dq_part == 0
            assert all(part.count % tiling.dq_part == 0 for part in tiling.columns.dq_parts)
            assert (tiling.distances > 0) == (program is not None)


@pytest.mark.parametrize(("d", "dv"), [(136, 64), (64, 136), (192, 128), (192, 192), (256, 256)])
def test_wide_heads_take_one_kernel_that_has_each_column_of_dk_and_dv_once(d: int, dv: int) -> None:
    with sharing(1):
        made = plan(d, dv)
    assert made.step == "backward_wide"
    columns = made.tiling.columns
    assert isinstance(columns, WideBackwardTensorMemory)
    for width, region in ((made.tiling.d, columns.dk), (made.tiling.dv, columns.dv)):
        products = columns.lane_columns(width)
        assert [c for first, lane in products for c in range(first + lane, first + 128)] == list(range(width))
        assert all(first % 64 == 0 for first, _ in products), "columns that lie together in shared memory"
        assert region.count == made.tiling.tile_n * len(products)


@pytest.mark.parametrize(("d", "dv"), [(136, 200), (200, 64), (192, 192), (256, 256), (8, 200)])
def test_two_blocks_with_half_of_the_queries_each_pad_wide_rows_to_the_widest(d: int, dv: int) -> None:
    made = plan(d, dv)
    assert made.step == "backward_query_pair" and "2 blocks per tile of keys" in str(made)
    tiling, columns = made.tiling, made.tiling.columns
    assert isinstance(tiling, QueryPairTiling) and isinstance(columns, QueryPairTensorMemory)
    assert (tiling.tile_m, tiling.tile_n, tiling.d, tiling.dv, tiling.stages) == (256, 128, 256, 256, 4)
    assert all(part == columns.scores for part in columns.dq_parts)
    assert tiling.dq_room == 0, "dQ is added from registers"


def test_sums_by_distance_take_the_room_of_a_stage() -> None:
    tiling = plan(256, 256, learning_distances()).tiling
    assert isinstance(tiling, QueryPairTiling) and tiling.stages == 3


def test_sums_by_head_or_column_of_wide_rows_are_for_one_block() -> None:
    learned = torch.randn(8, requires_grad=True)
    bare = ca.Attention(score_mod=lambda s, b, h, q, kv: s - learned[h] * (q - kv)).program
    assert ONE in str(plan(256, 256, GradientProgram(bare, fused_reads(bare))))


def test_regions_of_tensor_memory_never_overlap() -> None:
    with pytest.raises(ValueError, match=r"dP \(columns 100-227\) lies over|S \(columns 0-127\) lies over dP"):
        BackwardTensorMemory(*(Columns(n, 128) for n in (0, 100, 256, 384)), (Columns(100, 128),))
    with pytest.raises(ValueError, match="leaves tensor memory"):
        dataclasses.replace(plan(128, 128).tiling, dv=192)
    with pytest.raises(ValueError, match=r"dQ \(columns 32-127\) lies over P"):
        PairBackwardTensorMemory(*(Columns(n, 128) for n in (0, 128, 256, 384)), (Columns(32, 96),))


@pytest.mark.parametrize("d, dv", [(136, 64), (160, 128), (192, 128), (64, 136), (128, 192)])
def test_two_blocks_share_a_tile_of_wide_heads_where_their_sums_leave_six_strips(d: int, dv: int) -> None:
    """Who leaves P or dS does so over a strip that its group has read, and that no product needs meanwhile."""
    tiling = plan(d, dv).tiling
    assert isinstance(tiling, WidePairBackwardTiling) and tiling.kernel == "backward_wide_pair"
    columns, group = tiling.columns, tiling.strip
    for of, left in ((columns.scores, columns.probabilities), (columns.gradients, columns.left_gradients)):
        read = [of.first + group * n for n in range(tiling.groups * 2)]  # by one group and the other in turns
        for g in range(tiling.groups):
            assert left.first + columns.apart * g in read[g :: tiling.groups]
    assert columns.left_gradients.first >= columns.scores.stop
    assert tiling.places["ds"] * 2 == 256 * 64 * 2 and "q" not in tiling.places


def test_strips_that_are_there_at_one_time_never_overlap() -> None:
    right = plan(192, 128).tiling.columns
    with pytest.raises(ValueError, match=r"P \(columns 320-383\) lies over dQ"):
        dataclasses.replace(right, dq_parts=(Columns(352, 96),))
    with pytest.raises(ValueError, match=r"S \(columns 320-447\) lies over dS"):
        dataclasses.replace(right, gradients=Columns(352, 128))
    with pytest.raises(ValueError, match="leaves tensor memory"):
        WidePairBackwardTensorMemory.of(SimpleNamespace(tile_m=128, d=192, dv=192))


def test_dq_has_columns_of_its_own_where_some_are_left() -> None:
    assert plan(64, 64).tiling.columns.dq_is_apart and plan(64, 128).tiling.columns.dq_is_apart
    with sharing(1):
        assert not plan(128, 128).tiling.columns.dq_is_apart


def test_a_block_has_registers_for_its_roles() -> None:
    with pytest.raises(ValueError, match="registers of a thread of each"):
        BackwardRoles(compute_registers=200, dq_registers=96, other_registers=64)


def test_a_plan_prints_where_everything_lies() -> None:
    said = str(plan(128, 128))
    assert "dV 256-383, dK 384-511, P over both ends of S, dQ 32-95 between, dS over dP; 512 of 512" in said
    assert "256 keys stay" in said and "2 blocks per tile of keys" in said and "q_stages 1, do_stages 1" in said
    with sharing(1):
        said = str(plan(128, 128))
    assert "S 0-127, dP 128-255, dV 256-383, dK 384-511, P over S, dS and dQ over dP; 512 of 512" in said
    assert "dV 256-319, dK 320-383, dQ 384-447, P over S, dS over dP; 512 of 512" in str(plan(64, 64))
    assert "P and dS 2 x 128 threads" in said and "q_stages 2, do_stages 1" in said
    said = str(plan(256, 256))
    assert "S 0-127, dP 128-255, dVt 256-383, dKt 384-511, dS over dP, dQ in 128 and 128 columns over S; 512" in said
    assert "128 keys stay, 256 queries pass" in said and "stages 4" in said
    with sharing(1):
        said = str(plan(256, 256))
    assert "S 0-63, dP 64-127, dVt 128-255, dKt 256-383, dQ 384-511, dQ in 128 and 128 columns; 512 of 512" in said
    said = str(plan(192, 128))
    assert "dV 0-127, dK 128-319, S 320-447, dP 384-511, dQ 384-479, one after the other" in said
    assert "P 320-383, dS 448-511; 512 of 512" in said and "2 blocks per tile of keys" in said
    with sharing(1):
        assert "dVt 128-191, dKt 192-319, dQ 320-511, dQ at once; 512 of 512" in str(plan(192, 128))


# --- one block or two for a tile of keys --------------------------------------------------------------------------


def blocks_of(
    mask: Any, length: int, layout: Layout = DENSE, program: Program | None = None, d: int = 128, dv: int | None = None
) -> str:
    """What is said of a call of two heads and as many keys as queries."""
    problem = Problem(2, 2, 2, length, length, d, dv or d, torch.bfloat16, torch.device("cpu"), layout=layout)
    return str(plan_backward(problem, program or ca.Attention(mask_mod=mask).program, BLACKWELL).main)


@pytest.mark.parametrize(
    ("mask", "length"),
    [(None, 4096), (causal(), 4096), (causal(), 512), (causal() & sliding_window(1024), 8192)],
)
def test_two_blocks_share_a_tile_where_larger_tiles_visit_little_more(mask: Any, length: int) -> None:
    assert TWO in blocks_of(mask, length)


@pytest.mark.parametrize("mask", [None, causal(), causal() & sliding_window(1)])
def test_tiles_of_wide_heads_may_visit_more_than_those_of_64_keys(mask: Any) -> None:
    assert TWO in blocks_of(mask, 4096, d=192, dv=128)


@pytest.mark.parametrize(
    ("mask", "length"),
    [
        (causal(), 300),
        (causal() & sliding_window(128), 8192),
        (document(torch.arange(4096) // 300), 4096),
        (neighborhood((64, 64), (7, 7)), 4096),
    ],
)
def test_one_block_has_a_tile_where_few_are_visited_or_nobody_knows(mask: Any, length: int) -> None:
    assert ONE in blocks_of(mask, length)


def test_of_packed_sequences_the_mean_length_decides() -> None:
    packed = Layout("packed", "packed")
    assert TWO in blocks_of(causal(), 4096, packed) and ONE in blocks_of(causal(), 500, packed)


SUMMED, PAIRS = (torch.zeros(*size, requires_grad=True) for size in ((2, 2048), (2, 1024, 1024)))


@pytest.mark.parametrize(
    "score",
    [
        lambda s, b, h, q, kv: s + SUMMED[h, q] * (q - kv),
        lambda s, b, h, q, kv: s + PAIRS[h, q, kv],
        lambda s, b, h, q, kv: torch.tanh(s + SUMMED[h, q - kv + 1024]),
    ],
    ids=["by row", "by pair", "by distance in a tanh"],
)
def test_one_block_has_a_tile_where_sums_take_the_registers(score: Any) -> None:
    bare = ca.Attention(score_mod=score).program
    assert ONE in blocks_of(None, 1024, program=GradientProgram(bare, fused_reads(bare)))


@pytest.mark.parametrize("layout", [DENSE, Layout("packed", "packed")], ids=["dense", "packed"])
def test_two_share_a_tile_where_gradients_are_summed_by_head(layout: Layout) -> None:
    bare = ca.Attention(score_mod=lambda s, b, h, q, kv: s - LEARNED[h, 0] * (q - kv)).program
    learned = GradientProgram(bare, fused_reads(bare))
    assert TWO in blocks_of(None, 1024, layout, program=learned)


def test_narrow_head_dimensions_have_one_block() -> None:
    assert all(ONE in blocks_of(None, 4096, d=d) for d in (64, 96))


def test_explain_says_the_class_and_that_nobody_measured_it() -> None:
    problem = Problem(2, 2, 2, 4096, 4096, 128, 128, torch.bfloat16, torch.device("cpu"))
    words = choose_backward(problem, Program(), BLACKWELL, False).words
    assert "a key is seen by up to 4,224 of up to 4,224 queries" in words and "backward_pair; not measured" in words


def test_fewer_tiles_run_at_once_by_two_blocks() -> None:
    """Calls are therefore split that leave half as many SMs idle."""
    problem = Problem(1, 2, 2, 4096, 4096, 128, 128, torch.bfloat16, torch.device("cpu"))
    cut = plan_backward(problem, Program(), BLACKWELL).main.cut
    assert cut is not None and cut.tiles * cut.pieces <= 8 * BLACKWELL.sms // 2
