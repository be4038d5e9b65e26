"""What kind a call is of: one value on which choices of tilings hang."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.analysis.captured_gradient import GradientProgram, fused_reads
from composattn.analysis.program import Program
from composattn.backends.fused.planning.call_class import (
    BANDS,
    BEYOND,
    CallClass,
    Direction,
    MaskKind,
    ModsKind,
    Rounds,
    class_of,
)
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Layout, Problem
from composattn.call.schedule import Schedule
from composattn.mods.dropout import Dropout

IDS = torch.arange(512) // 100
TABLE, SLOPES = torch.zeros(512, 512), torch.ones(8)
MASKS: dict[MaskKind, Any] = {
    MaskKind.NONE: None,
    MaskKind.ENDS: lambda b, h, q, kv: q >= kv,
    MaskKind.BOUNDS: lambda b, h, q, kv: (q >= kv) & (q - kv < 100),
    MaskKind.TESTED: lambda b, h, q, kv: (q >= kv) & ((q - kv) % 4 == 0),
    MaskKind.OPAQUE: lambda b, h, q, kv: (q * kv) % 7 < 3,
    MaskKind.RUNS: lambda b, h, q, kv: (kv < 4) | ((q >= kv) & (q - kv < 100)),
    MaskKind.READ: lambda b, h, q, kv: (IDS[q] == IDS[kv]) & (q >= kv),
}
SCORES: dict[ModsKind, Any] = {
    ModsKind.PLAIN: None,
    ModsKind.LINE: lambda s, b, h, q, kv: s - SLOPES[h] * (q - kv),
    ModsKind.OF_SCORE: lambda s, b, h, q, kv: 30 * torch.tanh(s / 30),
    ModsKind.OTHER: lambda s, b, h, q, kv: torch.where(q >= kv, s, -1e9),
    ModsKind.PAIRS: lambda s, b, h, q, kv: s + TABLE[q, kv],
}


def classed(
    score: Any = None, mask: Any = None, direction: Direction = "forward", heads: int = 1, **fields: Any
) -> CallClass:
    problem = Problem(1, 32, 32, 512, 512, 64, 64, torch.bfloat16, torch.device("cpu"))
    program = ca.Attention(score_mod=score, mask_mod=mask).program
    return class_of(dataclasses.replace(problem, **fields), program, HOPPER, direction, rows=64, heads=heads)


@pytest.mark.parametrize("mask", MASKS)
def test_masks_are_of_the_kind_that_decides_how_they_run(mask: MaskKind) -> None:
    assert classed(mask=MASKS[mask]).mask is mask


LONG_IDS = torch.arange(8192) // 1000
OF_KEYS: dict[MaskKind, Any] = {
    MaskKind.NONE: None,
    MaskKind.ENDS: MASKS[MaskKind.ENDS],
    MaskKind.BOUNDS: MASKS[MaskKind.BOUNDS],
    MaskKind.TESTED: MASKS[MaskKind.TESTED],
    MaskKind.OPAQUE: MASKS[MaskKind.OPAQUE],
    MaskKind.READ: lambda b, h, q, kv: kv < LONG_IDS[b],
    MaskKind.LISTED: lambda b, h, q, kv: TABLE[q % 512, kv % 512] > 0,
    MaskKind.DOCUMENTS: lambda b, h, q, kv: (LONG_IDS[q] == LONG_IDS[kv]) & (q >= kv),
    MaskKind.WHOLE: lambda b, h, q, kv: LONG_IDS[q] == LONG_IDS[kv],
}


@pytest.mark.parametrize("mask", OF_KEYS)
def test_masks_are_of_the_kind_that_decides_which_queries_see_a_key(mask: MaskKind) -> None:
    assert classed(mask=OF_KEYS[mask], direction="backward", q_len=8192, kv_len=8192).mask is mask


def test_documents_are_a_kind_where_there_are_rows_enough_that_tiles_begin_with_them() -> None:
    mask = OF_KEYS[MaskKind.DOCUMENTS]
    for batch, length, kind in ((1, 8192, MaskKind.DOCUMENTS), (2, 2048, MaskKind.READ), (3, 2048, MaskKind.DOCUMENTS)):
        assert classed(mask=mask, batch=batch, q_len=length, kv_len=length).mask is kind
    softer = classed(SCORES[ModsKind.OF_SCORE], mask, q_len=8192, kv_len=8192)
    assert softer.mask is MaskKind.READ


def test_every_kind_of_mask_is_some_calls() -> None:
    assert {*MASKS, *OF_KEYS} == set(MaskKind)


@pytest.mark.parametrize("mods", SCORES, ids=str)
def test_score_mods_are_of_the_kind_that_decides_how_they_run(mods: ModsKind) -> None:
    assert classed(SCORES[mods]).mods is mods


def test_what_sums_gradients_and_dropout_are_kinds_of_their_own() -> None:
    table = TABLE.clone().requires_grad_()
    bare = ca.Attention(score_mod=lambda s, b, h, q, kv: s + table[q, kv]).program
    problem = Problem(1, 32, 32, 512, 512, 64, 64, torch.bfloat16, torch.device("cpu"))
    learned = GradientProgram(bare, fused_reads(bare))
    assert class_of(problem, learned, HOPPER, "backward", rows=128).mods is ModsKind.LEARNED_PAIRS
    kept = Dropout.with_seed(0.1, 5)
    assert kept is not None
    dropping = Program(bare.score, keep=kept.expr)
    assert class_of(problem, dropping, HOPPER, "forward", rows=64).mods is ModsKind.DROPOUT


def test_work_is_counted_in_tiles_of_each_sm() -> None:
    found = [classed(q_heads=n, kv_heads=n).work for n in (16, 17, 33, 34, 67)]
    two = Rounds.TWO_ROUNDS, Rounds.TWO_ROUNDS
    assert found == [Rounds.AT_ONCE, *two, Rounds.FEW_ROUNDS, Rounds.ROUNDS]
    assert classed(q_len=16, heads=4).work is Rounds.FEW_ROWS


def test_keys_count_by_what_rows_see() -> None:
    assert (classed().seen, classed().length) == (512, 512)
    causal = classed(mask=lambda b, h, q, kv: q >= kv, q_len=2048, kv_len=2048)
    assert (causal.seen, causal.length) == (1152, 2304)
    assert classed(q_len=512, kv_len=BANDS[-2] + 1).seen == BEYOND
    backward = classed(direction="backward", q_len=512, kv_len=2048)
    assert (backward.seen, backward.length) == (512, 512)


def test_layout_order_and_rows_that_are_no_whole_sectors_are_told() -> None:
    assert classed(head_dim=40, head_dim_v=40).sectors is False and classed(head_dim=48, head_dim_v=48).sectors
    assert classed(layout=Layout("packed", "packed")).layout == "packed"
    assert classed(layout=Layout("packed", "dense")).layout == "mixed"
    assert classed(layout=Layout(kv="paged", page_size=16, used_kv=True)).layout == "paged"
    assert classed(schedule=Schedule(batch_invariant=True)).order == "batch-invariant"


def test_equal_calls_have_equal_classes_and_a_class_can_be_read() -> None:
    assert classed() == classed() and hash(classed()) == hash(classed(q_len=511))
    assert str(classed(mask=MASKS[MaskKind.BOUNDS])) == (
        "forward, any order, dense, D 64, no score mod, bounds on positions, up to two rounds, "
        "a row sees up to 256 of up to 512 keys"
    )
