"""The kernels of warps as machine code for all of their GPUs: registers, shared memory, instructions they must have."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")

import composattn as ca
from composattn.analysis.captured_gradient import GradientProgram, fused_reads
from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.planning.plan_backward import BackwardPlans, plan_backward
from composattn.backends.fused.tiles.target import TARGETS
from composattn.call.problem import Layout, Problem
from composattn.call.schedule import Schedule
from composattn.mods import alibi, causal, document, sliding_window, softcap

LENGTH = 8192
IDS, BIAS = torch.arange(LENGTH) // 1000, torch.randn(16, 2 * LENGTH, requires_grad=True)
BLOCKS = torch.rand(LENGTH // 64, LENGTH // 64) < 0.3
MODS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"mask_mod": causal()},
    "window": {"mask_mod": causal() & sliding_window(1024)},
    "documents": {"mask_mod": causal() & document(IDS)},
    "ALiBi": {"mask_mod": causal(), "score_mod": alibi(16)},
    "soft cap": {"mask_mod": causal(), "score_mod": softcap(30.0)},
    "learned bias": {"mask_mod": causal(), "score_mod": lambda s, b, h, q, kv: s + BIAS[h, q - kv + LENGTH]},
    "blocks": {"mask_mod": lambda b, h, q, kv: BLOCKS[q // 64, kv // 64]},
}
ARCHES = [t.arch for t in TARGETS.values() if t.backend == "warp"]
DIMS = (64, 96, 128, 192, 256)
LAYOUTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "packed": {"layout": Layout("packed", "packed")},
    "paged": {"layout": Layout("dense", "paged", page_size=64, used_kv=True)},
    "split": {"q_len": 8, "schedule": Schedule(split_kv=4)},
}
BY_DAY = {
    ("sm_80", 128, "causal", "dense"), ("sm_86", 256, "soft cap", "packed"), ("sm_120a", 64, "none", "paged"),
    ("sm_120a", 128, "causal", "packed"), ("sm_89", 128, "window", "dense"),
}  # fmt: skip
MATRIX = [
    pytest.param(*of, marks=[] if of in BY_DAY else [pytest.mark.slow])
    for of in itertools.product(ARCHES, DIMS, MODS, LAYOUTS)
]
SPILLED = 8
"""The most that a kernel may spill."""
SPILLED_FORWARDS = {(64, "window", "packed"): 17}
"""Forwards that spill more."""


def problem_of(d: int, lies: str, q_len: int = LENGTH) -> Problem:
    options = dict(LAYOUTS[lies])
    q_len = options.pop("q_len", q_len)
    return Problem(2, 16, 4, q_len, LENGTH, d, d, torch.bfloat16, torch.device("cpu"), **options)


@pytest.mark.parametrize(("arch", "d", "mods", "lies"), MATRIX)
def test_a_kernel_fits_into_its_gpu(arch: str, d: int, mods: str, lies: str) -> None:
    target = next(t for t in TARGETS.values() if t.arch == arch)
    plan = plan_forward(problem_of(d, lies), ca.Attention(**MODS[mods]).program, target)
    made, found = compile_offline(plan), compile_offline(plan).mnemonics
    assert f".target {arch}" in made.ptx
    assert made.spills <= SPILLED_FORWARDS.get((d, mods, lies), SPILLED)
    assert plan.shared_memory <= target.shared_memory
    # a score takes D / 16 of a product's 256, and so does its share of the output
    tiles = found["HMMA"] * 16 * 8 * 16 / (2 * plan.tiling.warp_rows * plan.tiling.tile_n * d)
    assert tiles in (1, 2), "tiles that the code has, one for each loop"
    in_bulk = target.copies_in_bulk and lies != "paged" and d <= 128
    assert {"LDGSTS", "UTMALDG", "SYNCS"} & set(found) == ({"UTMALDG", "SYNCS"} if in_bulk else {"LDGSTS"})
    assert found["LDSM"] and not {"HGMMA", "STSM"} & set(found)
    if plan.is_split:
        assert compile_offline(plan.combine).spills == 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_kernels_of_one_query_fit(arch: str) -> None:
    target = next(t for t in TARGETS.values() if t.arch == arch)
    for d in DIMS:
        plan = plan_forward(problem_of(d, "dense", q_len=1), ca.Attention().program, target)
        assert compile_offline(plan).spills == 0


SPILLED_BACKWARDS = {64: 12, 256: 9}
"""By D, the most that backwards spill that spill more: listed blocks at D 64, no mods at 256."""
BACKWARDS_BY_DAY = {("sm_80", 128, "causal"), ("sm_86", 64, "learned bias"), ("sm_120a", 256, "none")}


def backward(arch: str, d: int, mods: str) -> BackwardPlans:
    target = next(t for t in TARGETS.values() if t.arch == arch)
    problem = Problem(2, 16, 4, LENGTH, LENGTH, d, d, torch.bfloat16, torch.device("cpu"))
    program = ca.Attention(**MODS[mods]).program
    if mods == "learned bias":
        program = GradientProgram(program, fused_reads(program))
    return plan_backward(problem, program, target)


@pytest.mark.parametrize(
    ("arch", "d", "mods"),
    [
        pytest.param(*of, marks=[] if of in BACKWARDS_BY_DAY else [pytest.mark.slow])
        for of in ((arch, d, mods) for arch in ARCHES for d in DIMS for mods in MODS)
    ],
)
def test_a_backward_fits_into_its_gpu(arch: str, d: int, mods: str) -> None:
    plans = backward(arch, d, mods)
    target, tiling = plans.main.target, plans.main.tiling
    made, found = compile_offline(plans.main), compile_offline(plans.main).mnemonics
    assert f".target {arch}" in made.ptx
    assert made.spills <= SPILLED_BACKWARDS.get(d, SPILLED)
    assert plans.main.shared_memory <= target.shared_memory
    # five products of a tile, of 16 x 8 x 16 each, in one loop for each run of queries
    tiles = found["HMMA"] * 16 * 8 * 16 * tiling.threads // 32 / (5 * tiling.tile_m * tiling.tile_n * d)  # type: ignore[attr-defined]
    assert tiles in (1, 2, 3)
    assert found["LDSM"] and found["LDGSTS"] and (found["RED"] or found["REDG"])
    assert not {"UTMALDG", "SYNCS", "HGMMA", "STSM"} & set(found)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_kernels_around_a_backward_fit(arch: str) -> None:
    for d in DIMS:
        plans = backward(arch, d, "causal")
        for plan in (plans.preprocess, plans.postprocess):
            assert compile_offline(plan).spills == 0
