"""The Blackwell forward, compiled with no GPU: it fits, spills nothing, frees what it allocates, uses its units."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.backends.fused.compile import compile_offline
from composattn.backends.fused.inspect import Artifact
from composattn.backends.fused.plan import ForwardPlan, plan_forward
from composattn.backends.fused.target import BLACKWELL, TARGETS
from composattn.call.problem import DENSE, Layout, Problem
from composattn.call.schedule import AUTO, Schedule
from composattn.mods import alibi, causal, document, neighborhood, relative_bias, sliding_window, softcap
from composattn.mods.mask import Mask
from composattn.mods.score import Score
from tests.compile.blackwell_matrix import Cell, cells, faults, frees_what_it_allocates

B300 = TARGETS[10, 3]
PACKED = Layout("packed", "packed")
DOCUMENTS = torch.arange(2048, dtype=torch.int32) // 300


def plan(
    score: Score | None = None,
    mask: Mask | None = None,
    d: int = 128,
    dv: int | None = None,
    target: object = BLACKWELL,
    layout: Layout = DENSE,
    schedule: Schedule = AUTO,
) -> ForwardPlan:
    problem = Problem(
        2, 8, 8, 2048, 2048, d, dv or d, torch.bfloat16, torch.device("cpu"), layout=layout, schedule=schedule
    )
    return plan_forward(problem, ca.Attention(score_mod=score, mask_mod=mask).program, target)  # type: ignore[arg-type]


PLANS = {
    "plain-d128": plan(),
    "window-d192-dv128": plan(mask=sliding_window(512), d=192, dv=128),
    "causal-packed-d256-sm103": plan(mask=causal(), d=256, layout=PACKED, target=B300),
    "neighbours-d64": plan(mask=neighborhood((45, 45), (13, 9)), d=64),
}
MORE = {
    "causal-d64": plan(mask=causal(), d=64),
    "causal-d96": plan(mask=causal(), d=96),
    "documents-d128": plan(mask=document(DOCUMENTS)),
    "alibi-causal-d128": plan(alibi(8), causal()),
    "softcap-causal-d64": plan(softcap(30.0), causal(), d=64),
    "causal-persistent-d128": plan(mask=causal(), schedule=Schedule(persistent=True)),
    "documents-d64": plan(mask=document(DOCUMENTS), d=64),
    "softcap-d192": plan(softcap(30.0), d=192),
    "relative-bias-d64": plan(relative_bias(torch.zeros(8, 4095)), d=64),
    "causal-d192-dv128": plan(mask=causal(), d=192, dv=128),
    "split-d128": plan(schedule=Schedule(split_kv=2)),
}


def check_lean(artifact: Artifact) -> None:
    if artifact.registers is None or not artifact.instructions:
        pytest.skip("needs cuobjdump and nvdisasm (PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm)")
    assert not list(faults(artifact))


@pytest.mark.parametrize("name", PLANS)
def test_compiles_lean(name: str, folder: Path) -> None:
    check_lean(compile_offline(PLANS[name], folder))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_compile_lean(name: str, folder: Path) -> None:
    check_lean(compile_offline(MORE[name], folder))


@pytest.mark.nightly
@pytest.mark.parametrize("cell", cells(), ids=str)
def test_every_cell_of_the_matrix_compiles_lean(cell: Cell, folder: Path) -> None:
    check_lean(compile_offline(cell.plan, folder))


def test_a_kernel_that_keeps_its_tensor_memory_is_not_lean(folder: Path) -> None:
    text = compile_offline(PLANS["plain-d128"], folder).ptx
    assert frees_what_it_allocates(text, 512) and not frees_what_it_allocates(text, 256)
    for kept in (
        re.sub(r"tcgen05\.dealloc.*", "", text),
        text.replace("\n\ttcgen05.relinquish", "\n\tret;\n\ttcgen05.relinquish"),
        "".join(text.rpartition("bar.sync")[::2]),
    ):
        assert kept != text and not frees_what_it_allocates(kept, 512)


def test_the_machine_code_is_of_the_target_that_was_asked_for(folder: Path) -> None:
    for name, arch in (("plain-d128", "sm_100a"), ("causal-packed-d256-sm103", "sm_103a")):
        assert f".target {arch}" in compile_offline(PLANS[name], folder).ptx


def test_the_loops_are_as_short_as_those_that_were_counted(folder: Path) -> None:
    """Instructions of a kv tile: of the softmax of a warp, untested and tested; of the others, for two query tiles."""
    of = loops_of(PLANS["plain-d128"], folder)
    assert of == {name: [pytest.approx(n, rel=0.02) for n in counts] for name, counts in COUNTED.items()}


def test_a_line_over_keys_costs_no_more_than_100_instructions_a_tile(folder: Path) -> None:
    """ALiBi beside no score mod: a multiply-add for two keys, and what these add."""
    plain, tested = loops_of(MORE["alibi-causal-d128"], folder)["MUFU"]
    assert plain <= COUNTED["MUFU"][0] + 100 and tested <= COUNTED["MUFU"][1] + 100


def loops_of(plan: ForwardPlan, folder: Path) -> dict[str, list[int]]:
    """How long the innermost loops are that have such an instruction."""
    code = compile_offline(plan, folder).instructions
    if not code:
        pytest.skip("needs nvdisasm (PyPI: nvidia-cuda-nvdisasm)")
    loops = [(i.target, n) for n, i in enumerate(code) if i.target is not None and i.target <= n]
    inner = [(a, b) for a, b in loops if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)]
    return {name: sorted(b - a + 1 for a, b in inner if any(i.name == name for i in code[a:b])) for name in COUNTED}


COUNTED = {"MUFU": [432, 617], "FMUL2": [184], "UTCHMMA": [151], "UTMALDG": [56]}
