"""Few queries of many sequences on Hopper: which blocks read their keys, chosen from shapes alone."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import re
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.hopper.tiling import HopperTiling, launched_registers, registers_for
from composattn.call.problem import Problem
from composattn.mods import softcap


def tiling(batch: int, length: int = 8192, d: int = 64, schedule: Any = None, **mods: Any) -> HopperTiling:
    problem = Problem(batch, 32, 8, 1, length, d, d, torch.bfloat16, torch.device("cpu"))
    problem = dataclasses.replace(problem, schedule=schedule or ca.Schedule())
    chosen = plan_forward(problem, ca.Attention(**mods).program, HOPPER).tiling
    assert isinstance(chosen, HopperTiling)
    return chosen


def blocks_and_keys(chosen: HopperTiling) -> tuple[int, int]:
    return chosen.blocks, chosen.tile_n


SURVEYS = Path(__file__).parents[2] / "benchmarks/results/cuts/h200-decode.json"


def test_what_the_model_chooses_takes_little_more_than_the_best_cut_that_was_timed() -> None:
    """The calls are those that all kinds of blocks were timed for."""
    found = []
    for survey in json.loads(SURVEYS.read_text())["surveys"][-2:]:
        rows = collections.defaultdict(dict)
        for row in survey["rows"]:
            if re.match("(one|two|three)", row["impl"]):
                rows[row["row"]][row["impl"]] = row["ms"]
        for row, times in rows.items():
            batch, length, heads, kv_heads, d = map(int, re.findall(r"\d+", row))
            problem = Problem(batch, heads, kv_heads, 1, length, d, d, torch.bfloat16, torch.device("cpu"))
            plan = plan_forward(problem, ca.Attention().program, HOPPER)
            blocks = ("one", "two", "three")[plan.tiling.blocks - 1]
            stages = "/2" * (plan.tiling.blocks > 1 and plan.tiling.stages == 2)
            time = times.get(f"{blocks}{stages} {plan.splits}")
            found += [] if time is None else [time / min(times.values())]
    assert len(found) > 220
    assert geometric_mean(found) < 1.01 and max(found) < 1.15


def test_two_blocks_of_a_sm_fill_each_others_ends() -> None:
    assert blocks_and_keys(tiling(32, d=128)) == (2, 64)
    assert blocks_and_keys(tiling(32)) == (2, 128), "keys of D 64 are half as wide"
    assert blocks_and_keys(tiling(32, score_mod=softcap(30.0))) == (2, 128)


@pytest.mark.parametrize("length", [1024, 2048, 4096])
def test_three_blocks_take_what_fills_three_places(length: int) -> None:
    assert blocks_and_keys(tiling(48, length)) == (3, 64), "384 tiles in 396 places"
    assert blocks_and_keys(tiling(48, length, d=128)) != (3, 64), "which has no registers for them"


def test_keys_that_lie_in_l2_are_read_by_all_sms() -> None:
    problem = Problem(8, 40, 8, 1, 1024, 128, 128, torch.bfloat16, torch.device("cpu"))
    plan = plan_forward(problem, ca.Attention().program, HOPPER)
    assert (plan.tiling.blocks, plan.splits) == (2, 2), "64 tiles, 33 MB of K and V"


@pytest.mark.parametrize(("batch", "found"), [(32, (2, 64)), (48, (1, 128))])
def test_words_of_dropout_have_registers_for_64_keys_of_two_blocks(batch: int, found: tuple[int, int]) -> None:
    assert blocks_and_keys(tiling(batch, 1024, dropout_p=0.1)) == found


def test_blocks_that_share_a_sm_read_no_further_ahead_than_others() -> None:
    """By two stages, else the only block of an SM is far ahead of two of another one."""
    stages = {batch: tiling(batch, 4096, d=128).stages for batch in (12, 16, 17, 24, 32)}
    assert stages == {12: 3, 16: 3, 17: 2, 24: 2, 32: 2}, "96, 128; 136, 192, 256 tiles of 132 SMs"


def test_results_of_a_fixed_order_come_from_one_kind_of_block() -> None:
    fixed = ca.Schedule(batch_invariant=True)
    assert len({blocks_and_keys(tiling(batch, schedule=fixed)) for batch in (1, 17, 32, 48)}) == 1


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_threads_that_compute_have_the_registers_that_copying_ones_leave(blocks: int) -> None:
    """One more step of 8, and they would wait for ever for what they were not launched with."""
    for warpgroups, paged in itertools.product((1, 2, 3), (False, True)):
        computing, copying = registers_for(warpgroups, blocks, paged, "copying")
        launched = launched_registers(warpgroups, blocks) * (warpgroups + 1)
        assert warpgroups * computing + copying <= launched
        assert warpgroups * (computing + 8) + copying > launched or computing == 240
