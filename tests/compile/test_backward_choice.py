"""What tiling of Hopper's backward a call gets, at the sizes that were timed: nothing is compiled here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.analysis.program import Program
from composattn.backends.fused.planning.cut import Cut
from composattn.backends.fused.planning.plan_backward import BackwardPlan, SinkForm, plan_backward
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.hopper.backward_choice import FORMS, backward_facts, serves
from composattn.backends.hopper.backward_tiling import HopperBackwardTiling
from composattn.call.problem import DENSE, Layout, Problem
from composattn.mods import causal, document
from composattn.mods.dropout import Dropout
from composattn.mods.mask import Mask
from composattn.mods.score import Score
from tests.compile.test_backward import MODS, plans


def timed(
    mods: str, d: int, length: int, *, dv: int | None = None, in_order: bool = False
) -> BackwardPlan[HopperBackwardTiling]:
    """The main kernel's plan at the sizes of the benchmark: 16k tokens, or one sequence of more, hidden 2048."""
    score, mask = MODS[mods]
    program = Program(None if score is None else Score.of(score).expr, None if mask is None else Mask.of(mask).expr)
    batch, heads = max(1, 16384 // length), 2048 // d
    problem = Problem(batch, heads, heads, length, length, d, dv or d, torch.bfloat16, torch.device("cpu"))
    return plan_backward(problem, program, HOPPER, deterministic=in_order).main


FULL, CAUSAL = "plain-full", "plain-causal"


def test_at_timed_sizes_wide_heads_go_by_the_kernel_that_won() -> None:
    exchanged = "backward_exchange"
    assert {timed(m, 256, n).step for m in (FULL, CAUSAL) for n in (2048, 8192)} == {exchanged}
    assert {timed(m, 192, 8192, dv=dv).step for m in (FULL, CAUSAL) for dv in (128, 192)} == {exchanged}
    assert [timed(m, 192, 2048).step for m in (FULL, CAUSAL)] == [exchanged] * 2
    assert [timed(CAUSAL, 192, n, in_order=fixed).step for n, fixed in ((1024, False), (512, True))] == [
        exchanged,
        "backward_wide",
    ]
    assert {
        timed(m, d, 8192, dv=dv, in_order=True).step for m in (FULL, CAUSAL) for d, dv in ((256, 256), (192, 128))
    } == {exchanged}
    # dV a query tile later wants two stages of dO: 2 to 9 % at D 192, D 256 loses 2
    later = [timed(m, d, 8192, dv=dv).tiling.dv_later for m in (FULL, CAUSAL) for d, dv in ((192, 192), (192, 128))]
    assert all(later) and not timed(FULL, 256, 8192).tiling.dv_later


def test_at_timed_sizes_k_and_v_wait_in_registers_as_far_as_there_are_any() -> None:
    """1 to 4 %. Where products lack registers they wait for each other, which takes 1.3 times as long."""

    def resident(mods: str, d: int, length: int) -> tuple[int, int]:
        t = timed(mods, d, length).tiling
        return t.resident_v, t.resident_k

    assert {resident(m, 64, n) for m in (FULL, CAUSAL) for n in (1024, 8192, 32768)} == {(64, 0)}
    assert {resident(m, 96, n) for m in (FULL, CAUSAL) for n in (1024, 8192)} == {(96, 80)}
    assert {resident(m, 128, n) for m in (FULL, CAUSAL) for n in (2048, 8192, 32768)} == {(16, 0)}


def chosen(
    d: int, shape: tuple[int, int, int, int], mods: str = FULL, *, dv: int | None = None
) -> HopperBackwardTiling:
    """The tiling of (heads, key/value heads, queries, keys)."""
    score, mask = MODS[mods]
    program = Program(None if score is None else Score.of(score).expr, None if mask is None else Mask.of(mask).expr)
    problem = Problem(2, *shape, d, dv or d, torch.bfloat16, torch.device("cpu"))
    return plan_backward(problem, program, HOPPER).main.tiling


def test_a_call_of_few_keys_has_a_block_a_tile() -> None:
    """7,800 queries on 512 keys of D 128 take 0.84 of the time. Blocks of up to three tiles of keys of D 64 stay."""
    few = [chosen(d, (8, 8, q, kv)) for d, q, kv in ((128, 7800, 512), (64, 8192, 900))]
    claiming = [chosen(64, (8, 8, q, kv)) for q, kv in ((4096, 77), (1024, 128), (100, 100), (2048, 256), (2048, 384))]
    more = [chosen(d, (8, 8, q, kv)) for d, q, kv in ((64, 2048, 600), (64, 300, 300), (128, 7800, 7800))]
    assert not any(t.persistent or t.clears for t in few) and all(t.persistent and t.clears for t in more)
    assert all(t.persistent for t in claiming)
    assert [t.dq_begins for t in claiming] == ["only", "only", "only", "claim", "claim"]


def test_tiles_of_128_queries_have_few_rows_in_vain_and_no_short_lines_behind_scores() -> None:
    """Tiles of 64 take 0.77 to 0.81 of the time of 137 to 178 queries, 0.93 of 553, 0.94 to 0.97 of short ALiBi."""
    rows = {
        q: chosen(64, (8, 1, q, q), CAUSAL).tile_m for q in (137, 143, 178, 204, 384, 448, 512, 553, 577, 1003, 1412)
    }
    assert {q for q, m in rows.items() if m == 64} == {137, 143, 178, 448, 553}
    assert [chosen(64, (16, 16, n, n), "alibi-causal").tile_m for n in (1024, 2048, 8192)] == [64, 64, 128]
    assert chosen(64, (16, 16, 1024, 1024), "softcap-causal").tile_m == 128


def test_pairs_stay_up_to_four_thousand_tokens_where_nothing_spills() -> None:
    """They take 0.90 to 0.97 of the time of a block a tile, and 0.86 to 0.94 of one block with 64 keys."""
    dims = (160, 160), (192, 192), (192, 128), (256, 256)
    stay = {
        (d, m): timed(m, d, n, dv=dv).tiling.persistent for d, dv in dims for m in (FULL, CAUSAL) for n in (512, 4096)
    }
    assert [of for of, stays in stay.items() if not stays] == [(256, FULL)]
    assert not any(timed(CAUSAL, d, 8192).tiling.persistent for d in (192, 256))
    assert not timed("softcap-causal", 192, 512).tiling.persistent
    assert not timed(CAUSAL, 192, 512, in_order=True).tiling.persistent


def test_pairs_exchange_gradients_whatever_mods_there_are_where_nothing_spills() -> None:
    short, grouped = (8, 8, 406, 406), (8, 1, 406, 406)
    exchange = "backward_exchange"
    assert {chosen(d, grouped, m).kernel for d in (160, 192, 256) for m in (CAUSAL, "relative-full")} == {exchange}
    assert {chosen(d, short, m).kernel for d in (160, 192, 256) for m in (FULL, "relative-full")} == {exchange}
    assert {chosen(d, short, CAUSAL).kernel for d in (160, 192)} == {exchange}
    assert {chosen(192, short, m, dv=128).kernel for m in (FULL, CAUSAL, "document", "grid")} == {exchange}
    assert [chosen(d, grouped, "grid").kernel for d in (192, 256)] == [exchange, "backward_wide"]
    assert {chosen(d, grouped, "document").kernel for d in (192, 256)} == {exchange}
    dropout = Dropout.with_seed(0.1, 5)
    assert dropout is not None
    steps = []
    for d in (160, 192, 256):
        problem = Problem(2, *grouped, d, d, torch.bfloat16, torch.device("cpu"))
        steps.append(plan_backward(problem, Program(None, None, keep=dropout.expr), HOPPER).main.step)
    assert steps == [exchange, exchange, "backward_wide"]


def test_parts_of_dq_that_pairs_add_one_after_the_other() -> None:
    """7 % at 192/128, 6 to 8 % at D 192."""
    parts = {(d, dv): timed(FULL, d, 8192, dv=dv).tiling.part_columns for d, dv in ((192, 128), (192, 192), (256, 256))}
    assert parts == {(192, 128): 48, (192, 192): 48, (256, 256): 64}


def test_at_timed_sizes_the_rest_of_a_last_round_is_cut() -> None:
    """1 to 5 %; nobody adds in pieces where a fixed order is asked for, or tiles differ."""
    cut = {64: (2048, 8192, 32768), 96: (2048, 8192), 128: (32768,), 192: (2048, 8192)}
    assert all(timed(FULL, d, n).cut is not None for d, lengths in cut.items() for n in lengths)
    assert all(timed(FULL, d, n, in_order=True).cut is None for d, lengths in cut.items() for n in lengths)
    assert all(timed(CAUSAL, d, n).cut is None for d, lengths in cut.items() for n in lengths)
    assert [timed(FULL, 64, n).cut for n in (2048, 8192)] == [Cut(4096, 4092, 5), Cut(4096, 4092, 16)]


@pytest.mark.parametrize(
    ("batch", "heads", "length", "cut"),
    [(2, 16, 1280, Cut(320, 264, 2)), (5, 16, 1100, Cut(720, 660, 2)), (4, 12, 1024, None)],
)
def test_a_last_round_of_tiles_of_128_queries_is_cut_as_if_they_had_64(
    batch: int, heads: int, length: int, cut: Cut | None
) -> None:
    """1,280: 0.93 of the time, 1,100 0.98; of 384 tiles, nearly three rounds, none is cut."""
    problem = Problem(batch, heads, heads, length, length, 64, 64, torch.bfloat16, torch.device("cpu"))
    main = plan_backward(problem, Program(None, None), HOPPER).main
    assert (main.tiling.tile_m, main.cut) == (128, cut)


def test_at_timed_sizes_fixed_orders_stay_where_they_gain() -> None:
    stay = [
        (d, n) for d in (64, 96, 128) for n in (1024, 2048, 8192) if timed(FULL, d, n, in_order=True).tiling.persistent
    ]
    assert stay == [(64, 1024), (64, 2048), (96, 1024), (96, 2048), (96, 8192)]
    for d, n in stay:
        t = timed(CAUSAL, d, n, in_order=True).tiling
        assert (*t.registers, t.tries_first) == (232, 40, True)  # 18 spills with 32


def test_at_timed_sizes_blocks_leave_where_a_head_has_more_tiles_than_run_at_once() -> None:
    """1 to 3 % of D 128, 1 to 2 of full calls of D 64; causal ones of D 64 lose 2, and all of 16k up to 3."""
    rows = [(m, d, n) for m in (FULL, CAUSAL) for d in (64, 128) for n in (16384, 32768)]
    tilings = {row: timed(*row).tiling for row in rows}
    leave = [row for row, t in tilings.items() if not t.persistent]
    assert leave == [(FULL, 64, 32768), (FULL, 128, 32768), (CAUSAL, 128, 32768)]
    assert all(t.clears for t in tilings.values())


def test_sections_are_of_few_groups_whose_queries_fill_l2() -> None:
    """32 heads on 4 read 8 times what they had to from memory; in a fixed order one group at a time is 1.24 as fast."""

    def together(
        heads: int,
        length: int,
        deterministic: bool = False,
        asked: int | None = None,
        kv_heads: int = 4,
        batch: int = 2,
    ) -> int | None:
        problem = Problem(batch, heads, kv_heads, length, length, 128, 128, torch.bfloat16, torch.device("cpu"))
        problem = dataclasses.replace(problem, schedule=ca.Schedule(heads_together=asked))
        return plan_backward(
            problem, Program(None, None), HOPPER, deterministic=deterministic
        ).main.tiling.heads_together

    assert together(32, 8192) == 2 and together(32, 16384) == 1 and together(32, 8192, deterministic=True) == 1
    assert together(32, 8192, asked=3) == 3
    # tiles that are equally long go in step: three heads of 33 MB are 3 % faster than one
    assert together(32, 8192, deterministic=True, kv_heads=8) is None
    assert together(32, 2048) is None and together(4, 65536) is None


def test_many_heads_of_a_group_are_cut_in_pieces_where_tiles_differ() -> None:
    """64 heads on 8 gain 10 % at 4k, 16 on one document mask 14 %; pieces of one tile run in sections of two rounds."""

    below = causal()

    def found(
        batch: int, length: int, heads: int, kv_heads: int, mask: Any = below, d: int = 128, packed: int = 0
    ) -> tuple[int, int | None]:
        layout = Layout("packed", "packed") if packed else DENSE
        total = length * (batch if packed else 1)
        sizes = (packed or batch, heads, kv_heads, total, total, d, d, torch.bfloat16, torch.device("cpu"))
        program = Program(None, None if mask is None else mask.expr)
        main = plan_backward(Problem(*sizes, layout=layout), program, HOPPER).main
        assert (main.tiling.heads_a_piece > 0) is (main.cut is not None and main.cut.tiles is None)
        return main.tiling.heads_a_piece, main.tiling.heads_together

    # four heads a piece, three of six; two where four leave too few pieces
    assert [found(2, 8192, *heads) for heads in ((32, 4), (24, 3), (24, 4), (28, 4))] == [
        (4, 2),
        (4, 2),
        (3, 2),
        (2, 1),
    ]
    assert [found(1, 4096, *heads) for heads in ((64, 8), (16, 2))] == [(4, 4), (2, 2)]
    assert found(1, 32768, 64, 8) == (4, 1) == found(2, 8192, 32, 1)
    # no fewer heads, no narrow ones, no equal tiles
    assert all(found(2, 8192, *shape)[0] == 0 for shape in ((32, 8), (64, 8, below, 64), (32, 4, None)))
    # documents: eight pieces or heads are at one of them, whose tiles are few
    ids = document(torch.arange(8192) // 1000)
    assert [found(2, 8192, *heads, below & ids) for heads in ((64, 8), (32, 8), (16, 2))] == [(4, 4), (0, 8), (2, 2)]
    assert [found(2, 8192, *heads, packed=16) for heads in ((64, 8), (32, 8), (16, 2))] == [(4, 4), (0, 8), (2, 2)]
    assert found(2, 8192, 64, 8, ids) == (0, 2) and found(2, 8192, 64, 8, packed=2) == (4, 2)


@pytest.mark.parametrize(
    ("mods", "length", "claimed"),
    [
        ("plain-full", 512, True),
        ("plain-full", 1024, True),
        ("plain-full", 2048, False),
        ("plain-causal", 1024, True),
        ("plain-causal", 2048, True),
        ("plain-causal", 8192, False),
        ("plain-causal", 16384, False),
        ("plain-causal", 32768, False),
        ("keys-ahead", 2048, True),
        ("alibi-causal", 2048, False),
    ],
)
def test_who_comes_first_writes_dq_where_that_is_faster(mods: str, length: int, claimed: bool) -> None:
    tiling = plans(mods, 128, length=length).main.tiling
    assert (tiling.claimed_parts > 0, tiling.clears) == (claimed, not claimed)
    assert not tiling.tries_first
    assert not plans(mods, 128, length=length, deterministic=True).main.tiling.claimed_parts


@pytest.mark.parametrize(
    ("mask", "queries", "keys", "seen"),
    [
        (lambda b, h, q, kv: (q >= kv) & (q - kv < 256), 700, 700, True),
        (lambda b, h, q, kv: (q >= kv) & (q - kv < 256), 700, 300, False),
        (lambda b, h, q, kv: (q - kv >= 200) & (q - kv < 456), 700, 700, False),
        (lambda b, h, q, kv: (kv - q >= 100) & (kv - q < 300), 700, 700, False),
    ],
    ids=["window", "rows-without-a-key", "first-rows-see-none", "last-rows-see-none"],
)
def test_dq_is_claimed_where_each_query_tile_is_visited(
    mask: Callable[..., Any], queries: int, keys: int, seen: bool
) -> None:
    """Nobody would write the others: no form that claims can cut such a call, whatever was tuned."""
    call = (
        Problem(20, 16, 16, queries, keys, 128, 128, torch.bfloat16, torch.device("cpu")),
        Program(None, Mask.of(mask).expr),
        HOPPER,
    )
    claiming = [form for form in FORMS if "dQ claim" in form and serves(form, backward_facts(*call, False))]
    assert bool(claiming) == seen == (plan_backward(*call).main.tiling.claimed_parts > 0)


@pytest.mark.parametrize(("queries", "stays"), [(4096, False), (1024, False), (512, True)])
def test_queries_on_few_keys_claim_dq_at_d_72(queries: int, stays: bool) -> None:
    problem = Problem(19, 16, 16, queries, 300, 72, 72, torch.bfloat16, torch.device("cpu"))
    tiling = plan_backward(problem, Program(None, None), HOPPER).main.tiling
    assert tiling.claimed_parts > 0 and tiling.persistent == stays


@pytest.mark.parametrize(("queries", "keys", "d"), [(128, 128, 128), (77, 77, 96), (4096, 77, 64), (3000, 100, 128)])
def test_the_only_tile_of_keys_finishes_dq(queries: int, keys: int, d: int) -> None:
    """Not where gradients of sinks wait for a postprocess, nor where a head has another tile."""
    problem, program = Problem(40, 8, 4, queries, keys, d, d, torch.bfloat16, torch.device("cpu")), Program(None, None)
    alone = plan_backward(problem, program, HOPPER)
    assert alone.main.tiling.finishes_dq and alone.postprocess is None
    with_sinks = plan_backward(problem, program, HOPPER, sinks=SinkForm(torch.float32, by_sequence=False))
    beside = plan_backward(dataclasses.replace(problem, kv_len=keys + 128), program, HOPPER)
    for plans_of_both in (with_sinks, beside):
        assert not plans_of_both.main.tiling.finishes_dq and plans_of_both.postprocess is not None


@pytest.mark.parametrize(("batch", "length", "pieces"), [(107, 600, 1), (107, 1024, 4), (3, 600, 3)])
def test_heads_of_a_group_are_summed_by_one_block_where_short_sequences_are_many(
    batch: int, length: int, pieces: int
) -> None:
    problem = Problem(batch, 28, 4, length, length, 128, 128, torch.bfloat16, torch.device("cpu"))
    tiling = plan_backward(problem, Program(None, causal().expr), HOPPER).main.tiling
    assert -(-7 // (tiling.heads_a_piece or 7)) == pieces
