"""Probabilities by the maximum before a tile, in the emulator: a row that rises far above it is computed again."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.analysis.program import Program
from composattn.backends.fused.emulated import EmulatedForward, emulating
from composattn.backends.fused.plan import ForwardPlan, plan_forward
from composattn.backends.fused.target import HOPPER
from composattn.backends.hopper.tiling import GUESSING, forward_tiling
from composattn.call.problem import Problem
from composattn.emulator.cluster import EAGER, LATE, random_mode
from composattn.mods.mask import Mask
from composattn.mods.masks import causal

import os
KERNEL = os.environ.get("KERNEL", GUESSING)
KEYS = 270  # in tiles of 64, of which the kernel goes over the last one first


def speculative(problem: Problem, program: Program) -> ForwardPlan:
    """The plan for 8,192 queries, its tiles of 64 keys so that few have several."""
    long = dataclasses.replace(problem, q_len=8192, kv_len=8192)
    cut = forward_tiling(long, program, HOPPER)
    cut = dataclasses.replace(cut, kernel=KERNEL, rescale_early=False, tile_n=64)
    return plan_forward(problem, program, HOPPER, tiling=cut)


@pytest.mark.parametrize(
    ("grows", "dtype", "mask"),
    [
        pytest.param("not", torch.bfloat16, None, marks=pytest.mark.slow),
        ("steadily", torch.float16, None),
        ("far beyond fp32's exponents", torch.bfloat16, None),
        ("with -inf before", torch.bfloat16, None),
        pytest.param("steadily", torch.bfloat16, causal(), marks=pytest.mark.slow),
    ],
)
def test_rows_come_out_right_however_far_they_rise(
    grows: str, dtype: torch.dtype, mask: Mask | None, generator: torch.Generator
) -> None:
    q, k, v = (torch.randn(1, 1, KEYS, 64, generator=generator) for _ in range(3))
    factor = {"not": 1.0, "steadily": 20.0, "far beyond fp32's exponents": 3000.0, "with -inf before": 20.0}[grows]
    k = k * torch.linspace(factor, 1.0, KEYS)[:, None]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    hidden = torch.zeros(KEYS)
    hidden[70:] = -torch.inf

    def hides(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + hidden[kv]

    score = hides if grows == "with -inf before" else None
    asked = ca.Attention(score_mod=score, mask_mod=mask)
    wanted, lse = ca.attention(
        q.double(), k.double(), v.double(), score_mod=score, mask_mod=mask, return_lse=True, backend="reference"
    )
    plan = speculative(Problem.of(q, k, v), asked.program)
    captured = [c.tensor for c in asked.program.captures]
    found = []
    for mode in (EAGER, LATE, random_mode(1)):
        with emulating(mode):
            found.append(EmulatedForward(plan)(q, k, v, 0.125, captured)[:2])
    for out, out_lse in found:
        assert torch.equal(out, found[0][0])
        torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=1e-2)
        assert out_lse is not None
        torch.testing.assert_close(out_lse.double(), lse.double(), atol=1e-3, rtol=1e-5)
