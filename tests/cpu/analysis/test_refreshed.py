"""What is made of tensors is made again when one of them was written to; below an operator nothing new is held on to.

There memory may be a CUDA graph's.
"""

from __future__ import annotations

import ctypes

import torch

import composattn as ca
from composattn.analysis.program import Program
from composattn.analysis.refreshed import Refreshed, distrusting, no_caching, version
from composattn.analysis.tile_lists import Extent, KeyLists
from composattn.backends.fused.tiles.work import WorkTables
from composattn.call.problem import Problem
from composattn.call.sequences import NO_SEQUENCES


def test_a_value_is_made_again_when_its_source_was_written_to_and_only_then() -> None:
    source = torch.zeros(2)
    kept: Refreshed[float | None] = Refreshed(None)

    def value() -> float | None:
        return kept([version(source)], lambda: float(source.sum()), [source])

    assert [value(), value(), kept.version] == [0.0, 0.0, 1]
    source.add_(1)
    assert [value(), value(), kept.version] == [2.0, 2.0, 2]
    source.data = torch.full((2,), 3.0)  # counts as no write: the address shows it
    assert value() == 6.0
    with distrusting():
        assert [value(), value(), kept.version] == [6.0, 6.0, 4], "once, whatever the counter says"


def test_memory_that_begins_where_other_memory_ended_is_told_apart() -> None:
    room = torch.zeros(2)
    source = torch.zeros(2)

    def over_the_room() -> torch.Tensor:
        """Memory at one address whoever asks, as an allocator gives a block out again."""
        return torch.frombuffer((ctypes.c_float * 2).from_address(room.data_ptr()), dtype=torch.float32)

    source.data = over_the_room()
    before = version(source)
    assert before == version(source)
    room.fill_(1)
    source.data = torch.zeros(2)
    source.data = over_the_room()
    after = version(source)
    assert before is not None and after is not None
    assert before[:2] == after[:2], "the address and the count are the same"
    assert before != after


def test_what_counts_no_writes_is_made_every_time() -> None:
    with torch.inference_mode():
        source = torch.zeros(2)
    kept: Refreshed[int] = Refreshed(0)
    for _ in range(3):
        kept([version(source)], lambda: 1)
    assert kept.version == 3


def test_a_value_that_is_rewritten_in_place_is_current_even_where_nothing_new_is_kept() -> None:
    source, table = torch.ones(2), torch.zeros(2)
    kept = Refreshed(table, [version(source)])
    source.mul_(5)
    with no_caching():
        assert kept([version(source)], lambda: table.copy_(source)) is table
        assert kept([version(source)], lambda: torch.zeros(2)) is table, "it is up to date"


def test_a_work_table_is_made_each_time_and_used_if_there_is_one() -> None:
    q = torch.zeros(2, 4, 300, 64, dtype=torch.bfloat16)
    problem = Problem.of(q, q, q)
    causal = Program(mask=ca.mask(lambda b, h, q, kv: q >= kv).expr)
    tables = WorkTables(problem, causal.intervals, 128, 128, "longest_first")
    with no_caching():
        made = tables(NO_SEQUENCES)
        assert not tables.made
    kept = tables(NO_SEQUENCES)
    assert torch.equal(made, kept)
    with no_caching():
        assert tables(NO_SEQUENCES) is kept


def test_lists_of_tiles_are_made_each_time_and_used_if_there_are_some() -> None:
    seen = torch.rand(3, 3) < 0.5
    mask = ca.mask(lambda b, h, q, kv: seen[q // 128, kv // 128])
    lists = KeyLists(mask.expr, Extent(384, 384, 1, 1, torch.device("cpu")), (128, 128))
    with no_caching():
        made = lists.of_call()
        assert not lists._own.kept.value
    kept = lists.of_call()
    assert all(map(torch.equal, made, kept))
    with no_caching():
        assert lists.of_call() is kept
