"""The record of Blackwell's compile matrix: it comes back as it was kept, and `--check` names a kernel that changed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

from tests.compile.blackwell_matrix import Cell, cells
from tests.compile.compiled_cells import Record, Row, check

SAME, OTHER, NEVER_MADE = cells()[:3]
MADE: Row = {"spills": 0, "faults": [], "ptx": "0123456789abcdef"}


@pytest.fixture
def record(tmp_path: Path) -> Record:
    kept = Record("1.0", "sources of another day", "0123456789", {str(SAME): MADE, str(OTHER): MADE})
    kept.write(tmp_path / "record.json")
    assert Record.read(tmp_path / "record.json") == kept
    assert Record.of_these_sources(tmp_path / "record.json").rows == {}
    return kept


@pytest.mark.parametrize("ptx, names_it", [("0123456789abcdef", False), ("fedcba9876543210", True)])
def test_check_names_a_kernel_that_the_record_has_with_other_ptx(
    ptx: str, names_it: bool, record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(cell: Cell) -> Row:
        return MADE | {"ptx": ptx} if cell == OTHER else MADE

    assert check([SAME, OTHER, NEVER_MADE], row, record) == names_it
    said = capsys.readouterr().out
    assert (str(OTHER) in said) == names_it
    assert f"of 2 cells {2 - names_it} are as in the record of 0123456" in said
