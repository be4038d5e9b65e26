"""Tuning a call from end to end, by emulated kernels and a clock that says what the test wants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn import tuning
from composattn.errors import BackendUnavailable
from composattn.shaped import shaped


def attention() -> ca.Attention:
    return ca.Attention(mask_mod=ca.mods.causal(), backend="hopper-emulated")


def test_the_fastest_candidate_is_kept_and_taken_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("composattn.backends.fused.compiling.tuned.FILE", str(tmp_path / "tuned.json"))
    inputs = shaped((1, 1, 1, 192, 192, 64, 64), torch.bfloat16, "cpu")
    for rows in inputs[:3]:
        rows.normal_()
    calls: list[Callable[[], object]] = []

    def clock(call: Callable[[], object]) -> float:
        """Every candidate is slower than the one before it, but the last one."""
        if call not in calls:
            calls.append(call)
        return 2.0 + calls.index(call) if len(calls) < 3 or call is not calls[-1] else 1.0

    (found,) = tuning.tune(attention, inputs, gradient=False, stopwatch=clock, gpu="no GPU")
    assert found.kept is not None and found.kept.form == list(found.ms)[-1] != found.own
    assert f"kept: tuned: {found.kept.gain - 1:+.1%}" in str(found)
    said = str(attention().explain(*inputs[:3]))
    assert f"form: {found.kept.form}; tuned: " in said and f"the tables say {found.own}" in said


def test_a_call_that_no_table_chose_is_refused_by_name() -> None:
    inputs = shaped((1, 1, 1, 8, 8, 16, 16), torch.bfloat16, "cpu")
    with pytest.raises(BackendUnavailable, match="nothing to tune: no table of forms chose the forward"):
        list(tuning.tune(lambda: ca.Attention(backend="streaming"), inputs, False, lambda call: 1.0, "no GPU"))
