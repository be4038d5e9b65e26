"""Which tiles of keys are computed in pieces: few enough, never short ones, and runs of query tiles that lose none."""

from __future__ import annotations

import random

import pytest

from composattn.backends.fused.planning.cut import SHORTEST, Cut, best_cut, cut_in_order

SMS = 132


def triangle(tiles: int, group: int = 1) -> list[int]:
    return [2 * (tiles - n) * group for n in range(tiles)]


# lengths of the tiles of a head, heads; whole tiles, pieces of the others
CASES = {
    "many-of-one-length": ([100] * 64, 16, 1024, 1),
    "many-of-many-lengths": (triangle(64), 32, 2048, 1),
    "groups-of-8-on-3-heads-of-two-entries": (triangle(64, 8), 6, 0, 2),
    "groups-of-8-on-2-heads": (triangle(32, 8), 2, 0, 4),
    "one-round-of-many-lengths": (triangle(32), 4, 0, 2),
    "one-round-of-one-length": ([100] * 132, 1, 132, 1),
    "one-round-and-a-little": ([100] * 140, 1, 132, 7),
    "two-rounds-and-a-half-of-one-length": ([98] * 4, 84, 264, 3),
    "nearly-three-rounds-of-one-length": ([800] * 64, 6, 384, 1),
    "thirteen-rounds-and-four-tiles": ([128] * 86, 20, 1716, 16),
    "thirteen-rounds-and-a-third": ([32] * 22, 80, 1716, 3),
    "thirty-one-rounds-and-four-short-tiles": ([16] * 16, 256, 4092, 2),
    "fifteen-rounds-and-a-half": ([128] * 64, 32, 2048, 1),
    "one-short-tile": ([3], 1, 1, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_tiles_are_cut_where_multiprocessors_would_idle(case: str) -> None:
    lengths, repeats, whole, pieces = CASES[case]
    cut = best_cut(lengths, repeats, SMS)
    assert (cut.tiles, cut.whole, cut.pieces) == (len(lengths) * repeats, whole, pieces)


def test_no_piece_is_short() -> None:
    for _ in range(200):
        lengths = sorted((random.randint(0, 60) for _ in range(random.randint(1, 40))), reverse=True)
        cut = best_cut(lengths, random.randint(1, 9), SMS)
        assert 0 <= cut.whole <= cut.tiles
        assert cut.pieces == 1 or max(lengths) >= cut.pieces * SHORTEST
        assert (cut.cut == 0) == (cut.pieces == 1)


def test_a_call_with_no_keys_has_no_tiles_to_cut() -> None:
    assert best_cut([], 4, 132) == Cut(0, 0, 1)


# lengths of the tiles of a head for one query head, heads, the group, heads asked for; pieces, heads of a section
IN_ORDER = {
    "groups-of-8-on-8-heads": (triangle(64), 8, 8, 1, 2, 1),
    "groups-of-8-on-4-heads": (triangle(32), 4, 8, None, 2, 2),
    "groups-of-8-on-2-heads": (triangle(32), 2, 8, None, 4, 1),
    "four-heads": (triangle(64), 4, 1, None, 1, 2),
    "all-at-once": (triangle(16), 4, 1, None, 1, 4),
    "one-head": (triangle(256), 1, 1, None, 1, 1),
}


@pytest.mark.parametrize("case", IN_ORDER)
def test_a_fixed_order_is_cut_by_heads_of_a_group_in_two_sections_at_least(case: str) -> None:
    lengths, heads, group, asked, pieces, together = IN_ORDER[case]
    cut, found = cut_in_order(lengths, heads, group, SMS, asked)
    assert (cut.pieces, found) == (pieces, together) and cut.cut in (0, cut.tiles)
    assert group % cut.pieces == 0
