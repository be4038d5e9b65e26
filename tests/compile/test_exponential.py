"""2^x by hardware and by polynomials, in the emulator against fp64, alone and in a forward kernel."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute import math as cm
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from composattn.analysis.program import Program
from composattn.backends import reference
from composattn.backends.fused.planning.plan import ForwardPlan, plan_forward
from composattn.backends.fused.running.emulated import EmulatedForward, text_of
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Problem
from composattn.emulator.capture import Captured
from composattn.emulator.launch import run
from composattn.mods import causal
from composattn.primitives.arithmetic import IN_PAIRS, ONE_BY_ONE, Arithmetic
from composattn.primitives.e4m3_powers import FIRST, UNIT, e4m3
from composattn.primitives.exponential import COEFFICIENTS, exp2_of_columns
from composattn.primitives.exponential_units import HARDWARE, ExponentialUnits

THREADS, EACH = 256, 16


class OfThreads:
    """A launch of a `kernel` that has `EACH` numbers of x for each thread."""

    kernel: Any

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, y).launch(grid=(x.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream)


def put_through(kernel: OfThreads, given: torch.Tensor, found: torch.Tensor, arch: str = "sm_90a") -> torch.Tensor:
    """`found` (blocks, THREADS, numbers of a thread), as the emulated kernel makes it of `given`."""
    declared: list[Any] = [
        make_fake_tensor(kind, (cute.sym_int(), THREADS, each), (THREADS * each, each, 1))
        for kind, each in ((Float32 if t.is_floating_point() else Int32, t.shape[2]) for t in (given, found))
    ]
    captured = Captured(kernel, [*declared, make_fake_stream()], arch)
    run(captured.program, captured.launch(given, found))
    return found


class Exponentials(OfThreads):
    """2^x of each number, of `EACH` columns per thread."""

    def __init__(self, units: ExponentialUnits, arithmetic: Arithmetic = ONE_BY_ONE) -> None:
        self.units, self.arithmetic = units, arithmetic

    @cute.kernel
    def kernel(self, x, y):
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        numbers = [x[block, thread, c] for c in range(EACH)]
        for c, number in enumerate(exp2_of_columns(self.units, range(EACH), numbers, self.arithmetic)):
            y[block, thread, c] = number


def exponentials(
    units: ExponentialUnits, x: torch.Tensor, arithmetic: Arithmetic = ONE_BY_ONE, arch: str = "sm_90a"
) -> torch.Tensor:
    """`x`: any number of fp32."""
    blocks = -(-x.numel() // (THREADS * EACH))
    given = torch.zeros(blocks, THREADS, EACH)
    given.view(-1)[: x.numel()] = x
    found = put_through(Exponentials(units, arithmetic), given, torch.full_like(given, torch.nan), arch)
    return found.view(-1)[: x.numel()]


class Powers(OfThreads):
    """2^x as e4m3 by polynomials of degree 1, four of a thread's numbers in a word."""

    @cute.kernel
    def kernel(self, x, y):
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        for n in range(EACH // 4):
            numbers = [cm.fma(x[block, thread, 4 * n + i], UNIT, FIRST) for i in range(4)]
            y[block, thread, n] = e4m3(numbers, (True, True))


def rounded_powers(x: torch.Tensor) -> torch.Tensor:
    """`x`: 4,096 numbers of fp32."""
    words = torch.zeros(1, THREADS, EACH // 4, dtype=torch.int32)
    return put_through(Powers(), x.view(1, THREADS, EACH), words).view(torch.float8_e4m3fn).view(-1).float()


def test_logarithms_are_rounded_to_powers_of_e4m3(generator: torch.Generator) -> None:
    """With no bias, 3.1 % in the root mean square where rounding 2^x leaves 2.6; whole x are exact, NaN stays."""
    x = torch.rand(THREADS * EACH, generator=generator) * 14.0 - 6.0
    x[-512:] = torch.arange(-512, 0) / 128.0 - 6.0  # down to 2^-10, half of the least number
    found = rounded_powers(x)
    assert (found[-512:] - x[-512:].exp2()).abs().max() <= 2.0**-10 + 0.08 * 2.0**-6
    x, found = x[:-512], found[:-512]
    errors, of_e4m3 = (of / x.exp2() - 1.0 for of in (found, x.exp2().to(torch.float8_e4m3fn).float()))
    assert abs(float(errors.mean())) < 2e-3
    assert 0.030 < float(errors.square().mean().sqrt()) < 0.032 and float(errors.abs().max()) < 0.08
    assert 0.026 < float(of_e4m3.square().mean().sqrt()) < 0.027
    edges = torch.tensor([-6.0, -1.0, 0.0, 5.0, 8.0, -17.0, -1e30, -torch.inf, torch.nan])
    found = rounded_powers(torch.cat([edges, torch.zeros(THREADS * EACH - len(edges))]))[: len(edges)]
    assert found.tolist()[:-1] == [2.0**-6, 0.5, 1.0, 32.0, 256.0, 0.0, 0.0, 0.0] and found[-1].isnan()


# the largest relative error, of the coefficients and of fp32; and which part of the results is the nearest bf16
NEAR = {3: (8.6e-5, 0.98), 4: (3.0e-6, 0.999), 5: (1.5e-7, 0.9999)}


@pytest.mark.parametrize("degree", NEAR)
def test_polynomials_are_as_near_as_they_say(degree: int, generator: torch.Generator) -> None:
    largest, nearest = NEAR[degree]
    x = torch.rand(1 << 17, generator=generator)
    for spread in (x - 1.0, 134.0 * x - 126.0):
        found, wanted = exponentials(ExponentialUnits(1, 1, degree), spread), torch.exp2(spread.double())
        error = float(((found.double() - wanted) / wanted).abs().max())
        assert 0.9 * largest < error <= largest
        apart = (found.bfloat16().view(torch.int16) - wanted.bfloat16().view(torch.int16)).abs()
        assert int(apart.max()) <= 1 and float((apart == 0).float().mean()) >= nearest


@pytest.mark.parametrize("units", [HARDWARE, *(ExponentialUnits(1, 1, degree) for degree in NEAR)], ids=str)
def test_ends_and_whole_numbers(units: ExponentialUnits) -> None:
    whole = torch.arange(-126, 128).float()
    wanted = torch.ldexp(torch.ones_like(whole), whole.int())
    torch.testing.assert_close(exponentials(units, whole), wanted, atol=0, rtol=2**-22 if units == HARDWARE else 0)
    inf, nan = torch.inf, torch.nan
    hidden = exponentials(units, torch.tensor([-inf, -1e30, -200.0, -127.5, nan]))
    assert torch.equal(hidden[:3], torch.zeros(3)) and 0 <= float(hidden[3]) < 2**-126 and hidden[4].isnan()


def test_columns_are_shared_out_as_planned() -> None:
    units = ExponentialUnits(1, 4)
    assert [units.is_polynomial(c) for c in range(8)] == [False, False, False, True] * 2
    assert not any(HARDWARE.is_polynomial(c) for c in range(128))
    x = torch.linspace(-3.0, 0.0, 4096)
    found = exponentials(units, x).view(-1, 4)
    assert torch.equal(found[:, :3], exponentials(HARDWARE, x).view(-1, 4)[:, :3])
    assert torch.equal(found[:, 3], exponentials(ExponentialUnits(1, 1), x).view(-1, 4)[:, 3])


@pytest.mark.parametrize("units", [ExponentialUnits(10, 32), ExponentialUnits(6, 8, 5)], ids=str)
def test_two_an_instruction_give_the_same_bits(units: ExponentialUnits, generator: torch.Generator) -> None:
    x = torch.cat([134.0 * torch.rand(4096, generator=generator) - 130.0, torch.tensor([-torch.inf, torch.nan, 0.0])])
    found, wanted = exponentials(units, x, IN_PAIRS, "sm_100a"), exponentials(units, x)
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


def planned(units: ExponentialUnits, d: int = 64) -> ForwardPlan:
    problem = Problem(1, 2, 2, 300, 300, d, d, torch.bfloat16, torch.device("cpu"))
    program = Program(None, causal().expr)
    tiling = plan_forward(problem, program, HOPPER).tiling
    return plan_forward(problem, program, HOPPER, tiling=dataclasses.replace(tiling, exponential=units))


def test_a_forward_takes_a_part_of_its_exponentials_from_the_polynomial(generator: torch.Generator) -> None:
    plan = planned(ExponentialUnits(1, 4))
    assert "1 of 4 columns by a polynomial of degree 3" in str(plan) and "polynomial" not in str(planned(HARDWARE))
    q, k, v = (torch.randn(1, 2, 300, 64, generator=generator).bfloat16() for _ in range(3))
    k[0, 1, 9] = torch.nan  # a key whose exponentials are the polynomial's: NaN stays NaN
    out, lse, *_ = EmulatedForward(plan)(q, k, v, 0.125, [], [])
    exact = (t.double() for t in (q, k, v))
    wanted, wanted_lse = reference.attention(*exact, score=None, mask=causal().expr, scale=0.125)
    assert torch.equal(out.isnan(), wanted.isnan()) and out[0, 1, 9:].isnan().all()
    assert torch.equal(lse.isnan(), wanted_lse.isnan())
    error = (out.double() - wanted).nan_to_num()
    assert float(error.norm() / wanted.nan_to_num().norm()) <= torch.finfo(torch.bfloat16).eps
    assert float((lse.double() - wanted_lse).nan_to_num().abs().max()) <= 1e-4


def test_a_quarter_of_the_columns_is_a_quarter_of_the_exponentials() -> None:
    counts = [len(re.findall(r"\bex2\.", text_of(planned(units)))) for units in (HARDWARE, ExponentialUnits(1, 4))]
    elements = 2 * planned(HARDWARE).tiling.tile_n // 4  # of a thread
    steps = counts[0] // elements  # copies of softmax in the kernel; each has two factors beside, but the first
    rounded = 2  # how the largest probability of each row was rounded is computed once, at the end
    assert counts[0] == steps * elements + 2 * (steps - 1) + rounded
    assert counts[0] - counts[1] == steps * elements // 4


def fused(a: torch.Tensor, b: torch.Tensor, c: float) -> torch.Tensor:
    """a·b + c of fp32 numbers, rounded once: fp64 holds the product, and its sum is rounded to odd before fp32.

    (Boldo, Melquiond, Emulation of a FMA and correctly rounded sums, 2008.)
    """
    product, added = a.double() * b.double(), torch.tensor(c, dtype=torch.float32).double()
    total = product + added
    without = total - product
    lost = (product - (total - without)) + (added - without)  # what the sum's rounding left out, exactly
    bits = total.view(torch.int64)
    toward = bits + torch.where((lost > 0) == (total > 0), 1, -1)
    return torch.where((lost != 0) & (bits % 2 == 0), toward, bits).view(torch.float64).float()


def test_a_fused_multiply_add_is_rounded_once() -> None:
    tiny = 2.0**-24
    cases = [  # a, b, c, and a·b + c to the nearest fp32
        (1.0 + 2 * tiny, 1.0 + 2 * tiny, -1.0, 4 * tiny),  # 4 tiny², lost from the product alone, is half of a bit here
        (1.0, tiny, 1.0, 1.0),  # half of a bit above 1: to even
        (
            tiny * (1.0 + 2 * tiny),
            1.0 - 2 * tiny,
            1.0 + 2 * tiny,
            1.0 + 2 * tiny,
        ),  # 2^-70 below half: twice rounded, up
        (3.0, 2.0, 1.0, 7.0),
    ]
    for a, b, c, wanted in cases:
        assert float(fused(torch.tensor([a]), torch.tensor([b]), c)) == wanted


def in_exact_arithmetic(degree: int, x: torch.Tensor) -> torch.Tensor:
    """What `polynomial_exp2` says step by step, for numbers from -126 to 1, as a device rounds it."""
    whole = x.double().floor()  # both sums with `_WHOLE` are exact, rounded down as they are
    rest = (x.double() - whole).float()
    *first, last = COEFFICIENTS[degree]
    total = torch.full_like(x, last)
    for coefficient in (*first[::-1], 1.0):
        total = fused(total, rest, coefficient)
    return (total.double() * torch.exp2(whole)).float()


# Table 2 of FlashAttention-4: largest and mean relative error of fp32, then of its bf16, and which part is the bf16
# nearest to 2^x. What bf16 itself costs is 3.89e-3 and 1.41e-3. (flash-attn-4's coefficients of degree 3: 8.77e-5.)
IDEAL = (3.89e-3, 1.41e-3)
ERRORS = {
    3: (8.57e-5, 5.44e-5, 3.90e-3, 1.41e-3, 0.99),
    4: (2.96e-6, 1.84e-6, 3.89e-3, 1.41e-3, 0.9996),
    5: (1.45e-7, 5.5e-8, 3.89e-3, 1.41e-3, 0.99998),
}


def relative_errors(found: torch.Tensor, wanted: torch.Tensor) -> list[float]:
    apart = ((found.double() - wanted) / wanted).abs()
    return [float(apart.max()), float(apart.mean())]


@pytest.mark.parametrize(("degree", "count"), [(3, 1 << 22), (4, 1 << 20), (5, 1 << 20)])
def test_errors_in_exact_fp32_arithmetic_are_those_of_the_papers_table(
    degree: int, count: int, generator: torch.Generator
) -> None:
    """4 M numbers in [0, 1), as the paper has them: no bf16 is further than the next, and 99 % are the nearest."""
    x = torch.rand(count, generator=generator)
    wanted = torch.exp2(x.double())
    found = in_exact_arithmetic(degree, x)
    *errors, nearest = ERRORS[degree]
    measured = [*relative_errors(found, wanted), *relative_errors(found.bfloat16(), wanted)]
    assert measured == pytest.approx(errors, rel=0.02)
    assert relative_errors(wanted.bfloat16(), wanted) == pytest.approx(IDEAL, rel=0.01)
    apart = (found.bfloat16().view(torch.int16).int() - wanted.bfloat16().view(torch.int16).int()).abs()
    assert int(apart.max()) <= 1 and float((apart == 0).float().mean()) >= nearest - 3e-4


@pytest.mark.parametrize("degree", ERRORS)
def test_the_kernel_computes_what_exact_fp32_arithmetic_gives(degree: int, generator: torch.Generator) -> None:
    x = 126.0 * torch.rand(1 << 14, generator=generator) - 126.0
    assert torch.equal(exponentials(ExponentialUnits(1, 1, degree), x), in_exact_arithmetic(degree, x))
