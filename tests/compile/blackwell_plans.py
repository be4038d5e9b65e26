"""Plans of calls for Blackwell that tests compile: 8 heads, 2048 queries and keys where nothing else is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import composattn as ca
from composattn.analysis.captured_gradient import GradientProgram, fused_reads
from composattn.analysis.program import Program
from composattn.backends.fused.planning.plan import ForwardPlan, plan_forward
from composattn.backends.fused.planning.plan_backward import BackwardPlans, plan_backward
from composattn.backends.fused.tiles.target import BLACKWELL, Target
from composattn.call.problem import DENSE, Layout, Problem
from composattn.call.schedule import AUTO, Schedule
from composattn.mods.mask import Mask
from composattn.mods.score import Score

LENGTH, HEADS = 2048, 8
PACKED, PAGES = Layout("packed", "packed"), Layout("dense", "paged", page_size=64, used_kv=True)

Given = Score | Mask | Callable[..., Any] | None


def program_of(score: Given = None, mask: Given = None, learned: bool = False) -> Program:
    """`learned`: with the gradients of what the mods read that asks for one."""
    program = ca.Attention(score_mod=score, mask_mod=mask).program
    return GradientProgram(program, fused_reads(program)) if learned else program


def problem_of(
    d: int = 128,
    dv: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    layout: Layout = DENSE,
    schedule: Schedule = AUTO,
    q_len: int = LENGTH,
    kv_heads: int = HEADS,
) -> Problem:
    return Problem(
        2, HEADS, kv_heads, q_len, LENGTH, d, dv or d, dtype, torch.device("cpu"), layout=layout, schedule=schedule
    )


def forward_plan(score: Given = None, mask: Given = None, target: Target = BLACKWELL, **shape: Any) -> ForwardPlan:
    """`shape`: see `problem_of`."""
    return plan_forward(problem_of(**shape), program_of(score, mask), target)


def backward_plans(
    score: Given = None,
    mask: Given = None,
    target: Target = BLACKWELL,
    in_order: bool = False,
    learned: bool = False,
    **shape: Any,
) -> BackwardPlans:
    program = program_of(score, mask, learned)
    return plan_backward(problem_of(**shape), program, target, deterministic=in_order, cut=None)
