"""The kernels of warps as machine code for all of their GPUs: registers, shared memory, instructions they must have."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")

import composattn as ca
from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.planning.plan import plan_forward
from tests.compile.compiled_cells import Matrix, Record
from tests.compile.golden import traced_form
from tests.compile.warp_matrix import (
    BACKWARD,
    DIMS,
    FORWARD,
    GPUS,
    SPILLED,
    BackwardCell,
    Cell,
    problem_of,
)

BY_DAY = {
    "sm_80 D128 causal dense", "sm_86 D256 soft-cap packed", "sm_120a D64 none paged", "sm_120a D128 causal packed",
    "sm_89 D128 window dense",
}  # fmt: skip
BACKWARDS_BY_DAY = {
    "sm_80 D128 causal dense", "sm_86 D64 learned-bias dense", "sm_120a D256 none dense",
    "sm_80 D64 learned-bias packed",  # 26 spilled where what a tile ends with stayed in registers
}  # fmt: skip


def cells(matrix: Matrix, by_day: set[str]) -> list[object]:
    return [
        pytest.param(cell, marks=[] if str(cell) in by_day else [pytest.mark.slow], id=str(cell))
        for cell in matrix.cells
    ]


def mnemonics_of_fitting(cell: Cell) -> Mapping[str, int]:
    """How often its machine code has each instruction; it is for its GPU and has room there."""
    made = compile_offline(cell.plan)
    assert f".target {cell.target.arch}" in made.ptx
    assert made.spills <= SPILLED
    assert cell.plan.shared_memory <= cell.target.shared_memory
    return made.mnemonics


@pytest.mark.parametrize("cell", cells(FORWARD, BY_DAY))
def test_a_kernel_fits_into_its_gpu(cell: Cell) -> None:
    plan, target, found = cell.plan, cell.target, mnemonics_of_fitting(cell)
    # a score takes D / 16 of a product's 256, and so does its share of the output
    tiles = found["HMMA"] * 16 * 8 * 16 / (2 * plan.tiling.warp_rows * plan.tiling.tile_n * cell.d)
    assert tiles in (1, 2), "tiles that the code has, one for each loop"
    in_bulk = target.copies_in_bulk and cell.layout != "paged" and cell.d <= 128
    assert {"LDGSTS", "UTMALDG", "SYNCS"} & set(found) == ({"UTMALDG", "SYNCS"} if in_bulk else {"LDGSTS"})
    assert found["LDSM"] and not {"HGMMA", "STSM"} & set(found)
    if plan.is_split:
        assert compile_offline(plan.combine).spills == 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", GPUS)
def test_kernels_of_one_query_fit(arch: str) -> None:
    for d in DIMS:
        plan = plan_forward(problem_of(d, q_len=1), ca.Attention().program, GPUS[arch])
        assert compile_offline(plan).spills == 0


@pytest.mark.parametrize("cell", cells(BACKWARD, BACKWARDS_BY_DAY))
def test_a_backward_fits_into_its_gpu(cell: BackwardCell) -> None:
    plan, found = cell.plan, mnemonics_of_fitting(cell)
    # five products of a tile, of 16 x 8 x 16 each, in one loop for each run of queries
    tiles = (
        found["HMMA"] * 16 * 8 * 16 * plan.tiling.threads // 32 / (5 * plan.tiling.tile_m * plan.tiling.tile_n * cell.d)
    )
    assert tiles in (1, 2, 3)
    assert found["LDSM"] and found["LDGSTS"] and (found["RED"] or found["REDG"])
    assert not {"UTMALDG", "SYNCS", "HGMMA", "STSM"} & set(found)


@pytest.mark.slow
@pytest.mark.parametrize("arch", GPUS)
def test_kernels_around_a_backward_fit(arch: str) -> None:
    for d in DIMS:
        plans = BackwardCell(GPUS[arch], d, "causal", "dense").plans
        for plan in (plans.preprocess, plans.postprocess):
            assert compile_offline(plan).spills == 0


@pytest.mark.parametrize("matrix", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_every_cell_was_compiled_and_fits(matrix: Matrix) -> None:
    rows = Record.read(matrix.record).rows
    assert list(rows) == [str(cell) for cell in matrix.cells]
    assert {name: row["faults"] for name, row in rows.items() if row["faults"]} == {}


def test_a_product_is_one_operation() -> None:
    """Scores and output in each of two loops; as one operation for each two instructions they take twice as long."""
    plan = Cell(GPUS["sm_80"], 256, "causal", "dense").plan
    lines = traced_form(plan).splitlines()
    assert sum("mma.sync" in line for line in lines) == 4
    assert len(lines) < 8_000  # 11,062 before
