"""Which captured gradients a kernel may sum, and the units it sums them in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from composattn.analysis.captured_gradient import (
    GradientProgram,
    Pattern,
    bound,
    fused_reads,
    in_numbers,
    pattern_of,
)
from composattn.analysis.program import Program
from composattn.graph.content import content
from composattn.graph.expr import walk
from composattn.mods.dropout import Dropout
from composattn.mods.score import Score

ONE, TWO, THREE = torch.randn(9), torch.randn(9, 9), torch.randn(9, 9, 9)
IDS = torch.arange(9)

READS: dict[str, tuple[Callable[..., Any], Pattern | None]] = {
    "scalar": (lambda b, h, q, kv: ONE[3], Pattern.HEAD),
    "head": (lambda b, h, q, kv: TWO[b, h], Pattern.HEAD),
    "row": (lambda b, h, q, kv: TWO[h, q // 2], Pattern.ROW),
    "row-gathered": (lambda b, h, q, kv: ONE[IDS[q]], Pattern.ROW),
    "column": (lambda b, h, q, kv: TWO[b, kv], Pattern.COLUMN),
    "distance": (lambda b, h, q, kv: TWO[h, q - kv + 4], Pattern.DISTANCE),
    "distance-turned": (lambda b, h, q, kv: ONE[3 - 2 * (kv - q)], Pattern.DISTANCE),
    "buckets": (lambda b, h, q, kv: ONE[torch.clamp((q - kv).abs() // 2, max=8)], Pattern.DISTANCE),
    "pair": (lambda b, h, q, kv: THREE[h, q, kv], Pattern.PAIR),
    "sum": (lambda b, h, q, kv: ONE[q + kv], None),
    "gathered-pair": (lambda b, h, q, kv: TWO[IDS[q], IDS[kv]], None),
    "not-quite-distance": (lambda b, h, q, kv: ONE[q - kv // 2 * 2], None),
}


@pytest.mark.parametrize("name", READS)
def test_pattern_of(name: str) -> None:
    read, wanted = READS[name]
    expr = Score.of(lambda s, b, h, q, kv: s + read(b, h, q, kv)).expr
    leaf = next(n for n in walk(expr) if n.op == "read" and n.attr.tensor is not IDS)
    assert pattern_of(leaf) is wanted


def test_a_place_that_the_score_decides_has_no_pattern() -> None:
    expr = Score.of(lambda s, b, h, q, kv: s + ONE[(s > 0).int()] + TWO[h, IDS[(s > 1).int()]]).expr
    leaves = [n for n in walk(expr) if n.op == "read" and n.attr.tensor is not IDS]
    assert [pattern_of(leaf) for leaf in leaves] == [None, None]


@pytest.mark.parametrize("name", ["add", "softcap", "slopes", "where"])
def test_bounds_hold(name: str) -> None:
    mods = {
        "add": lambda s, b, h, q, kv: s + ONE[kv],
        "softcap": lambda s, b, h, q, kv: 7 * torch.tanh((s + ONE[kv]) / 7),
        "slopes": lambda s, b, h, q, kv: s - ONE[h] * (q - kv),
        "where": lambda s, b, h, q, kv: s + torch.where(q > kv, 2.0, -3.0) * ONE[h],
    }
    program = Program(Score.of(mods[name]).expr)
    (read,) = next(iter(fused_reads(program).values()))
    table = ONE.double().requires_grad_()
    q, kv = torch.meshgrid(torch.arange(9), torch.arange(9), indexing="ij")
    for i in range(9):
        for j in range(9):
            # the same function over a tensor of its own: the derivative by any element
            score = torch.tensor(float(i - j), dtype=torch.float64)
            free = {n: _over(mods[n], table) for n in (name,)}[name]
            (slope,) = torch.autograd.grad(free(score, 0, 3, q[i, j], kv[i, j]), table)
            assert float(slope.abs().max()) <= read.bound(9, 9) + 1e-12


def _over(mod: Callable[..., Any], table: torch.Tensor) -> Callable[..., Any]:
    def call(*positions: Any) -> Any:
        names = mod.__globals__
        kept, names["ONE"] = names["ONE"], table
        try:
            return mod(*positions)
        finally:
            names["ONE"] = kept

    return call


@pytest.mark.parametrize("mod", [lambda s, b, h, q, kv: s * ONE[h], lambda s, b, h, q, kv: s + torch.exp(ONE[kv])])
def test_what_has_no_bound_is_left_to_the_fallback(mod: Callable[..., Any]) -> None:
    assert not fused_reads(Program(Score.of(mod).expr))


def test_one_read_that_does_not_fit_leaves_the_whole_tensor() -> None:
    program = Program(Score.of(lambda s, b, h, q, kv: s + ONE[kv] + ONE[q + kv] + TWO[h, kv]).expr)
    assert [c.tensor is TWO for c in fused_reads(program)] == [True]


def test_programs_with_other_sums_are_other_kernels() -> None:
    program = Program(Score.of(lambda s, b, h, q, kv: s + ONE[kv] + TWO[h, kv]).expr)
    reads = fused_reads(program)
    one, two = reads
    summing = [GradientProgram(program, {c: reads[c] for c in chosen}) for chosen in ((one,), (two,), (one, two))]
    assert len({content(p) for p in (program, *summing)}) == 4


def test_sums_are_bounded_by_rows_slopes_and_what_dropout_keeps() -> None:
    program = Program(Score.of(lambda s, b, h, q, kv: s + ONE[kv] - TWO[h, q] * (q - kv)).expr)
    assert GradientProgram(program, fused_reads(program)).bounds(10, 64, 32) == (10, 10 * 96)
    kept = Dropout.with_seed(0.75, 5)
    assert kept is not None
    dropped = Program(program.score, keep=kept.expr)
    assert GradientProgram(dropped, fused_reads(program)).bounds(10, 64, 32) == (40, 40 * 96)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_become_numbers_with_one_rounding_to_fp32(dtype: torch.dtype, generator: torch.Generator) -> None:
    like = torch.empty(3, 50, dtype=dtype)
    total = torch.randint(-(2**61), 2**61, (150,), generator=generator)
    exact = total.double() / 2.0**60
    found = in_numbers(total, torch.tensor(2.0**60), like)
    assert torch.equal(found, exact.float().to(dtype).view(3, 50))


def test_bound_of_what_is_unknown_is_none() -> None:
    assert bound(Score.of(lambda s, b, h, q, kv: s).expr, 5, 5) is None
