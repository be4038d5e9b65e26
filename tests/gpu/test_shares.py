"""The last rounds of long full calls, shared alike by all blocks: right, the same bits each time, in graphs too."""

from __future__ import annotations

import pytest
import torch

import composattn as ca
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.tiles.scheduler import Scheduler
from composattn.backends.fused.tiles.target import Target
from composattn.call.problem import Problem
from tests.support import gpu_backend, poison_cuda_memory


def assert_scheduled(scheduler: Scheduler, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """That blocks take tiles so, where they are Hopper's; of other architectures the results are checked alone."""
    if gpu_backend() == "hopper":
        plan = plan_forward(Problem.of(q, k, v), ca.Attention().program, Target.of(q.device))
        assert plan.tiling.scheduler is scheduler


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, calls: int) -> None:
    """Right, and of the same bits in so many calls, every other one a graph's replay."""

    def attend() -> tuple[torch.Tensor, torch.Tensor]:
        return ca.attention(q, k, v, return_lse=True, backend=gpu_backend())

    poison_cuda_memory()
    out, lse = attend()
    wanted, wanted_lse = ca.attention(*(x.double() for x in (q, k, v)), return_lse=True, backend="reference")
    torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), wanted_lse.double(), atol=1e-3, rtol=1e-5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = attend()
    for i in range(calls):
        if i % 2 == 0:
            for t in recorded:
                t.fill_(torch.nan)
            graph.replay()
        found = attend() if i % 2 else recorded
        assert torch.equal(found[0], out) and torch.equal(found[1], lse)


def numbers(shape: tuple[int, ...], make: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=make, device="cuda").to(torch.bfloat16)


@pytest.mark.parametrize(("d", "length", "batch"), [(128, 2500, 2), (128, 8500, 1), (192, 2500, 2), (256, 2301, 2)])
def test_shares_are_right_and_the_same_each_time(d: int, length: int, batch: int) -> None:
    """More than two rounds of tiles; with 8,500 keys rows use a speculative maximum."""
    make = torch.Generator("cuda").manual_seed(d + length)
    q, k, v = (numbers((batch, heads, length, d), make) for heads in (8, 4, 4))
    assert_scheduled(Scheduler.LATE_STREAM_K, q, k, v)
    check(q, k, v, calls=50)
