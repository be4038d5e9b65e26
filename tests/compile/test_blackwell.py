"""The Blackwell forward, compiled with no GPU: it fits, spills nothing, frees what it allocates, uses its units."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

from benchmarks.model.loops import roles
from benchmarks.model.sass import instructions
from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.compiling.inspect import Artifact
from composattn.backends.fused.planning.plan import ForwardPlan
from composattn.backends.fused.tiles.target import TARGETS
from composattn.call.schedule import Schedule
from composattn.mods import alibi, causal, document, neighborhood, relative_bias, sliding_window, softcap
from composattn.mods.mask import Mask
from tests.compile.blackwell_matrix import Cell, cells, faults, frees_what_it_allocates
from tests.compile.blackwell_plans import PACKED, PAGES, forward_plan

B300 = TARGETS[10, 3]
DOCUMENTS = torch.arange(2048, dtype=torch.int32) // 300


PLANS = {
    "plain-d128": forward_plan(),
    "softcap-causal-pages-d192-dv128": forward_plan(softcap(30.0), causal(), d=192, dv=128, layout=PAGES),
    "causal-packed-d256-sm103": forward_plan(mask=causal(), d=256, layout=PACKED, target=B300),
    "neighbours-d64": forward_plan(mask=neighborhood((45, 45), (13, 9)), d=64),
}
MORE = {
    "causal-d64": forward_plan(mask=causal(), d=64),
    "causal-d96": forward_plan(mask=causal(), d=96),
    "documents-d128": forward_plan(mask=document(DOCUMENTS)),
    "alibi-causal-d128": forward_plan(alibi(8), causal()),
    "softcap-causal-d64": forward_plan(softcap(30.0), causal(), d=64),
    "softcap-causal-d128": forward_plan(softcap(30.0), causal()),
    "plain-d128-sm103": forward_plan(target=B300),
    "causal-persistent-d128": forward_plan(mask=causal(), schedule=Schedule(persistent=True)),
    "documents-d64": forward_plan(mask=document(DOCUMENTS), d=64),
    "softcap-d192": forward_plan(softcap(30.0), d=192),
    "relative-bias-d64": forward_plan(relative_bias(torch.zeros(8, 4095)), d=64),
    "window-d192-dv128": forward_plan(mask=sliding_window(512), d=192, dv=128),
    "window-persistent-d128": forward_plan(mask=sliding_window(512), schedule=Schedule(persistent=True)),
    "causal-d192-dv128": forward_plan(mask=causal(), d=192, dv=128),
    "split-d128": forward_plan(schedule=Schedule(split_kv=2)),
}


def check_lean(artifact: Artifact) -> None:
    if artifact.registers is None or not artifact.assembly:
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


UNITS = {  # columns by a polynomial, of 32; flash-attn-4 has none at D 192 and 256 of hardware alone, D 64 as D 128
    "D 64": (forward_plan(d=64), 10),
    "D 96, causal": (forward_plan(mask=causal(), d=96), 10),
    "D 128": (PLANS["plain-d128"], 4),
    "D 192/128": (forward_plan(d=192, dv=128), 0),
    "D 256": (forward_plan(d=256), 0),
    "soft cap": (forward_plan(softcap(30.0), causal()), 22),
    "soft cap, doubled exponentials": (forward_plan(softcap(30.0), causal(), target=B300), 2),
    "D 64, doubled exponentials": (forward_plan(d=64, target=B300), 0),
}


@pytest.mark.parametrize("name", UNITS)
def test_exponentials_go_to_multiply_adds_where_their_unit_is_the_busiest(name: str) -> None:
    planned, columns = UNITS[name]
    units = planned.tiling.exponential
    assert sum(units.is_polynomial(c) for c in range(32)) == columns
    words = f"{columns} of 32 columns by a polynomial of degree 3" if columns else "all columns by hardware"
    assert f"exp2       {words}" in str(planned)


def softmax_loops(planned: ForwardPlan, folder: Path) -> list[tuple[int, int]]:
    """(instructions, exponentials of hardware) of the softmax's loops of a warp, the untested one first."""
    artifact = compile_offline(planned, folder)
    if not artifact.assembly:
        pytest.skip("needs nvdisasm (PyPI: nvidia-cuda-nvdisasm)")
    (role,) = (role for role in roles(instructions(artifact)) if role.job == "softmax")
    return [(len(loop.body), loop.counts["MUFU"]) for loop in (role.plain, role.tested)]


@pytest.mark.parametrize(
    ("name", "most", "exponentials"),
    [
        ("plain-d128", (514, 699), 113),
        pytest.param("causal-d64", (616, 800), 89, marks=pytest.mark.slow),
        pytest.param("plain-d128-sm103", (393, 625), 129, marks=pytest.mark.slow),
    ],
)
def test_softmax_is_no_longer_than_it_was_and_has_the_exponentials_that_were_planned(
    name: str, most: tuple[int, int], exponentials: int, folder: Path
) -> None:
    found = softmax_loops((PLANS | MORE)[name], folder)
    assert all(length <= limit and made == exponentials for (length, made), limit in zip(found, most, strict=True))


@pytest.mark.slow
def test_a_soft_cap_takes_five_quarters_of_an_exponential_by_hardware(folder: Path) -> None:
    """Beside those of 42 columns, and of the factor: reciprocals are shared by four columns."""
    (untested, made), _ = softmax_loops(MORE["softcap-causal-d128"], folder)
    assert made == 128 + 128 // 4 + (128 - 4 * 22) + 1 and untested <= 1521


def test_the_loops_are_as_short_as_those_that_were_counted(folder: Path) -> None:
    """Instructions of a kv tile: of the softmax of a warp, untested and tested; of the others, for two query tiles."""
    of = loops_of(PLANS["plain-d128"], folder)
    assert of == {name: [pytest.approx(n, rel=0.02) for n in counts] for name, counts in COUNTED.items()}


@pytest.mark.slow
@pytest.mark.parametrize("mask", [causal(), sliding_window(512)], ids=["causal", "window"])
def test_the_correction_tests_nothing_where_both_query_tiles_go_on(mask: Mask, folder: Path) -> None:
    """Counts instructions of two query tiles with a rescale; flash-attn-4's has 186."""
    (role,) = (
        r for r in roles(instructions(compile_offline(forward_plan(mask=mask), folder))) if r.job == "correction"
    )
    some, together = (len(loop.body) for loop in role.loops)
    assert together <= 186 < some


def test_a_line_over_keys_costs_no_more_than_100_instructions_a_tile(folder: Path) -> None:
    """ALiBi beside no score mod: a multiply-add for two keys, and what these add."""
    plain, tested = loops_of(MORE["alibi-causal-d128"], folder)["MUFU"]
    assert plain <= COUNTED["MUFU"][0] + 100 and tested <= COUNTED["MUFU"][1] + 100


def loops_of(plan: ForwardPlan, folder: Path) -> dict[str, list[int]]:
    """How long the innermost loops are that have such an instruction."""
    code = instructions(compile_offline(plan, folder))
    if not code:
        pytest.skip("needs nvdisasm (PyPI: nvidia-cuda-nvdisasm)")
    loops = [(i.target, n) for n, i in enumerate(code) if i.target is not None and i.target <= n]
    inner = [(a, b) for a, b in loops if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)]
    return {name: sorted(b - a + 1 for a, b in inner if any(i.name == name for i in code[a:b])) for name in COUNTED}


COUNTED = {"MUFU": [504, 689], "FMUL2": [184, 504, 689], "UTCHMMA": [151], "UTMALDG": [56]}
