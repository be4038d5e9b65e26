"""Divisions and remainders that decide what is visible give the bits that torch gives, in kernels too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from composattn.analysis.program import Program
from composattn.mods.mask import Mask
from composattn.mods.score import Score
from composattn.primitives.emit import deciding
from tests.quotients import (
    FORMULAS,
    IN_FP32,
    OF_A_CPU,
    hold_blocks,
    hold_blocks_by_negative_numbers,
    hold_formulas,
    hold_whole_quotients,
    hold_windows_of_heads,
)

pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")


@pytest.mark.parametrize("formulas", [{k: f for k, f in FORMULAS.items() if k not in IN_FP32}, OF_A_CPU])
@pytest.mark.parametrize("backend", ["streaming", "reference"])
def test_pytorch_backends_give_torchs_bits(backend: str, formulas: dict[str, Callable[[Any, Any], Any]]) -> None:
    hold_formulas(backend, formulas=formulas)


@pytest.mark.parametrize("d", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["hopper-emulated", "blackwell-emulated"])
def test_quotients_of_whole_numbers_below_0_are_rounded_down(backend: str, d: int, generator: torch.Generator) -> None:
    hold_whole_quotients(backend, d)


@pytest.mark.parametrize("backend", ["hopper-emulated", pytest.param("blackwell-emulated", marks=pytest.mark.slow)])
def test_windows_whose_ends_are_such_quotients_are_exact(backend: str, generator: torch.Generator) -> None:
    hold_windows_of_heads(backend, 128, generator)


@pytest.mark.parametrize("backend", ["hopper-emulated", "blackwell-emulated"])
def test_blocks_by_negative_numbers_begin_behind_multiples_of_them(backend: str) -> None:
    hold_blocks_by_negative_numbers(backend)


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
