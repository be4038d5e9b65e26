"""Probabilities by the maximum before a tile, in the emulator, however far a row rises above it."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.analysis.program import Program
from composattn.backends.fused.planning.plan import ForwardPlan, plan_forward
from composattn.backends.fused.running.emulated import EmulatedForward, emulating
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.hopper.forward_choice import choose_forward
from composattn.backends.hopper.tiling import GUESSING
from composattn.call.problem import Problem
from composattn.emulator.mode import EAGER, LATE, random_mode
from composattn.mods.mask import Mask
from composattn.mods.masks import causal
from composattn.primitives.rescale_threshold import ALWAYS_RESCALE, RescaleThreshold
from composattn.testing.tolerance import Case, check

BY_SUMS = RescaleThreshold(8.0, share=1 / 32)
BY_SUMS_WIDE = RescaleThreshold(8.0, share=1 / 16, sums_read="doubled")

# In tiles of 32, of which the kernel goes over the last one first: it guesses from the third one on, and again 9 tiles
# behind the first failure
KEYS = 430

HIDDEN = torch.where(torch.arange(KEYS) < 70, 0.0, -torch.inf)


def guessing(problem: Problem, program: Program, **changes: Any) -> ForwardPlan:
    """The plan for 8,192 queries, its tiles of 32 keys so that few have many, and the largest scores kept."""
    long = dataclasses.replace(problem, q_len=8192, kv_len=8192)
    cut = choose_forward(long, program, HOPPER).tiling
    cut = dataclasses.replace(cut, kernel=GUESSING, tile_n=32, **{"threshold": ALWAYS_RESCALE} | changes)
    return plan_forward(problem, program, HOPPER, tiling=cut, return_max_scores=True)


def hidden_behind_70(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + HIDDEN[kv]


@pytest.mark.parametrize(
    ("grows", "d", "dtype", "mask"),
    [
        pytest.param("not", 64, torch.bfloat16, None, marks=pytest.mark.slow),
        pytest.param("steadily", 64, torch.float16, None, marks=pytest.mark.slow),
        pytest.param("beyond fp32's exponents", 96, torch.bfloat16, None, marks=pytest.mark.slow),
        pytest.param("steadily", 128, torch.float16, None, marks=pytest.mark.slow),
        ("with -inf before", 64, torch.bfloat16, None),
        pytest.param("at the first keys", 32, torch.bfloat16, None, marks=pytest.mark.slow),
        pytest.param("steadily", 64, torch.bfloat16, causal(), marks=pytest.mark.slow),
        pytest.param("beyond fp32's exponents", 96, torch.float16, causal(), marks=pytest.mark.slow),
    ],
)
def test_rows_come_out_right_however_far_they_rise(
    grows: str, d: int, dtype: torch.dtype, mask: Mask | None, generator: torch.Generator
) -> None:
    q, k, v = (torch.randn(1, 1, KEYS, d, generator=generator) for _ in range(3))
    most = {"not": 1.0, "steadily": 60.0, "beyond fp32's exponents": 3000.0}.get(grows, 20.0)
    rises = torch.linspace(most, 1.0, KEYS)
    if grows == "at the first keys":
        rises = torch.where(torch.arange(KEYS) < 3, 200.0, 1.0)
    q, k, v = (x.to(dtype) for x in (q, k * rises[:, None], v))
    score = hidden_behind_70 if grows == "with -inf before" else None
    asked = ca.Attention(score_mod=score, mask_mod=mask)
    exact = ca.Attention(score_mod=score, mask_mod=mask, backend="reference")
    wanted, lse, highest = exact(q.double(), k.double(), v.double(), return_lse=True, return_max_scores=True)
    plan = guessing(Problem.of(q, k, v), asked.program)
    captured = [c.tensor for c in asked.program.captures]
    found = []
    for mode in (EAGER, LATE, random_mode(1)):
        with emulating(mode):
            found.append(EmulatedForward(plan)(q, k, v, d**-0.5, captured))
    for out, out_lse, out_highest in found:
        assert torch.equal(out, found[0][0])
        torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=1e-2)
        assert out_lse is not None
        assert out_highest is not None
        torch.testing.assert_close(out_lse.double(), lse.double(), atol=1e-3, rtol=1e-5)
        torch.testing.assert_close(out_highest.double(), highest.double(), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_guesses_begin_again_behind_those_that_fail(dtype: torch.dtype, generator: torch.Generator) -> None:
    """Keys of 41 tiles whose scores rise all the time: 8 tiles look for their maximum, later 16."""
    keys = 1300
    q, k, v = (torch.randn(1, 1, n, 64, generator=generator) for n in (70, keys, keys))
    k = k * torch.linspace(40.0, 1.0, keys)[:, None]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    wanted, lse = ca.attention(q.double(), k.double(), v.double(), return_lse=True, backend="reference")
    with emulating(LATE):
        plan = guessing(Problem.of(q, k, v), Program())
        out, out_lse, _ = EmulatedForward(plan)(q, k, v, 0.125)
    torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=1e-2)
    assert out_lse is not None
    torch.testing.assert_close(out_lse.double(), lse.double(), atol=1e-3, rtol=1e-5)


SLOPES = torch.tensor([4.0, 0.25])
DOWN = torch.arange(KEYS) // 64 % 3 * -5e8  # to where a row counts as hidden, and back
LEAST = torch.finfo(torch.float32).min
LARGE = torch.where(torch.arange(KEYS) < 3, 1e4, 0.0)
MODS: dict[str, Any] = {
    "alibi": lambda s, b, h, q, kv: s - SLOPES[h] * (q - kv),
    "alibi to both sides": lambda s, b, h, q, kv: s - SLOPES[h] * (q - kv).abs(),
    "hidden by large numbers": lambda s, b, h, q, kv: s + DOWN[kv] + torch.where(q % 5 == 0, -1e9, 0.0),
    "the least number": lambda s, b, h, q, kv: torch.where((q % 5 == 0) | (kv > 200), LEAST, s),
    "large": lambda s, b, h, q, kv: s * 0.5 + LARGE[kv] - (kv == 300) * 1e4,
}


@pytest.mark.parametrize(
    ("mod", "d", "dtype", "mask"),
    [
        ("alibi", 64, torch.bfloat16, causal()),
        pytest.param("alibi to both sides", 96, torch.float16, None, marks=pytest.mark.slow),
        ("hidden by large numbers", 64, torch.float16, None),
        ("the least number", 128, torch.bfloat16, causal()),
        pytest.param("large", 64, torch.bfloat16, None, marks=pytest.mark.slow),
    ],
)
def test_with_a_score_mod_rows_are_those_of_fp64(
    mod: str, d: int, dtype: torch.dtype, mask: Mask | None, generator: torch.Generator
) -> None:
    """Two heads on one; a row whose scores are all below -2^25 sees nothing, whichever tile it was hidden in."""
    q = torch.randn(1, 2, KEYS, d, generator=generator).to(dtype)
    k, v = (torch.randn(1, 1, KEYS, d, generator=generator).to(dtype) for _ in range(2))
    asked = ca.Attention(score_mod=MODS[mod], mask_mod=mask)
    exact = ca.Attention(score_mod=MODS[mod], mask_mod=mask, backend="reference")
    wanted, lse, highest = exact(q.double(), k.double(), v.double(), return_lse=True, return_max_scores=True)
    captured = [c.tensor for c in asked.program.captures]
    forward = EmulatedForward(guessing(Problem.of(q, k, v), asked.program))
    with emulating(LATE):
        out, out_lse, out_highest = forward(q, k, v, d**-0.5, captured)
    torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(out_lse.double(), lse.double(), atol=1e-3, rtol=1e-5)
    found, sees = out_highest.double(), lse > -torch.inf
    torch.testing.assert_close(found[sees], highest[sees].double(), atol=1e-3, rtol=1e-5)


def test_a_largest_probability_that_is_rounded_costs_no_accuracy(generator: torch.Generator) -> None:
    """One key of each row decides; by the maximum before, its probability is no power of 2."""
    q, k, v = (torch.randn(1, 1, KEYS, 64, generator=generator) for _ in range(3))
    k[..., 5, :] = 12 * k[..., 5, :].sign()
    q = (q.abs() * k[..., 5:6, :].sign()).bfloat16()
    k, v = k.bfloat16(), v.bfloat16()
    wanted = ca.attention(q.double(), k.double(), v.double(), backend="reference")
    with emulating(EAGER):
        out = EmulatedForward(guessing(Problem.of(q, k, v), ca.Attention().program))(q, k, v, 0.125)[0]
    assert torch.equal(out, wanted.bfloat16())


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="guesses"),
        pytest.param({"kernel": "forward", "threshold": BY_SUMS}, id="threshold by sums"),
        pytest.param({"kernel": "forward", "threshold": BY_SUMS_WIDE}, id="threshold by sums, noted at doublings"),
    ],
)
def test_outliers_cost_hardly_more_than_with_the_maximum_of_each_tile(changes: dict[str, Any]) -> None:
    """Root mean square errors of plain rows; a largest probability that is rounded costs more the larger it may be.

    By guesses up to 2^64 they are 1.085 of those, with a lag of 2^8 1.19.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64, generator=generator) for n in (192, KEYS, KEYS))
    for x in (q, k, v):
        x += torch.where(
            torch.rand(x.shape, generator=generator) < 1e-2, 10 * torch.randn(x.shape, generator=generator), 0
        )
    q, k, v = (x.bfloat16() for x in (q, k, v))
    wanted = ca.attention(q.double(), k.double(), v.double(), backend="reference")
    plan = guessing(Problem.of(q, k, v), ca.Attention().program)
    cut = dataclasses.replace(plan.tiling, **changes)
    with emulating(EAGER):
        forward = EmulatedForward(plan_forward(Problem.of(q, k, v), ca.Attention().program, HOPPER, tiling=cut))
        out = forward(q, k, v, 0.125)[0]
    by_tile = by_each_maximum(q, k, v, 32)
    assert deviation(out, wanted) <= 1.02 * deviation(by_tile, wanted)


def by_each_maximum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile_n: int) -> torch.Tensor:
    """Probabilities in bf16 by the largest score that a row has seen when a tile's are computed; sums in fp32."""
    scores = q.float() @ k.float().transpose(-1, -2) * 0.125
    highest = torch.full((*q.shape[:-1], 1), -torch.inf)
    total, out = torch.zeros_like(highest), torch.zeros(*q.shape[:-1], v.shape[-1])
    for first in reversed(range(0, k.shape[-2], tile_n)):
        tile, before = scores[..., first : first + tile_n], highest
        highest = torch.maximum(before, tile.amax(-1, keepdim=True))
        p, fades = (tile - highest).exp(), (before - highest).exp()
        total = total * fades + p.sum(-1, keepdim=True)
        out = out * fades + p.bfloat16().float() @ v[..., first : first + tile_n, :].float()
    return (out / total).bfloat16()


def deviation(out: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((out.double() - wanted).square().mean().sqrt())


@pytest.mark.parametrize(("heads", "queries", "keys", "d", "dv"), [(4, 63, 1600, 96, 64), (8, 20, 1600, 64, 64)])
def test_heads_that_share_a_tile_guess_in_all_its_rows(
    heads: int, queries: int, keys: int, d: int, dv: int, generator: torch.Generator
) -> None:
    """Rows of the second warpgroup on are queries that exist, though rows of that number would not."""
    sizes = (heads, queries, d), (2, keys, d), (2, keys, dv)
    q, k, v = (torch.randn(1, *size, generator=generator).bfloat16() for size in sizes)
    many = Problem.of(*(x.expand(64, -1, -1, -1) for x in (q, k, v)))  # as many tiles as keep a GPU busy
    plan = plan_forward(many, Program(), HOPPER)
    assert (plan.tiling.kernel, plan.is_split) == (GUESSING, False) and plan.tiling.slots > 1
    asked = {"backend": "hopper-emulated", "schedule": ca.Schedule(split_kv=1)}
    check(partial(ca.attention, **asked), Case(q, k, v, name="no mask"))


def test_no_maximum_lags_where_others_are_guessed() -> None:
    """A guess below the largest score so far would fail."""
    problem = Problem(1, 1, 1, KEYS, KEYS, 64, 64, torch.bfloat16, torch.device("cpu"))
    with pytest.raises(ValueError, match="none may lag"):
        guessing(problem, Program(), threshold=BY_SUMS)
