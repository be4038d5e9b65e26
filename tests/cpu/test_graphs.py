"""What a CUDA graph records of a call derives anew what a replay reads; what it can't is refused by name."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from benchmarks.host_work import without_kernels
from composattn.analysis import derived, refreshed, streams, tile_lists
from composattn.call.inputs import Inputs as Given
from composattn.dispatch import operators
from composattn.dispatch.serialized import serialize
from composattn.errors import GraphUnsupported
from composattn.graph.expr import Capture
from composattn.mods import causal, document
from composattn.mods.mask import Mask
from tests.replays import Launched, Replay, gpu_streams, integers, recording

__all__ = ["gpu_streams"]
LENGTH = 512


class Inputs:
    """q, k, v and what flows back, of dense or packed rows."""

    def __init__(self, batch: int = 2, length: int = LENGTH, packed: bool = False) -> None:
        shape = (batch * length, 2, 64) if packed else (batch, 2, length, 64)
        self.q, self.k, self.v = (torch.randn(shape).bfloat16().requires_grad_() for _ in range(3))
        self.dout = torch.randn(shape).bfloat16()

    def step(self, **options: Any) -> list[torch.Tensor]:
        out = ca.attention(self.q, self.k, self.v, **options)
        return [out, *torch.autograd.grad(out, (self.q, self.k, self.v), self.dout)]


Options = Callable[..., dict[str, Any]]


def drawn_ids() -> torch.Tensor:
    return torch.randint(0, 5, (2, LENGTH)).sort(1, descending=True).values


def some_offsets() -> torch.Tensor:
    cuts = (torch.randperm(2 * LENGTH - 1)[:3] + 1).sort().values
    return torch.cat([torch.tensor([0]), cuts, torch.tensor([2 * LENGTH])]).int()


# what a call reads, and how it is drawn
FORMS: dict[str, tuple[Callable[[], torch.Tensor], Options]] = {
    "documents": (drawn_ids, lambda x: {"mask_mod": causal() & document(x)}),
    "documents in any order": (
        lambda: torch.randint(0, 5, (2, LENGTH)),
        lambda x: {"mask_mod": lambda b, h, q, kv: (x[b, q] == x[b, kv]) & (q >= kv)},
    ),
    "documents, not causal": (drawn_ids, lambda x: {"mask_mod": lambda b, h, q, kv: x[b, q] == x[b, kv]}),
    "values that ascend": (drawn_ids, lambda x: {"mask_mod": lambda b, h, q, kv: x[b, q] <= x[b, kv]}),
    "limits by batch": (
        lambda: torch.randint(1, LENGTH, (2,)),
        lambda x: {"mask_mod": lambda b, h, q, kv: (q >= kv) & (q - kv <= x[b])},
    ),
    "a 0-d limit": (
        lambda: torch.randint(1, LENGTH, ()),
        lambda x: {"mask_mod": lambda b, h, q, kv: (q >= kv) & (q - kv <= x)},
    ),
    "blocks": (
        lambda: torch.randint(0, 2, (2, 2, LENGTH // 64, LENGTH // 64), dtype=torch.int8),
        lambda x: {"mask_mod": ca.BlockSparse(x, 64)},
    ),
    "picked blocks": (
        lambda: torch.randint(-1, LENGTH // 64, (2, 2, LENGTH // 64, 3)),
        lambda x: {"mask_mod": ca.BlockSparse.topk(x, 64, LENGTH, LENGTH)},
    ),
    "packed": (some_offsets, lambda x: {"mask_mod": causal(), "varlen": ca.Varlen(x)}),
}


def launched(step: Callable[[], object]) -> list[list[torch.Tensor]]:
    """What the kernels of a step read of integers: captured tensors, tables, lengths."""
    Launched.given = []
    step()
    return Launched.given


def assert_same(found: list[list[torch.Tensor]], wanted: list[list[torch.Tensor]]) -> None:
    assert found and len(found) == len(wanted)
    for x, y in zip(found, wanted, strict=True):
        assert len(x) == len(y) and all(map(torch.equal, x, y))


@pytest.mark.usefixtures("gpu_streams")
@pytest.mark.parametrize("known", [True, False], ids=["planned-before", "planned-there"])
@pytest.mark.parametrize("form", FORMS)
def test_a_replay_gives_every_kernel_what_tensors_hold_then(
    form: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, options = FORMS[form]
    x, given = Inputs(packed=form == "packed"), draw()
    if not known:  # no graph can record a look at how matching values lie: bands serve, as where they lie together
        monkeypatch.setattr(tile_lists, "_has_gaps", lambda table: False)
    read = options(given)
    with without_kernels(Launched):
        for _ in range(3 if known else 0):
            x.step(**read)
        with recording(monkeypatch) as graph:
            x.step(**read)
        for n in range(3):
            given.copy_(draw())
            found = launched(graph)
            assert_same(found, launched(lambda: x.step(**options(given.clone()))))
            if n == 1:  # what eager calls keep is theirs
                assert_same(launched(lambda: x.step(**read)), found)
                assert_same(launched(graph), found)


@pytest.mark.usefixtures("gpu_streams")
def test_segments_of_documents_are_told_anew_at_each_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    x, length = Inputs(1, 4608), 4608
    ids = -(torch.arange(length) // 1000)
    with without_kernels(Launched):
        x.step(mask_mod=causal() & document(ids))
        with recording(monkeypatch) as graph:
            x.step(mask_mod=causal() & document(ids))
        ids.copy_(-(torch.arange(length) // 700))
        assert_same(launched(graph), launched(lambda: x.step(mask_mod=causal() & document(ids.clone()))))


@pytest.mark.usefixtures("gpu_streams")
def test_a_graph_reads_no_memory_of_a_plan_which_may_end_before(monkeypatch: pytest.MonkeyPatch) -> None:
    x, ids = Inputs(), drawn_ids()
    read: list[torch.Tensor] = []
    with without_kernels(Launched):
        x.step(mask_mod=causal() & document(ids))
        with recording(monkeypatch) as graph:
            monkeypatch.setattr(Launched, "_read", lambda _, arguments: read.extend(integers(arguments)))
            x.step(mask_mod=causal() & document(ids))
    of_graph = {t.untyped_storage().data_ptr() for t in (*graph.held, ids)}
    assert read and all(t.untyped_storage().data_ptr() in of_graph for t in read)


def test_compiled_code_leaves_nothing_in_the_memory_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mode "reduce-overhead" runs a step in the graph's memory before it records one, with other tensors."""
    x = Inputs()

    def step(ids: torch.Tensor) -> list[torch.Tensor]:
        mask = Mask.of(causal() & document(ids))
        serialized = serialize((None, mask, None, None, None), (None,) * 4)
        lengths, hints = Given(x.q, x.k, x.v).flatten()
        of_call = (lengths, hints, serialized.form, -1)
        out, lse, _, kept = operators.attend._init_fn(x.q, x.k, x.v, list(serialized.tensors), *of_call, False)
        given = (x.dout, None, x.q, x.k, x.v, list(serialized.tensors), out, lse, kept)
        return [out, lse, kept, *operators.attend_backward._init_fn(*given, *of_call, [True, True, True, False])]

    with without_kernels(Launched), torch.no_grad():
        for n in range(3):
            ids = drawn_ids()
            with monkeypatch.context() as now, Replay(looks=not n) as graph:
                now.setattr(refreshed, "belongs_to_graph", lambda: True)
                if n:
                    now.setattr(streams, "is_capturing", lambda: True)
                with torch.device("meta"):  # a default device is not where a plan's own tensors lie
                    results = step(ids)
            Launched.given = []
            left = {storage.data_ptr() for storage in graph.let_go() if storage.nbytes()}
            assert left <= {t.untyped_storage().data_ptr() for t in results}
        eager = drawn_ids()
        assert_same(launched(lambda: step(eager)), launched(lambda: step(eager.clone())))


def test_a_number_that_the_host_reads_is_refused_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    x, width = Inputs(), ca.scalar(30)

    def window(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (q - kv <= width)

    def attend(**options: Any) -> None:
        ca.attention(x.q, x.k, x.v, **options)

    with without_kernels(Launched):
        for _ in range(3):  # the fast path, too
            attend(mask_mod=window)
            with recording(monkeypatch), pytest.raises(GraphUnsupported, match="0-d tensor"):
                attend(mask_mod=window)
        with recording(monkeypatch):
            with pytest.raises(GraphUnsupported, match="dropout_seed="):
                attend(dropout_p=0.5)
            attend(dropout_p=0.5, dropout_seed=3)
            attend(dropout_p=0.5, dropout_seed=torch.tensor(3))
            with pytest.raises(GraphUnsupported, match="debug_checks"), ca.debug_checks(True):
                attend(mask_mod=causal())


def test_a_table_that_was_made_of_offsets_is_refused_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Inputs()

    def refused(call: Callable[[Mask], object]) -> None:
        mask = document(offsets=torch.tensor([0, 100, LENGTH]))
        call(mask)
        with recording(monkeypatch), pytest.raises(GraphUnsupported, match=r"the offsets .*document\(ids\)"):
            call(mask)

    with without_kernels(Launched):
        refused(lambda mask: x.step(mask_mod=mask))
        refused(lambda mask: ca.Attention(mask_mod=mask)(x.q, x.k, x.v))
    gc.collect()  # an error holds the tables, at which each call of later tests would look


@pytest.mark.parametrize("backend", ["streaming", "reference"])
def test_backends_that_look_at_tiles_are_refused_in_a_graph(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = Inputs(1, 32)
    with recording(monkeypatch), pytest.raises(GraphUnsupported, match="waits for the device"):
        ca.attention(x.q, x.k, x.v, mask_mod=causal(), backend=backend)


def test_a_tensor_that_is_short_where_the_mask_hides_is_refused_when_a_graph_meets_it_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, limit = Inputs(), torch.full((LENGTH - 64,), 3)
    hidden = ca.Attention(mask_mod=lambda b, h, q, kv: (q < LENGTH - 64) & (limit[q] >= kv))
    with without_kernels(Launched):
        with recording(monkeypatch), pytest.raises(GraphUnsupported, match="call once before"):
            hidden(x.q, x.k, x.v)
        hidden(x.q, x.k, x.v)
        with recording(monkeypatch):
            hidden(x.q, x.k, x.v)


def test_memory_of_a_derived_tensor_comes_when_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.arange(5)
    with monkeypatch.context() as now:
        now.setattr(refreshed, "belongs_to_graph", lambda: True)
        doubled = derived.derive("twice", lambda t: 2 * t, Capture(source))
        assert doubled.kept.shape == (5,) and not doubled.kept.untyped_storage().nbytes()
        with derived.derived_for_graph():
            assert doubled.tensor.tolist() == [0, 2, 4, 6, 8]
    kept = doubled.kept
    again = derived.derive("thrice", lambda t: t + 1, doubled)
    assert again.kept.tolist() == [1, 3, 5, 7, 9]
    source += 1
    doubled.refresh()
    assert doubled.tensor is kept and kept.tolist() == [2, 4, 6, 8, 10]
