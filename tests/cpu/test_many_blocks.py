"""How many blocks a grid takes in each dimension: plans of more heads and sequences, and refusals of more tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composattn.analysis.program import Program
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.planning.plan_backward import plan_backward
from composattn.backends.fused.tiles.target import BLACKWELL, HOPPER, Target
from composattn.call.problem import Problem
from composattn.call.schedule import Schedule
from composattn.errors import TooManyBlocks


def problem(batch: int, heads: int, length: int = 16, **how: Any) -> Problem:
    return Problem(batch, heads, heads, length, length, 64, 64, torch.bfloat16, torch.device("cpu"), **how)


@pytest.mark.parametrize("target", [HOPPER, BLACKWELL], ids=lambda target: str(target.backend))
@pytest.mark.parametrize(
    ("batch", "heads", "many"), [(65535, 1, False), (1, 65535, False), (65536, 1, True), (1, 65536, True)]
)
def test_blocks_lie_in_one_row_beyond_65535_heads_or_sequences(
    batch: int, heads: int, many: bool, target: Target
) -> None:
    plans = plan_backward(problem(batch, heads, 400), Program(), target)  # of one tile of keys no postprocess has dQ
    assert plans.postprocess is not None and plans.preprocess.in_one_row is plans.postprocess.in_one_row is many


def test_parts_of_keys_are_combined_in_one_row_beyond_65535_heads() -> None:
    for heads, many in ((65535, False), (65536, True)):
        plan = plan_forward(problem(1, heads, schedule=Schedule(split_kv=2)), Program(), HOPPER)
        assert plan.is_split and plan.combine.in_one_row is many


@pytest.mark.parametrize("target", [HOPPER, BLACKWELL], ids=lambda target: str(target.backend))
def test_more_tiles_than_a_launch_takes_are_refused_before_anything_is_compiled(target: Target) -> None:
    plan_forward(problem(2**20, 2**10), Program(), target)
    for plan in (plan_forward, plan_backward):
        with pytest.raises(TooManyBlocks, match="a launch takes 2147483647; call it for parts of the batch"):
            plan(problem(2**21, 2**11), Program(), target)
