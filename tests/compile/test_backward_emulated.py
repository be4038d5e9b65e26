"""The backward kernels run by the emulator, with no GPU, against fp64: splits of dQ, mods, groups, ragged lengths."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

from composattn.backends import reference
from composattn.compile import compile_offline
from composattn.emulator.capture import Captured
from composattn.emulator.launch import Stream
from composattn.graph.mask import Mask
from composattn.graph.program import Program
from composattn.graph.score import Score
from composattn.launch_backward import BackwardLauncher
from composattn.plan_backward import BackwardPlan, plan_backward
from composattn.problem import Problem
from composattn.target import HOPPER
from tests.support import outlier_normal

SLOPES, BIAS, DOCUMENT = torch.rand(4), torch.randn(4, 600), torch.arange(300) // 70


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


MODS: dict[str, tuple[Any, Any]] = {
    "plain": (None, None),
    "causal": (None, causal),
    "hidden": (None, lambda b, h, q, kv: (q >= 20) & (kv < 30)),
    "window": (None, lambda b, h, q, kv: (q >= kv) & (q - kv < 30)),
    "document": (None, lambda b, h, q, kv: DOCUMENT[q] == DOCUMENT[kv]),
    "alibi": (lambda s, b, h, q, kv: s - SLOPES[h] * (q - kv), causal),
    "softcap": (lambda s, b, h, q, kv: 5.0 * torch.tanh(s / 5.0), causal),
    "relative": (lambda s, b, h, q, kv: s + BIAS[h, q - kv + 300], None),
    "choice": (lambda s, b, h, q, kv: s * torch.where(q > kv, 1.5, 0.5), None),
}

# mods, dtype, query heads, key heads, queries, keys, D, Dv, gradient through LSE, dQ in a fixed order
CASES = {
    "plain-d128": ("plain", torch.bfloat16, 1, 1, 128, 128, 128, 128, False, False),
    "plain-ragged": ("plain", torch.bfloat16, 1, 1, 100, 77, 128, 128, True, False),
    "plain-gqa2-d64-fp16": ("plain", torch.float16, 2, 1, 100, 177, 64, 64, True, False),
    "causal-d64": ("causal", torch.bfloat16, 1, 1, 200, 200, 64, 64, True, False),
    "hidden-rows-and-keys": ("hidden", torch.bfloat16, 1, 1, 60, 150, 128, 128, True, False),
    "window-d128": ("window", torch.bfloat16, 1, 1, 250, 250, 128, 128, False, False),
    "document-d32": ("document", torch.float16, 2, 2, 200, 200, 32, 32, False, False),
    "alibi-gqa2-d128": ("alibi", torch.bfloat16, 4, 2, 150, 150, 128, 128, True, False),
    "softcap-d128": ("softcap", torch.bfloat16, 1, 1, 150, 150, 128, 128, True, False),
    "softcap-gqa2-d64": ("softcap", torch.bfloat16, 2, 1, 150, 150, 64, 64, False, False),
    "relative-d64": ("relative", torch.bfloat16, 2, 1, 150, 150, 64, 64, True, False),
    "choice-d80-dv40": ("choice", torch.float16, 1, 1, 150, 150, 80, 40, True, False),
    "causal-gqa2-d96": ("causal", torch.bfloat16, 2, 1, 200, 150, 96, 96, True, False),
    "plain-d160-dv96": ("plain", torch.float16, 1, 1, 130, 150, 160, 96, False, False),
    "causal-d128-in-order": ("causal", torch.bfloat16, 1, 1, 300, 300, 128, 128, False, True),
    "causal-d256": ("causal", torch.bfloat16, 1, 1, 150, 150, 256, 256, True, False),
    "softcap-d192-dv128": ("softcap", torch.float16, 1, 1, 150, 150, 192, 128, True, False),
    "relative-gqa2-d64-dv256": ("relative", torch.bfloat16, 2, 1, 130, 130, 64, 256, True, False),
    "window-d256-in-order": ("window", torch.bfloat16, 1, 1, 150, 150, 256, 256, False, True),
    "document-gqa2-d64-in-order": ("document", torch.float16, 2, 1, 290, 290, 64, 64, True, True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.mark.parametrize("case", CASES)
def test_emulated_gradients_match_fp64(case: str, folder: Path, generator: torch.Generator) -> None:
    mods, dtype, heads, kv_heads, q_len, kv_len, d, dv, through_lse, in_order = CASES[case]
    score, mask = MODS[mods]
    program = Program(None if score is None else Score.of(score).expr, None if mask is None else Mask.of(mask).expr)

    def draw(*shape: int) -> torch.Tensor:
        return outlier_normal(1, *shape, generator=generator, dtype=dtype)

    q, k, v = draw(heads, q_len, d), draw(kv_heads, kv_len, d), draw(kv_heads, kv_len, dv)
    dout, dlse = draw(heads, q_len, dv), torch.randn(1, heads, q_len, generator=generator)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    scale = d**-0.5
    out, lse = reference.attention(*exact, score=program.score, mask=program.mask, scale=scale)
    loss = (out * dout.double()).sum()
    if through_lse:
        loss = loss + torch.where(lse == -math.inf, 0.0, lse * dlse.double()).sum()
    wanted = torch.autograd.grad(loss, exact)

    stream = Stream()

    def kernel_of(plan: BackwardPlan) -> Any:
        backend = importlib.import_module(f"composattn.backends.{plan.backend}.{plan.module}")
        kernel = Captured(*backend.kernel(plan), plan.target.arch, compile_offline(plan, folder).ptx_path.read_text())
        return lambda *given: stream.run(kernel.program, kernel.launch(*given, dynamic_shared=plan.shared_memory))

    plans = plan_backward(Problem.of(q, k, v), program, HOPPER, has_dlse=through_lse, deterministic=in_order)
    found = BackwardLauncher(plans, kernel_of)(
        q, k, v, out.detach().to(dtype), lse.detach().float(), dout, dlse if through_lse else None, scale,
        [c.tensor for c in plans.main.captured], [s.value for s in program.scalars],
    )  # fmt: skip
    for name, got, want in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        error = float((got.double() - want).norm() / want.norm())
        # P, dS, O and the result are rounded to the type, each by at most eps / 2 of itself
        assert error <= 2 * torch.finfo(dtype).eps, f"{name}: {error:.2e}"
