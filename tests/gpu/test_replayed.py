"""Masks whose tensors are new, or written to, at each step: what is derived from them is replayed as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import composattn as ca
from composattn.analysis import replayed
from tests.support import gpu_backend, needs_backward

LENGTH = 640
STEPS = replayed.AFTER + 8
Results = list[torch.Tensor]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """One entry for each replay."""
    found: list[object] = []
    replay = replayed.CudaGraph.__call__

    def counted(graph: replayed.CudaGraph) -> None:
        found.append(graph)
        replay(graph)

    monkeypatch.setattr(replayed.CudaGraph, "__call__", counted)
    yield found


class Inputs:
    def __init__(self) -> None:
        make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.qkv = [torch.randn(1, 2, LENGTH, 64, **make).requires_grad_() for _ in range(3)]
        self.dout = torch.randn(1, 2, LENGTH, 64, **make)

    def step(self, attention: Callable[..., Any], *of: Any) -> Results:
        out = attention(*self.qkv, *of)
        return [out.detach(), *torch.autograd.grad(out, self.qkv, self.dout)]


def assert_close(found: Results, wanted: Results) -> None:
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02 * float(y.abs().max()))


def drawn(step: int, ordered: bool = True) -> torch.Tensor:
    ids = torch.randint(0, 3 + step % 4, (LENGTH,), device="cuda")
    return ids.sort().values if ordered else ids


def mask_of(ids: torch.Tensor) -> Any:
    return lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv])


def blocks_of(ids: torch.Tensor) -> Any:
    return create_block_mask(mask_of(ids), None, None, LENGTH, LENGTH, device="cuda")


def by_mask(q: Any, k: Any, v: Any, ids: torch.Tensor, backend: str | None = None) -> Any:
    return ca.attention(q, k, v, mask_mod=mask_of(ids), backend=backend)


def by_blocks(q: Any, k: Any, v: Any, blocks: Any, backend: str | None = None) -> Any:
    return ca.flex_attention(q, k, v, block_mask=blocks, backend=backend)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("way", ["mask", "blocks"])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_new_mask_each_step(way: str, ordered: bool, compiled: bool, replays: list[object]) -> None:
    needs_backward(gpu_backend())
    layer, given = (by_mask, lambda ids: ids) if way == "mask" else (by_blocks, blocks_of)
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    x = Inputs()
    for n in range(STEPS):
        ids = drawn(n, ordered)
        assert_close(x.step(run, given(ids)), x.step(by_mask, ids, "streaming"))
    assert replays or (way == "blocks" and not compiled)  # eager: lists that add nothing


def test_ids_written_in_place_on_streams_in_turn(replays: list[object]) -> None:
    needs_backward(gpu_backend())
    x, ids, streams = Inputs(), drawn(0), [torch.cuda.Stream() for _ in range(3)]
    attention = ca.Attention(mask_mod=mask_of(ids))
    found: list[tuple[Results, torch.Tensor]] = []
    for n in range(3 * STEPS):
        stream = streams[n % 3]
        stream.wait_stream(streams[(n - 1) % 3] if n else torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            ids.copy_(drawn(n))
            found.append((x.step(attention), ids.clone()))
    torch.cuda.synchronize()
    for results, then in found[-6:]:
        assert_close(results, x.step(by_mask, then, "streaming"))
    assert replays


def test_blocks_written_in_place(replays: list[object]) -> None:
    """Lists of tiles read a table that a graph rewrites, whose writes torch does not count by itself."""
    needs_backward(gpu_backend())
    x, tiles = Inputs(), torch.ones(1, 2, LENGTH // 64, LENGTH // 64, dtype=torch.int8, device="cuda")
    attention = ca.Attention(mask_mod=ca.BlockSparse(tiles, 64))
    for _ in range(STEPS):
        tiles.copy_(torch.randint(0, 2, tiles.shape, device="cuda"))
        tiles[..., 0] = 1  # each row sees some keys
        wanted = ca.Attention(mask_mod=ca.BlockSparse(tiles.clone(), 64), backend="streaming")
        assert_close(x.step(attention), x.step(wanted))
    assert replays


def test_two_masks_on_two_streams_at_once(replays: list[object]) -> None:
    """They share the pool of memory in which they replay."""
    needs_backward(gpu_backend())
    xs, streams = [Inputs(), Inputs()], [torch.cuda.Stream(), torch.cuda.Stream()]
    ids = [drawn(0), drawn(1)]
    attentions = [ca.Attention(mask_mod=mask_of(i)) for i in ids]
    found: list[tuple[int, Results, torch.Tensor]] = []
    torch.cuda.synchronize()
    for n in range(3 * STEPS):
        for m in range(2):
            with torch.cuda.stream(streams[m]):
                ids[m].copy_(drawn(n + m))
                found.append((m, xs[m].step(attentions[m]), ids[m].clone()))
    torch.cuda.synchronize()
    for m, results, then in found[-12:]:
        assert_close(results, xs[m].step(by_mask, then, "streaming"))
    assert replays


def test_a_users_graph_of_a_mask_that_was_replayed(replays: list[object]) -> None:
    needs_backward(gpu_backend())
    x, ids = Inputs(), drawn(0)
    attention = ca.Attention(mask_mod=mask_of(ids))
    for n in range(STEPS):
        ids.copy_(drawn(n))
        x.step(attention)
    assert replays
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.step(attention)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = x.step(attention)
    for n in range(3):
        ids.copy_(drawn(n + 1))
        graph.replay()
        wanted = x.step(by_mask, ids, "streaming")
        assert_close(found, wanted)
        ids.copy_(drawn(n + 2))
        assert_close(x.step(attention), x.step(by_mask, ids, "streaming"))


def test_random_numbers_are_drawn_as_if_nothing_was_captured(replays: list[object]) -> None:
    needs_backward(gpu_backend())
    x, ids = Inputs(), drawn(0)
    torch.cuda.manual_seed(7)
    wanted = [torch.rand(4, device="cuda") for _ in range(STEPS)]
    attention = ca.Attention(mask_mod=mask_of(ids))
    torch.cuda.manual_seed(7)
    for n in range(STEPS):
        assert torch.equal(torch.rand(4, device="cuda"), wanted[n])
        ids.copy_((torch.arange(LENGTH, device="cuda") * (n + 2)) // LENGTH)
        x.step(attention)
    assert replays


def test_graphs_take_no_memory_of_a_pool_that_a_step_uses(replays: list[object]) -> None:
    """What a graph makes meanwhile would lie there, where whoever owns the pool gives it to others."""
    needs_backward(gpu_backend())
    x, ids, pool = Inputs(), drawn(0, ordered=False), torch.cuda.MemPool()
    attention = ca.Attention(mask_mod=mask_of(ids))
    for n in range(STEPS):
        ids.copy_(drawn(n, ordered=False))
        with torch.cuda.use_mem_pool(pool):
            found = x.step(attention)
            torch.cuda.synchronize()
            held = [torch.full((LENGTH * size,), -7, dtype=torch.int64, device="cuda") for size in (1, 2, 4, 9, 18)]
        assert_close(found, x.step(by_mask, ids, "streaming"))
        del held
    assert replays
