"""Divisions and remainders that decide what is visible give the bits that torch gives, in kernels too.

A mask of one key per query makes lse the score of that key, so that one kernel shows the value of each formula (a head
of its own) at each number (a key of its own), NaN and infinities included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.analysis.program import Program
from composattn.graph.jumps import deciding
from composattn.mods.mask import Mask
from composattn.mods.score import Score

pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

NUMBERS = torch.tensor(
    [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.5, -1.5, 3.0, -3.0, 21.0, 41.0, 246.0, -246.0, 1e5, -1e5, 16777217.0]
)
DIVISORS = torch.tensor([0.1, -0.1, math.inf, -math.inf, 0.0, math.nan, 41.0, -41.0])[torch.arange(16) % 8]
FORMULAS: dict[str, Callable[[Any, Any], Any]] = {
    "% 0.1": lambda x, y: x % 0.1,
    "% -0.7": lambda x, y: x % -0.7,
    "% 41": lambda x, y: x % 41.0,
    "%": lambda x, y: x % y,
    "1 %": lambda x, y: 1.0 % x,
    "fmod": torch.fmod,
    "fmod 0.1": lambda x, y: torch.fmod(x, 0.1),
    "// 0.1": lambda x, y: x // 0.1,
    "// -41": lambda x, y: x // -41.0,
    "//": lambda x, y: x // y,
    "1 //": lambda x, y: 1.0 // x,
    "div to zero": lambda x, y: torch.div(x, 41.0, rounding_mode="trunc"),
    "floor of a quotient": lambda x, y: torch.floor(x / 41.0),
    "quotient as an integer": lambda x, y: torch.where(x.abs() < 1e6, (x / 41.0).int(), 0),
    "quotient compared": lambda x, y: torch.where(x / 41.0 >= 6.0, 1.0, 0.0),
    "sign": lambda x, y: torch.sign(x),
}


def finite(value: Any) -> Any:
    """`value`, with numbers in the place of NaN and infinities."""
    value = torch.where(torch.isnan(value), 33.25, value)
    return torch.where(value == math.inf, 44.25, torch.where(value == -math.inf, 55.25, value))


def hold_formulas(backend: str, device: str = "cpu") -> None:
    """Each formula at each pair of numbers is what torch gives on a CPU."""
    numbers, divisors = NUMBERS.to(device), DIVISORS.to(device)

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        total: Any = 0.0
        for n, formula in enumerate(FORMULAS.values()):
            total = torch.where(h == n, finite(formula(numbers[kv], divisors[kv])), total)
        return total

    q = torch.zeros(1, len(FORMULAS), len(NUMBERS), 64, dtype=torch.float16, device=device)
    mods: dict[str, Any] = {"score_mod": score_mod, "mask_mod": lambda b, h, q, kv: q == kv}
    _, found = ca.attention(q, q, q, **mods, return_lse=True, backend=backend)
    for lse, (name, formula) in zip(found[0].cpu(), FORMULAS.items(), strict=True):
        wanted = finite(formula(NUMBERS, DIVISORS)).float()
        torch.testing.assert_close(lse, wanted, rtol=1e-6, atol=1e-6, msg=lambda words, name=name: f"{name}: {words}")


def hold_blocks(backend: str, generator: torch.Generator, device: str = "cpu") -> None:
    """Blocks of 41 by true division, by constants and by a captured number, are those of integers."""
    q, k, v = (torch.randn(1, 1, 300, 64, generator=generator).half().to(device) for _ in range(3))
    size = torch.tensor(41.0, device=device)
    floored, whole = (
        lambda b, h, q, kv: (q / 41).int() == torch.floor(kv / size),
        lambda b, h, q, kv: q // 41 == kv // 41,
    )
    found = ca.attention(q, k, v, mask_mod=floored, backend=backend)
    wanted = ca.attention(q, k, v, mask_mod=whole, backend="streaming")
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_emulated_quotients_and_remainders_are_those_of_torch() -> None:
    hold_formulas("hopper-emulated")


def test_emulated_blocks_by_true_division_are_those_of_integers(generator: torch.Generator) -> None:
    hold_blocks("hopper-emulated", generator)


def test_divisions_that_decide_nothing_stay_cheap() -> None:
    table = torch.rand(8)

    def score_mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where(q / 3 > 1, torch.tanh(s / 30.0), s) + (q - kv) / 128 + table[(kv / 7).int()]

    program = Program(Score.of(score_mod).expr, Mask.of(lambda b, h, q, kv: kv / 5.0 >= 2.0).expr)
    divisors = {node.args[1].attr for node in deciding(program.score, program.mask) if node.op == "div"}
    assert divisors == {3, 7, 5.0}
