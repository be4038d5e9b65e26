"""Tiles from interval arithmetic against the dense mask: empty and full are never wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from composattn import errors
from composattn.analysis.dense import dense
from composattn.analysis.tiles import tiles
from composattn.mods import masks
from composattn.mods.mask import Mask
from tests.cpu.analysis.random_masks import RandomMask
from tests.dense_tiles import tiles_of


def sound(mask: RandomMask) -> None:
    visible = dense(mask.expr, mask.q_len, mask.kv_len, mask.batch, mask.heads)
    exact = tiles_of(visible, mask.tile)
    found = tiles(mask.expr, mask.q_len, mask.kv_len, mask.tile, mask.batch, mask.heads)
    assert found.dtype is torch.int8 and found.shape == exact.shape
    assert ((found == 1) | (found == exact)).all(), f"claimed {found.tolist()}, is {exact.tolist()}"
    if mask.random.random() < 0.1:
        refined = tiles(mask.expr, mask.q_len, mask.kv_len, mask.tile, mask.batch, mask.heads, refine=True)
        assert (refined == exact).all()


@pytest.mark.parametrize("part", range(20))
def test_random_masks_are_never_judged_wrong(part: int) -> None:
    start = int(os.environ["COMPOSATTN_TEST_SEED"]) * 100_000 + 50_000 + part * 1000
    for seed in range(start, start + 250):
        mask = RandomMask(seed)
        try:
            sound(mask)
        except BaseException as error:
            raise AssertionError(f"RandomMask({seed}), tile {mask.tile}: {mask.expr}: {error}") from error


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(20))
def test_many_random_masks_are_never_judged_wrong(part: int) -> None:
    start = int(os.environ["COMPOSATTN_TEST_SEED"]) * 1_000_000 + part * 50_000
    for seed in range(start, start + 10_000):
        mask = RandomMask(seed, depth=4)
        try:
            sound(mask)
        except BaseException as error:
            raise AssertionError(f"RandomMask({seed}, depth=4), tile {mask.tile}: {mask.expr}: {error}") from error


def test_most_random_tiles_that_can_be_settled_are() -> None:
    settled = possible = 0
    for seed in range(300):
        m = RandomMask(seed)
        exact = tiles_of(dense(m.expr, m.q_len, m.kv_len, m.batch, m.heads), m.tile)
        found = tiles(m.expr, m.q_len, m.kv_len, m.tile, m.batch, m.heads)
        settled += int((found != 1).sum())
        possible += int((exact != 1).sum())
    assert settled > 0.85 * possible, f"{settled} of {possible}"


IDS = torch.tensor([0] * 50 + [1] * 9 + [2] * 100 + [3] * 41)

SHARP = {
    "causal": masks.causal(), "causal_bottom_right": masks.causal("bottom_right"),
    "window": masks.sliding_window((10, 20)), "chunked": masks.chunked(24, 2) & masks.causal(),
    "documents": masks.document(IDS), "documents_causal": masks.document(IDS) & masks.causal(),
    "padding": masks.padding(torch.tensor([5, 77])), "prefix": masks.prefix_lm(70),
    "dilated": masks.dilated_window((20, 20), 4), "global_positions": masks.global_tokens(torch.tensor([3, 100])),
    "not_documents": ~masks.document(IDS), "random_padding": masks.padding(torch.arange(400).view(2, 200) % 7 < 3),
    "grid_row_tiles": masks.neighborhood((10, 20), (3, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARP)
def test_ready_masks_leave_no_tile_undecided(name: str) -> None:
    mask = SHARP[name]
    tile = (40, 8)
    exact = tiles_of(dense(mask.expr, 200, 200, 2, 2), tile)
    assert torch.equal(mask.tiles(200, 200, tile, batch=2, heads=2), exact)


def test_a_wrapping_sum_is_not_trusted() -> None:
    far = 2**31 - 5
    kinds = ca.mask(lambda b, h, q, kv: kv + far > q).tiles(64, 64, (16, 16))
    assert set(kinds.flatten().tolist()) == {1}


# What nothing is known of has the ends of int64: sums of it were taken to stay inside, and wrapped to one end.
OF_UNKNOWN: dict[str, Callable[..., Any]] = {
    "times a negative number": lambda b, h, q, kv: (kv % -8) * -8 <= 16,
    "shifted": lambda b, h, q, kv: (kv % -8) << 3 == -16,
    "their size and more": lambda b, h, q, kv: (q ^ kv).abs() + 1 <= 16,
    "a window as wide as their size": lambda b, h, q, kv: (q - kv).abs() < (~(h - q)).abs() + 9,
    "a window by a remainder": lambda b, h, q, kv: (q - kv).abs() < ((16 - 7 * q) % -4).abs() + 5,
    "squared": lambda b, h, q, kv: (q ^ kv) * (q ^ kv) < 300,
    "a difference with itself": lambda b, h, q, kv: ((q ^ kv) + 5) - (q ^ kv) > q - 40,
}


@pytest.mark.parametrize("name", OF_UNKNOWN)
def test_sums_of_what_nothing_is_known_of_are_judged_right(name: str) -> None:
    mask = ca.mask(OF_UNKNOWN[name])
    for tile in ((4, 4), (16, 16), (64, 64)):
        exact, found = tiles_of(dense(mask.expr, 100, 70), tile), mask.tiles(100, 70, tile)
        assert ((found == 1) | (found == exact)).all(), f"claimed {found.tolist()}, is {exact.tolist()}"


def test_rounding_of_floats_is_allowed_for() -> None:
    tenth = 0.1  # no fp32 number: at kv 30 the comparison hangs on the last bit
    kinds = ca.mask(lambda b, h, q, kv: kv * tenth < 3.0).tiles(1, 64, (1, 1))[0, 0, 0].tolist()
    assert kinds[:29] == [2] * 29 and kinds[30] == 1 and kinds[32:] == [0] * 32


def test_refined_tiles_are_exact() -> None:
    flags = torch.rand(100, 100, generator=torch.Generator().manual_seed(1)) < 0.2
    mask = ca.mask(lambda b, h, q, kv: flags[(q * 7) % 100, (kv * 3) % 100])
    kinds = mask.tiles(90, 95, (7, 3), refine=True)
    assert torch.equal(kinds, tiles_of(mask.dense(90, 95), (7, 3)))


def test_shape_follows_what_the_mask_depends_on() -> None:
    lengths = torch.tensor([3, 90])
    by_batch = ca.mask(lambda b, h, q, kv: kv < lengths[b])
    assert by_batch.tiles(100, 200, (16, 16), batch=2, heads=3).shape == (2, 1, 7, 13)
    assert masks.causal().tiles(100, 200, (16, 16), batch=2, heads=3).shape == (1, 1, 7, 13)


@pytest.mark.parametrize("bad", [{"q_len": 0}, {"kv_len": -1}, {"tile": (0, 16)}, {"batch": 0}, {"heads": 1.5}])
def test_what_is_no_shape_is_refused(bad: dict) -> None:
    with pytest.raises(errors.InvalidArgument, match=next(iter(bad))):
        masks.causal().tiles(**{"q_len": 8, "kv_len": 8, **bad})


def test_the_sign_of_what_is_no_number_is_zero() -> None:
    below = torch.full((32,), -2.0)
    tiles_of_signs = Mask.of(lambda b, h, q, kv: torch.sign(torch.log(below[kv])) >= 0).tiles(32, 32, (16, 16))
    assert (tiles_of_signs != 0).all()


@pytest.mark.parametrize(
    "root", [lambda t: torch.rsqrt(t.half().float()), lambda t: t**-0.5], ids=["of a cast", "power"]
)
def test_a_root_of_minus_0_is_in_no_empty_tile(root) -> None:
    t = torch.full((64,), 9.0)
    t[32:] = -0.0
    found = ca.mask(lambda b, h, q, kv: root(t[kv]) < 0.1).tiles(64, 64, tile=(16, 16))
    assert (found[..., 2:] != 0).all()
