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
    ("d", "keys", "columns"), [(72, 256, 128), (88, 512, 96), (80, 256, 96), (96, 256, 96), (72, 1024, 96)]
)
def test_rows_of_no_whole_sectors_come_in_two_boxes_where_keys_are_few(d: int, keys: int, columns: int) -> None:
    problem = Problem(512, 16, 16, 256, keys, d, d, torch.bfloat16, torch.device("cpu"))
    tiling = choose_forward(problem, ca.Attention().program, HOPPER).tiling
    assert (tiling.d, tiling.dv) == (columns, columns)


def test_outputs_of_wider_rows_have_the_same_bits(generator: torch.Generator) -> None:
    q = torch.randn(1, 2, 141, 72, generator=generator).bfloat16()
    k, v = (torch.randn(1, 1, 150, 72, generator=generator).bfloat16() for _ in range(2))
    problem = dataclasses.replace(Problem.of(q, k, v), schedule=ca.Schedule(persistent=True))
    program = ca.Attention(mask_mod=causal()).program
    wide = choose_forward(problem, program, HOPPER).tiling
    assert isinstance(wide, HopperTiling) and wide.d == 128
    found = []
    for tiling in (wide, dataclasses.replace(wide, d=96, dv=96)):
        out, _, _ = EmulatedForward(plan_forward(problem, program, FEW, tiling=tiling))(q, k, v, 72**-0.5, [])
        found.append(out)
    assert torch.equal(*found)
    wanted = ca.attention(q.double(), k.double(), v.double(), mask_mod=causal(), backend="reference")
    torch.testing.assert_close(found[0].double(), wanted, atol=2e-2, rtol=1e-2)
