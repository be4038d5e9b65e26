"""What benchmarks of one kernel's tilings share: who is wrong or fails is not timed, and said."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import composattn as ca
from benchmarks.kernel_cases import Launched, by_call, compile_first, error_of_rows, right_ones
from composattn.mods import causal


class Way(NamedTuple):
    text: str
    name: str


WAYS = [Way("full", "right"), Way("causal", "right"), Way("full", "wrong"), Way("full", "fails")]


def launch(way: Way) -> Launched:
    def call() -> None:
        if way.name == "fails":
            raise RuntimeError("no room")

    return call, lambda: 0.5 if way.name == "wrong" else 0.001


def test_only_right_ones_are_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    group = by_call(WAYS)[0]
    assert [way.name for way in group] == ["right", "wrong", "fails"]
    calls, errors = right_ones(group, launch, 0.1)
    assert set(calls) == {"right"} and errors == {"right": 0.001, "wrong": 0.5}
    said = capsys.readouterr().out
    assert "full wrong: WRONG, relative error 5.0e-01" in said and "full fails: RuntimeError no room" in said


def compiled(way: Way) -> str:
    if way.name == "fails":
        raise ValueError("no such kernel")
    return "" if way.text == "full" else "0 spills"


def test_what_cannot_be_compiled_stops_no_other_one(capsys: pytest.CaptureFixture[str]) -> None:
    compile_first(compiled, WAYS, workers=1)
    assert capsys.readouterr().out.splitlines() == ["causal right: 0 spills", "full fails: ValueError: no such kernel"]


@pytest.mark.parametrize("masked", [False, True], ids=["full", "causal"])
def test_rows_are_held_to_fp64(masked: bool, generator: torch.Generator) -> None:
    q, k, v = (torch.randn(2, 4, 40, 16, generator=generator) for _ in range(3))
    mask_mod = causal() if masked else None
    out = ca.attention(*(t.double() for t in (q, k, v)), mask_mod=mask_mod, backend="reference")
    assert isinstance(out, torch.Tensor)
    assert error_of_rows(out, q, k, v, masked, slice(30, 40)) < 1e-12
    out[-1, -1, 39] += 1
    assert error_of_rows(out, q, k, v, masked, slice(30, 40)) > 0.1
    assert error_of_rows(out, q, k, v, masked, slice(0, 39)) < 1e-12
