"""dQ of two query tiles as three products: each row of each tile once, and no dS written over that is still read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")

from composattn.backends.fused.kernels.dq_thirds import (
    HALF,
    STRIPS,
    WARPS,
    ds_places,
    is_outer,
    middle_half,
    outer_strip,
    product_place,
)

GROUPS = (0, 1)
Strip = tuple[int, int]  # tile, which of its strips
PER_PLACE = 2  # strips of a half product


def tiles(count: int) -> Iterator[tuple[int, int, int]]:
    """(tile, whether it is second, phase of its pair)."""
    for tile in range(count):
        yield tile, tile % 2, tile // 2 % 2


def strips_of(tile: int, second: int, phase: int) -> dict[int, Strip]:
    """Where dS of a tile's strips is."""
    first, behind = ds_places(second, phase)
    at = {first * PER_PLACE + i: (tile, i) for i in range(HALF)}
    return at | {behind * PER_PLACE + i: (tile, HALF + i) for i in range(WARPS)}


def starts(second: int, phase: int, group: int) -> bool:
    """Whether a warpgroup's product starts behind a tile."""
    return second == 1 or is_outer(phase, group)


def read(held: dict[int, Strip], second: int, phase: int, group: int) -> list[Strip]:
    start = product_place(second, phase, group) * PER_PLACE
    return [held[place] for place in range(start, start + WARPS)]


def test_every_strip_is_computed_once_a_tile_after_all_of_it_is_there() -> None:
    held: dict[int, Strip] = {}
    computed: list[Strip] = []
    due: list[tuple[int, int]] = []
    for tile, second, phase in tiles(12):
        held |= strips_of(tile, second, phase)  # while the product behind the tile before has not begun
        for before in due:
            computed += [strip for group in GROUPS if starts(*before, group) for strip in read(held, *before, group)]
        due = [(second, phase)]
    assert sorted(computed) == [(tile, strip) for tile in range(10) for strip in range(STRIPS)] + [
        (10, strip) for strip in (range(WARPS) if 10 // 2 % 2 == 0 else range(HALF, STRIPS))
    ]


def test_what_is_sent_goes_to_the_strips_that_were_computed() -> None:
    held: dict[int, Strip] = {}
    for tile, second, phase in tiles(8):
        held |= strips_of(tile, second, phase)
        for group in GROUPS:
            if not starts(second, phase, group):
                continue
            found = read(held, second, phase, group)
            if is_outer(phase, group):
                first = outer_strip(second, phase)
                assert found == [(tile, first + i) for i in range(WARPS)]
            else:
                for mine, whose in ((second, tile), (0, tile - 1)):
                    half, first = middle_half(mine, phase)
                    assert found[half * HALF :][:HALF] == [(whose, first + i) for i in range(HALF)]


@pytest.mark.parametrize("phase", GROUPS)
def test_a_tile_that_nothing_follows_has_an_outer_product_and_half_a_middle_one(phase: int) -> None:
    """Its second warpgroup has the product that would follow the second tile, of whose rows nothing is sent."""
    held = strips_of(0, 0, phase)
    start = product_place(1, phase, 1 - phase) * PER_PLACE
    half, first = middle_half(0, phase)
    middle = [held[start + half * HALF + i] for i in range(HALF)]
    assert middle == [(0, first + i) for i in range(HALF)]
    assert sorted(middle + read(held, 0, phase, phase)) == [(0, strip) for strip in range(STRIPS)]


def test_each_warpgroup_has_three_products_of_four_tiles() -> None:
    assert [sum(starts(second, phase, group) for _, second, phase in tiles(4)) for group in GROUPS] == [3, 3]
