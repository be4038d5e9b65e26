"""Columns of shared memory behind D and Dv: how many there are is a matter of copies, in the emulator."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.running.emulated import EmulatedForward
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.hopper.forward_choice import choose_forward
from composattn.backends.hopper.tiling import HopperTiling
from composattn.call.problem import Problem
from composattn.mods import causal

FEW = dataclasses.replace(HOPPER, sms=2)  # so that blocks that stay walk over several tiles each


@pytest.mark.parametrize(
    ("d", "queries", "columns", "of_output"),
    [
        (72, 256, 128, 72),
        (72, 4096, 128, 72),
        (88, 256, 128, 88),
        (88, 729, 96, 88),
        (80, 256, 96, 96),
        (96, 729, 96, 96),
    ],
)
def test_rows_of_no_whole_sectors_come_in_two_boxes_or_three_and_leave_in_one(
    d: int, queries: int, columns: int, of_output: int
) -> None:
    problem = Problem(512, 16, 16, queries, queries, d, d, torch.bfloat16, torch.device("cpu"))
    tiling = choose_forward(problem, ca.Attention().program, HOPPER).tiling
    assert (tiling.d, tiling.dv, tiling.output_columns, tiling.q_stages) == (columns, columns, of_output, 2)


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("d", [72, 88])
def test_outputs_have_the_same_bits_however_wide_rows_are_on_chip(
    d: int, stays: bool, generator: torch.Generator
) -> None:
    q = torch.randn(1, 2, 141, d, generator=generator).bfloat16()
    k, v = (torch.randn(1, 1, 150, d, generator=generator).bfloat16() for _ in range(2))
    problem = dataclasses.replace(Problem.of(q, k, v), schedule=ca.Schedule(persistent=stays))
    program = ca.Attention(mask_mod=causal()).program
    chosen = choose_forward(problem, program, HOPPER).tiling
    assert isinstance(chosen, HopperTiling)
    found = []
    for columns, spared in ((128, 0), (96, 0), (128, 128 - d), (96, 96 - d)):
        tiling = dataclasses.replace(chosen, d=columns, dv=columns, spared=spared, stages=2)
        out, _, _ = EmulatedForward(plan_forward(problem, program, FEW, tiling=tiling))(q, k, v, d**-0.5, [])
        found.append(out)
    assert all(torch.equal(found[0], out) for out in found[1:])
    wanted = ca.attention(q.double(), k.double(), v.double(), mask_mod=causal(), backend="reference")
    torch.testing.assert_close(found[0].double(), wanted, atol=2e-2, rtol=1e-2)
