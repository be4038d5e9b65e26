"""What kind a call is of: one value on which choices of tilings hang."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.analysis.captured_gradient import GradientProgram, fused_reads
from composattn.analysis.program import Program
from composattn.backends.fused.planning.facts import BACKWARD, BANDS, BEYOND, FORWARD, MASKS, Facts
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Layout, Problem
from composattn.call.schedule import Schedule
from composattn.mods.dropout import Dropout

IDS = torch.arange(512) // 100
TABLE, SLOPES = torch.zeros(512, 512), torch.ones(8)
OF_QUERIES: dict[str, Any] = {
    "none": None,
    "ends": lambda b, h, q, kv: q >= kv,
    "bounds": lambda b, h, q, kv: (q >= kv) & (q - kv < 100),
    "tested": lambda b, h, q, kv: (q >= kv) & ((q - kv) % 4 == 0),
    "opaque": lambda b, h, q, kv: (q * kv) % 7 < 3,
    "runs": lambda b, h, q, kv: (kv < 4) | ((q >= kv) & (q - kv < 100)),
    "read": lambda b, h, q, kv: (IDS[q] == IDS[kv]) & (q >= kv),
}
SCORES: dict[str, Any] = {
    "plain": None,
    "line": lambda s, b, h, q, kv: s - SLOPES[h] * (q - kv),
    "of_score": lambda s, b, h, q, kv: 30 * torch.tanh(s / 30),
    "other": lambda s, b, h, q, kv: torch.where(q >= kv, s, -1e9),
    "pairs": lambda s, b, h, q, kv: s + TABLE[q, kv],
}


def classed(score: Any = None, mask: Any = None, backward: bool = False, heads: int = 1, **fields: Any) -> Facts:
    problem = Problem(1, 32, 32, 512, 512, 64, 64, torch.bfloat16, torch.device("cpu"))
    program = ca.Attention(score_mod=score, mask_mod=mask).program
    finders = BACKWARD if backward else FORWARD
    return Facts(finders, dataclasses.replace(problem, **fields), program, HOPPER, rows=64, heads=heads)


@pytest.mark.parametrize("mask", OF_QUERIES)
def test_masks_are_of_the_kind_that_decides_how_they_run(mask: str) -> None:
    assert classed(mask=OF_QUERIES[mask]).mask == mask


LONG_IDS = torch.arange(8192) // 1000
OF_KEYS: dict[str, Any] = {
    "none": None,
    "ends": OF_QUERIES["ends"],
    "bounds": OF_QUERIES["bounds"],
    "tested": OF_QUERIES["tested"],
    "opaque": OF_QUERIES["opaque"],
    "read": lambda b, h, q, kv: kv < LONG_IDS[b],
    "listed": lambda b, h, q, kv: TABLE[q % 512, kv % 512] > 0,
    "documents": lambda b, h, q, kv: (LONG_IDS[q] == LONG_IDS[kv]) & (q >= kv),
    "whole": lambda b, h, q, kv: LONG_IDS[q] == LONG_IDS[kv],
}


@pytest.mark.parametrize("mask", OF_KEYS)
def test_masks_are_of_the_kind_that_decides_which_queries_see_a_key(mask: str) -> None:
    assert classed(mask=OF_KEYS[mask], backward=True, q_len=8192, kv_len=8192).mask == mask


def test_documents_are_a_kind_where_there_are_rows_enough_that_tiles_begin_with_them() -> None:
    mask = OF_KEYS["documents"]
    for batch, length, kind in ((1, 8192, "documents"), (2, 2048, "read"), (3, 2048, "documents")):
        assert classed(mask=mask, batch=batch, q_len=length, kv_len=length).mask == kind
    softer = classed(SCORES["of_score"], mask, q_len=8192, kv_len=8192)
    assert softer.mask == "read"


def test_every_kind_of_mask_is_some_calls() -> None:
    assert {*OF_QUERIES, *OF_KEYS} == {*MASKS}


@pytest.mark.parametrize("mods", SCORES, ids=str)
def test_score_mods_are_of_the_kind_that_decides_how_they_run(mods: str) -> None:
    assert classed(SCORES[mods]).mods == mods


def test_what_sums_gradients_and_dropout_are_kinds_of_their_own() -> None:
    table = TABLE.clone().requires_grad_()
    bare = ca.Attention(score_mod=lambda s, b, h, q, kv: s + table[q, kv]).program
    problem = Problem(1, 32, 32, 512, 512, 64, 64, torch.bfloat16, torch.device("cpu"))
    learned = GradientProgram(bare, fused_reads(bare))
    assert Facts(BACKWARD, problem, learned, HOPPER, rows=128).mods == "learned_pairs"
    kept = Dropout.with_seed(0.1, 5)
    assert kept is not None
    dropping = Program(bare.score, keep=kept.expr)
    assert Facts(FORWARD, problem, dropping, HOPPER, rows=64).mods == "dropout"


def test_work_is_counted_in_tiles_of_each_sm() -> None:
    found = [classed(q_heads=n, kv_heads=n).work for n in (16, 17, 33, 34, 67)]
    two = "two_rounds", "two_rounds"
    assert found == ["at_once", *two, "few_rounds", "rounds"]
    assert classed(q_len=16, heads=4).work == "few_rows"


def test_keys_count_by_what_rows_see() -> None:
    assert (classed().seen, classed().length) == (512, 512)
    causal = classed(mask=lambda b, h, q, kv: q >= kv, q_len=2048, kv_len=2048)
    assert (causal.seen, causal.length) == (1152, 2304)
    assert classed(q_len=512, kv_len=BANDS[-2] + 1).seen == BEYOND
    backward = classed(backward=True, q_len=512, kv_len=2048)
    assert (backward.seen, backward.length) == (512, 512)


def test_layout_order_and_rows_that_are_no_whole_sectors_are_told() -> None:
    assert classed(head_dim=40, head_dim_v=40).sectors is False and classed(head_dim=48, head_dim_v=48).sectors
    assert classed(layout=Layout("packed", "packed")).layout == "packed"
    assert classed(layout=Layout("packed", "dense")).layout == "mixed"
    assert classed(layout=Layout(kv="paged", page_size=16, used_kv=True)).layout == "paged"
    assert classed(schedule=Schedule(batch_invariant=True)).order == "batch-invariant"


def test_calls_of_a_kind_have_the_same_words() -> None:
    assert str(classed()) == str(classed(q_len=511)) != str(classed(q_len=64))
    assert str(classed(mask=OF_QUERIES["bounds"])) == (
        "forward, any order, dense, D 64, no score mod, bounds on positions, up to two rounds, "
        "a row sees up to 256 of up to 512 keys"
    )


def test_a_fact_is_found_once_and_only_when_it_is_asked_for() -> None:
    asked: list[str] = []
    call = Facts({"twice": lambda f: asked.append("twice") or 2 * f.once, "once": lambda f: asked.append("once") or 1})
    assert asked == [] and (call.twice, call.twice, asked) == (2, 2, ["twice", "once"])
    assert call.but(once=3).twice == 6


def test_what_no_finder_knows_is_of_the_problem_the_gpu_or_the_schedule() -> None:
    call = classed(kv_heads=8, schedule=Schedule(split_kv=3))
    assert (call.group, call.sms, call.split_kv) == (4, HOPPER.sms, 3)
    with pytest.raises(AttributeError, match="no attribute 'tiles_of_what'"):
        _ = call.tiles_of_what
