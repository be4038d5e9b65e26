"""Which passes of the kernel language a kernel is compiled without; that its code stays the same, records say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from composattn.analysis.program import Program
from composattn.backends.fused.compiling.passes import switches
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.planning.plan_backward import plan_backward
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import DENSE, Layout, Problem
from composattn.mods.mask import Mask
from composattn.mods.score import Score

NEITHER = "use-nvgpu-optimization-pass=false use-strength-reduction-pass=false"
DIVIDES = "use-nvgpu-optimization-pass=false"


def problem(layout: Layout = DENSE) -> Problem:
    return Problem(2, 4, 4, 1024, 1024, 64, 64, torch.bfloat16, torch.device("cpu"), layout=layout)


def with_mask(mask: Callable[..., Any]) -> Program:
    return Program(None, Mask.of(mask).expr)


def with_score(score: Callable[..., Any]) -> Program:
    return Program(Score.of(score).expr, None)


@pytest.mark.parametrize(
    "program",
    [Program(), with_mask(lambda b, h, q, kv: q >= kv), with_score(lambda s, b, h, q, kv: s * 2.0 / (q + 1))],
    ids=["plain", "causal", "a score divided"],
)
def test_what_divides_no_positions_is_compiled_without_either(program: Program) -> None:
    backward = plan_backward(problem(), program, HOPPER)
    plans = [plan_forward(problem(), program, HOPPER), backward.preprocess, backward.main, backward.postprocess]
    assert [switches(plan) for plan in plans] == [NEITHER] * 4


@pytest.mark.parametrize(
    "program",
    [
        with_mask(lambda b, h, q, kv: q // 64 == kv // 64),
        with_mask(lambda b, h, q, kv: (q - kv) % 3 == 0),
        with_score(lambda s, b, h, q, kv: s + (kv % 7)),
    ],
    ids=["blocks", "every third", "a score of rests"],
)
def test_mods_that_divide_positions_keep_the_pass_for_divisions(program: Program) -> None:
    assert switches(plan_forward(problem(), program, HOPPER)) == DIVIDES
    assert switches(plan_backward(problem(), program, HOPPER).main) == DIVIDES


def test_pages_keep_the_pass_for_divisions() -> None:
    assert switches(plan_forward(problem(Layout("dense", "paged", max_kv_len=1024)), Program(), HOPPER)) == DIVIDES
