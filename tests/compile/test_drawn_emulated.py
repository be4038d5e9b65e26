"""Blocks that stay and draw their tiles give the bits of a block per tile, and leave their counter at zero."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.backends.fused.planning.arguments import ForwardArguments
from composattn.backends.fused.planning.plan import ForwardPlan, plan_forward
from composattn.backends.fused.planning.plan_backward import plan_backward
from composattn.backends.fused.running.emulated import EmulatedForward, emulating
from composattn.backends.fused.tiles.scheduler import Scheduler
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.hopper.forward_choice import (
    choose_forward,
    forward_facts,
    tiling_of_form,
)
from composattn.backends.hopper.tiling import HopperTiling
from composattn.call.problem import Problem
from composattn.emulator.capture import Captured
from composattn.emulator.mode import EAGER, LATE, random_mode
from composattn.mods.masks import causal, sliding_window
from composattn.mods.scores import alibi, softcap
from composattn.testing.tolerance import Case, check
from tests.support import on_few_sms, outlier_normal, sampled

FEW = dataclasses.replace(HOPPER, sms=3)  # so that blocks walk over several tiles each
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask_mod": causal()},
    "window": {"mask_mod": sliding_window(40)},
    "alibi causal": {"score_mod": alibi(torch.linspace(0.1, 1.0, 2)), "mask_mod": causal()},
    "keys that no query sees": {"mask_mod": lambda b, h, q, kv: (q >= kv) & (q < 128)},
}


def drawn(plan: ForwardPlan, **changes: Any) -> ForwardPlan:
    return dataclasses.replace(plan, tiling=dataclasses.replace(plan.tiling, **changes))


def check_bits_of_a_block_per_tile(plan: ForwardPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Whichever way outputs leave where blocks draw their tiles."""
    leaves = drawn(plan, scheduler=Scheduler.ONE_TILE)
    out, lse = EmulatedForward(leaves)(q, k, v, 0.06)[:2]
    assert lse is not None and not out.isnan().any()
    for mode in (EAGER, LATE, random_mode(2)):
        with emulating(mode):
            other, its_lse = EmulatedForward(plan)(q, k, v, 0.06)[:2]
        assert its_lse is not None
        assert torch.equal(out, other) and torch.equal(lse, its_lse), mode


@pytest.mark.parametrize(("name", "guesses"), sampled(itertools.product(CASES, (False, True)), 5))
def test_drawn_tiles_give_the_same_bits(name: str, guesses: bool, generator: torch.Generator) -> None:
    """Two sequences of 2 heads, one key/value head, 2 query tiles each: 8 tiles for 3 blocks."""
    mods = CASES[name]
    q, k, v = (outlier_normal(2, h, 201, 128, generator=generator, dtype=torch.bfloat16) for h in (2, 1, 1))
    program = ca.Attention(**mods).program
    captured = [c.tensor for c in program.captures]
    _, wanted = ca.attention(q, k, v, scale=0.088, return_lse=True, backend="reference", **mods)

    def run(plan: ForwardPlan) -> tuple[torch.Tensor, torch.Tensor | None]:
        forward = EmulatedForward(plan)
        found = forward(q, k, v, 0.088, captured)[:2]
        assert forward.kernel.result.blocks == (3 if plan.tiling.persistent else 8)
        return found

    problem = dataclasses.replace(Problem.of(q, k, v), schedule=ca.Schedule(persistent=True))
    form = "large, guesses, stays" if guesses else "large, stays"
    facts = forward_facts(problem, program, FEW)
    plan = plan_forward(problem, program, FEW, tiling=tiling_of_form(form, facts))
    if guesses:
        plan = drawn(plan, tile_n=32)  # the first two tiles look for their maximum
    assert plan.tiling.scheduler is Scheduler.LATE
    out, lse = run(drawn(plan, scheduler=Scheduler.ONE_TILE))
    assert lse is not None and not out.isnan().any()
    assert torch.allclose(lse, wanted, atol=1e-4, rtol=0)
    for mode in (EAGER, LATE, random_mode(1)):
        with emulating(mode):
            other, its_lse = run(plan)
        assert torch.equal(out, other) and torch.equal(lse, its_lse), mode


def test_the_last_draw_of_a_kernel_leaves_the_counter_at_zero(generator: torch.Generator) -> None:
    """4 tiles, for fewer blocks, as many and more."""
    q, k, v = (outlier_normal(1, 2, 140, 128, generator=generator, dtype=torch.bfloat16) for _ in range(3))
    program = ca.Attention().program
    for sms in (1, 3, 4, 20):
        problem = dataclasses.replace(Problem.of(q, k, v), schedule=ca.Schedule(persistent=True))
        plan = plan_forward(problem, program, dataclasses.replace(HOPPER, sms=sms))
        forward = EmulatedForward(plan)
        seen = []

        def launch(*given: Any, kernel: Any = forward.kernel, seen: list[int] = seen) -> None:
            drawn_from = ForwardArguments(*given).counter
            assert not drawn_from.any()
            kernel(*given)
            seen.append(int(drawn_from))

        forward.__dict__["kernel"] = launch
        for _ in range(2):
            forward(q, k, v, 0.088)
        assert seen == [0, 0], sms


def test_a_kernel_that_was_stopped_leaves_the_counter_at_zero(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    """If it did not, the next kernel would start where this one stopped, and leave rows of NaN before that place."""
    q, k, v = (outlier_normal(1, 1, 101, 128, generator=generator, dtype=torch.bfloat16) for _ in range(3))
    problem = dataclasses.replace(Problem.of(q, k, v), schedule=ca.Schedule(persistent=True))
    forward = EmulatedForward(plan_forward(problem, ca.Attention().program, FEW))
    counters = []

    def stopped(*given: Any) -> None:
        counters.append(ForwardArguments(*given).counter.fill_(2))
        raise ZeroDivisionError("as a finding would")

    monkeypatch.setattr(forward, "kernel", stopped)
    with pytest.raises(ZeroDivisionError):
        forward(q, k, v, 0.088)
    assert counters[0].item() == 0


def test_only_blocks_that_draw_store_outputs_from_registers() -> None:
    problem = Problem.of(*(torch.zeros(1, 1, 8192, d, dtype=torch.bfloat16) for d in (192, 192, 128)))
    for mask, stays, direct in ((None, None, True), (causal(), None, True), (causal(), False, False)):
        sized = dataclasses.replace(problem, schedule=ca.Schedule(persistent=stays))
        chosen = choose_forward(sized, ca.Attention(mask_mod=mask).program, HOPPER).tiling
        assert chosen.output_direct == direct == chosen.persistent
    assert choose_forward(problem, ca.Attention(score_mod=alibi(torch.ones(1))).program, HOPPER).tiling.resident == 0


@pytest.mark.parametrize("name", sampled(["causal", "full", "keys that no query sees"]))
def test_the_next_queries_come_while_outputs_leave_from_registers(name: str, generator: torch.Generator) -> None:
    """6 tiles for two blocks, which read Q from shared memory."""
    q, k, v = (outlier_normal(1, h, 290, 256, generator=generator, dtype=torch.bfloat16) for h in (2, 1, 1))
    problem = dataclasses.replace(Problem.of(q, k, v), schedule=ca.Schedule(persistent=True))
    plan = plan_forward(problem, ca.Attention(**CASES[name]).program, dataclasses.replace(HOPPER, sms=2))
    assert isinstance(plan.tiling, HopperTiling) and plan.tiling.scheduler is Scheduler.LATE
    assert plan.direct_store and not plan.tiling.frees_queries and not plan.tiling.separate_o
    check_bits_of_a_block_per_tile(plan, q, k, v)


@pytest.mark.parametrize(
    "mods",
    [{}, {"mask_mod": sliding_window(300)}, {"score_mod": softcap(5.0), "mask_mod": causal()}],
    ids=["full-d96", "window-d128", "soft cap-d128"],
)
def test_turns_come_where_fewer_blocks_run_than_were_launched(
    mods: dict[str, Any], monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    """A part of a GPU runs fewer blocks: a tile with a block's own number began after those that waited for it."""
    dim = 128 if mods else 96
    q, k, v, dout = (outlier_normal(1, 1, 700, dim, generator=generator, dtype=torch.bfloat16) for _ in range(4))
    case = Case(q, k, v, **mods, dout=dout)
    plan = plan_backward(Problem.of(q, k, v), case.program, dataclasses.replace(HOPPER, sms=4), deterministic=True).main
    assert plan.tiling.persistent
    launch = Captured.launch
    monkeypatch.setattr(Captured, "launch", lambda *given, **sizes: launch(*given, **sizes | {"sms": 2}))
    for mode in (EAGER, LATE):
        with emulating(mode), on_few_sms("hopper-emulated", 4):
            check(partial(ca.attention, backend="hopper-emulated", deterministic=True), case)
