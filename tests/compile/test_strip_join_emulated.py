"""Gradients of keys by strips of an image, added by the kernel behind a backward, in the emulator."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

from composattn.analysis.strips import CutRow, Strips
from composattn.backends.fused.planning.plan_backward import StripJoinPlan
from composattn.backends.fused.rewrites.strips import KeyParts
from composattn.backends.fused.running.emulated import EmulatedKernel
from composattn.backends.fused.tiles.target import HOPPER

ROWS, HEADS, D, DV = 5, 3, 16, 8


@pytest.mark.parametrize(
    "strips",
    [
        *(Strips(*of) for of in ((48, 0), (48, 6), (17, 16), (96, 20), (64, 31), (40, 4), (41, 17))),
        *(Strips(*of, apart=8) for of in ((48, 3), (41, 8), (9, 0))),
    ],
)
@pytest.mark.parametrize("batch", [1, 2])
def test_gradients_of_a_key_are_added_over_all_strips_that_have_it(strips: Strips, batch: int) -> None:
    plan = StripJoinPlan(target=HOPPER, dtype=torch.bfloat16, head_dim=D, head_dim_v=DV, strips=strips)
    length = ROWS * strips.columns
    like = [torch.empty(batch, length, HEADS, d, dtype=torch.bfloat16).transpose(1, 2) for d in (D, DV)]
    parts = [KeyParts(strips).memory(t).normal_() for t in like]
    found = [torch.full_like(t, torch.nan) for t in like]
    EmulatedKernel(plan)(*parts, *found)
    for joined, part in zip(found, parts, strict=True):
        width = part.shape[-1]
        wanted = torch.zeros(batch, HEADS, ROWS, strips.columns, width)
        for strip, its in enumerate(part.float().view(batch, strips.count, HEADS, ROWS, strips.wide, width).unbind(1)):
            for c in range(strips.wide):
                column = strip * strips.apart - strips.before + c
                if 0 <= column < strips.columns:
                    wanted[:, :, :, column] += its[:, :, :, c]
        assert torch.equal(joined, wanted.bfloat16().view(joined.shape))


@pytest.mark.parametrize(("columns", "above"), [(1, 0), (30, 1), (41, 2)])
def test_gradients_of_a_cut_row_come_from_where_strips_have_it(columns: int, above: int) -> None:
    at, last = ROWS, ROWS + above + 2
    strips = Strips(48, 6, above=above, cut=CutRow(at, columns, at, last))
    plan = StripJoinPlan(target=HOPPER, dtype=torch.bfloat16, head_dim=D, head_dim_v=DV, strips=strips)
    length = at * 48 + columns
    like = [torch.empty(2, HEADS, length, d, dtype=torch.bfloat16) for d in (D, DV)]
    parts = [KeyParts(strips).memory(t).normal_() for t in like]
    whole = dataclasses.replace(strips, above=0, cut=None)
    found = [torch.full_like(t, torch.nan) for t in like]
    EmulatedKernel(plan)(*parts, *found)
    there = [*range(above, above + at), last]
    rows = [part.unflatten(2, (last + 1, -1))[:, :, there].flatten(2, 3) for part in parts]
    of_whole = [torch.full((2, HEADS, (at + 1) * 48, d), torch.nan).bfloat16() for d in (D, DV)]
    EmulatedKernel(dataclasses.replace(plan, strips=whole))(*rows, *of_whole)
    wanted = [t[:, :, :length] for t in of_whole]
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
