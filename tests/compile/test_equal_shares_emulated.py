"""Few queries of many sequences in equal shares of all keys: the rows of fp64, and the same bits in any order."""

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
from composattn.call.problem import Problem
from composattn.emulator.mode import EAGER, LATE, random_mode
from composattn.mods import softcap
from tests.support import outlier_normal


@pytest.mark.parametrize(
    ("sms", "batch", "heads", "queries", "d", "length", "mods"),
    [
        pytest.param(3, 2, 4, 1, 128, 301, {}, id="two tiles by three"),
        pytest.param(4, 1, 6, 1, 64, 700, {}, id="one tile by four"),
        pytest.param(3, 3, 3, 5, 96, 210, {"score_mod": softcap(20.0)}, id="three tiles of five queries by three"),
        pytest.param(2, 3, 4, 1, 128, 301, {}, id="three tiles by two"),
        pytest.param(2, 5, 2, 1, 128, 40, {}, id="five tiles of few keys by two", marks=pytest.mark.slow),
        pytest.param(2, 7, 8, 1, 64, 1200, {}, id="seven tiles by two", marks=pytest.mark.slow),
    ],
)
def test_equal_shares_give_the_rows_of_fp64(
    sms: int, batch: int, heads: int, queries: int, d: int, length: int, mods: dict[str, Any],
    generator: torch.Generator,
) -> None:  # fmt: skip
    q = outlier_normal(batch, heads, queries, d, generator=generator, dtype=torch.bfloat16)
    k, v = (outlier_normal(batch, 1, length, d, generator=generator, dtype=torch.bfloat16) for _ in range(2))
    wanted, wanted_lse = ca.attention(q.double(), k.double(), v.double(), return_lse=True, backend="reference", **mods)
    program, problem, target = ca.Attention(**mods).program, Problem.of(q, k, v), dataclasses.replace(HOPPER, sms=sms)
    tiling = dataclasses.replace(choose_forward(problem, program, target).tiling, scheduler=Scheduler.STREAM_K)
    plan = plan_forward(problem, program, target, tiling=tiling, return_max_scores=True)
    assert not plan.is_split
    found = []
    for mode in (EAGER, LATE, random_mode(1), random_mode(2)):
        with emulating(mode):
            found.append(EmulatedForward(plan)(q, k, v, d**-0.5, []))
            assert not counter_of(q, plan.counters).any(), "nobody has arrived behind the kernel"
    for out, lse, highest in found:
        assert lse is not None and highest is not None
        assert torch.equal(out, found[0][0]) and torch.equal(lse, found[0][1])
        torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=1e-2)
        torch.testing.assert_close(lse.double(), wanted_lse.double(), atol=1e-3, rtol=1e-5)
    if not mods:
        scores = torch.einsum("bhqd,bkd->bhqk", q.double(), k[:, 0].double()) * d**-0.5
        torch.testing.assert_close(found[0][2].double(), scores.amax(-1), atol=1e-4, rtol=1e-4)
