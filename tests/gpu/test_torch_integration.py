"""The generated kernels inside torch's machinery: compile, CUDA graphs, streams, GPUs, checkpoints, autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import composattn as ca
from composattn.mods import causal
from tests.support import gpu_backend, has_backward, needs_backward


def draw(generator: torch.Generator, length: int = 300, device: str = "cuda") -> list[torch.Tensor]:
    return [
        torch.randn(2, 4, length, 64, generator=generator).to(device, torch.bfloat16).requires_grad_() for _ in range(3)
    ]


def biased(device: str = "cuda") -> tuple[ca.Attention, torch.Tensor]:
    table = (0.1 * torch.randn(4, 2001)).to(device).requires_grad_()
    documents = (torch.arange(1000) // 170).to(device)
    attention = ca.Attention(
        score_mod=lambda s, b, h, q, kv: s + table[h, q - kv + 1000],
        mask_mod=lambda b, h, q, kv: (q >= kv) & (documents[q] == documents[kv]),
    )
    return attention, table


def gradients(run: Any, inputs: list[torch.Tensor], *more: torch.Tensor) -> list[torch.Tensor]:
    """out and lse, and the gradients of all that is given where there is a backward."""
    if not has_backward(gpu_backend()):
        with torch.no_grad():
            return list(run(*inputs))
    out, lse = run(*inputs)
    return [out, lse, *torch.autograd.grad(out.float().sin().sum() + lse.cos().sum(), [*inputs, *more])]


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02 * float(y.detach().abs().max()))  # dQ: in any order


@pytest.fixture(autouse=True)
def forget_compiled_code() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_calls_give_the_eager_gradients(mode: str | None, generator: torch.Generator) -> None:
    attention, table = biased()

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return attention(q * 1.5, k, v, return_lse=True)

    compiled = torch.compile(forward, fullgraph=True, mode=mode)
    for length in (300, 300, 300, 417, 529):
        inputs = draw(generator, length)
        torch.compiler.cudagraph_mark_step_begin()
        found = [t.clone() for t in gradients(compiled, inputs, table)]
        assert_same(found, gradients(forward, inputs, table))


def test_cuda_graph_capture_and_replay(generator: torch.Generator) -> None:
    attention, table = biased()
    inputs, dout = draw(generator), draw(generator)[0].detach()

    def step() -> list[torch.Tensor]:
        if not has_backward(gpu_backend()):
            with torch.no_grad():
                return [attention(*inputs)]
        return list(torch.autograd.grad(attention(*inputs), [*inputs, table], dout))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(3):
        with torch.no_grad():
            for old, new in zip(inputs, draw(generator), strict=True):
                old.copy_(new)
            table.normal_(0, 0.1)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(found, step())


def test_streams_other_than_the_default(generator: torch.Generator) -> None:
    attention, table = biased()
    inputs = draw(generator)
    wanted = gradients(lambda *x: attention(*x, return_lse=True), inputs, table)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    found = []
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)  # what would read too early, reads too early now
            found.append(gradients(lambda *x: attention(*(t * 1 for t in x), return_lse=True), inputs, table))
    torch.cuda.synchronize()
    for each in found:
        assert_same(each, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_several_gpus_in_one_process(generator: torch.Generator) -> None:
    results = []
    for device in range(torch.cuda.device_count()):
        torch.manual_seed(0)
        attention, table = biased(f"cuda:{device}")
        inputs = draw(torch.Generator().manual_seed(0), device=f"cuda:{device}")
        found = gradients(lambda *x, a=attention: a(*x, return_lse=True), inputs, table)
        results.append([t.to("cuda:0") for t in found])
    for other in results[1:]:
        assert_same(other, results[0])


def test_checkpointing_and_torch_func(generator: torch.Generator) -> None:
    needs_backward(gpu_backend())
    attention, table = biased()
    inputs = draw(generator)

    def forward(*x: torch.Tensor) -> Any:
        return attention(*x, return_lse=True)

    wanted = gradients(forward, inputs, table)
    assert_same(gradients(lambda *x: checkpoint(forward, *x, use_reentrant=False), inputs, table), wanted)

    def loss(*x: torch.Tensor) -> torch.Tensor:
        out, lse = forward(*x)
        return out.float().sin().sum() + lse.cos().sum()

    found = torch.func.grad(loss, argnums=(0, 1, 2))(*(t.detach() for t in inputs))
    assert_same(list(found), wanted[2:5])


def test_autocast_takes_fp32_inputs(generator: torch.Generator) -> None:
    attention = ca.Attention(mask_mod=causal())
    inputs = [t.detach().float().requires_grad_() for t in draw(generator)]
    with torch.autocast("cuda", torch.bfloat16), torch.set_grad_enabled(has_backward(gpu_backend())):
        out = attention(*inputs)
    assert isinstance(out, torch.Tensor) and out.dtype is torch.bfloat16
    torch.testing.assert_close(out, attention(*(t.detach().bfloat16() for t in inputs)))
    if has_backward(gpu_backend()):
        assert all(g.dtype is torch.float32 for g in torch.autograd.grad(out.sum(), inputs))
