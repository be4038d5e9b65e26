"""Few tiles of 64 queries, each alone on an SM: held to fp64, and the same bits in any order."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.planning.plan import ForwardPlan, plan_forward
from composattn.backends.fused.running.emulated import emulating
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Problem
from composattn.emulator.mode import EAGER, LATE, random_mode
from composattn.mods import alibi, causal, sliding_window, softcap
from composattn.testing import Case, check
from tests.support import outlier_normal, sampled

BIAS = torch.randn(200, 200, generator=torch.Generator().manual_seed(1))
MODS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask_mod": causal()},
    "window of a soft cap": {"score_mod": softcap(20.0), "mask_mod": sliding_window(70) & causal()},
    "alibi": {"score_mod": alibi(torch.tensor([0.5, 0.25])), "mask_mod": causal()},
    "bias": {"score_mod": lambda score, b, h, q, kv: score + BIAS[q, kv]},
    "rows that see nothing": {"mask_mod": lambda b, h, q, kv: q < 70},
}
DIMS = ((64, 64), (96, 80), (128, 128), (192, 192), (192, 128), (256, 256))


def planned(mods: dict[str, Any], length: int, dims: tuple[int, int]) -> ForwardPlan:
    problem = Problem(1, 2, 1, length, length, *dims, torch.bfloat16, torch.device("cpu"))
    return plan_forward(problem, ca.Attention(**mods).program, HOPPER)


@pytest.mark.parametrize(
    ("name", "dims"), sampled([(n, d) for i, n in enumerate(MODS) for d in DIMS[i % 2 :: 2]] + [("causal", (256, 256))])
)
def test_rows_of_tiles_that_run_at_once_are_those_of_fp64(
    name: str, dims: tuple[int, int], generator: torch.Generator
) -> None:
    mods, length = MODS[name], 190
    plan = planned(mods, length, dims)
    assert (plan.tiling.tile_m, plan.tiling.blocks) == (64, 1) and not plan.tiling.persistent
    draw = partial(outlier_normal, generator=generator, dtype=torch.bfloat16)
    q, k, v = draw(1, 2, length, dims[0]), draw(1, 1, length, dims[0]), draw(1, 1, length, dims[1])
    attention, found = partial(ca.attention, backend="hopper-emulated"), []
    for mode in (EAGER, LATE, random_mode(1)):
        with emulating(mode):
            check(attention, Case(q, k, v, **mods))
            found.append(attention(q, k, v, **mods))
    assert all(torch.equal(out, found[0]) for out in found)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("name", ["full", "causal", "window of a soft cap", "bias"])
def test_blocks_of_one_warpgroup_compile_lean(name: str, dims: tuple[int, int]) -> None:
    artifact = compile_offline(planned(MODS[name], 1024, dims))
    if artifact.registers is None:
        pytest.skip("needs cuobjdump and nvdisasm (PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm)")
    assert artifact.spills == 0
    assert artifact.registers * artifact.threads <= HOPPER.registers
    assert artifact.shared_memory <= HOPPER.shared_memory
