"""Runs that a device replays as graphs give what they would give anew; graphs are stood for by runs on their memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import composattn as ca
from composattn.analysis import matches, replayed
from composattn.analysis.derived import Derived, Upkeep, derive
from composattn.analysis.refreshed import no_caching
from composattn.analysis.rerun import Rerun
from composattn.analysis.tile_lists import Extent, KeyLists, QueryLists, TileLists
from composattn.graph.expr import Capture, captures
from composattn.mods import causal, document

CPU = torch.device("cpu")
RUNS = replayed.AFTER + 5


class StandIn:
    """What a graph does: runs again on the memory it was captured with; what it makes meanwhile is overwritten."""

    made = 0
    replays = 0

    def __init__(self, run: Callable[[], object], device: torch.device) -> None:
        self.run = run
        StandIn.made += 1

    def __call__(self) -> None:
        StandIn.replays += 1
        with _Seen() as seen:
            self.run()
        for tensor, count in seen.counts.values():
            _set_version((tensor,), (count,))


_set_version = torch._C._autograd._unsafe_set_version_counter  # type: ignore[attr-defined]


class _Seen(TorchDispatchMode):
    """How often what is read and written inside had been written to: of a graph torch counts no writes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[int, tuple[torch.Tensor, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in args:
            if isinstance(tensor, torch.Tensor):
                self.counts.setdefault(id(tensor), (tensor, tensor._version))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU that has graphs, and looks at no number of a tensor, as a GPU does not."""
    monkeypatch.setitem(replayed.GRAPHS, "cpu", StandIn)
    monkeypatch.setattr(matches, "derives_anew", lambda: True)
    monkeypatch.setattr(replayed, "_turns", {})
    monkeypatch.setattr(StandIn, "made", 0)
    monkeypatch.setattr(StandIn, "replays", 0)
    yield


def sums(inputs: Sequence[Any], factor: int = 1) -> list[torch.Tensor]:
    x, y = inputs
    at = torch.arange(len(x))
    return [(x + at).sort().values * factor, x if y is None else x.cumsum(0) + y]


def test_a_replay_follows_its_inputs_and_gives_memory_of_its_own() -> None:
    run, kept = Rerun(sums), []
    for _ in range(RUNS):
        x, y = torch.randint(0, 9, (20,)), torch.randint(0, 9, (20,))
        kept.append((run((x, y), (3,)), sums((x, y), 3)))
    for found, wanted in kept:
        assert all(map(torch.equal, found, wanted))
    assert (StandIn.made, StandIn.replays) == (1, RUNS - 2 - replayed.AFTER)


def test_another_form_is_captured_anew() -> None:
    run, y = Rerun(sums), torch.ones(30, dtype=torch.int64)
    # each differs from the one before by its length, a constant, or which inputs are there, and by nothing else
    for n, factor, other in (
        (20, 1, None),
        (30, 1, None),
        (30, 2, None),
        (30, 2, y),
        (30, 1, y),
        (30, True, y),
        (30, 1.0, y),
    ):
        for _ in range(RUNS):
            x = torch.randint(0, 9, (n,))
            assert all(map(torch.equal, run((x, other), (factor,)), sums((x, other), factor)))
    assert StandIn.made == 7


def test_expanded_inputs_and_large_ones_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Rerun(lambda inputs: [inputs[0] + 1])
    for n in range(RUNS):
        assert torch.equal(run((torch.tensor([n]).expand(9),))[0], torch.full((9,), n + 1))
    monkeypatch.setattr(replayed, "MOST_BYTES", 100)
    for n in range(RUNS):
        assert torch.equal(run((torch.full((9,), n),))[0], torch.full((9,), n + 1))
    assert not StandIn.made


def test_a_column_of_a_large_tensor_is_not_captured() -> None:
    """Memory like it would be as large."""
    run, large = Rerun(lambda inputs: [inputs[0] + 1]), torch.zeros(9, replayed.MOST_BYTES // 8)
    for n in range(RUNS):
        large[:, 0] = n
        assert torch.equal(run((large[:, 0],))[0], torch.full((9,), n + 1.0))
    assert not StandIn.made


class FakeGraph:
    """What torch holds graphs to: a pool that graphs have used is there for more as long as one of them lives."""

    uses: ClassVar[dict[int, int]] = {}

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert self.uses.get(pool, 1), "a pool whose graphs have all ended"
        self.uses[pool] = self.uses.get(pool, 0) + 1
        self.pool = pool

    def capture_end(self) -> None: ...

    def __del__(self) -> None:
        self.uses[self.pool] -= 1


def test_graphs_share_a_pool_for_as_long_as_one_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    device, handles, FakeGraph.uses = torch.device("cuda", 99), itertools.count(), {}
    fakes = {"CUDAGraph": FakeGraph, "graph_pool_handle": lambda: next(handles), "stream": lambda of: nullcontext()}
    for name, fake in {**fakes, "Stream": MagicMock(), "current_stream": MagicMock()}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    first, second = (replayed.CudaGraph(lambda: None, device) for _ in range(2))
    del first
    third = replayed.CudaGraph(lambda: None, device)
    assert FakeGraph.uses == {0: 2}
    del second, third
    assert replayed.CudaGraph(lambda: None, device).pool == 1


@pytest.mark.parametrize("backend", ["native", "cudaMallocAsync", "pluggable"])
@pytest.mark.parametrize("caches", [True, False])
def test_gpus_have_graphs_where_torch_keeps_their_memory_apart(
    backend: str, caches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING", raising=False)
    if not caches:
        monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    monkeypatch.setattr(replayed, "Replay", MagicMock())
    on_gpu: Any = SimpleNamespace(
        device=torch.device("cuda", 0), shape=(9,), stride=lambda: (1,), element_size=lambda: 4
    )
    monkeypatch.setattr(torch, "_debug_has_internal_overlap", lambda t: 0)
    found = replayed.replay_of(lambda inputs: inputs, [on_gpu], [on_gpu], ())
    assert (found is not None) == (backend == "native" and caches)


def test_a_refused_capture_is_said_once_and_runs_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(run: Any, device: torch.device) -> Any:
        raise RuntimeError("not permitted")

    monkeypatch.setitem(replayed.GRAPHS, "cpu", refused)
    run = Rerun(lambda inputs: [inputs[0] + 1])
    with pytest.warns(UserWarning, match="not captured"):
        for n in range(replayed.AFTER + 2):
            run((torch.full((9,), n),))
    assert torch.equal(run((torch.zeros(9),))[0], torch.ones(9))
    monkeypatch.setitem(replayed.GRAPHS, "cpu", StandIn)
    another = Rerun(lambda inputs: [inputs[0] + 1])
    for n in range(RUNS):
        assert torch.equal(another((torch.full((9,), n),))[0], torch.full((9,), n + 1))
    assert not StandIn.made, "nothing is captured where a capture has failed"


def test_standing_tensors_are_read_and_written_where_they_lie() -> None:
    def compute(inputs: Sequence[Any]) -> list[torch.Tensor]:
        x, table, kept = inputs
        return [kept.copy_(x + table), x * table]

    run, table, kept = Rerun(compute), torch.arange(5), torch.zeros(5, dtype=torch.int64)
    for n in range(RUNS):
        if n == RUNS - 1:
            table = torch.arange(5) * 2  # of other memory: another form
        x = torch.full((5,), n)
        table.add_(1)
        found, product = run((x, table, kept), (), (1, 2))
        assert found is kept
        assert torch.equal(kept, x + table) and torch.equal(product, x * table)
    assert StandIn.replays


def chain(ids: Capture) -> tuple[Derived, Derived, Derived]:
    first = derive("first", lambda x: x + 1, ids)
    second = derive("second", lambda x: x.cumsum(0), first)
    return first, second, derive("both", lambda x, y: torch.stack([x, y]), ids, second)


def values_of(ids: torch.Tensor) -> list[torch.Tensor]:
    second = (ids + 1).cumsum(0)
    return [ids + 1, second, torch.stack([ids, second])]


def test_what_is_derived_is_brought_up_to_date_in_one_launch() -> None:
    ids = torch.arange(6)
    parts = chain(Capture(ids))
    upkeep = Upkeep(parts[2:])
    for n in range(RUNS):
        ids.copy_(torch.randint(0, 9, (6,)))
        before, versions = StandIn.replays, [d.version for d in parts]
        upkeep()
        assert all(map(torch.equal, [d.kept for d in parts], values_of(ids)))
        assert [d.version - v for d, v in zip(parts, versions, strict=True)] == [1, 1, 1]
        upkeep()
        assert StandIn.replays - before == (n >= replayed.AFTER + 2)
        assert all(d.is_up_to_date() for d in parts)


def test_what_another_brought_up_to_date_is_read_where_it_lies() -> None:
    ids = torch.arange(6)
    parts = chain(Capture(ids))
    upkeep = Upkeep(parts)
    for _ in range(RUNS):
        ids.copy_(torch.randint(0, 9, (6,)))
        parts[0].refresh()
        version = parts[0].version
        upkeep()
        assert parts[0].version == version
        assert all(map(torch.equal, [d.kept for d in parts], values_of(ids)))
    assert StandIn.replays


def test_a_run_that_fails_leaves_nothing_that_counts_as_up_to_date() -> None:
    ids, fails = torch.arange(6), [False]

    def recipe(x: torch.Tensor) -> torch.Tensor:
        if fails[0]:
            raise RuntimeError("no memory")
        return x * 2

    first = derive("plain", lambda x: x + 1, Capture(ids))
    upkeep = Upkeep([first, derive("fails", recipe, first)])
    ids.add_(1)
    fails[0] = True
    with pytest.raises(RuntimeError, match="no memory"):
        upkeep()
    fails[0] = False
    upkeep()
    assert torch.equal(upkeep.derived[1].kept, (ids + 1) * 2)


@pytest.mark.parametrize("kind", [KeyLists, QueryLists])
def test_lists_of_new_contents_are_those_of_a_fresh_mask(kind: type[TileLists]) -> None:
    def made(blocks: torch.Tensor, ids: torch.Tensor) -> TileLists:
        mask = ca.BlockSparse(blocks, 32, partial=causal() & document(ids))
        return kind(mask.expr, Extent(300, 300, 2, 1, CPU), (48, 80))

    blocks, ids = torch.randint(0, 3, (2, 1, 10, 10), dtype=torch.int8), torch.arange(300) // 40
    kept = made(blocks, ids)
    for n in range(RUNS):
        wanted = made(blocks.clone(), ids.clone()).of_call()
        if n % 2:
            with no_caching():
                found = kept.of_call()  # read at once: the next run may write there
        else:
            found = kept.of_call()
        assert all(map(torch.equal, found, wanted))
        with no_caching():  # of other contents, in a call that keeps nothing: what is kept stays
            was = blocks.clone()
            blocks.zero_()
            kept.of_call()
            blocks.copy_(was)
        assert all(map(torch.equal, kept.of_call(), wanted))
        blocks.copy_(torch.randint(0, 3, (2, 1, 10, 10)))
        ids.copy_(torch.randint(0, 9, (300,)).sort().values)
    assert StandIn.replays


@pytest.mark.parametrize("kind", [KeyLists, QueryLists])
def test_lists_follow_a_table_that_was_replayed(kind: type[TileLists]) -> None:
    """They read nothing but the table of blocks, and know of its writes by what torch counts."""

    def made(blocks: torch.Tensor) -> TileLists:
        return kind(ca.BlockSparse(blocks, 32).expr, Extent(300, 300, 2, 1, CPU), (48, 80))

    blocks = torch.randint(0, 3, (2, 1, 10, 10), dtype=torch.int8)
    kept = made(blocks)
    for _ in range(2 * RUNS):
        assert all(map(torch.equal, kept.of_call(), made(blocks.clone()).of_call()))
        blocks.copy_(torch.randint(0, 3, (2, 1, 10, 10)))
    assert StandIn.replays


def test_documents_of_a_mask_in_many_threads() -> None:
    ids = [torch.randint(0, 9, (300,)) for _ in range(4)]
    masks = [causal() & document(i) for i in ids]
    failed: list[object] = []

    def work(n: int) -> None:
        upkeep = Upkeep([d for d in (*captures(masks[n].expr),) if isinstance(d, Derived)] or derived_of(masks[n]))
        for _ in range(10):
            ids[n].copy_(torch.randint(0, 9, (300,)))
            upkeep()
            for d in upkeep.derived:
                fresh = d.recipe(*[s.tensor for s in d.sources])
                if not torch.equal(d.kept, fresh):
                    failed.append(d)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed and StandIn.replays


def derived_of(mask: Any) -> list[Derived]:
    """The tables of its bands."""
    from composattn.analysis.bands import ends_of, tile_intervals

    return [c for c in captures(*ends_of(tile_intervals(mask.expr))) if isinstance(c, Derived)]


def test_a_capture_sees_nothing_of_what_its_thread_has_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a pool is entered by thread, as autocast and modes are: a graph must lie in none but its own."""
    here, states = threading.get_ident(), []

    class Looking(StandIn):
        def __init__(self, run: Callable[[], object], device: torch.device) -> None:
            modes = torch._C._len_torch_dispatch_stack()
            states.append((threading.get_ident() == here, modes, torch.is_autocast_enabled("cpu")))
            super().__init__(run, device)

    monkeypatch.setitem(replayed.GRAPHS, "cpu", Looking)
    rerun = Rerun(sums)
    with torch.no_grad(), torch.autocast("cpu"), _Seen():
        for n in range(RUNS):
            x = torch.randint(0, 9, (8,), generator=torch.Generator().manual_seed(n))
            for found, wanted in zip(rerun((x, None)), sums((x, None)), strict=True):
                assert torch.equal(found, wanted)
    assert states == [(False, 0, False)]


def test_what_fails_in_a_capture_is_said_where_it_was_asked_for() -> None:
    def fails() -> Any:
        raise RuntimeError("no graph")

    with pytest.raises(RuntimeError, match="no graph"):
        replayed._apart(CPU, fails)
