"""Whatever the schedule, the same bits: orders, persistent blocks, sections of heads, of dense and packed sequences."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.analysis.program import Program
from composattn.backends.fused.planning.plan import ForwardPlan, plan_forward
from composattn.backends.fused.running.emulated import EmulatedForward, emulating
from composattn.backends.fused.tiles.scheduler import Scheduler
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.hopper.forward_choice import forward_facts, tiling_of_form
from composattn.call.problem import Problem
from composattn.call.sequences import NO_SEQUENCES, Sequences
from composattn.emulator.mode import EAGER, LATE, random_mode
from composattn.mods.mask import Mask
from composattn.mods.masks import causal, document
from tests.support import outlier_normal, sampled

FEW = dataclasses.replace(HOPPER, sms=3)  # so that persistent blocks walk over several tiles each
SCHEDULES = (
    ca.Schedule(order="in_order"),
    ca.Schedule(order="shortest_first"),
    ca.Schedule(heads_together=1),
    ca.Schedule(persistent=True),
    ca.Schedule(order="in_order", persistent=True, heads_together=1),
)


@pytest.mark.parametrize("lies", ["dense", pytest.param("packed", marks=pytest.mark.slow)])
def test_results_do_not_depend_on_the_schedule(lies: str, generator: torch.Generator) -> None:
    lengths, heads = (70, 0, 1, 130, 199), (4, 2)
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))
    q, k, v = (outlier_normal(400, h, 64, generator=generator, dtype=torch.bfloat16) for h in (heads[0], 2, 2))
    mask: Mask = causal()
    varlen: ca.Varlen | None = ca.Varlen(cu)
    sequences = Sequences(cu, cu)
    if lies == "dense":
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        mask, varlen, sequences = causal() & document(ids), None, NO_SEQUENCES
    program = Program(None, Mask.of(mask).expr)

    def plan(schedule: ca.Schedule) -> ForwardPlan:
        problem = dataclasses.replace(Problem.of(q, k, v, varlen), schedule=schedule)
        return plan_forward(problem, program, FEW)

    def run(schedule: ca.Schedule) -> tuple[torch.Tensor, torch.Tensor | None]:
        captured = [c.tensor for c in program.captures]
        return EmulatedForward(plan(schedule))(q, k, v, 0.125, captured, (), sequences)[:2]

    out, lse = run(ca.Schedule())
    assert lse is not None
    assert not out.isnan().any()
    for schedule in SCHEDULES:
        other_out, other_lse = run(schedule)
        assert other_lse is not None
        assert torch.equal(out, other_out), schedule
        assert torch.equal(lse, other_lse), schedule


def test_warpgroups_that_pass_by_tiles_give_the_same_bits_in_blocks_that_stay(generator: torch.Generator) -> None:
    """Documents of 1 to 130 rows, in tiles of 128 queries; of the last tile's rows one warpgroup has none."""
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([70, 1, 130, 99]))
    q, k, v = (outlier_normal(1, 2, 300, 128, generator=generator, dtype=torch.bfloat16) for _ in range(3))
    mask = causal() & document(ids)
    program = Program(None, mask.expr)
    captured = [c.tensor for c in program.captures]
    _, wanted = ca.attention(q, k, v, mask_mod=mask, scale=0.088, return_lse=True, backend="reference")
    found = []
    for persistent in (False, True):
        problem = dataclasses.replace(Problem.of(q, k, v), schedule=ca.Schedule(persistent=persistent))
        facts = forward_facts(problem, program, FEW)
        plan = plan_forward(problem, program, FEW, tiling=tiling_of_form("large", facts))
        for mode in (EAGER, LATE, random_mode(1)):
            with emulating(mode):
                found.append(EmulatedForward(plan)(q, k, v, 0.088, captured)[:2])
    for out, lse in found:
        assert torch.equal(out, found[0][0]) and torch.equal(lse, found[0][1])
    assert float((lse - wanted).abs().max()) <= 1e-4


def behind(b: object, h: object, q: Any, kv: Any) -> Any:
    return kv + 70 <= q  # the first query tiles see nothing: no Q is copied for them


# D, keys, the mask, fields of the tiling: small blocks, guessed maxima in three warpgroups, blocks of D 128, rows apart
TWO_Q: dict[str, tuple[int, int, Any, dict[str, Any]]] = {
    "small": (64, 200, causal(), {}),
    "small, tiles that see nothing": (64, 200, behind, {}),
    "guessing": (64, 400, None, {}),
    "d 128": (128, 300, causal(), {}),
}


@pytest.mark.parametrize("name", sampled(TWO_Q, 4))
def test_two_stages_of_queries_give_the_same_bits(name: str, generator: torch.Generator) -> None:
    dim, keys, mask, fields = TWO_Q[name]
    q, k, v = (outlier_normal(1, 3, keys, dim, generator=generator, dtype=torch.bfloat16) for _ in range(3))
    program, one = Program(None, None if mask is None else Mask.of(mask).expr), dataclasses.replace(HOPPER, sms=1)
    problem = dataclasses.replace(Problem.of(q, k, v), schedule=ca.Schedule(persistent=True))
    form = "small" if "small" in name else "large, guesses, stays" if name == "guessing" else "large, stays"
    facts = forward_facts(problem, program, HOPPER)
    two = dataclasses.replace(tiling_of_form(form, facts), **fields)
    assert two.q_stages == 2 and two.blocks == (3 if "small" in name else 1)
    one_tile = dataclasses.replace(two, scheduler=Scheduler.ONE_TILE)
    assert one_tile.q_stages == 1
    _, wanted = ca.attention(q, k, v, mask_mod=mask, scale=0.088, return_lse=True, backend="reference")
    found = []
    for cut in (one_tile, two):
        plan = plan_forward(problem, program, one, tiling=cut)
        for mode in (EAGER, LATE, random_mode(1)) if cut is two else (EAGER,):
            with emulating(mode):
                found.append(EmulatedForward(plan)(q, k, v, 0.088, ())[:2])
    for out, lse in found:
        assert torch.equal(out, found[0][0]) and torch.equal(lse, found[0][1])
    seen = wanted > -torch.inf
    assert torch.equal(seen, found[0][1] > -torch.inf)
    assert float((found[0][1] - wanted)[seen].abs().max()) <= 1e-4


def test_a_plan_says_which_order_it_chose() -> None:
    def of(mask: Mask, heads: int = 32, **schedule: object) -> str:
        problem = Problem(1, heads, heads, 1000, 1000, 64, 64, torch.bfloat16, torch.device("cpu"))
        asked = dataclasses.replace(problem, schedule=ca.Schedule(**schedule))  # type: ignore[arg-type]
        return str(plan_forward(asked, Program(None, mask.expr), HOPPER))

    assert "longest first: the last query tile of a head first" in of(causal())
    assert "longest first: by a table on the device" in of(document(torch.arange(1000) // 70))
    assert "longest first: by a table on the device" in of(Mask.of(lambda b, h, q, kv: q <= kv))
    assert "in order, as all tiles run at once" in of(document(torch.arange(1000) // 70), heads=2)
    assert "shortest first: by a table on the device, as asked for" in of(causal(), order="shortest_first")
    assert "persistent" in of(causal(), persistent=True)
    assert "3 key/value heads at a time" in of(causal(), heads_together=3)
