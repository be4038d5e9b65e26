"""fp16 has the kernels of bf16: line for line the same PTX, but for the names of types and the number one.

So what an fp16 call takes longer on a GPU is not code's: 1 to 6 %, an H200 at its power cap
(benchmarks/log/2026-11.md#forward-43).
"""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")

from composattn.analysis.program import Program
from composattn.backends.fused.planning.plan import Plan, plan_forward
from composattn.backends.fused.planning.plan_backward import plan_backward
from composattn.backends.fused.running.emulated import text_of
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Problem
from composattn.mods import causal
from composattn.mods.mask import Mask

ONE = {torch.bfloat16: 0x3F803F80, torch.float16: 0x3C003C00}  # two of them, side by side


def plan_of(step: str, d: int, dtype: torch.dtype, mask: Mask | None) -> Plan:
    posed = Problem(1, 4, 2, 8192, 8192, d, d, dtype, torch.device("cpu"))
    program = Program(None, None if mask is None else mask.expr)
    return plan_forward(posed, program, HOPPER) if step == "forward" else plan_backward(posed, program, HOPPER).main


def lines_of(plan: Plan, dtype: torch.dtype) -> list[str]:
    text = re.sub(r"composattn_\w+|//.*", "", text_of(plan)).replace(str(ONE[dtype]), "one").replace("bf16", "f16")
    return [line.strip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("step", ["forward", "backward"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_fp16_has_the_kernels_of_bf16(d: int, step: str) -> None:
    mask = causal() if d == 128 else None
    bf16, fp16 = (lines_of(plan_of(step, d, dtype, mask), dtype) for dtype in ONE)
    assert bf16 == fp16 and len(bf16) > 500
