"""The units in which gradients of captured tensors are summed, found by a kernel, in the emulator."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from composattn.analysis.captured_gradient import GradientProgram, fused_reads, in_numbers
from composattn.analysis.program import Program
from composattn.backends.fused.running.emulated import EmulatedKernel
from composattn.backends.fused.running.sums import FixedPointSums
from composattn.backends.fused.tiles.target import AMPERE, BLACKWELL, HOPPER, Target
from composattn.call.problem import Problem
from composattn.call.sequences import NO_SEQUENCES, Sequences, Varlen
from composattn.mods.score import Score

pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

ONE, TWO = torch.randn(9), torch.randn(9, 9)
PROGRAM = Program(Score.of(lambda s, b, h, q, kv: s + ONE[kv] - TWO[h, q] * (q - kv)).expr)


class Case:
    """A call of two query heads on one: dense (2, H, 300, Dv), or packed with rows that no sequence uses."""

    def __init__(self, generator: torch.Generator, dim: int = 64, packed: bool = False, target: Target = HOPPER):
        self.varlen: Varlen | None = None
        q_shape: tuple[int, ...]
        v_shape: tuple[int, ...]
        lse_shape: tuple[int, ...]
        q_shape, v_shape, lse_shape = (2, 2, 300, dim), (2, 1, 200, dim), (2, 2, 300)
        if packed:
            used = torch.tensor([140, 0, 99, 3], dtype=torch.int32)
            self.varlen = Varlen(torch.tensor([0, 150, 150, 250, 300]).int(), seqused_q=used)
            q_shape, v_shape, lse_shape = (300, 2, dim), (300, 1, dim), (2, 300)
        self.in_use = torch.ones(300, dtype=torch.bool)
        if packed:
            self.in_use[140:150] = self.in_use[249:250] = self.in_use[253:] = False
        self.dout, self.v = (torch.randn(s, generator=generator).bfloat16() for s in (q_shape, v_shape))
        self.dlse: torch.Tensor | None = torch.randn(lse_shape, generator=generator)
        self.program, self.target = GradientProgram(PROGRAM, fused_reads(PROGRAM)), target
        self.packed = packed

    def units(self) -> torch.Tensor:
        problem = Problem.of(self.dout, self.v, self.v, varlen=self.varlen)
        sequences = NO_SEQUENCES if self.varlen is None else Sequences.of(self.varlen, None)
        sums = FixedPointSums(self.program, PROGRAM, problem, (300, 200), self.target, EmulatedKernel)
        *totals, units = sums.begun(self.dout, self.v, self.dlse, [c.tensor for c in PROGRAM.captures], sequences)
        assert not any(total.any() for total in totals)
        return units

    def largest(self) -> list[float]:
        """What the sums can't be above."""

        def largest(t: torch.Tensor) -> float:
            return float((t[self.in_use] if self.packed else t).double().abs().max())

        of_dlse = 0.0
        if self.dlse is not None:
            of_dlse = float((self.dlse[:, self.in_use] if self.packed else self.dlse).abs().max())
        most = 2 * self.dout.shape[-1] * largest(self.dout) * largest(self.v) + of_dlse
        lengths = (300, 300) if self.packed else (300, 200)
        return [most * b for b in self.program.bounds(self.dout.numel() // self.dout.shape[-1], *lengths)]


def check(case: Case) -> None:
    for unit, largest in zip(case.units().tolist(), case.largest(), strict=True):
        assert (1 - 1e-5) * 2.0**59 <= unit * largest <= (1 + 1e-5) * 2.0**60
        assert unit.hex().startswith("0x1.0000000000000p"), "a power of two"


FORMS: dict[str, Any] = {"D 64": {}, "D 88": {"dim": 88}, "D 512": {"dim": 512}, "packed": {"packed": True}}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_dlse", [False, True], ids=["", "LSE"])
def test_units_just_hold_the_largest_sums(form: str, has_dlse: bool, generator: torch.Generator) -> None:
    case = Case(generator, **FORMS[form])
    if not has_dlse:
        case.dlse = None
    check(case)


@pytest.mark.parametrize("target", [AMPERE, BLACKWELL], ids=["warp", "blackwell"])
def test_all_architectures_find_them(target: Target, generator: torch.Generator) -> None:
    check(Case(generator, target=target))


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e6, 1e12])
def test_they_follow_the_sizes_of_gradients(size: float, generator: torch.Generator) -> None:
    case = Case(generator)
    case.dout, case.v, case.dlse = case.dout * size, case.v * size**0.5, None
    check(case)


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_squares_of_gradients_and_values_need_not_be_numbers(size: float, generator: torch.Generator) -> None:
    case = Case(generator)
    case.dout, case.v, case.dlse = case.dout * size, case.v / size, None
    check(case)


def test_one_large_row_says_them_whatever_others_are(generator: torch.Generator) -> None:
    case = Case(generator)
    case.dout, case.v, case.dlse = case.dout * 2**-20, case.v * 2**-20, None
    case.dout[1, 1, 299] *= 2**20
    case.v[0, 0, 131] *= 2**20
    check(case)


def test_sums_have_room_where_squares_of_gradients_vanish(generator: torch.Generator) -> None:
    case = Case(generator)
    case.dout, case.v, case.dlse = case.dout * 1e-30, case.v * 1e15, None
    assert all(u * m < 2.0**60 for u, m in zip(case.units().tolist(), case.largest(), strict=True))
    case.dout.zero_()
    units = case.units()
    assert units.isfinite().all() and (units > 0).all()


@pytest.mark.parametrize(
    ("where", "what"), list(itertools.product(["dout", "v", "dlse"], [torch.inf, -torch.inf, torch.nan]))
)
def test_numbers_that_are_not_finite_make_gradients_nan(where: str, what: float, generator: torch.Generator) -> None:
    case = Case(generator)
    getattr(case, where).view(-1)[-70] = what
    total = torch.zeros(1, dtype=torch.int64)
    assert all(in_numbers(total, unit, torch.zeros(1)).isnan() for unit in case.units())


def test_rows_that_no_sequence_uses_have_no_say(generator: torch.Generator) -> None:
    case = Case(generator, packed=True)
    assert case.dlse is not None
    clean = case.units()
    case.dout[~case.in_use], case.v[~case.in_use], case.dlse[:, ~case.in_use] = torch.nan, torch.inf, torch.nan
    assert torch.equal(case.units(), clean)
    case.v[248] = torch.inf
    assert case.units().isnan().all()
