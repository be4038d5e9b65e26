"""Columns of Q that wait in registers, in the emulator: all or some of them, in blocks that stay too."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.running.emulated import EmulatedForward, emulating
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.hopper.forward_choice import choose_forward
from composattn.backends.hopper.tiling import GUESSING, HopperTiling
from composattn.call.problem import Problem
from composattn.call.schedule import AUTO
from composattn.emulator.mode import EAGER, LATE, Mode, random_mode
from composattn.mods import causal, sliding_window
from composattn.mods.mask import Mask
from tests.support import outlier_normal

FEW = dataclasses.replace(HOPPER, sms=2)  # so that blocks that stay walk over several tiles each
STAYS = ca.Schedule(persistent=True)
LONG = 16384  # keys of which all tilings hold what they can
NOT_ALL = causal() & Mask.of(lambda b, h, q, kv: q < 100)


@pytest.mark.parametrize("dims", [(192, 128), (184, 120)])
def test_parts_of_split_keys_leave_registers_in_fp32(dims: tuple[int, int], generator: torch.Generator) -> None:
    """The tiling stores lines of 16-bit numbers elsewhere."""
    d, dv = dims
    q = outlier_normal(1, 2, 141, d, generator=generator, dtype=torch.bfloat16)
    k, v = (outlier_normal(1, 1, 301, width, generator=generator, dtype=torch.bfloat16) for width in (d, dv))
    wanted, wanted_lse = ca.attention(q.double(), k.double(), v.double(), return_lse=True, backend="reference")
    problem = dataclasses.replace(Problem.of(q, k, v), schedule=ca.Schedule(split_kv=2))
    program = ca.Attention().program
    cut = choose_forward(dataclasses.replace(problem, q_len=LONG, kv_len=LONG), program, HOPPER).tiling
    assert isinstance(cut, HopperTiling) and cut.output_direct
    plan = plan_forward(problem, program, FEW, tiling=cut)
    assert plan.is_split
    out, lse, _ = EmulatedForward(plan)(q, k, v, d**-0.5, [])
    assert lse is not None
    torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), wanted_lse.double(), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize(
    ("d", "dv", "mask", "resident", "schedule", "dtype"),
    [
        pytest.param(192, 192, causal(), 128, AUTO, torch.bfloat16, id="two thirds of d192 causal"),
        pytest.param(192, 128, causal(), 192, AUTO, torch.float16, id="all of d192 with dv128"),
        pytest.param(128, 128, causal() & sliding_window(150), 128, AUTO, torch.bfloat16, id="all of d128 in a window"),
        pytest.param(192, 192, None, 128, AUTO, torch.float16, id="two thirds of d192", marks=pytest.mark.slow),
        pytest.param(128, 128, None, 128, AUTO, torch.bfloat16, id="all of d128, maxima guessed"),
        pytest.param(192, 192, None, 128, STAYS, torch.bfloat16, id="two thirds of d192 in blocks that stay"),
        pytest.param(
            192, 128, sliding_window(60), 192, STAYS, torch.bfloat16, id="all in a window", marks=pytest.mark.slow
        ),
        pytest.param(192, 128, NOT_ALL, 192, AUTO, torch.bfloat16, id="all, of queries of which some see no key"),
    ],
)
def test_rows_are_those_of_fp64(
    d: int,
    dv: int,
    mask: Mask | None,
    resident: int,
    schedule: ca.Schedule,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    """Two heads on one; of the last tile's queries one warpgroup has a few, the other none."""
    q = outlier_normal(1, 2, 141, d, generator=generator, dtype=dtype)
    k, v = (outlier_normal(1, 1, 301, width, generator=generator, dtype=dtype) for width in (d, dv))
    if d == 128 and mask is None:  # of tiles of 32, so that guesses are made, and some fail
        k = (k * torch.linspace(8.0, 1.0, 301)[:, None]).to(dtype)
    mods: dict[str, Any] = {"mask_mod": mask, "scale": d**-0.5, "return_lse": True}
    wanted, wanted_lse = ca.attention(q.double(), k.double(), v.double(), **mods, backend="reference")
    problem = dataclasses.replace(Problem.of(q, k, v), schedule=schedule)
    program = ca.Attention(mask_mod=mask).program
    cut = choose_forward(dataclasses.replace(problem, q_len=LONG, kv_len=LONG), program, HOPPER).tiling
    assert isinstance(cut, HopperTiling)
    assert cut.resident == resident
    if cut.kernel == GUESSING:
        cut = dataclasses.replace(cut, tile_n=32)
    found = []
    # where Q's place is free once registers have it, nothing but a fence says that it was read
    strict = [Mode(late=True, fenced_reads=True)] if cut.frees_queries else []
    for mode in (EAGER, LATE, random_mode(1), *strict):
        with emulating(mode):
            found.append(EmulatedForward(plan_forward(problem, program, FEW, tiling=cut))(q, k, v, d**-0.5, []))
    for out, lse, _ in found:
        assert lse is not None
        assert torch.equal(out, found[0][0])
        torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=1e-2)
        torch.testing.assert_close(lse.double(), wanted_lse.double(), atol=1e-3, rtol=1e-5)
