"""Divisions and remainders that decide what is visible give the bits that torch gives: what backends are held to.

A mask of one key per query makes lse the score of that key, so that one kernel shows the value of each formula (a head
of its own) at each number (a key of its own), NaN and infinities included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import composattn as ca
from composattn.testing.tolerance import Case, check

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
    # which of two zeros it is
    "1 / fmod": lambda x, y: 1 / torch.fmod(x, 3.0),
    "1 / %": lambda x, y: 1 / (x % -3.0),
    "1 / (//)": lambda x, y: 1 / (x // 1e9) + 1 / (x // -1e9),
    "1 / (/)": lambda x, y: 1 / (x / math.inf) + 1 / (x / -math.inf),
    "** 0.5": lambda x, y: 1 / x**0.5,
    "** -0.5": lambda x, y: x**-0.5,
    "1 / sqrt": lambda x, y: 1 / torch.sqrt(x),
    "rsqrt": lambda x, y: torch.rsqrt(x),
    "rsqrt of a cast": lambda x, y: torch.rsqrt(x.half().float()) + torch.rsqrt(x.bfloat16().float()),
    "1 / trunc": lambda x, y: 1 / torch.trunc(x / 1e9),
    "1 / ceil": lambda x, y: 1 / torch.ceil(x / 1e9),
    "1 / floor": lambda x, y: 1 / torch.floor(x / 1e9),
    "1 / round": lambda x, y: 1 / torch.round(x / 1e9),
    "1 / -": lambda x, y: 1 / -x,
    "1 / (0 -)": lambda x, y: 1 / (0.0 - x),
    "1 / (+ 0)": lambda x, y: 1 / (x + 0.0),
    "1 / (- 0)": lambda x, y: 1 / (x - 0.0),
    "1 / (+ -0)": lambda x, y: 1 / (x + -0.0),
    "1 / abs": lambda x, y: 1 / torch.abs(x),
    "1 / (* 0)": lambda x, y: 1 / (x * 0.0),
    "1 / where": lambda x, y: 1 / torch.where(x <= 0, x, -x),
}
OF_A_CPU: dict[str, Callable[[Any, Any], Any]] = {
    "1 / relu": lambda x, y: 1 / torch.relu(x),
    "1 / clamp": lambda x, y: 1 / x.clamp(min=0),
    "1 / clamp from above": lambda x, y: 1 / x.clamp(max=-0.0),
    "1 / hardtanh": lambda x, y: 1 / torch.nn.functional.hardtanh(x),
    "1 / leaky_relu": lambda x, y: 1 / torch.nn.functional.leaky_relu(x),
    "1 / elu": lambda x, y: 1 / torch.nn.functional.elu(x),
    "1 / sin": lambda x, y: torch.where(x.abs() < 1.0, 1 / torch.sin(x), 0.0),
    "1 / tanh": lambda x, y: torch.where(x == 0.0, 1 / torch.tanh(x), 0.0),
    "1 / expm1": lambda x, y: torch.where(x == 0.0, 1 / torch.expm1(x), 0.0),
    "1 / log1p": lambda x, y: torch.where(x == 0.0, 1 / torch.log1p(x), 0.0),
    "1 / erf": lambda x, y: torch.where(x == 0.0, 1 / torch.erf(x), 0.0),
}
"""Whose zero has another sign on a GPU. torch there takes the larger number by an instruction, to which 0.0 is larger
than -0.0: kernels do so too. Of smooth functions kernels give 0.0 for -0.0, as the instruction for a sine does (H200),
or may do so."""


# Of numbers below 0 that a head, a batch entry or a size begins: kernels know these as CuTe's own integers, whose
# quotients are cut towards 0.
WHOLE: dict[str, Callable[..., Any]] = {
    "heads //": lambda b, h, q, kv: (h - 5) // 2,
    "heads %": lambda b, h, q, kv: (h * 3 - 7) % 4,
    "batch // and %": lambda b, h, q, kv: (b - 4) // 3 + (b - 5) % 4,
    "a distance //": lambda b, h, q, kv: (20 * h - 2 * q + 299) // 2 - (20 * h - 2 * kv) // 2,
    "a distance %": lambda b, h, q, kv: (h - 3 * kv) % 7,
    "to zero": lambda b, h, q, kv: torch.div(h - 6, 4, rounding_mode="trunc") + torch.fmod(b - 7, 3),
    "by a negative number": lambda b, h, q, kv: (h + b) // -3 + (h * q) % -5,
    "of a product": lambda b, h, q, kv: (-h * b) // 2 + (b - h) // (h + 1),
}


IN_FP32 = ("% 0.1", "% -0.7", "fmod 0.1")  # the reference has 0.1 in fp64, as scores are


def finite(value: Any) -> Any:
    """`value`, with numbers in the place of NaN and infinities."""
    value = torch.where(torch.isnan(value), 33.25, value)
    return torch.where(value == math.inf, 44.25, torch.where(value == -math.inf, 55.25, value))


def hold_formulas(backend: str, device: str = "cpu", formulas: dict[str, Callable[[Any, Any], Any]] = FORMULAS) -> None:
    """Each formula at each pair of numbers is what torch gives on a CPU."""
    numbers, divisors = NUMBERS.to(device), DIVISORS.to(device)

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        total: Any = 0.0
        for n, formula in enumerate(formulas.values()):
            total = torch.where(h == n, finite(formula(numbers[kv], divisors[kv])), total)
        return total

    q = torch.zeros(1, len(formulas), len(NUMBERS), 64, dtype=torch.float16, device=device)
    mods: dict[str, Any] = {"score_mod": score_mod, "mask_mod": lambda b, h, q, kv: q == kv}
    _, found = ca.attention(q, q, q, **mods, return_lse=True, backend=backend)
    for lse, (name, formula) in zip(found[0].cpu(), formulas.items(), strict=True):
        wanted = finite(formula(NUMBERS, DIVISORS)).float()
        torch.testing.assert_close(lse, wanted, rtol=1e-6, atol=1e-6, msg=lambda words, name=name: f"{name}: {words}")


def hold_whole_quotients(backend: str, d: int, device: str = "cpu") -> None:
    """Each formula, at a query of its own in turn, where a query sees itself alone."""

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        total: Any = 0
        for n, formula in enumerate(WHOLE.values()):
            total = torch.where(q % len(WHOLE) == n, formula(b, h, q, kv), total)
        return total.float()

    q = torch.zeros(3, 4, 130, d, dtype=torch.bfloat16, device=device)
    k = q[:, :2]
    mods: dict[str, Any] = {"score_mod": score_mod, "mask_mod": lambda b, h, q, kv: q == kv}
    _, lse = ca.attention(q, k, k, **mods, return_lse=True, backend=backend)
    b, h, at = torch.arange(3)[:, None, None], torch.arange(4)[:, None], torch.arange(130)
    for n, (name, formula) in enumerate(WHOLE.items()):
        wanted = formula(b, h, at, at).float().expand(3, 4, 130)
        of_formula = at % len(WHOLE) == n
        wrong = lambda words, name=name: f"{name}: {words}"  # noqa: E731
        torch.testing.assert_close(lse.cpu()[..., of_formula], wanted[..., of_formula], rtol=0, atol=1e-4, msg=wrong)


def hold_windows_of_heads(backend: str, d: int, generator: torch.Generator, device: str = "cpu") -> None:
    """Windows whose ends are such quotients, wider from head to head, forward and backward."""
    draw = partial(torch.randn, generator=generator)
    q, dout = (draw(2, 4, 384, d).bfloat16().to(device) for _ in range(2))
    k, v = (draw(2, 2, 384, d).bfloat16().to(device) for _ in range(2))
    mask = lambda b, h, q, kv: (q >= kv) & (2 * q - 2 * kv < 120 + 20 * h)  # noqa: E731
    check(partial(ca.attention, backend=backend), Case(q, k, v, mask_mod=mask, dout=dout))
    zero = torch.zeros_like(q)
    _, lse = ca.attention(zero, k, k, mask_mod=mask, return_lse=True, backend=backend)
    h, at = torch.arange(4)[:, None], torch.arange(384)
    assert torch.equal(lse.exp().round().int().cpu(), (60 + 10 * h).minimum(at + 1).int().expand(2, 4, 384))


def hold_blocks_by_negative_numbers(backend: str, device: str = "cpu") -> None:
    """Quotients of positions by them change behind a multiple of the number, not before it."""

    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return ((q // -64) * 100 + kv // -16).float()

    q = torch.zeros(1, 1, 150, 64, dtype=torch.float16, device=device)
    _, lse = ca.attention(
        q, q, q, score_mod=score_mod, mask_mod=lambda b, h, q, kv: q == kv, return_lse=True, backend=backend
    )
    at = torch.arange(150)
    torch.testing.assert_close(lse[0, 0].cpu(), ((at // -64) * 100 + at // -16).float(), rtol=0, atol=1e-3)
    _, lse = ca.attention(q, q, q, mask_mod=lambda b, h, q, kv: q // -16 == kv // -16, return_lse=True, backend=backend)
    wanted = (at[:, None] // -16 == at // -16).sum(-1)
    assert torch.equal(lse[0, 0].exp().round().long().cpu(), wanted)


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
