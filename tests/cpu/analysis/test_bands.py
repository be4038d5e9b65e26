"""Bands against the dense mask: sound for random masks, sharp for the ready ones."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch

import composattn as ca
from composattn.analysis import matches
from composattn.analysis.bands import EVERYTHING, NOTHING, TileInterval, row_limits, tile_intervals, transposed
from composattn.analysis.dense import dense
from composattn.analysis.derived import Derived, derive, refresh
from composattn.analysis.program import Program
from composattn.graph.content import content
from composattn.graph.evaluate import Env, evaluate_all
from composattn.graph.expr import Capture, DType, Expr, captures, const
from composattn.mods import masks
from tests.cpu.analysis.random_masks import RandomMask
from tests.dense_tiles import tiles_of
from tests.support import count_calls


def ends(
    intervals: tuple[TileInterval, ...],
    rows: int,
    columns: int,
    tile: int,
    batch: int,
    heads: int,
    mirrored: bool = False,
) -> torch.Tensor:
    """int64 (interval, 4, B, H, tile): the ends at every tile of `tile` rows."""
    first = torch.arange(0, rows, tile)
    index = {
        "b": torch.arange(batch).view(-1, 1, 1), "h": torch.arange(heads).view(-1, 1), "first": first,
        "last": (first + tile - 1).clamp(max=rows - 1), "q_len": torch.tensor(columns if mirrored else rows),
        "kv_len": torch.tensor(rows if mirrored else columns),
    }  # fmt: skip
    exprs = [e for i in intervals for e in (i.begin, i.end, i.full_begin, i.full_end)]
    assert all(e.dtype is DType.INT32 for e in exprs)
    values = [v.expand(batch, heads, len(first)) for v in evaluate_all(exprs, Env(index))]
    return torch.stack(values).unflatten(0, (-1, 4)).to(torch.int64)


def check(visible: torch.Tensor, found: torch.Tensor, tile: int) -> None:
    """Every visible kv of a tile is inside; every kv of a full range is visible from all rows; both ends ascend."""
    rows, columns = visible.shape[-2:]
    tiles = -(-rows // tile)
    padded = torch.nn.functional.pad(visible, (0, 0, 0, tiles * tile - rows))
    some = padded.unflatten(2, (tiles, tile)).any(3)
    hidden = torch.nn.functional.pad(~visible, (0, 0, 0, tiles * tile - rows)).unflatten(2, (tiles, tile)).any(3)
    kv = torch.arange(columns)
    begin, end, full_begin, full_end = found.unsqueeze(-1).unbind(1)
    inside = ((begin <= kv) & (kv < end)).any(0)
    assert not (some & ~inside).any(), "a visible position is not visited"
    full = ((full_begin <= kv) & (kv < full_end)).any(0)
    assert not (hidden & full).any(), "a hidden position is not tested"
    clamped = found[:, :2].clamp(0, columns)
    assert (clamped[1:] >= clamped[:-1]).all(), "the intervals do not ascend"


def both_ways(expr: Expr, q_len: int, kv_len: int, tile: tuple[int, int], batch: int, heads: int) -> None:
    visible = dense(expr, q_len, kv_len, batch, heads).expand(batch, heads, q_len, kv_len)
    check(visible, ends(tile_intervals(expr), q_len, kv_len, tile[0], batch, heads), tile[0])
    mirrored = ends(transposed(expr)[0], kv_len, q_len, tile[1], batch, heads, True)
    check(visible.mT, mirrored, tile[1])


@pytest.mark.parametrize("part", [pytest.param(n, marks=[pytest.mark.slow] if n >= 12 else []) for n in range(20)])
def test_random_masks_are_never_cut_short(part: int) -> None:
    start = int(os.environ["COMPOSATTN_TEST_SEED"]) * 100_000 + part * 1000
    for seed in range(start, start + 200):  # 11 ms each
        mask = RandomMask(seed)
        try:
            both_ways(mask.expr, mask.q_len, mask.kv_len, mask.tile, mask.batch, mask.heads)
        except BaseException as error:
            raise AssertionError(f"RandomMask({seed}): {mask.expr}, {tile_intervals(mask.expr)}") from error


def test_a_condition_on_rows_is_asked_of_the_tile_where_all_its_rows_give_one_value() -> None:
    even = ca.mask(lambda b, h, q, kv: ((q - q % 2).clamp(max=0) >= h) & (q >= kv))  # 0 in every row
    both_ways(even.expr, 40, 40, (8, 8), 1, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(20))
def test_many_random_masks_are_never_cut_short(part: int) -> None:
    start = int(os.environ["COMPOSATTN_TEST_SEED"]) * 1_000_000 + part * 50_000
    for seed in range(start, start + 10_000):
        mask = RandomMask(seed, depth=4)
        both_ways(mask.expr, mask.q_len, mask.kv_len, mask.tile, mask.batch, mask.heads)


# --- sharp: what is visited and what is tested, for the ready masks ---------------------------------------------

IDS = torch.tensor([0] * 50 + [1] * 9 + [2] * 100 + [3] * 41)
FALLING = IDS.flip(0)
OFFSETS = torch.tensor([0, 50, 59, 159, 200])
STARTS, ENDS = (OFFSETS[n : n + 4].repeat_interleave(OFFSETS.diff()) for n in (0, 1))
LENGTHS = torch.tensor([5, 77])
WIDTHS = torch.tensor([3, 50])

SHARP = {
    "causal": masks.causal(),
    "causal_bottom_right": masks.causal("bottom_right"),
    "window_left": masks.sliding_window(30),
    "window_both": masks.sliding_window((10, 20)),
    "window_causal_bottom_right": masks.sliding_window(30, "bottom_right") & masks.causal("bottom_right"),
    "window_by_head": masks.sliding_window((WIDTHS, None)) & masks.causal(),
    "window_by_scalar": masks.sliding_window(ca.scalar(17)) & masks.causal(),
    "window_by_distance": ca.mask(lambda b, h, q, kv: (q - kv).abs() < 7),
    "window_by_float": ca.mask(lambda b, h, q, kv: (q - kv).abs().float() <= 6.5),
    "window_of_largest_int": masks.sliding_window((2**31 - 1, 2**31 - 1)),
    "prefix": masks.prefix_lm(70),
    "prefix_by_batch": masks.prefix_lm(LENGTHS),
    "chunked": masks.chunked(24),
    "chunked_causal": masks.chunked(24, 2) & masks.causal(),
    "block_causal": masks.chunked(24, None),
    "block_diagonal": masks.block_diagonal(16, 8),
    "documents": masks.document(IDS),
    "documents_by_batch": masks.document(torch.stack([IDS, IDS.flip(0)])),
    "documents_causal": masks.document(IDS) & masks.causal(),
    "documents_by_offsets": masks.document(offsets=OFFSETS) & masks.causal(),
    "documents_window_global": masks.document(IDS) & masks.sliding_window((10, 10)) | masks.global_tokens(3),
    "ends_by_key": ca.mask(lambda b, h, q, kv: (q >= STARTS[kv]) & (q < ENDS[kv])),
    "ids_rising": ca.mask(lambda b, h, q, kv: IDS[kv] <= IDS[q]),
    "ids_falling": ca.mask(lambda b, h, q, kv: FALLING[kv] > 1),
    "ids_strictly_before": ca.mask(lambda b, h, q, kv: (IDS[kv] < IDS[q]) | (q >= kv)),
    "not_documents": ~masks.document(IDS),
    "padding": masks.padding(LENGTHS),
    "padding_both": masks.padding(LENGTHS, LENGTHS),
    "not_causal": ~masks.causal(),
    "not_window": ~masks.sliding_window((10, 10)),
    "not_the_diagonal": ca.mask(lambda b, h, q, kv: q != kv),
    "neighbours_1d": masks.neighborhood((200,), (7,)),
    "one_or_other": ca.mask(lambda b, h, q, kv: torch.where(q < 64, kv < 32, kv >= 96)),
}  # fmt: skip

# Visited tiles are exact, but some full tiles lie across two intervals, or behind a residue, and are tested.
VISITS = {
    "global_window": masks.global_tokens(5) | masks.sliding_window((10, 10)),
    "sinks_window": masks.global_tokens(5, "keys") | (masks.sliding_window(30) & masks.causal()),
    "shared_prefix": masks.shared_prefix(OFFSETS),
    "shared_prefix_of": masks.shared_prefix(OFFSETS, torch.tensor([0, 0, 2, 2])),
    "dilated": masks.dilated_window((20, 20), 4),
    "dilated_causal": masks.dilated_window(20, 3) & masks.causal(),
    "three_parts": ca.mask(lambda b, h, q, kv: (q // 8 == kv // 8) | (kv < 5) | (kv > q + 100)),
}


TILES = [(16, 16), (40, 8), (64, 32), (1, 1), (128, 64)]


@pytest.mark.parametrize(
    ("name", "tile"),
    # below its step, a dilated window has empty tiles between the visible ones: the test finds those
    [(n, t) for n in [*SHARP, *VISITS] for t in TILES if t != (1, 1) or "dilated" not in n],
    ids=str,
)
def test_ready_masks_visit_exactly_their_tiles(name: str, tile: tuple[int, int]) -> None:
    expr = {**SHARP, **VISITS}[name].expr
    visible = dense(expr, 200, 200, 2, 2).expand(2, 2, 200, 200)
    found = ends(tile_intervals(expr), 200, 200, tile[0], 2, 2)
    check(visible, found, tile[0])
    exact = tiles_of(visible, tile)
    left = torch.arange(0, 200, tile[1])
    right = (left + tile[1]).clamp(max=200)
    begin, end, full_begin, full_end = found.clamp(0, 200).unsqueeze(-1).unbind(1)
    visited = ((begin < right) & (end > left) & (begin < end)).any(0)
    assert torch.equal(visited, exact > 0)
    if name in SHARP:
        assert torch.equal(((full_begin <= left) & (right <= full_end)).any(0), exact == 2)


@pytest.mark.parametrize("name", [*SHARP, *VISITS])
def test_ready_masks_are_sound_both_ways_at_odd_lengths(name: str) -> None:
    expr = {**SHARP, **VISITS}[name].expr
    for q_len, kv_len in ((131, 197), (200, 61), (1, 200), (199, 1)):
        both_ways(expr, q_len, kv_len, (17, 23), 2, 2)


def test_causal_reads_as_expected() -> None:
    (interval,) = tile_intervals(masks.causal().expr)
    assert repr(interval) == "[0, add(last, 1)) full [0, add(first, 1))"
    (back,) = transposed(masks.causal().expr)[0]
    assert repr(back) == "[first, q_len) full [last, q_len)"


def test_no_mask_and_nothing_visible() -> None:
    assert repr(tile_intervals(const(True))) == repr(EVERYTHING)
    assert tile_intervals(const(False)) == NOTHING
    unknown = ca.mask(lambda b, h, q, kv: torch.sin(q * kv * 1.0) > 0)
    assert repr(tile_intervals(unknown.expr)) == "([0, kv_len) full [0, 0),)"


def test_unsorted_ids_are_bounded_by_their_own_run() -> None:
    ids = torch.tensor([3, 1, 1, 3, 0, 0, 2, 2])
    found = ends(tile_intervals(masks.document(ids).expr), 8, 8, 1, 1, 1)[0, :, 0, 0]
    assert found[0].tolist() == [0, 1, 1, 0, 4, 4, 6, 6]
    assert found[1].clamp(max=8).tolist() == [4, 3, 3, 4, 6, 6, 8, 8]
    full = (found[3].clamp(max=8) - found[2].clamp(max=8)).clamp(min=0)
    assert full.tolist() == [0, 2, 2, 0, 2, 2, 2, 2]


@pytest.mark.parametrize("op", ["lt", "le", "gt", "ge"])
def test_values_compared_with_positions_bound_them_whatever_they_are(op: str, generator: torch.Generator) -> None:
    compare = getattr(torch, op)
    for seed in range(60):
        n, most = (int(torch.randint(1, high, (), generator=generator)) for high in (50, 120))
        table = torch.randint(-5, most, (2, n), generator=generator)
        table = table.sort(-1).values if seed % 2 else table  # as documents have them, or in any order
        mask = ca.mask(lambda b, h, q, kv, table=table: compare(table[b, kv], q))  # type: ignore[misc]
        for q_len, kv_len in ((n, n), (2 * n + 3, n), (n, n + 9), (3 * n, n // 2 + 1)):
            both_ways(mask.expr, q_len, kv_len, (8, 5), 2, 1)


def test_derived_tensors_follow_what_they_come_from() -> None:
    ids = torch.zeros(64, dtype=torch.int32)
    expr = masks.document(ids).expr
    (found,) = tile_intervals(expr)
    every = captures(found.begin, found.end, found.full_begin, found.full_end)
    held = [c for c in every if isinstance(c, Derived)]
    tensors = [c.tensor for c in held]
    assert held
    ids[32:] = 1
    refresh(held)
    assert all(c.tensor is t for c, t in zip(held, tensors, strict=True)), "kernels hold on to the tensors"
    check(dense(expr, 64, 64), ends(tile_intervals(expr), 64, 64, 16, 1, 1), 16)
    at = ends(tile_intervals(expr), 64, 64, 16, 1, 1)[0, :2, 0, 0].clamp(0, 64)
    assert at.tolist() == [[0, 0, 32, 32], [32, 32, 64, 64]]


def test_an_unchanged_tensor_is_not_computed_again() -> None:
    ids = torch.zeros(64, dtype=torch.int32)
    held = derive("count", lambda x: x + 1, Capture(ids))
    before = held.version
    held.refresh()
    assert held.version == before
    ids += 1
    held.refresh()
    assert held.version == before + 1 and held.tensor.eq(2).all()
    assert derive("count", lambda x: x + 1, Capture(ids)) is held


def test_made_in_inference_mode_and_refreshed_outside() -> None:
    ids = torch.zeros(8, dtype=torch.int32)
    with torch.inference_mode():
        held = derive("twice", lambda x: x * 2, Capture(ids))
        born_there = derive("thrice", lambda x: x * 3, Capture(torch.ones(8)))
    ids += 1
    refresh([held, born_there])
    assert held.tensor.eq(2).all() and born_there.tensor.eq(3).all()


def test_captured_tensors_are_let_go_with_their_mask() -> None:
    ids = torch.zeros(64, dtype=torch.int32)
    gone = weakref.ref(ids)
    expr = masks.document(ids).expr
    tile_intervals(expr), transposed(expr)[0]
    del ids, expr
    gc.collect()
    assert gone() is None


def test_a_tensor_that_is_the_mask_is_let_go_too() -> None:
    def of_rows(flags: torch.Tensor) -> Expr:
        return ca.mask(lambda b, h, q, kv: flags[q]).expr

    flags = torch.ones(64, dtype=torch.bool)
    gone, expr = weakref.ref(flags), of_rows(flags)
    tile_intervals(expr), transposed(expr)[0], row_limits(expr)
    del flags, expr
    gc.collect()
    assert gone() is None


def test_a_wider_band_costs_no_more() -> None:
    def steps(width: int) -> int:
        mask = (masks.causal() & masks.sliding_window(width)).expr
        return count_calls(lambda: tile_intervals(mask))

    steps(7)
    assert steps(1_000_003) == steps(1_003) < 2_000  # 846


def test_what_is_derived_can_be_read() -> None:
    text = masks.dilated_window((20, 20), 4).bands()
    assert "first - 20 <= kv < last + 21; all of it tested" in text and "tested in every tile: kv = q mod 4" in text


def test_what_comes_from_captured_tensors_can_be_read() -> None:
    ids = torch.arange(400) // 90
    text = (masks.document(ids) & masks.sliding_window((torch.tensor(64), 0))).bands()
    assert text.startswith("max(min(t2[0, first..last]), first - t1) <= kv < min(max(t2[2, first..last]), last + 1);")
    assert "t0 int64[400]; t1 int64[]; t2 int32[10, 4, 400] from t0" in text


@pytest.mark.parametrize("kind", ["sorted", "any"])
def test_equal_values_of_a_tensor_and_itself_are_found_without_search(kind: str, generator: torch.Generator) -> None:
    for _ in range(200):
        n, heads = (int(torch.randint(1, most, (), generator=generator)) for most in (20, 3))
        values = torch.randint(0, 5, (2, heads, n), generator=generator)
        values = values.sort(-1).values if kind == "sorted" else values
        assert torch.equal(matches._equal_to_itself(values), matches._equal(values, values))


BY_LENGTH = {
    "documents": lambda n: masks.document(torch.arange(n) // 70) & masks.causal(),
    "offsets": lambda n: masks.document(offsets=torch.tensor([0, 100, n])),
    "shared_prefix": lambda n: masks.shared_prefix(torch.tensor([0, 100, n])),
    "padding": lambda n: masks.padding(torch.arange(n).view(1, n) % 3 > 0),
    "tokens": lambda n: masks.global_tokens(torch.tensor([4, n - 1])),
    "marked": lambda n: masks.global_tokens(torch.arange(n) % 50 == 0),
}


@pytest.mark.parametrize("name", BY_LENGTH)
def test_tensors_of_another_length_share_a_kernel(name: str) -> None:
    assert content(Program(None, BY_LENGTH[name](300).expr)) == content(Program(None, BY_LENGTH[name](450).expr))
