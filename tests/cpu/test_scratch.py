"""Memory that a backward's kernels use among themselves is nobody else's while they do, and little of it is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composattn.backends.fused.running import scratch
from composattn.backends.fused.running.scratch import LIMIT, SMALL, Scratch


def of_size(numbers: int = 64) -> Scratch:
    return Scratch(numbers, (1, 1, 2, 32), (64, 64, 32, 1), torch.device("cpu"))


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "kept", {})


def test_what_was_left_is_taken_again_and_what_is_taken_is_nobody_elses() -> None:
    made, other = of_size(), of_size()
    first, place = made.take()
    second, _ = made.take()
    assert place is not None and first[0] is not second[0]
    assert [tuple(t.shape) for t in first] == [(64,), (1, 1, 2, 32)]
    scratch.kept[place] = first
    assert other.take()[0][0] is not first[0], "calls of another form"
    assert made.take()[0] is first
    assert made.take()[0] is not first


def test_each_stream_has_its_own_and_a_recorded_graph_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now: dict[str, Any] = {"stream": 7, "records": False}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: now["stream"], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: now["records"], raising=False)
    made = of_size()
    made._device = 0
    first, place = made.take()
    assert place is not None
    scratch.kept[place] = first
    now["stream"] = 8
    assert made.take()[0] is not first
    now.update(stream=7, records=True)
    taken, nowhere = made.take()
    assert taken is not first and nowhere is None
    now["records"] = False
    assert made.take()[0] is first


def test_memory_of_a_graph_that_is_warmed_up_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "memory_is_ours", lambda: False)
    assert of_size().take()[1] is None


def test_little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as m:
        m.setattr(scratch, "memory_is_ours", lambda: pytest.fail("asked at each call of a large one"))
        assert of_size(SMALL // 4).take()[1] is None
    for _ in range(3 * LIMIT):
        memory, place = of_size().take()
        assert place is not None
        scratch.kept[place] = memory
    assert len(scratch.kept) <= LIMIT
