"""Counted rows: whose a kernel is, which peer stands beside ours, and what the tables say of it."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import counters, counters_report
from benchmarks.counters_report import FLASH, Row
from benchmarks.implementations import DETERMINISTIC, OURS, PACKED

UNITS = '"0","","ns"'


def page(*kernels: tuple[str, str]) -> str:
    """What ncu prints: its own words, names, units, a line a kernel."""
    lines = [f'"{n}","{name}","{ns}"' for n, (name, ns) in enumerate(kernels)]
    return "\n".join(["==PROF== Disconnected", '"ID","Kernel Name","gpu__time_duration.sum"', UNITS, *lines])


MARK = (f"void {counters.MARK}(long)", "1,500")


def test_marks_say_whose_kernels_are() -> None:
    text = page(MARK, ("prepare", "70,000"), ("main", "4,060,123.5"), MARK, ("theirs", "n/a"))
    found = counters.by_call(text, [("row", OURS), ("row", FLASH)])
    assert found == {
        ("row", OURS): [{"kernel": "prepare", "ns": 70000.0}, {"kernel": "main", "ns": 4060123.5}],
        ("row", FLASH): [{"kernel": "theirs"}],
    }


def test_ours_flash_and_the_fastest_peer_are_worth_counting() -> None:
    times = {OURS: 1.0, PACKED: 0.9, FLASH: 1.2, "torch cuDNN": 1.1, "slow": 2.0}
    rows = [{"impl": name, "ms": ms} for name, ms in times.items()] + [{"impl": "broken", "error": "no"}]
    assert counters.worth_counting(rows) == [OURS, PACKED, FLASH, "torch cuDNN"]


def row(impl: str, ms: float, cycles: float = 2e6) -> Row:
    main = {
        "kernel": "main",
        "ns": ms * 1e6,
        "cycles": cycles,
        "matrix": 70.0,
        "stall_wait": 1.5,
        "stall_barrier": 2.25,
    }
    small = {"kernel": "before", "ns": 70e3, "cycles": 1e5}
    return {"row": "case", "impl": impl, "ms": ms, "mhz": 1650.0, "watts": 690.0, "kernels": [small, main]}


def test_a_line_has_ours_beside_the_fastest_peer_and_a_fixed_order_beside_the_default() -> None:
    rows = [row(OURS, 2.0), row(FLASH, 1.9, 1.9e6), row("torch cuDNN", 2.5), row(DETERMINISTIC, 2.2), {"row": "other"}]
    table = counters_report.newest(
        [{"commit": "older", "rows": [row(FLASH, 1.0), row(OURS, 3.0)]}, {"commit": "b" * 40, "rows": rows}]
    )
    assert table["case"][OURS]["ms"] == 2.0 and table["case"][OURS]["commit"] == "bbbbbbb" and len(table) == 1
    pairs = [(words, ours["impl"], theirs["impl"]) for words, ours, theirs in counters_report.compared(table)]
    assert pairs == [("case", OURS, FLASH), ("case, fixed order", DETERMINISTIC, OURS)]


def test_a_kernel_is_held_to_its_bound_in_clocks_so_that_no_clock_rate_matters() -> None:
    limit = {"pairs": 1.008, "rounds": 13.03, "balance": 0.931, "unit": "shared", "clocks": 1.5e6, "flop_clocks": 1.2e6}
    line = counters_report.time_line("case", row(OURS, 2.0) | {"commit": "b"}, row(FLASH, 1.9), {("case", OURS): limit})
    cells = dict(zip(counters_report.TIMES, line, strict=True))
    assert cells["of it"] == "0.75, –" and cells["ratio"] == "0.950" and cells["others, µs"] == "70, 70"
    assert cells["bound, TFLOP/s"] == f"{132 * 4.096 * 0.8:.0f}, –", "of a clock of 1 GHz"
    assert cells["rounds, balance"] == "13.0 0.93, –" and cells["busiest unit"] == "shared, –"
    assert counters_report.waits(row(OURS, 2.0)["kernels"][1]) == "barrier 2.2 wait 1.5"


def test_what_was_not_counted_is_no_line_and_nothing_kept_is_said(tmp_path: Path) -> None:
    assert counters_report.all_kept(tmp_path) == "No counters are kept.\n"
    facts = {"machine": "one H200", "versions": {FLASH: "4.0"}, "commit": "a" * 40, "date": "2026-11-22"}
    rows = [row(OURS, 2.0), row(FLASH, 1.9), {"row": "case", "impl": "broken", "error": "no", "kernels": []}]
    (tmp_path / "h200.json").write_text(json.dumps(facts | {"rows": rows}))
    text = counters_report.all_kept(tmp_path)
    assert text.startswith("one H200; flash-attn-4 4.0; commits `aaaaaaa` 2026-11-22.") and "broken" not in text
    assert sum(line.startswith("| case |") for line in text.splitlines()) == 2
