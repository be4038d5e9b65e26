"""dQ that warps round while others compute, of calls with many more tiles than multiprocessors, again and again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.backends.fused.architecture import planned_for
from composattn.backends.fused.plan_backward import plan_backward
from composattn.backends.hopper import backward_keys_apart
from composattn.call.problem import Problem
from composattn.mods import alibi, causal, document, sliding_window
from tests.support import gpu_backend, needs_backward, outlier_normal, poison_cuda_memory

IDS = torch.repeat_interleave(torch.arange(5), torch.tensor([1600, 40, 1500, 1100, 808]))
MODS: dict[str, Callable[[int], dict[str, Any]]] = {
    "full": lambda length: {},
    "causal": lambda length: {"mask_mod": causal()},
    "window": lambda length: {"mask_mod": sliding_window(500)},
    "alibi": lambda length: {"mask_mod": causal(), "score_mod": alibi(16)},
    "documents": lambda length: {"mask_mod": document(IDS[:length].cuda())},
}
TIMES = 8


CASES = [
    *[
        (mods, d, length)
        for mods in ("full", "causal", "window")
        for d, length in ((64, 2048), (96, 2048), (128, 2011))
    ],
    ("causal", 72, 2000),  # padded columns
    ("alibi", 128, 2048),
    *[("documents", d, 5040) for d in (64, 96, 128)],
]


@pytest.mark.parametrize(("mods", "d", "length"), CASES)
def test_dq_is_that_of_a_fixed_order(
    mods: str, d: int, length: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward_keys_apart, "SLOW_MEMORY", 1 << 20)  # as beside the slowest
    backend = gpu_backend()
    needs_backward(backend)
    draw = partial(outlier_normal, generator=generator, dtype=torch.bfloat16, device="cuda")
    q, dout = draw(2, 16, length, d).requires_grad_(), draw(2, 16, length, d)
    k, v = (draw(2, 16, length, d).requires_grad_() for _ in range(2))
    options = MODS[mods](length)
    attention = ca.Attention(**options, backend=backend)
    plan = plan_backward(Problem.of(q, k, v), attention.program, planned_for(backend)).main
    assert plan.tiling.rounds

    def gradients(deterministic: bool) -> tuple[torch.Tensor, ...]:
        poison_cuda_memory()
        out = ca.attention(q, k, v, **options, backend=backend, deterministic=deterministic)
        return torch.autograd.grad(out, (q, k, v), dout)  # type: ignore[arg-type]

    wanted = gradients(True)
    largest = wanted[0].float().abs().amax(-1, keepdim=True)
    for _ in range(TIMES):
        found = gradients(False)
        # sums in another order, each rounded once
        apart = (found[0].float() - wanted[0].float()).abs()
        assert bool((apart <= 2 * torch.finfo(torch.bfloat16).eps * largest).all())
        for got, want in zip(found[1:], wanted[1:], strict=True):
            assert float((got.float() - want.float()).norm()) <= 1e-2 * float(want.float().norm())
