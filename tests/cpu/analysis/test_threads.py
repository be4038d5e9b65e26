"""Threads and streams that share a mask: each computes with what its own call says, whatever others do meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import composattn as ca
from composattn.analysis.derived import Derived, refresh
from composattn.analysis.range_extremes import Windows, range_extreme
from composattn.analysis.refreshed import Refreshed, Rewriting
from composattn.analysis.streams import DEFAULT_STREAM, Streams, is_capturing
from composattn.analysis.tile_lists import Extent, KeyLists
from composattn.backends.fused.tiles.work import MOST_TABLES, WorkTables
from composattn.call.problem import Layout, Problem
from composattn.call.sequences import Sequences
from composattn.graph.expr import Capture, captures, index

CPU = torch.device("cpu")
V = TypeVar("V")


def in_another_thread(call: Callable[[], V]) -> V:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(60)


def starts(*at: int) -> torch.Tensor:
    return torch.tensor(at, dtype=torch.int32)


def test_lists_of_one_thread_stay_when_another_asks_for_other_lengths() -> None:
    mask = ca.mask(lambda b, h, q, kv: ((q // 32) * (kv // 32)) % 3 == 0)
    lists = KeyLists(mask.expr, Extent(192, 192, 2, 1, CPU, ragged=True), (32, 32))

    def of(middle: int) -> list[torch.Tensor]:
        places = (starts(0, middle, 256), None)
        return lists.of_call(queries=places, keys=places)

    mine = of(64)
    before = [t.clone() for t in mine]
    theirs = in_another_thread(lambda: of(192))
    assert not torch.equal(theirs[0], before[0])
    assert all(map(torch.equal, mine, before)), "a kernel of this thread may still read them"


def test_the_limit_of_tables_is_of_each_thread() -> None:
    packed = Problem(1, 2, 2, 300, 300, 64, 64, torch.bfloat16, CPU, layout=Layout("packed", "packed"))
    tables = WorkTables(packed, None, 16, 16, "in_order")

    def tables_of(count: int) -> list[torch.Tensor]:
        held = [starts(0, 300) for _ in range(count)]
        return [tables(Sequences(cu_q=t, cu_k=t)) for t in held]

    tables_of(1)
    mine = list(tables.made)
    in_another_thread(lambda: tables_of(MOST_TABLES))
    assert list(tables.made) == mine


def test_what_threads_share_is_made_once_and_none_sees_it_half_made() -> None:
    kept: Refreshed[int] = Refreshed(0, ["old"])
    making, go_on, made = threading.Event(), threading.Event(), []

    def make() -> int:
        making.set()
        assert go_on.wait(60)
        made.append(1)
        return len(made)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: kept(["new"], make))
        assert making.wait(60)
        second = pool.submit(lambda: kept(["new"], make))
        go_on.set()
        assert (first.result(60), second.result(60), kept.version) == (1, 1, 1)


class Watching(TorchDispatchMode):
    """Whether `tensor` holds `wanted` after every operation."""

    def __init__(self, tensor: torch.Tensor, wanted: torch.Tensor) -> None:
        super().__init__()
        self.tensor, self.wanted, self.operations = tensor, wanted.numpy(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.operations += 1
        assert (self.tensor.numpy() == self.wanted).all(), f"half made, after {func}"
        return found


def test_a_table_that_is_made_again_of_the_same_is_right_all_along() -> None:
    """Every call makes the table of a tensor that counts no writes, while other threads read it."""
    with torch.inference_mode():
        ids = torch.arange(100) % 7
    low, high = index("first"), index("last")
    table = next(c for c in captures(range_extreme(Capture(ids), 0, (low,), low, high, True)) if isinstance(c, Windows))
    watching = Watching(table.tensor, table.tensor.clone())
    with watching:
        refresh([table])
    assert watching.operations > 5 and isinstance(table, Derived)


class Stream:
    """A stand-in for a CUDA stream that records who waits for whom."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream, self.waited_for = handle, list[int]()

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other.cuda_stream)


def test_the_default_stream_is_not_asked_whether_a_graph_records_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = DEFAULT_STREAM, list[int]()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: now, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_isCurrentStreamCapturing", lambda: asked.append(now) or now == 8, raising=False
    )
    assert not is_capturing() and not asked, "it can't be captured"
    now = 7
    assert not is_capturing()
    now = 8
    assert is_capturing() and asked == [7, 8]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not is_capturing() and asked == [7, 8]


def test_streams_wait_for_who_wrote_and_who_writes_for_all_that_read(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = streams = [Stream(n) for n in range(3)]
    now, capturing = one, False
    monkeypatch.setattr("composattn.analysis.streams.stream_handle", lambda device: now.cuda_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now)
    monkeypatch.setattr("composattn.analysis.streams.is_capturing", lambda: capturing)
    monkeypatch.setattr("composattn.analysis.refreshed.streams_of", Streams)
    kept: Refreshed[int] = Refreshed(0, device=torch.device("cuda", 0))

    def ask(stamp: int) -> list[list[int]]:
        kept([stamp], lambda: stamp)
        waited = [list(s.waited_for) for s in streams]
        for s in streams:
            s.waited_for.clear()
        return waited

    assert ask(1) == ask(1) == [[], [], []]
    now = two
    assert ask(1) == [[], [0], []] and ask(1) == [[], [], []], "once for what was written once"
    now = three
    assert ask(2) == [[], [], [0, 1]]
    now = one
    assert ask(2) == [[2], [], []]
    now, capturing = two, True
    assert ask(2) == ask(3) == [[], [], []], "a graph that is recorded may wait for nothing outside"


def test_memory_is_nobody_elses_before_a_stream_that_rewrites_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Stream(0), Stream(1)
    now, used = one, list[tuple[object, int]]()
    monkeypatch.setattr("composattn.analysis.streams.stream_handle", lambda device: now.cuda_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, stream: used.append((t, stream.cuda_stream)))
    monkeypatch.setattr("composattn.analysis.refreshed.streams_of", Streams)
    table = torch.zeros(3)
    kept: Refreshed[torch.Tensor] = Refreshed(table, (0,), device=torch.device("cuda", 0))
    together = Rewriting([kept])
    kept([1], lambda: table.add_(1))
    assert not used
    now = two
    kept([2], lambda: table.add_(1))
    assert used == [(table, 1)]
    now = one
    with together as values:
        values.done(lambda n: [3])
    assert used == [(table, 1), (table, 0)]
