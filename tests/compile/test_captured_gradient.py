"""Gradients of captured tensors summed by the backward kernel, in the emulator against fp64; by every pattern."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import composattn as ca
from benchmarks.host_work import without_kernels
from composattn.analysis.captured_gradient import GradientProgram, Pattern, fused_reads
from composattn.analysis.program import Program
from composattn.backends import reference
from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.planning.plan_backward import plan_backward
from composattn.backends.fused.running.emulated import EmulatedCall, EmulatedKernel
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.autograd import BackwardInputs
from composattn.call.problem import Problem
from composattn.call.sequences import NO_SEQUENCES
from composattn.graph.expr import Capture
from composattn.mods.mask import Mask
from composattn.mods.score import Score
from tests.support import outlier_normal, sampled, uncancelled_sizes

pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

LENGTH = 260
TABLES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "relative": lambda h: (h, 2 * LENGTH + 1),
    "across": lambda h: (2 * LENGTH + 1, h),
    "tight": lambda h: (h, 150 + 200 - 1),
    "buckets": lambda h: (32, h),
    "slopes": lambda h: (h,),
    "row": lambda h: (h, LENGTH),
    "column": lambda h: (LENGTH,),
    "pair": lambda h: (h, LENGTH, LENGTH),
    "number": lambda h: (),
}
Mod = Callable[..., Any]
MODS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Mod], set[Pattern]]] = {
    "relative": (lambda t: lambda s, b, h, q, kv: s + t["relative"][h, q - kv + LENGTH], {Pattern.DISTANCE}),
    "relative-in-softcap": (
        lambda t: lambda s, b, h, q, kv: 5 * torch.tanh((s + t["relative"][h, q - kv + LENGTH]) / 5),
        {Pattern.DISTANCE},
    ),
    "buckets": (
        lambda t: lambda s, b, h, q, kv: s + t["buckets"][torch.clamp((q - kv).abs() // 4, max=31), h],
        {Pattern.DISTANCE},
    ),
    "across-memory": (lambda t: lambda s, b, h, q, kv: s + t["across"][q - kv + LENGTH, h], {Pattern.DISTANCE}),
    # what lies beyond the sequences lies beyond the table too, so some lanes of a warp read number by number
    "tight": (lambda t: lambda s, b, h, q, kv: s + t["tight"][h, kv - q + 149], {Pattern.DISTANCE}),
    "two-by-distance": (
        lambda t: lambda s, b, h, q, kv: s + t["relative"][h, q - kv] + t["buckets"][torch.clamp(q - kv, 0, 31), h],
        {Pattern.DISTANCE},
    ),
    "slopes": (lambda t: lambda s, b, h, q, kv: s - t["slopes"][h] * (q - kv), {Pattern.HEAD}),
    "row": (lambda t: lambda s, b, h, q, kv: s + 0.01 * t["row"][h, q] * (q - kv), {Pattern.ROW}),
    "column": (lambda t: lambda s, b, h, q, kv: s + t["column"][kv], {Pattern.COLUMN}),
    "pair": (lambda t: lambda s, b, h, q, kv: s + t["pair"][h, q, kv], {Pattern.PAIR}),
    "several": (
        lambda t: (
            lambda s, b, h, q, kv: (
                s + t["relative"][h, q - kv + LENGTH] + 0.5 * t["relative"][h, kv] + t["number"] * 0.1 * (q - kv)
            )
        ),
        {Pattern.DISTANCE, Pattern.COLUMN, Pattern.HEAD},
    ),
    "score-dependent": (lambda t: lambda s, b, h, q, kv: s * t["slopes"][h] + t["column"][kv], set()),
}
SHAPES = {
    "d64-gqa2-ragged": (2, 1, 150, 200, 64, torch.bfloat16, False),
    "d128-causal-fp16": (1, 1, 150, 150, 128, torch.float16, True),
    "d192-gqa2-ragged": (2, 1, 100, 140, 192, torch.bfloat16, False),
    "d256-causal": (1, 1, 130, 130, 256, torch.bfloat16, True),
}


@pytest.mark.parametrize(
    ("mods", "shape"),
    [  # by default each of the mods with one of the shapes, in turn: three kernels to compile
        pytest.param(mods, shape, marks=[pytest.mark.slow] if (i - j) % len(SHAPES) else [])
        for (i, mods), (j, shape) in itertools.product(enumerate(MODS), enumerate(SHAPES))
    ],
)
def test_emulated_captured_gradients_match_fp64(mods: str, shape: str, generator: torch.Generator) -> None:
    heads, kv_heads, q_len, kv_len, d, dtype, causal = SHAPES[shape]
    make, _ = MODS[mods]
    tables = {n: torch.randn(size(heads), generator=generator).requires_grad_() for n, size in TABLES.items()}
    score = make(tables)
    mask = (lambda b, h, q, kv: q >= kv) if causal else None

    def draw(heads: int, length: int) -> torch.Tensor:
        return outlier_normal(1, heads, length, d, generator=generator, dtype=dtype)

    inputs = [draw(heads, q_len), draw(kv_heads, kv_len), draw(kv_heads, kv_len)]
    dout, dlse = draw(heads, q_len), torch.randn(1, heads, q_len, generator=generator)
    program = Program(Score.of(score).expr, None if mask is None else Mask.of(mask).expr)
    read = [c.tensor for c in program.captures]
    exact = [t.double().requires_grad_() for t in inputs]
    o, lse = reference.attention(*exact, score=program.score, mask=program.mask, scale=d**-0.5)
    out = o.detach().to(dtype)
    known = BackwardInputs(*inputs, out, lse.detach().float(), dout, dlse, read, [True] * (3 + len(read)))
    with torch.no_grad():
        found = EmulatedCall(Problem.of(*inputs), program, d**-0.5, HOPPER).gradient(known, (), NO_SEQUENCES)

    # D comes from O as it was rounded: an error of D is a gradient through LSE with the other sign
    of_rounding = (dout.double() * (out.double() - o)).sum(-1).detach()

    def gradients(signs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        incoming = dout.double() * signs[..., None], (dlse.double() - of_rounding) * signs
        return torch.autograd.grad((o, lse), [*exact, *read], incoming, retain_graph=True)

    wanted, sizes = gradients(torch.ones_like(dlse)), uncancelled_sizes(gradients, dlse, generator)
    for got, want in zip(found[:3], wanted[:3], strict=True):
        assert float((got.double() - want).norm() / want.norm()) <= 2 * torch.finfo(dtype).eps
    for got, want, size in zip(found[3:], wanted[3:], sizes[3:], strict=True):
        # P and dP come from rounded inputs: what a bf16 computation carries
        assert float((got.double() - want.double()).norm()) <= 4 * torch.finfo(dtype).eps * size


def test_gradients_of_known_forms_are_those_of_the_first_call(generator: torch.Generator) -> None:
    table, bias = (torch.randn(2, 401, generator=generator).requires_grad_() for _ in range(2))
    inputs = [outlier_normal(1, 2, 70, 64, generator=generator, dtype=torch.bfloat16).requires_grad_() for _ in "qkv"]
    dout = torch.randn(1, 2, 70, 64, generator=generator).bfloat16()

    def gradients(*learned: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out: Any = ca.attention(*inputs, score_mod=lambda s, b, h, q, kv: s + table[h, q - kv + 200] + bias[h, kv])
        return torch.autograd.grad(out, (*inputs, *learned), dout)

    with without_kernels(EmulatedKernel):
        first = gradients(table, bias)
        for _ in range(2):
            assert all(map(torch.equal, gradients(table, bias)[3:], first[3:]))
            assert torch.equal(gradients(bias)[3], first[4])


SPILLING = [
    *itertools.product(["relative", "relative-in-softcap"], [64, 128, 256]),
    *(("two-by-distance", d) for d in (64, 256)),  # with D 128 a few registers of the second table spill
]


# of each two by default one is causal and one is not
@pytest.mark.parametrize(
    ("mods", "d", "mask"),
    sampled((*case, mask) for n, case in enumerate(SPILLING) for mask in ("full", "causal")[:: 1 - n % 2 * 2]),
)
def test_sums_in_the_kernel_spill_nothing(mods: str, mask: str, d: int, folder: Path) -> None:
    make, _ = MODS[mods]
    score = Score.of(make({name: torch.randn(TABLES[name](4)) for name in ("relative", "buckets")}))
    program = Program(score.expr, Mask.of(lambda b, h, q, kv: q >= kv).expr if mask == "causal" else None)
    problem = Problem(1, 4, 2, 8, 8, d, d, torch.bfloat16, torch.device("cuda"))
    summing = GradientProgram(program, fused_reads(program))
    plan = plan_backward(problem, summing, HOPPER).main
    made = compile_offline(plan, folder)
    assert not made.stack and made.spills == 0 and made.shared_memory <= HOPPER.shared_memory
    if made.mnemonics:
        t = plan.tiling
        assert made.mnemonics["WARPGROUP"] <= 14  # the products stay asynchronous
        # a lane adds up at most three of the 79 diagonals of 64 queries and a warp's 16 keys
        dq = t.tile_m * t.d // (4 * 128 * (t.sharing if t.shared_keys else t.warpgroups))
        # where dQ is computed a tile later: in two places, sums in two branches, but where the compiler joins them
        places, sums = 1 + t.dq_later, 3 * len(summing.totals)
        assert sums <= made.mnemonics["REDG"] - t.clears - places * dq <= places * sums


@pytest.mark.parametrize("mods", MODS)
def test_patterns(mods: str) -> None:
    make, wanted = MODS[mods]
    tables = {name: torch.randn(size(2)).requires_grad_() for name, size in TABLES.items()}
    reads = fused_reads(Program(Score.of(make(tables)).expr))
    assert {r.pattern for group in reads.values() for r in group} == wanted
    # a derivative that looks at the score has no bound, and dS over d score_mod / d score none either
    assert (Capture(tables["slopes"]) in reads) == (mods == "slopes")


def test_explain_says_who_sums_and_where() -> None:
    table, gain = torch.randn(2, 601).requires_grad_(), torch.randn(2).requires_grad_()
    attention = ca.Attention(
        score_mod=lambda s, b, h, q, kv: s * gain[h] + table[h, q - kv + 300], backend="hopper-emulated"
    )
    text = str(attention.explain(*(torch.randn(1, 2, 64, 64).bfloat16() for _ in range(3))))
    assert "tile by tile in PyTorch" in text and "[2]" in text
