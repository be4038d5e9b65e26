"""Random calls of every kind: the streaming backend against the oracle, forward and backward.

New seeds in every run; `--seed` replays one, and a failure names its case's own seed.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import composattn as ca
from composattn.backends import tiles
from composattn.backends.tiles import TileSizes
from composattn.testing import Space, check, make_case, random_case, run, strategies
from tests.case_parts import draw_part

attend = functools.partial(ca.attention, backend="streaming")

ROUNDS, CASES = int(os.environ.get("COMPOSATTN_FUZZ", "10")), 100
"""10 rounds are 1,000 cases, 22 ms each on one core; COMPOSATTN_FUZZ asks for more rounds, the nightly run for 60."""

pytestmark = pytest.mark.usefixtures("one_thread")

WIDE = Space(head_dims=(8, 16, 40), longest=131)


def held_to_the_tolerance(seed: int, space: Space) -> None:
    case = random_case(seed, space)
    try:
        check(attend, case)
    except Exception as error:
        raise AssertionError(f"random_case({seed}): {case}") from error


@pytest.mark.parametrize("round_", range(ROUNDS))
def test_small_calls_in_small_tiles(round_: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(f"{os.environ['COMPOSATTN_TEST_SEED']}:{round_}")
    sizes = TileSizes(draw.choice((4, 8)), draw.choice((4, 8, 16)), draw.choice((1, 1 << 19)))
    monkeypatch.setitem(tiles.TILE_SIZES, "cpu", sizes)
    for _ in range(CASES):
        held_to_the_tolerance(draw.randrange(2**31), Space())


@pytest.mark.parametrize("round_", range(4))
def test_larger_calls_in_their_own_tiles(round_: int) -> None:
    draw = random.Random(f"{os.environ['COMPOSATTN_TEST_SEED']}:wide:{round_}")
    for _ in range(25):
        held_to_the_tolerance(draw.randrange(2**31), WIDE)


@pytest.mark.parametrize("round_", range(ROUNDS))
def test_calls_of_8_bits_with_scales_of_every_shape(round_: int) -> None:
    draw = random.Random(f"{os.environ['COMPOSATTN_TEST_SEED']}:8 bits:{round_}")
    space = Space(layouts=("dense", "varlen", "paged"), eight_bits=True, gradients=False)
    for _ in range(CASES // 2):
        held_to_the_tolerance(draw.randrange(2**31), space)


@pytest.mark.parametrize("round_", range(ROUNDS))
def test_parts_of_calls_by_offsets(round_: int) -> None:
    draw, found = random.Random(f"{os.environ['COMPOSATTN_TEST_SEED']}:parts:{round_}"), 0
    for seed in (draw.randrange(2**31) for _ in range(CASES // 2)):
        whole = dataclasses.replace(random_case(seed), dropout=(0.0, 0))
        drawn = draw_part(random.Random(seed), whole)
        if drawn is None:
            continue
        part, place = drawn
        found += 1
        try:
            check(attend, part)
            of_whole, of_part = (run(in_fp64, case.without_gradients()) for case in (whole, part))
            for name, result in of_part.items():
                torch.testing.assert_close(result, of_whole[name][place], rtol=1e-9, atol=1e-9)
        except Exception as error:
            raise AssertionError(f"random_case({seed}), a part: {part}") from error
    assert found > CASES // 10


def in_fp64(*tensors: torch.Tensor, **options: Any) -> Any:
    return ca.attention(*(t.double() for t in tensors), **options, backend="reference")


@given(strategies.cases())
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_calls_that_hypothesis_draws(case: object) -> None:
    check(attend, case)  # type: ignore[arg-type]


def test_mods_of_ones_own_are_checked_on_shapes_of_ones_own() -> None:
    def mine(score: torch.Tensor, b: object, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return score - torch.abs(q - kv) / (1 + h)

    case = make_case(3, score_mod=mine, heads=6, kv_heads=2, q_len=37, kv_len=41, dim=8, v_dim=4)
    check(attend, case)
    assert str(case) == "Case(B2 H6/2 S37x41 D8/4 float32)"


def test_a_seed_is_one_case() -> None:
    assert repr(random_case(7)) == repr(random_case(7))
    assert len({repr(random_case(seed)) for seed in range(50)}) == 50


def test_lengths_are_those_of_the_space() -> None:
    drawn = [random_case(seed, Space(shortest=31, longest=64)) for seed in range(50)]
    assert {case.q.shape[2] for case in drawn} == {31, 32, 33, 37, 61, 64}
