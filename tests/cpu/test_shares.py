"""The last rounds of equal tiles, shared alike: who has which keys, and which calls have shares."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")

import composattn as ca
from composattn.backends.fused.planning.plan import ForwardPlan, plan_forward
from composattn.backends.fused.tiles.scheduler import Scheduler
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Problem
from composattn.mods import causal, softcap
from composattn.primitives.stream_k import StreamK


@dataclasses.dataclass
class Divisor:
    """What a kernel divides by, as plain numbers."""

    divisor: int

    def __rdivmod__(self, number: int) -> tuple[int, int]:
        return divmod(number, self.divisor)


def shares(tiles: int, keys: int, blocks: int) -> Any:
    rest = tiles % blocks + blocks
    return StreamK(tiles - rest, rest, Divisor(keys), Divisor(blocks), None, None)


@given(blocks=st.integers(1, 12), tiles=st.integers(1, 60), keys=st.integers(1, 40))
def test_each_key_of_each_tile_is_in_one_share_and_shares_are_alike(blocks: int, tiles: int, keys: int) -> None:
    tiles += blocks
    made = shares(tiles, keys, blocks)
    seen: dict[int, list[int]] = {}
    left: dict[int, int] = {}  # by share: whose sums lie there
    sizes = set()
    for number in range(made.whole + blocks):
        of_number = [made.tile(number, i) for i in range(made.tiles(number))]
        if number >= made.whole:
            sizes.add(sum(portion.high - portion.low for _, portion in of_number))
        for i, (tile, portion) in enumerate(of_number):
            assert portion.low < portion.high
            seen.setdefault(tile, []).extend(range(portion.low, portion.high))
            if portion.leaves:
                assert i == 0, "what others take is left first"
                left[portion.number] = tile
            if portion.takes:
                assert i == len(of_number) - 1 and left.pop(portion.number - 1) == tile
            assert not (portion.leaves and portion.takes)
    assert not left
    assert seen.keys() == set(range(tiles))
    assert all(sorted(of_tile) == list(range(keys)) for of_tile in seen.values())
    assert max(sizes) - min(sizes) <= 1


def planned(
    d: int, length: int, batch: int = 2, dv: int = 0, keys: int = 0, schedule: Any = None, **mods: Any
) -> ForwardPlan:
    problem = Problem(batch, 8, 8, length, keys or length, d, dv or d, torch.bfloat16, torch.device("cpu"))
    problem = dataclasses.replace(problem, schedule=schedule or ca.Schedule())
    return plan_forward(problem, ca.Attention(**mods).program, HOPPER)


@pytest.mark.parametrize(("d", "length", "batch"), [(128, 4096, 8), (128, 4608, 3), (128, 8192, 2), (256, 8192, 2)])
def test_long_full_calls_whose_last_round_is_not_full_share_it(d: int, length: int, batch: int) -> None:
    plan = planned(d, length, batch)
    assert plan.tiling.scheduler is Scheduler.LATE_STREAM_K and not plan.is_split
    assert "the last two rounds shared alike" in str(plan)
    assert plan.counters == 1 + 132 * 8


@pytest.mark.parametrize(
    "changes",
    [
        {"mask_mod": causal()},
        {"score_mod": softcap(30.0)},
        {"schedule": ca.Schedule(batch_invariant=True)},
        {"schedule": ca.Schedule(split_kv=2)},
        {"schedule": ca.Schedule(persistent=False)},
        {"d": 64},
        {"d": 192, "dv": 128},
        {"length": 8448},  # 1,056 tiles are 8 rounds of 132
        {"length": 1024},
        {"keys": 5_000_000},  # which 32 bits don't count in shares
    ],
    ids=str,
)
def test_others_share_nothing(changes: dict[str, Any]) -> None:
    plan = planned(**{"d": 256, "length": 8192, **changes})
    assert not plan.tiling.scheduler.shares and plan.counters == 1
