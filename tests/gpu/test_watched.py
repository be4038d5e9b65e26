"""On a GPU, ranges and kernels of a profile tell direction, mask, score mod and backend."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler import emit_nvtx
from torch.profiler import ProfilerActivity

import composattn as ca
from composattn.mods import causal, sliding_window, softcap
from tests.support import gpu_backend, has_backward

MASK, SCORE = causal() & sliding_window(100), softcap(30.0)


def run() -> list[torch.Tensor]:
    """out, and the gradients where there is a backward, of the same numbers each time."""
    torch.manual_seed(0)
    has = has_backward(gpu_backend())
    inputs = [torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.bfloat16).requires_grad_(has) for _ in range(3)]
    out: Any = ca.attention(*inputs, mask_mod=MASK, score_mod=SCORE, backend=gpu_backend())
    return [out, *(torch.autograd.grad(out.float().square().sum(), inputs) if has else ())]


def test_ranges_and_kernels_of_a_profile_say_what_runs() -> None:
    run()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = profile.events()
    of_host = {e.name for e in events if e.name.startswith("composattn ") and e.device_type == DeviceType.CPU}
    kernels = {e.name for e in events if e.name.startswith("composattn_") and e.device_type == DeviceType.CUDA}
    for direction in ("forward", "backward") if has_backward(gpu_backend()) else ("forward",):
        assert f"composattn {direction}: causal & sliding_window(100), softcap(30.0), {gpu_backend()}" in of_host
        assert any(name.startswith(f"composattn_{direction}_bf16_d64_dense_masked_scored") for name in kernels)


def test_a_call_inside_of_emit_nvtx_gives_the_same_numbers() -> None:
    without = run()
    with emit_nvtx():
        inside = run()
    torch.testing.assert_close(inside, without, rtol=1e-2, atol=1e-2)  # sums of dQ come in any order
