"""The last rounds of equal tiles, shared alike by all blocks, give the rows of fp64, and the same bits in any order."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.running.counter import counter_of
from composattn.backends.fused.running.emulated import EmulatedForward, emulating
from composattn.backends.fused.tiles.scheduler import Scheduler
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.hopper.forward_choice import choose_forward
from composattn.backends.hopper.tiling import GUESSING, HopperTiling
from composattn.call.problem import Problem
from composattn.emulator.mode import EAGER, LATE, random_mode
from tests.support import outlier_normal

FEW = dataclasses.replace(HOPPER, sms=3)  # 8 tiles: a round of whole ones, and three shares of five
LONG = 4096  # of which all tilings are those that shares are for


def shared(problem: Problem, program: Any, **changes: Any) -> HopperTiling:
    """The tiling of a long call, with tiles of few keys."""
    long = dataclasses.replace(problem, q_len=LONG, kv_len=LONG)
    found = choose_forward(long, program, FEW).tiling
    assert isinstance(found, HopperTiling) and found.scheduler.draws
    return dataclasses.replace(found, scheduler=Scheduler.LATE_STREAM_K, tile_n=32, **changes)


@pytest.mark.parametrize(
    ("dims", "kernel"),
    [
        pytest.param((256, 256), "forward", id="d256"),
        pytest.param((192, 192), "forward", id="d192, some of Q in registers", marks=pytest.mark.slow),
        pytest.param((128, 128), "forward", id="d128"),
        pytest.param((128, 128), GUESSING, id="d128, maxima guessed"),
    ],
)
def test_shares_give_the_rows_of_fp64(dims: tuple[int, int], kernel: str, generator: torch.Generator) -> None:
    """Two sequences of 2 heads on one: each share but the last leaves sums, each but the first takes some."""
    d, _ = dims
    q = outlier_normal(2, 2, 201, d, generator=generator, dtype=torch.bfloat16)
    k, v = (outlier_normal(2, 1, 301, width, generator=generator, dtype=torch.bfloat16) for width in dims)
    wanted, wanted_lse = ca.attention(q.double(), k.double(), v.double(), return_lse=True, backend="reference")
    program = ca.Attention().program
    problem = Problem.of(q, k, v)
    cut = shared(problem, program, kernel=kernel)
    plan = plan_forward(problem, program, FEW, tiling=cut, return_max_scores=True)
    found = []
    for mode in (EAGER, LATE, random_mode(1), random_mode(2)):
        with emulating(mode):
            forward = EmulatedForward(plan)
            found.append(forward(q, k, v, d**-0.5, []))
            assert not counter_of(q, plan.counters).any(), "flags are down behind the kernel"
    for out, lse, highest in found:
        assert lse is not None and highest is not None
        assert torch.equal(out, found[0][0])
        torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=1e-2)
        torch.testing.assert_close(lse.double(), wanted_lse.double(), atol=1e-3, rtol=1e-5)
    scores = torch.einsum("bhqd,bkd->bhqk", q.double(), k[:, 0].double()) * d**-0.5
    torch.testing.assert_close(found[0][2].double(), scores.amax(-1), atol=1e-4, rtol=1e-4)
