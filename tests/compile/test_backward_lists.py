"""Gradients where query tiles come from lists, emulated against fp64; by lists a fixed order too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.analysis.program import Program
from composattn.backends import reference
from composattn.backends.fused.planning.plan_backward import plan_backward
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Problem
from composattn.mods import masks
from composattn.mods.mask import Mask
from composattn.mods.score import Score
from tests.support import outlier_normal, sampled

BLOCKS = torch.tensor([[[1, 0, 1], [0, 0, 0], [0, 1, 1]], [[0, 1, 0], [1, 1, 1], [0, 0, 1]]], dtype=torch.bool)
SHIFT = torch.randn(600)

KINDS = torch.randint(0, 3, (1, 2, 7, 10), generator=torch.Generator().manual_seed(4), dtype=torch.int8)

MASKS: dict[str, Any] = {
    "kinds-of-48x32": ca.BlockSparse(KINDS, (48, 32), partial=masks.causal()),
    "grid": masks.neighborhood((15, 20), (3, 5)),
    "blocks-by-head": ca.mask(lambda b, h, q, kv: BLOCKS[h, q // 128, kv // 128]),
    "documents-apart": masks.document(torch.arange(300) // 40 % 3),
    "blocks-and-causal": ca.mask(lambda b, h, q, kv: BLOCKS[h, q // 128, kv // 128]) & masks.causal(),
}
# mask, score mod, queries, keys, key heads, D, dQ in a fixed order
CASES: dict[str, tuple[Any, ...]] = {
    "grid-d64": ("grid", None, 300, 300, 2, 64, False),
    "blocks-gqa2-d128-in-order": ("blocks-by-head", None, 300, 300, 1, 128, True),
    "documents-apart-d64-in-order": ("documents-apart", None, 300, 300, 2, 64, True),
    "blocks-ragged-relative-d64": (
        "blocks-and-causal", lambda s, b, h, q, kv: s + SHIFT[q - kv + 300], 290, 350, 2, 64, False,
    ),
    "kinds-of-48x32-gqa2-d64-in-order": ("kinds-of-48x32", None, 300, 300, 1, 64, True),
    "grid-gqa2-d192": ("grid", None, 300, 300, 1, 192, False),
    "blocks-d192-in-order": ("blocks-by-head", None, 200, 300, 2, 192, True),
    "blocks-d256-in-order": ("blocks-by-head", None, 200, 300, 2, 256, True),
}  # fmt: skip


@pytest.mark.parametrize("case", sampled(CASES))
def test_gradients_by_lists_match_fp64(case: str, generator: torch.Generator) -> None:
    name, score, q_len, kv_len, kv_heads, d, in_order = CASES[case]
    mask = MASKS[name]

    def draw(heads: int, length: int) -> torch.Tensor:
        return outlier_normal(1, heads, length, d, generator=generator, dtype=torch.bfloat16).requires_grad_()

    inputs = [draw(2, q_len), draw(kv_heads, kv_len), draw(kv_heads, kv_len)]
    dout, dlse = draw(2, q_len).detach(), torch.randn(1, 2, q_len, generator=generator)
    program = Program(None if score is None else Score.of(score).expr, Mask.of(mask).expr)
    assert plan_backward(Problem.of(*inputs), program, HOPPER).main.lists is not None
    options = {"score_mod": score, "mask_mod": mask, "deterministic": in_order, "return_lse": True}
    out = ca.attention(*inputs, backend="hopper-emulated", **options)
    seen = out[1].isfinite()
    found = torch.autograd.grad(out, inputs, [dout, torch.where(seen, dlse, 0.0)])
    exact = [t.detach().double().requires_grad_() for t in inputs]
    out = reference.attention(*exact, score=program.score, mask=program.mask, scale=d**-0.5)
    wanted = torch.autograd.grad(out, exact, [dout.double(), torch.where(seen, dlse, 0.0).double()])
    for which, got, want in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        error = float((got.double() - want).norm() / want.norm())
        assert error <= 2 * torch.finfo(torch.bfloat16).eps, f"{which}: {error:.2e}"
