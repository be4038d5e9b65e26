"""What a call below an operator may hold on to: nothing, as its memory may be a CUDA graph's."""

from __future__ import annotations

import torch

import composattn as ca
from composattn.analysis.program import Program
from composattn.analysis.refreshed import keeping_nothing
from composattn.analysis.tile_lists import Extent, KeyLists
from composattn.backends.fused.work import WorkTables
from composattn.call.problem import Problem
from composattn.call.sequences import NO_SEQUENCES


def test_a_work_table_is_made_each_time_and_used_if_there_is_one() -> None:
    q = torch.zeros(2, 4, 300, 64, dtype=torch.bfloat16)
    problem = Problem.of(q, q, q)
    causal = Program(mask=ca.mask(lambda b, h, q, kv: q >= kv).expr)
    tables = WorkTables(problem, causal.intervals, 128, 128, "longest_first")
    with keeping_nothing():
        made = tables(NO_SEQUENCES)
        assert not tables.made
    kept = tables(NO_SEQUENCES)
    assert torch.equal(made, kept)
    with keeping_nothing():
        assert tables(NO_SEQUENCES) is kept


def test_lists_of_tiles_are_made_each_time_and_used_if_there_are_some() -> None:
    seen = torch.rand(3, 3) < 0.5
    mask = ca.mask(lambda b, h, q, kv: seen[q // 128, kv // 128])
    lists = KeyLists(mask.expr, Extent(384, 384, 1, 1, torch.device("cpu")), (128, 128))
    with keeping_nothing():
        made = lists.of_call()
        assert not lists.kept.value
    kept = lists.of_call()
    assert all(map(torch.equal, made, kept))
    with keeping_nothing():
        assert lists.of_call() is kept
