"""Files of tables: what a row may say of calls, and that all that stands in the files is used."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from composattn.backends.fused.planning.facts import MASKS, MODS, WORK
from composattn.backends.fused.planning.tables import first, row_of, rows_of, tables_of

FILES = sorted((Path(__file__).parents[2] / "composattn" / "backends").rglob("*.json"))


@dataclasses.dataclass
class Call:
    mods: str = "plain"
    mask: str = "none"
    widest: int = 64


def made(tmp_path: Path, *rows: dict[str, Any], **more: Any) -> Any:
    path = tmp_path / "tables.json"
    path.write_text(json.dumps({"patterns": {}, "results": "a.json", "tables": {"it": rows}} | more))
    return tables_of(path)["it"]


def test_the_first_row_that_a_call_matches_is_taken_and_facts_of_others_may_be_given(tmp_path: Path) -> None:
    rows = made(
        tmp_path,
        {"says": "a", "mods": ["line", "pairs"]},
        {"says": "b", "mask": {"not": ["none"]}, "widest": "(64, 96]"},
        {"says": "c", "stays": [True]},
        {"says": "d"},
    )
    assert first(rows, Call("line"), stays=True) == "a"
    assert first(rows, Call(mask="bounds", widest=96), stays=True) == "b"
    assert first(rows, Call(mask="bounds", widest=64), stays=True) == "c"
    assert first(rows, Call(), stays=False) == "d"
    assert [row.says for row in rows_of(rows, Call(), stays=True)] == ["c", "d"]


def test_patterns_of_a_file_are_shared_by_rows_and_a_row_says_its_evidence(tmp_path: Path) -> None:
    patterns = {"wide": {"widest": "(96, inf)"}, "plain": {"mods": ["plain"]}}
    measured = {"says": "a", "of": "wide plain", "shapes": 3, "gain": 1.05}
    rows = made(tmp_path, measured, {"says": "b", "why": "as it was"}, patterns=patterns)
    assert rows[0].pattern.keys() == {"widest", "mods"}
    assert [rows[0].pattern["widest"](number) for number in (96, 97)] == [False, True]
    assert row_of(rows, Call(widest=128)).evidence.startswith("measured on 3 shapes: 1.050 of the best")
    assert row_of(rows, Call()).evidence == "no sweep timed it: as it was"


@pytest.mark.parametrize("row", [{"of": "wide"}, {"mods": None}, {"widest": "(64 96]"}], ids=str)
def test_a_row_that_none_can_be_is_named_with_its_file(row: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tables\.json, 'it': no row of a table is \{\"says\": \"a\", "):
        made(tmp_path, {"says": "a"} | row)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_each_pattern_of_a_file_is_some_rows(path: Path) -> None:
    file = json.loads(path.read_text())
    used = {name for rows in file["tables"].values() for row in rows for name in row.get("of", "").split()}
    assert used == set(file.get("patterns", {}))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_rows_name_kinds_that_calls_can_be(path: Path) -> None:
    file = json.loads(path.read_text())
    for said in (*itertools.chain(*file["tables"].values()), *file.get("patterns", {}).values()):
        for name, known in {"mods": MODS, "mask": MASKS, "work": WORK}.items():
            kinds = said.get(name, [])
            assert set(kinds["not"] if isinstance(kinds, dict) else kinds) <= known.keys(), said


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_each_table_of_a_file_is_asked(path: Path) -> None:
    texts = [module.read_text() for module in path.parent.glob("*.py")]
    for name in json.loads(path.read_text())["tables"]:
        assert any(f'"{name}"' in text for text in texts), name


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_row_of_a_file_stands_behind_one_that_has_all_calls(path: Path) -> None:
    whole = {"taken", "named"}  # of which all rows that match are taken
    for name, rows in json.loads(path.read_text())["tables"].items():
        bare = [not set(row) - {"says", "why", "shapes", "gain"} for row in rows]
        assert name in whole or not any(bare[:-1]), name
