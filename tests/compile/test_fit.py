"""What fits in registers by `python -m benchmarks.fit`: the tables take no more, and its record is of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

from benchmarks.fit import VARIED, Cost, Sample, fitted, samples

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "compiled"
# instructions that spill in what the tables take; that form was timed, and is 5 % ahead of all others all the same
SPILLING = {"forward D 64 ALiBi causal": 18}


def recorded() -> list[tuple[Sample, dict[str, int]]]:
    found: list[tuple[Sample, dict[str, int]]] = []
    for direction in VARIED:
        said = json.loads((RESULTS / f"hopper-fit-{direction}.json").read_text())["samples"]
        found += [(sample, said[str(sample)]) for sample in samples(direction) if str(sample) in said]
    return found


@pytest.mark.parametrize(("sample", "found"), [pytest.param(*each, id=str(each[0])) for each in recorded()])
def test_the_tables_take_what_was_compiled_and_no_more_than_fits(sample: Sample, found: dict[str, int]) -> None:
    assert getattr(sample.plan().tiling, VARIED[sample.direction]) == found["table"], "run benchmarks.fit again"
    assert found["table"] <= found["fits"] or found["spills"] == SPILLING[str(sample)]


@pytest.mark.parametrize(("most", "wanted"), [(96, 96), (80, 80), (160, 112), (48, 48)])
def test_the_most_that_fits_is_found_from_above_and_from_below(
    most: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables take 64 columns of these; a compiler of the test's spills beyond `most`; three steps are tried."""

    def cost(plan: Any) -> Cost:
        return Cost(spills=int(plan.tiling.resident > most), waits=14, bytes=0)

    monkeypatch.setattr(Cost, "of", cost)
    sample = Sample("backward", 96, "soft cap", "causal")
    found = fitted(sample)
    assert found["table"] == 64 and found["fits"] == wanted
