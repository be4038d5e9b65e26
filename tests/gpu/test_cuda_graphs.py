"""A replay of a CUDA graph gives what tensors hold then: all that is derived from them is a part of the graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.dispatch import plan_cache
from composattn.errors import GraphUnsupported
from composattn.mods import causal, document
from tests.support import gpu_backend, has_backward, needs_backward

LENGTH = 512
Results = list[torch.Tensor]


class Inputs:
    """q, k, v and what flows back."""

    def __init__(self, batch: int = 1, length: int = LENGTH, packed: bool = False) -> None:
        shape = (length, 2, 64) if packed else (batch, 2, length, 64)
        make = {"device": "cuda", "dtype": torch.bfloat16}
        self.q, self.k, self.v = (torch.randn(shape, **make).requires_grad_() for _ in range(3))  # type: ignore[call-overload]
        self.dout = torch.randn(shape, **make)  # type: ignore[call-overload]

    def step(self, attention: Callable[..., Any], *learned: torch.Tensor) -> Results:
        """Its output, and gradients of q, k, v and what else is learned where there is a backward."""
        if not has_backward(gpu_backend()):
            with torch.no_grad():
                return [attention(self.q, self.k, self.v)]
        out = attention(self.q, self.k, self.v)
        return [out.detach(), *torch.autograd.grad(out, [self.q, self.k, self.v, *learned], self.dout)]


def captured(step: Callable[[], Results]) -> tuple[torch.cuda.CUDAGraph, Results]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    return graph, found


def assert_close(found: Results, wanted: Results) -> None:
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02 * float(y.detach().abs().max()))  # dQ: in any order


def of_streaming(x: Inputs, options: dict[str, Any], *learned: torch.Tensor) -> Results:
    return x.step(lambda *qkv: ca.attention(*qkv, backend="streaming", **options), *learned)


def sorted_ids(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, 4, (length,), device="cuda").sort().values


def offsets() -> torch.Tensor:
    cuts = torch.randperm(LENGTH - 1)[:3].sort().values + 1
    return torch.cat([torch.tensor([0]), cuts, torch.tensor([LENGTH])]).int().cuda()


FORMS: dict[str, tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], dict[str, Any]]]] = {
    "documents": (sorted_ids, lambda x: {"mask_mod": causal() & document(x)}),
    "documents in any order": (
        lambda: torch.randint(0, 4, (LENGTH,), device="cuda"),
        lambda x: {"mask_mod": lambda b, h, q, kv: (x[q] == x[kv]) & (q >= kv)},
    ),
    "limits by batch": (
        lambda: torch.randint(1, LENGTH, (2,), device="cuda"),
        lambda x: {"mask_mod": lambda b, h, q, kv: (q >= kv) & (q - kv <= x[b])},
    ),
    "a 0-d limit": (
        lambda: torch.randint(1, LENGTH, (), device="cuda"),
        lambda x: {"mask_mod": lambda b, h, q, kv: (q >= kv) & (q - kv <= x)},
    ),
    "picked blocks": (
        lambda: torch.randint(0, LENGTH // 64, (1, 2, LENGTH // 64, 3), device="cuda"),
        lambda x: {"mask_mod": ca.BlockSparse.topk(x, 64, LENGTH, LENGTH)},
    ),
    "packed": (offsets, lambda x: {"mask_mod": causal(), "varlen": ca.Varlen(x)}),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_replay_gives_what_tensors_hold_then(form: str) -> None:
    draw, options = FORMS[form]
    x, given = Inputs(2 if form == "limits by batch" else 1, packed=form == "packed"), draw()
    read = options(given)
    graph, found = captured(lambda: x.step(lambda *qkv: ca.attention(*qkv, **read)))
    for n in range(3):
        given.copy_(draw())
        graph.replay()
        wanted = of_streaming(x, options(given))
        assert_close(found, wanted)
        if n == 1:  # what eager calls keep is theirs
            assert_close(x.step(lambda *qkv: ca.attention(*qkv, **read)), wanted)
            graph.replay()
            assert_close(found, wanted)


def test_documents_that_are_told_apart_in_segments() -> None:
    x, ids = Inputs(length=4608), torch.arange(4608, device="cuda") // 1000
    graph, found = captured(lambda: x.step(lambda *qkv: ca.attention(*qkv, mask_mod=causal() & document(ids))))
    ids.copy_(torch.arange(4608, device="cuda") // 700)
    graph.replay()
    assert_close(found, of_streaming(x, {"mask_mod": causal() & document(ids)}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_learned_bias_of_any_type(dtype: torch.dtype) -> None:
    needs_backward(gpu_backend())
    x, table = Inputs(), (0.1 * torch.randn(2, 2 * LENGTH, device="cuda")).to(dtype).requires_grad_()
    options = {"score_mod": lambda s, b, h, q, kv: s + table[h, q - kv + LENGTH]}
    graph, found = captured(lambda: x.step(lambda *qkv: ca.attention(*qkv, **options), table))
    with torch.no_grad():
        table.normal_(0, 0.1)
    graph.replay()
    assert_close(found, of_streaming(x, options, table))


def test_learned_sinks() -> None:
    needs_backward(gpu_backend())
    x, sinks = Inputs(), torch.randn(2, device="cuda").requires_grad_()
    options = {"mask_mod": causal(), "sinks": sinks}
    graph, found = captured(lambda: x.step(lambda *qkv: ca.attention(*qkv, **options), sinks))
    with torch.no_grad():
        sinks.normal_()
    graph.replay()
    assert_close(found, of_streaming(x, options, sinks))


def test_a_graph_outlives_the_plan_of_its_call() -> None:
    x, ids = Inputs(), sorted_ids()
    graph, found = captured(lambda: x.step(lambda *qkv: ca.attention(*qkv, mask_mod=causal() & document(ids))))
    for key in list(plan_cache._plans):
        plan_cache.forget(key)
    gc.collect()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 16,), 7, device="cuda", dtype=torch.int32) for _ in range(64)]
    ids.copy_(sorted_ids())
    graph.replay()
    assert_close(found, of_streaming(x, {"mask_mod": causal() & document(ids)}))
    assert all(bool((t == 7).all()) for t in others)


def test_a_mask_that_a_graph_meets_first() -> None:
    x, known, ids = Inputs(), sorted_ids(), sorted_ids()
    for _ in range(2):
        x.step(lambda *qkv: ca.attention(*qkv, mask_mod=causal() & document(known)))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = x.step(lambda *qkv: ca.attention(*qkv, mask_mod=causal() & document(ids)))
    for _ in range(2):
        ids.copy_(sorted_ids())
        graph.replay()
        assert_close(found, of_streaming(x, {"mask_mod": causal() & document(ids)}))


def test_graphed_callables() -> None:
    needs_backward(gpu_backend())
    x, ids = Inputs(), sorted_ids()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return ca.attention(q, k, v, mask_mod=causal() & document(ids))

    x.step(attend)
    sample = tuple(t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v))
    graphed: Any = torch.cuda.make_graphed_callables(attend, sample)  # type: ignore[type-var]
    for _ in range(3):
        ids.copy_(sorted_ids())
        found = [t.clone() for t in x.step(graphed)]
        assert_close(found, of_streaming(x, {"mask_mod": causal() & document(ids)}))


@pytest.mark.parametrize("form", ["lambda", "ready", "kept"])
def test_compiled_code_with_little_overhead_takes_new_documents(form: str) -> None:
    torch._dynamo.reset()
    x, of_kept = Inputs(), sorted_ids()
    planned = ca.Attention(mask_mod=causal() & document(of_kept))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> Any:
        if form == "kept":
            return planned(q * 1.0, k, v)
        if form == "ready":
            return ca.attention(q, k, v, mask_mod=causal() & document(ids))
        return ca.attention(q, k, v, mask_mod=lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j))

    step = torch.compile(attend, mode="reduce-overhead")
    for _ in range(4):
        ids = sorted_ids()
        of_kept.copy_(ids)
        torch.compiler.cudagraph_mark_step_begin()
        found = [t.clone() for t in x.step(lambda *qkv, ids=ids: step(*qkv, ids))]
        assert_close(found, of_streaming(x, {"mask_mod": causal() & document(ids)}))


def test_what_only_the_host_reads_is_refused_when_it_is_captured() -> None:
    x, width, bounds = Inputs(), ca.scalar(40), torch.tensor([0, 100, LENGTH], device="cuda")
    by_offsets = document(offsets=bounds)
    refused: dict[str, dict[str, Any]] = {
        "0-d tensor": {"mask_mod": lambda b, h, q, kv: (q >= kv) & (q - kv <= width)},
        "dropout_seed=": {"dropout_p": 0.5},
        "document(ids)": {"mask_mod": by_offsets},
        "waits for the device": {"backend": "streaming"},
    }
    for words, options in refused.items():
        with torch.no_grad():
            ca.attention(x.q, x.k, x.v, **options)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(GraphUnsupported) as error, torch.no_grad(), torch.cuda.graph(graph):
            ca.attention(x.q, x.k, x.v, **options)
        assert words in str(error.value)


def test_dropout_of_a_captured_seed_follows_it() -> None:
    x, seed = Inputs(), torch.tensor(3, device="cuda")

    def attend() -> Results:
        with torch.no_grad():
            return [ca.attention(x.q, x.k, x.v, dropout_p=0.5, dropout_seed=seed)]

    graph, found = captured(attend)
    before = found[0].clone()
    seed.fill_(4)
    graph.replay()
    assert not torch.equal(found[0], before)
    assert torch.equal(found[0], attend()[0])
