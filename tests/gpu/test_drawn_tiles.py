"""Blocks that stay and draw their tiles: every row, the same bits, on several streams at once and in graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.running import counter
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Problem
from composattn.mods import causal, sliding_window, softcap
from tests.support import gpu_backend, poison_cuda_memory

MODS: dict[str, Callable[[], dict[str, Any]]] = {
    "full": dict,
    "causal": lambda: {"mask_mod": causal()},
    "window": lambda: {"mask_mod": sliding_window(257)},
    "soft cap": lambda: {"score_mod": softcap(20.0), "mask_mod": causal()},
}
LENGTHS = (1, 129, 1000, 2049, 3001)
WIDTHS = (128, 192, 256)


def drawn(batch: int, length: int, d: int, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v of 8 heads, four to a key/value head."""
    make = torch.Generator("cuda").manual_seed(seed)
    shapes = [(batch, heads, length, d) for heads in (8, 2, 2)]
    return [torch.randn(s, generator=make, device="cuda").to(torch.bfloat16) for s in shapes]


def attend(mods: dict[str, Any], *inputs: torch.Tensor, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return ca.attention(*inputs, return_lse=True, backend=gpu_backend(), **mods, **how)


@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", MODS)
def test_all_rows_are_those_of_a_block_per_tile(name: str, length: int, d: int) -> None:
    mods, inputs = MODS[name](), drawn(3, length, d)
    poison_cuda_memory()
    out, lse = attend(mods, *inputs)
    wanted, wanted_lse = ca.attention(*(x.double() for x in inputs), return_lse=True, backend="reference", **mods)
    torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), wanted_lse.double(), atol=1e-3, rtol=1e-5)
    of_problem = plan_forward(Problem.of(*inputs), ca.Attention(**mods).program, HOPPER)
    for schedule in (ca.Schedule(), ca.Schedule(persistent=False)):
        poison_cuda_memory()
        again, its_lse = attend(mods, *inputs, schedule=schedule)
        # wider blocks that stay may have fewer keys in a tile, and of shares a row's keys may be summed apart
        if schedule.persistent is None or (d == 128 and not of_problem.tiling.scheduler.shares):
            assert torch.equal(again, out) and torch.equal(its_lse, lse)


def test_streams_at_once_have_counters_of_their_own() -> None:
    mods = MODS["causal"]()
    calls = [drawn(2, 2000 + 100 * i, 128, seed=i) for i in range(4)]
    wanted = [attend(mods, *call) for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    found: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in calls]
    for _ in range(50):
        for stream, call, results in zip(streams, calls, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(attend(mods, *call))
    torch.cuda.synchronize()
    for (out, lse), results in zip(wanted, found, strict=True):
        assert all(torch.equal(o, out) and torch.equal(its, lse) for o, its in results)


@pytest.mark.parametrize("warm", [True, False])
def test_graphs_that_are_replayed_beside_each_other_and_beside_calls(warm: bool) -> None:
    """Two graphs of several calls each, recorded on one stream and replayed on two."""
    mods = MODS["causal"]()
    calls = [drawn(2, 1500 + 100 * i, 128, seed=i) for i in range(4)]
    wanted = [attend(mods, *call) for call in calls]
    torch.cuda.synchronize()
    if not warm:  # as if the first call of all were recorded
        counter._slabs.clear()
    graphs, outs = [], []
    for pair in (calls[:2], calls[2:]):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs += [attend(mods, *call) for call in pair]
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(50):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = attend(mods, *calls[0])
    torch.cuda.synchronize()
    for (out, lse), (found, its_lse) in zip([*wanted, wanted[0]], [*outs, eager], strict=True):
        assert torch.equal(out, found) and torch.equal(lse, its_lse)


def test_these_calls_are_drawn() -> None:
    if gpu_backend() != "hopper":
        pytest.skip("blocks of other architectures' forwards take tiles in other ways")
    for mods in MODS.values():
        for length in LENGTHS[2:]:
            plan = plan_forward(Problem.of(*drawn(3, length, 128)), ca.Attention(**mods()).program, HOPPER)
            assert plan.tiling.scheduler.draws
