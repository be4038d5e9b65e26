"""The forward of warps as machine code for all of its GPUs: registers, shared memory, the instructions it must have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")

import composattn as ca
from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.tiles.target import TARGETS
from composattn.call.problem import Problem
from composattn.call.schedule import Schedule
from composattn.mods import alibi, causal, document, sliding_window, softcap

LENGTH = 8192
IDS, BIAS = torch.arange(LENGTH) // 1000, torch.randn(16, 2 * LENGTH)
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
BY_DAY = {("sm_80", 128, "causal"), ("sm_86", 256, "soft cap"), ("sm_120a", 64, "none")}
MATRIX = [
    pytest.param(arch, d, mods, marks=[] if (arch, d, mods) in BY_DAY else [pytest.mark.slow])
    for arch in ARCHES
    for d in DIMS
    for mods in MODS
]
SPILLED = 8
"""The most that a kernel may spill."""


@pytest.mark.parametrize(("arch", "d", "mods"), MATRIX)
def test_a_kernel_fits_into_its_gpu(arch: str, d: int, mods: str) -> None:
    target = next(t for t in TARGETS.values() if t.arch == arch)
    problem = Problem(2, 16, 4, LENGTH, LENGTH, d, d, torch.bfloat16, torch.device("cpu"))
    plan = plan_forward(problem, ca.Attention(**MODS[mods]).program, target)
    made, found = compile_offline(plan), compile_offline(plan).mnemonics
    assert f".target {arch}" in made.ptx
    assert made.spills <= SPILLED
    assert plan.shared_memory <= target.shared_memory
    # a score takes D / 16 of a product's 256, and so does its share of the output
    tiles = found["HMMA"] * 16 * 8 * 16 / (2 * plan.tiling.warp_rows * plan.tiling.tile_n * d)
    assert tiles in (1, 2, 3, 4, 5, 6), "tiles that the code has, the first one and one for each loop"
    assert found["LDSM"] and found["LDGSTS"]
    assert not {"UTMALDG", "SYNCS", "HGMMA", "STSM"} & set(found)


@pytest.mark.slow
@pytest.mark.parametrize("lies", ["few queries", "parts"])
@pytest.mark.parametrize("arch", ARCHES)
def test_kernels_of_few_queries_fit(arch: str, lies: str) -> None:
    target = next(t for t in TARGETS.values() if t.arch == arch)
    for d in DIMS:
        schedule = Schedule(split_kv=4 if lies == "parts" else "auto")
        problem = Problem(2, 16, 4, 1, LENGTH, d, d, torch.bfloat16, torch.device("cpu"), schedule=schedule)
        plan = plan_forward(problem, ca.Attention().program, target)
        assert compile_offline(plan).spills == 0
        if plan.is_split:
            assert compile_offline(plan.combine).spills == 0
