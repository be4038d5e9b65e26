"""Products written by steps, whole and anew: the same bits, in the emulator, from as many pieces of assembly."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.analysis.program import Program
from composattn.backends.fused.planning.plan import ForwardPlan, plan_forward
from composattn.backends.fused.running.emulated import EmulatedForward, emulating, text_of
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.fused.tiles.written import Written
from composattn.backends.hopper.forward_choice import choose_forward
from composattn.backends.hopper.tiling import GUESSING, HopperTiling
from composattn.call.problem import Problem
from composattn.emulator.mode import EAGER
from composattn.mods import causal, softcap
from tests.compile.test_backward_emulated import CASES, check
from tests.support import outlier_normal

STYLES: tuple[Written, ...] = ("by steps", "whole", "anew")
TABLE = torch.randn(141, 301, generator=torch.Generator().manual_seed(7))
MANY = 8192  # keys of which large blocks are chosen, which guess their maxima


def forward(written: Written, problem: Problem, program: Program) -> ForwardPlan:
    cut = choose_forward(dataclasses.replace(problem, q_len=MANY, kv_len=MANY), program, HOPPER).tiling
    assert isinstance(cut, HopperTiling)
    cut = dataclasses.replace(cut, written=written)
    return plan_forward(problem, program, HOPPER, tiling=cut)


@pytest.mark.parametrize(
    ("d", "kernel", "resident", "mods"),
    [
        pytest.param(64, GUESSING, 0, {"mask_mod": causal()}, id="maxima guessed"),
        pytest.param(128, GUESSING, 128, {}, id="columns of q in registers", marks=pytest.mark.slow),
        pytest.param(256, "forward", 0, {"mask_mod": causal()}, id="d256"),
        pytest.param(
            64, "forward", 0, {"score_mod": lambda s, b, h, q, kv: s + TABLE[q, kv]}, id="what is read at pairs"
        ),
    ],
)
def test_outputs_have_the_same_bits(
    d: int, kernel: str, resident: int, mods: dict[str, Any], generator: torch.Generator
) -> None:
    q, k, v = (outlier_normal(1, 1, length, d, generator=generator, dtype=torch.bfloat16) for length in (141, 301, 301))
    program, problem = ca.Attention(**mods).program, Problem.of(q, k, v)
    read, plans = [c.tensor for c in program.captures], [forward(style, problem, program) for style in STYLES]
    assert {(plan.tiling.kernel, plan.tiling.resident) for plan in plans} == {(kernel, resident)}
    with emulating(EAGER):
        found = [EmulatedForward(plan)(q, k, v, d**-0.5, read) for plan in plans]
    for out, lse, _ in found:
        assert torch.equal(out, found[0][0])
        assert lse is None or torch.equal(lse, found[0][1])
    wanted = ca.attention(q.double(), k.double(), v.double(), **mods, backend="reference")
    assert float((found[0][0].double() - wanted).norm() / wanted.norm()) <= torch.finfo(q.dtype).eps


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("causal-d64", marks=pytest.mark.slow),
        pytest.param("causal-gqa2-d96", marks=pytest.mark.slow),
        pytest.param("causal-d128-in-order", marks=pytest.mark.slow),
        pytest.param("softcap-d192-dv128", marks=pytest.mark.slow),
        "causal-d256",
    ],
)
def test_gradients_have_the_same_bits(case: str, tmp_path: Path) -> None:
    """D 256 has products of two parts of columns, D 128 dQ transposed."""
    facts = (*CASES[case][:-1], True)  # sums in a fixed order
    by_steps, *others = (check(facts, tmp_path, torch.Generator().manual_seed(3), written=style) for style in STYLES)
    for found in others:
        assert all(map(torch.equal, found, by_steps))


@pytest.mark.parametrize(("style", "steps"), [("by steps", {1}), ("whole", {4, 8})])
def test_a_whole_product_is_one_piece_of_assembly(style: Written, steps: set[int]) -> None:
    """D 64: four steps of scores, eight of 128 keys' values."""
    problem = Problem(1, 1, 1, MANY, MANY, 64, 64, torch.bfloat16, torch.device("cpu"))
    text = text_of(forward(style, problem, ca.Attention().program))
    pieces = re.findall(r"// begin inline asm(.*?)// end inline asm", text, re.DOTALL)
    assert {count for piece in pieces if (count := piece.count("wgmma.mma_async"))} == steps


def test_columns_that_fill_up_blocks_of_memory_are_not_multiplied() -> None:
    """D 72 and Dv 40 have 96 and 64 columns of memory: scores have five steps of six, outputs 48 columns."""
    problem = Problem(1, 1, 1, MANY, MANY, 72, 40, torch.bfloat16, torch.device("cpu"))
    plan = plan_forward(problem, ca.Attention(score_mod=softcap(30.0)).program, HOPPER)
    assert (plan.tiling.d, plan.tiling.dv) == (96, 64)
    pieces = re.findall(r"// begin inline asm(.*?)// end inline asm", text_of(plan), re.DOTALL)
    products = [re.findall(r"wgmma\S*m64n(\d+)k16", piece) for piece in pieces]
    keys = str(plan.tiling.tile_n)
    assert {(of[0], len(of)) for of in products if of} == {(keys, 5), ("48", plan.tiling.tile_n // 16)}
