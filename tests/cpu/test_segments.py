"""Segments of rows that see only each other: found by contents alone, and tiles of them that cover each row once."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from composattn.analysis.derived import refresh
from composattn.analysis.program import Program
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.planning.plan_backward import SinkForm, plan_backward
from composattn.backends.fused.tiles import segments
from composattn.backends.fused.tiles.segments import SHORT, Segments, most_segments, runs, segments_of
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.fused.tiles.work import segment_tables
from composattn.call.problem import Problem
from composattn.call.schedule import Schedule
from composattn.call.sequences import NO_SEQUENCES
from composattn.mods import causal, document, sliding_window
from composattn.mods.dropout import Dropout
from composattn.mods.mask import Mask
from composattn.mods.score import Score

ROWS = 597


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of some hundred rows have segments too."""
    monkeypatch.setattr(segments, "LONG", 256)
    monkeypatch.setattr(segments, "MANY", 256)


def documents(*lengths: int) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def problem(length: int = ROWS, batch: int = 2, kv_length: int | None = None) -> Problem:
    kv_len, cpu = kv_length or length, torch.device("cpu")
    return Problem(batch, 16, 8, length, kv_len, 128, 128, torch.bfloat16, cpu)


def found(mask: Mask, length: int = ROWS, **how: int) -> Segments | None:
    return segments_of(problem(length, **how), Program(None, mask.expr))


def segments_in(visible: torch.Tensor) -> list[tuple[int, int]]:
    """The segments of a mask (S, S), by where the keys of each row begin and end."""
    n = len(visible)
    some = visible.any(1)
    begin = torch.where(some, visible.int().argmax(1), n + 3)
    end = torch.where(some, n - visible.flip(1).int().argmax(1), 0)
    return [(a, b) for a, b in runs(begin[None], end[None])[0].tolist() if b > a]


def test_documents_are_told_apart_and_short_ones_share_tiles_with_what_follows() -> None:
    ids = documents(150, 1, 1, 199, 40, 206)
    same = ids[:, None] == ids
    apart = [(0, 150), (150, 351), (351, 597)]
    assert segments_in(same) == segments_in(same.tril()) == segments_in(same.triu()) == apart
    hidden = torch.arange(ROWS) % 5 == 0
    assert segments_in(same & ~hidden[:, None]) == apart


def test_what_any_row_sees_across_a_place_joins_both_sides() -> None:
    same = documents(200, 200, 197)
    visible = same[:, None] == same
    assert segments_in(visible) == [(0, 200), (200, 400), (400, 597)]
    visible[450, 10] = True  # a row behind sees a key before
    assert segments_in(visible) == [(0, 597)]
    visible[450, 10], visible[10, 300] = False, True  # a row before sees a key behind
    assert segments_in(visible) == [(0, 400), (400, 597)]
    again = documents(200, 200, 197) % 2
    assert segments_in(again[:, None] == again) == [(0, 597)]


def test_of_too_many_as_many_have_several_documents_as_leaves_the_most() -> None:
    most = most_segments(2000)
    assert most == 8
    for count in (8, 9, 12, 15):
        ids = torch.arange(2000) * count // 2000
        found = segments_in((ids[:, None] == ids).tril())
        assert len(found) == 8 and max(b - a for a, b in found) <= -(-count // 8) * -(-2000 // count)


@pytest.mark.parametrize("short", [1, SHORT - 1])
def test_rows_behind_as_many_segments_as_there_may_be_are_not_lost(short: int) -> None:
    """A last document that is too short to begin a segment belongs to the one before."""
    ids = documents(*[200] * most_segments(1600), short)
    assert segments_in(ids[:, None] == ids) == [(at, at + 200) for at in range(0, 1400, 200)] + [(1400, 1600 + short)]
    assert segments_in(documents(590, 7)[:, None] == documents(590, 7)) == [(0, 597)]


@st.composite
def ends(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the keys of each row begin and end: of documents, torn ones, rows that see nothing, and ends anywhere."""
    lengths = draw(st.lists(st.sampled_from([1, 2, 7, 60, 127, 128, 129, 200, 256, 300]), min_size=1, max_size=14))
    ids = documents(*lengths)
    n, generator = len(ids), torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    ids = ids.roll(draw(st.sampled_from([0, 0, 5, 150])))
    same = ids[:, None] == ids
    begin, end = same.int().argmax(1), n - same.flip(1).int().argmax(1)

    def some() -> torch.Tensor:
        share = draw(st.sampled_from([0.0, 0.003, 0.3]))
        return torch.rand(n, generator=generator) < share

    empty, anywhere = some(), some()
    far = torch.randint(-2 * n, 3 * n, (2, n), generator=generator)
    begin = torch.where(empty, begin.max() + 3, torch.where(anywhere, far[0], begin))
    end = torch.where(empty, begin - 5, torch.where(anywhere, far[1], end))
    if draw(st.booleans()):
        end = torch.where(some(), end + 3 * n, end)
    return begin, end


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ends(), ends())
def test_segments_have_each_row_once_and_all_its_keys(one: tuple, other: tuple) -> None:
    """Sequences of a batch have segments of their own, and the ends of a segment are no closer than `SHORT`."""
    n = min(len(one[0]), len(other[0]))
    begin, end = (torch.stack([x[:n], y[:n]]) for x, y in zip(one, other, strict=True))
    for b, segments_here in enumerate(runs(begin, end).tolist()):
        assert len(segments_here) == most_segments(n)
        some = [(start, stop) for start, stop in segments_here if stop > start]
        assert some == [(start, stop) for start, stop in segments_here if (start, stop) != (n, n)]
        assert [start for start, _ in some] == [0, *(stop for _, stop in some[:-1])] and some[-1][1] == n
        assert len(some) == 1 or min(stop - start for start, stop in some) >= SHORT
        for start, stop in some:
            low, high = begin[b, start:stop].clamp(min=0), end[b, start:stop].clamp(max=n)
            sees = low < high
            assert bool(((low >= start) & (high <= stop) | ~sees).all())


@pytest.mark.parametrize("bounded", [False, True])
def test_tiles_cover_each_row_once_whatever_is_written_to_the_ids(bounded: bool) -> None:
    """The tables are made by operations that are recorded in the second run, and repeated from the third on."""
    contents = [
        documents(150, 1, 1, 199, 40, 206), documents(300, 297), documents(597), torch.arange(ROWS),
        documents(200, 200, 197).roll(50), documents(128, 128, 128, 213), documents(590, 7),
        documents(*[66] * 9, 3), documents(1, 596), documents(469, 128), documents(470, 127),
    ]  # fmt: skip
    ids = torch.stack(contents[:2])
    program = Program(None, (causal() & document(ids) if bounded else document(ids)).expr)
    of_call = segments_of(problem(), program)
    assert of_call is not None
    tables = [segment_tables(problem(), 128, "longest_first", of_call, of_keys) for of_keys in (False, True)]
    tables.append(segment_tables(problem(), 64, "in_order", of_call, False))
    for first, second in zip(contents, contents[3:] + contents[:3], strict=True):
        ids.copy_(torch.stack([first, second]))
        refresh(program.captures)
        meant = []
        for table, tile in zip(tables, (128, 128, 64), strict=True):
            times = torch.zeros(2, ROWS, dtype=torch.int32)
            found = [entry for entry in table(NO_SEQUENCES).tolist() if entry[0] >= 0]
            for b, m, start, stop, *_ in found:
                assert start + m * tile < stop
                times[b, start + m * tile : min(start + (m + 1) * tile, stop)] += 1
            assert bool((times == 1).all())
            meant.append({(b, start, stop) for b, _, start, stop, *_ in found})
        assert meant[0] == meant[1] == meant[2], "tables of other contents"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ends(), st.sampled_from([64, 96, 128]))
def test_tiles_cover_each_row_once_wherever_keys_begin_and_end(of_rows: tuple, tile: int) -> None:
    begin, end = of_rows
    n = len(begin)
    assume(n >= segments.LONG)
    of_call = found(Mask.of(lambda b, h, q, kv: (kv >= begin[q]) & (kv < end[q])), n)
    assert of_call is not None
    check_covered(of_call, n, tile)


def test_there_are_entries_for_as_many_tiles_as_there_can_be() -> None:
    """Each segment has one row in its last tile."""
    for tile in (64, 96, 128):
        of_call = found(document(documents(*[2 * tile + 1] * 8)), 8 * (2 * tile + 1))
        assert of_call is not None
        assert int((check_covered(of_call, 8 * (2 * tile + 1), tile)[:, 0] < 0).sum()) == 0


def check_covered(of_call: Segments, n: int, tile: int) -> torch.Tensor:
    """Checks the table of two sequences and returns it."""
    table = of_call.tiles(tile).tensor
    times = torch.zeros(2, n, dtype=torch.int32)
    for b, m, start, stop, *_ in (entry for entry in table.tolist() if entry[0] >= 0):
        times[b, start + m * tile : min(start + (m + 1) * tile, stop)] += 1
    assert bool((times == 1).all())
    return table


@pytest.mark.parametrize(
    "ids",
    [
        documents(150, 1, 1, 199, 40, 206), documents(300, 297), documents(200, 200, 197).roll(50), documents(597),
        documents(*[66] * 9, 3), torch.arange(ROWS) % 3, torch.stack([documents(300, 297), documents(200, 397)]),
    ],
    ids=["short", "two", "again", "one", "many", "anyhow", "by-sequence"],
)  # fmt: skip
def test_a_table_tells_which_queries_the_keys_of_a_tile_see(ids: torch.Tensor) -> None:
    """It agrees with each pair, and has what tensors say of all keys of a tile, where they say the same."""
    mask = causal() & document(ids)
    of_call = found(mask)
    assert of_call is not None and len(of_call.reads) == 2
    for b, m, start, stop, _, _, *numbers in of_call.tiles_of_keys(128).tensor.tolist():
        if b < 0:
            continue
        q, kv = torch.arange(ROWS)[:, None], torch.arange(ROWS)
        of = ids if ids.ndim == 1 else ids[b]
        visible = (q >= kv) & (of[q] == of[kv])
        first = start + m * 128
        begin, end, full_begin, full_end, agree, *said = numbers
        keys = slice(first, min(first + 128, stop))
        seen = visible[:, keys].any(1).nonzero()
        assert (begin, end) == (int(seen.min()), int(seen.max()) + 1) if len(seen) else begin >= end
        assert len(seen) == 0 or bool(visible[max(full_begin, 0) : max(full_end, 0), keys].all())
        if agree:
            key = torch.arange(first, min(first + 128, stop))
            assert torch.equal(visible[:, key], (q >= key) & (q >= said[0]) & (q < said[1]))
        lie_together = len(torch.unique_consecutive(of)) == len(of.unique())
        of_one = len(of[first : min(first + 128, stop)].unique()) == 1
        assert bool(agree) == (lie_together and of_one)


def test_the_tiles_that_see_most_come_first() -> None:
    ids = documents(150, 300, 147)
    of_call = found(document(ids), batch=1)
    assert of_call is not None
    table = segment_tables(problem(batch=1), 128, "longest_first", of_call, False)(NO_SEQUENCES)
    assert [row[2] for row in table.tolist() if row[0] >= 0] == [150, 150, 150, 0, 0, 450, 450]
    assert bool((table[7:, 0] == -1).all())


def test_in_a_fixed_order_the_tiles_of_a_segment_lie_in_a_row_the_last_one_first() -> None:
    """A tile that is n tiles behind another lies n entries before it; longest segments first."""
    ids = torch.stack([documents(150, 300, 147), documents(300, 147, 150)])
    of_call = found(document(ids))
    assert of_call is not None
    table = segment_tables(problem(), 128, "last_keys_first", of_call, True)(NO_SEQUENCES)
    there = [tuple(row[:3]) for row in table.tolist() if row[0] >= 0]
    assert [m for _, m, _ in there] == [2, 1, 0, 2, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert [(b, start) for b, m, start in there if m == 0] == [(1, 0), (0, 150), (1, 447), (0, 0), (1, 300), (0, 450)]
    assert bool((table[len(there) :, 0] == -1).all()) and sorted(there) == sorted(
        tuple(row[:3]) for row in of_call.tiles(128).tensor.tolist() if row[0] >= 0
    )


def test_masks_that_no_tensor_tells_have_none() -> None:
    ids = documents(300, 297)
    assert found(document(ids) & sliding_window(100)) is not None
    assert found(causal()) is None and found(sliding_window(100)) is None
    assert found(document(ids), kv_length=ROWS + 1) is None
    heads = torch.stack([ids, ids.roll(5)] * 8)
    assert found(Mask.of(lambda b, h, q, kv: heads[h, q] == heads[h, kv])) is None


def test_backward_plans_of_long_documents_say_so_where_nothing_else_takes_registers() -> None:
    ids = torch.repeat_interleave(torch.arange(6), torch.tensor([700, 1500, 300, 2500, 1192, 2000]))
    long, masks = problem(8192), (document(ids), causal() & document(ids))
    for mask, in_order in itertools.product(masks, (False, True)):
        plans = plan_backward(long, Program(None, mask.expr), HOPPER, deterministic=in_order)
        steps = plans.preprocess, plans.main, plans.postprocess
        assert all(plan.has_segments and plan.has_order_table for plan in steps) and plans.main.cut is None
        assert all("has_segments=True" in plan.key for plan in steps)
        assert "tiles begin where the mask falls apart" in str(plans)
    bounded = masks[1].expr
    kept = Dropout.with_seed(0.1, 5)
    assert kept is not None
    capped = Score.of(lambda s, b, h, q, kv: 5.0 * torch.tanh(s / 5.0)).expr
    for program in (Program(capped, bounded), Program(None, bounded, keep=kept.expr), Program(None, causal().expr)):
        assert not plan_backward(long, program, HOPPER).main.has_segments
    limit = torch.tensor([8000, 5000])
    padded = Program(None, Mask.of(lambda b, h, q, kv: kv < limit[b]).expr)
    assert not plan_backward(long, padded, HOPPER).main.has_segments
    of_each = SinkForm(torch.float32, by_sequence=True)
    assert not plan_backward(long, Program(None, bounded), HOPPER, sinks=of_each).main.has_segments
    torn = Program(None, document(ids.roll(5)).expr)  # by lists, whose tests have no registers for tall tiles and turns
    narrow = dataclasses.replace(long, head_dim=64, head_dim_v=64)
    in_turn = plan_backward(narrow, torn, HOPPER, deterministic=True).main
    assert in_turn.lists is not None and not in_turn.has_segments and in_turn.tiling.tile_m == 64
    for dim, dim_v in ((32, 32), (64, 64), (96, 96), (128, 64), (64, 128), (192, 192)):
        other = dataclasses.replace(long, head_dim=dim, head_dim_v=dim_v)
        for mask, in_order in itertools.product(masks, (False, True)):
            main = plan_backward(other, Program(None, mask.expr), HOPPER, deterministic=in_order).main
            assert main.has_segments == (main.metadata is not None) == (dim == dim_v <= 128)


def test_sixteen_query_heads_are_at_a_document_in_a_fixed_order() -> None:
    ids = torch.repeat_interleave(torch.arange(6), torch.tensor([700, 1500, 300, 2500, 1192, 2000]))
    full, bounded = document(ids), causal() & document(ids)
    wanted = {(16, 16): (0, 16), (32, 8): (0, 4), (64, 8): (2, 2), (16, 2): (2, 2), (8, 4): (0, 8)}
    for (heads, kv_heads), (piece, together) in wanted.items():
        of = dataclasses.replace(problem(8192), q_heads=heads, kv_heads=kv_heads)
        chosen = plan_backward(of, Program(None, bounded.expr), HOPPER, deterministic=True).main.tiling
        assert (chosen.heads_a_piece, chosen.heads_together) == (piece, together)
        assert chosen.persistent and chosen.tile_m == 64
        chosen = plan_backward(of, Program(None, full.expr), HOPPER, deterministic=True).main.tiling
        assert (chosen.heads_a_piece, chosen.heads_together, chosen.persistent) == (0, 16, False)


def test_plans_of_long_documents_say_so_and_their_kernels_are_others() -> None:
    ids = torch.repeat_interleave(torch.arange(6), torch.tensor([700, 1500, 300, 2500, 1192, 2000]))
    program, long = Program(None, (causal() & document(ids)).expr), problem(8192)
    plan = plan_forward(long, program, HOPPER)
    assert plan.has_segments and "has_segments=True" in plan.key
    assert "tiles begin where the mask falls apart" in str(plan)
    full = plan_forward(long, Program(None, document(ids).expr), HOPPER)
    assert full.has_segments and full.tiling.persistent and full.tiling.tile_n == 128
    listed = Program(None, document(ids.roll(5)).expr)  # matching values lie apart: lists of tiles
    assert not plan_forward(long, listed, HOPPER).has_segments


def test_forwards_of_all_sizes_of_tiles_begin_with_documents() -> None:
    """No tiles with a score mod or dropout do: reads in pairs and words of dropout go by tiles of the sequence."""
    ids = documents(700, 300, 500, 548)
    masks = document(ids).expr, (causal() & document(ids)).expr
    for dim, mask in itertools.product((64, 96, 128, 192), masks):
        apart = Schedule(pack_gqa=False)  # grouped heads of more than 128 columns share tiles of documents else
        batch = dataclasses.replace(problem(2048, batch=8), head_dim=dim, head_dim_v=dim, schedule=apart)
        plan = plan_forward(batch, Program(None, mask), HOPPER)
        assert plan.has_segments and plan.tiling.in_segments
        kept = Dropout.with_seed(0.1, 5)
        assert kept is not None
        capped = Score.of(lambda s, b, h, q, kv: 5.0 * torch.tanh(s / 5.0)).expr
        for program in (Program(capped, mask), Program(None, mask, keep=kept.expr)):
            assert not plan_forward(batch, program, HOPPER).has_segments


def test_other_sequences_of_a_batch_have_no_say_in_batch_invariant_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MANY", 4097)
    for batch, length, apart in ((8, 2048, False), (1, 8192, True)):
        program = Program(None, document(torch.arange(length) // 500).expr)
        of = dataclasses.replace(problem(length, batch), schedule=Schedule(batch_invariant=True))
        assert not plan_forward(of, program, HOPPER).has_segments
        assert plan_backward(of, program, HOPPER).main.has_segments == apart


def test_few_rows_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is derived for each new mask costs more than it gains."""
    monkeypatch.undo()
    of_documents = document(documents(600, 597, 851))
    assert found(of_documents, 2048, batch=2) is None and found(of_documents, 2048, batch=3) is not None
    assert found(document(documents(300, 297, 427)), 1024, batch=32) is None
