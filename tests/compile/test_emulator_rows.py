"""Whatever a mod computes of captured tensors comes out as PTX that the emulator has rows for."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.planning.plan_backward import plan_backward
from composattn.backends.fused.running.emulated import text_of
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Problem
from composattn.emulator.program import PtxProgram
from composattn.errors import ComposattnError
from composattn.graph.expr import DType
from composattn.graph.ops import ARITY, OPS

TOGETHER = 24  # terms of a kernel: a compilation takes seconds, and more of them wait for registers
INTEGERS = (torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)  # with the integers, what Hopper kernels read
LENGTH = 64

Term = Callable[[Any, Any, Any], Any]  # (score, q_idx, kv_idx) -> value


def table(dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(1, 2 * LENGTH + 1)
    return values % 2 == 0 if dtype is torch.bool else (values % 7).to(dtype)


def terms(dtype: torch.dtype) -> Iterator[Term]:
    """Every op of values read by key, by query and by pair, of constants and of the score."""
    t = table(dtype)
    for name, arity in ARITY.items():
        op = OPS[name].torch
        if arity == 1:
            yield lambda s, q, k, op=op: op(t[k])
            yield lambda s, q, k, op=op: op(t[q + k])
        elif arity == 2:
            yield lambda s, q, k, op=op: op(t[q], t[k])
            yield lambda s, q, k, op=op: op(t[q + k], t[k])
            yield lambda s, q, k, op=op: op(s, t[k])
            yield lambda s, q, k, op=op: op(t[k], s)
            yield lambda s, q, k, op=op: op(q, t[k])
            yield lambda s, q, k, op=op: op(t[k], 2)
            yield lambda s, q, k, op=op: op(t[k], 0.5)
        elif arity == 3:
            yield lambda s, q, k, op=op: op(t[q] > t[k], t[k], t[q])
            yield lambda s, q, k, op=op: op(s > t[k], s, t[k])


def summed(parts: list[Term]) -> Callable[..., Any]:
    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        total = score
        for part in parts:
            value = part(score, q, k)
            total = total + (torch.where(value, 1.0, -1.0) if value.expr.dtype is DType.BOOL else value)
        return total

    return score_mod


def comparisons(dtype: torch.dtype) -> Iterator[Term]:
    """Every comparison of values read by key, by query and by pair, as a mask has them: with no score."""
    t = table(dtype)
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        op = OPS[name].torch
        yield lambda s, q, k, op=op: op(t[q], t[k])
        yield lambda s, q, k, op=op: op(t[q + k], t[k])
        yield lambda s, q, k, op=op: op(t[k], 3)
        yield lambda s, q, k, op=op: op(q - k, t[q])
        yield lambda s, q, k, op=op: op(torch.minimum(t[q], t[k]), 0.5)


def any_of(parts: list[Term]) -> Callable[..., Any]:
    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return functools.reduce(operator.xor, [part(None, q, k) for part in parts])

    return mask_mod


def planned(parts: list[Term], backward: bool, masks: bool = False) -> Any:
    q = torch.zeros(1, 1, LENGTH, 64, dtype=torch.bfloat16)
    mods = {"mask_mod": any_of(parts)} if masks else {"score_mod": summed(parts)}
    program, problem = ca.Attention(**mods).program, Problem.of(q, q, q)
    if backward:
        return plan_backward(problem, program, HOPPER, has_dlse=False).main
    return plan_forward(problem, program, HOPPER)


def taken(part: Term, backward: bool) -> bool:
    """Whether tracing and planning take the term: shifts of floats and their like are refused by name."""
    try:
        planned([part], backward)
    except ComposattnError:
        return False
    return True


def read(plan: Any) -> None:
    """Compiles a plan and reads its PTX as the emulator does, which refuses what it has no row for."""
    PtxProgram(text_of(plan))


def compiled_terms(dtype: torch.dtype, backward: bool) -> int:
    """Reads the kernels of all terms that are taken, and counts these."""
    parts = [t for t in terms(dtype) if taken(t, backward)]
    for at in range(0, len(parts), TOGETHER):
        read(planned(parts[at : at + TOGETHER], backward))
    return len(parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int16, torch.int32], ids=str)
def test_minima_comparisons_and_casts_of_captured_values_are_emulated(dtype: torch.dtype) -> None:
    t = table(dtype)
    parts: list[Term] = [
        lambda s, q, k: torch.minimum(s, t[k]),
        lambda s, q, k: torch.maximum(t[q], t[k]),
        lambda s, q, k: torch.where(t[q] > t[k], t[k], t[q]),
        lambda s, q, k: t[q + k].bfloat16() == t[k],
        lambda s, q, k: t[k].int(),
        lambda s, q, k: t[k].long(),
    ]
    read(planned(parts, backward=False))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_every_op_of_every_captured_dtype_is_emulated(dtype: torch.dtype) -> None:
    assert compiled_terms(dtype, backward=False) >= 150


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_derivatives_of_every_op_of_captured_floats_are_emulated(dtype: torch.dtype) -> None:
    assert compiled_terms(dtype, backward=True) >= 100


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_masks_that_compare_captured_values_are_emulated(dtype: torch.dtype, backward: bool) -> None:
    read(planned(list(comparisons(dtype)), backward, masks=True))
