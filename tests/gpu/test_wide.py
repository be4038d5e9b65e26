"""Head dimensions above 256 on a GPU: every layout and way to divide the work, held to fp64 by the tolerance rule."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.call.schedule import Schedule
from composattn.mods import alibi, causal, neighborhood, relative_bias, sliding_window, softcap
from composattn.testing import Case, check, make_case, make_paged_case, make_varlen_case
from tests.support import gpu_backend

pytestmark = pytest.mark.gpu

HEADS: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dtype": torch.bfloat16, "device": "cuda", "dim": 512}


def dense(**options: Any) -> Case:
    return make_case(5, **{**HEADS, **options})


def packed(**options: Any) -> Case:
    return make_varlen_case(6, (900, 0, 33), (900, 7, 200), used_q=(800, 0, 33), **HEADS, **options)


def slopes() -> torch.Tensor:
    return 2.0 ** -torch.arange(1.0, 5.0, device="cuda")


MLA: dict[str, Any] = {"dim": 576, "v_dim": 512, "heads": 128, "kv_heads": 1}
CASES: dict[str, Any] = {
    "full": lambda: (dense(q_len=700, kv_len=900), {}),
    "causal": lambda: (dense(q_len=1000, mask_mod=causal()), {}),
    "causal-fp16": lambda: (dense(q_len=500, mask_mod=causal(), dtype=torch.float16), {}),
    "window-softcap": lambda: (
        dense(q_len=777, mask_mod=causal() & sliding_window(200), score_mod=softcap(20.0)),
        {},
    ),
    "alibi": lambda: (dense(q_len=400, kv_len=600, mask_mod=causal(), score_mod=alibi(slopes())), {}),
    "bias": lambda: (dense(q_len=300, score_mod=_bias(torch.randn(4, 300, 300, device="cuda"))), {}),
    "lists": lambda: (dense(q_len=1024, mask_mod=neighborhood((32, 32), (7, 5))), {}),
    "persistent": lambda: (dense(q_len=3000, mask_mod=causal()), {"schedule": Schedule(persistent=True)}),
    "in-order": lambda: (dense(q_len=500, mask_mod=causal()), {"schedule": Schedule(batch_invariant=True)}),
    "d264-dv8": lambda: (dense(q_len=300, dim=264, v_dim=8), {}),
    "d328-dv72": lambda: (dense(q_len=333, dim=328, v_dim=72, mask_mod=causal()), {}),
    "d40-dv320": lambda: (dense(q_len=333, dim=40, v_dim=320, mask_mod=causal()), {}),
    "mla-decode": lambda: (dense(q_len=1, kv_len=3000, **MLA), {}),
    "mla-two-tokens": lambda: (dense(q_len=2, kv_len=700, mask_mod=causal("bottom_right"), **MLA), {}),
    "mla-prefill": lambda: (dense(q_len=200, kv_len=300, batch=1, mask_mod=causal("bottom_right"), **MLA), {}),
    "values-in-keys": lambda: (_latent(dense(q_len=2, kv_len=3000, **MLA)), {}),
    "parts-of-kv": lambda: (dense(q_len=1, kv_len=5000), {"schedule": Schedule(split_kv=7)}),
    "packed": lambda: (packed(mask_mod=causal()), {}),
    "packed-heads": lambda: (packed(), {"schedule": Schedule(pack_gqa=True)}),
    "sinks": lambda: (dataclasses.replace(dense(q_len=300, mask_mod=causal()), sinks=slopes()), {}),
    "dropout": lambda: (dataclasses.replace(dense(q_len=300, mask_mod=causal()), dropout=(0.4, 77 << 40 | 5)), {}),
    "paged": lambda: (make_paged_case(7, [3000, 17, 0], page_size=64, **HEADS), {}),
    "mla-paged": lambda: (
        make_paged_case(8, [1000, 77], page_size=16, v_dim=512, **{**HEADS, "heads": 128, "kv_heads": 1, "dim": 576}),
        {},
    ),
}


def _latent(case: Case) -> Case:
    return dataclasses.replace(case, v=case.k[..., :512])


def _bias(values: torch.Tensor) -> Any:
    return lambda score, b, h, q, kv: score + values[h, q, kv]


@pytest.mark.parametrize("name", CASES)
def test_forward_is_as_close_as_plain_pytorch(name: str) -> None:
    case, options = CASES[name]()
    check(functools.partial(ca.attention, backend=gpu_backend(), **options), case.without_gradients())


LEARNED: dict[str, Any] = {
    "learned-slopes": lambda: dense(q_len=400, score_mod=alibi(slopes().requires_grad_())),
    "learned-bias": lambda: dense(q_len=300, score_mod=_bias(torch.randn(4, 300, 300, device="cuda").requires_grad_())),
    "learned-distances": lambda: dense(
        q_len=500,
        mask_mod=causal(),
        score_mod=relative_bias(torch.randn(4, 2 * 128 + 1, device="cuda").requires_grad_()),
    ),
    "few-keys": lambda: dense(q_len=3000, kv_len=70, batch=1, heads=8, kv_heads=1),
}
DIFFERENTIABLE = [
    "full", "causal", "causal-fp16", "window-softcap", "alibi", "bias", "lists", "d264-dv8", "d328-dv72", "d40-dv320",
    "packed", "sinks", "dropout",
]  # fmt: skip


@pytest.mark.parametrize("name", [*DIFFERENTIABLE, *LEARNED])
def test_gradients_are_as_close_as_plain_pytorch(name: str) -> None:
    case = LEARNED[name]() if name in LEARNED else CASES[name]()[0]
    check(functools.partial(ca.attention, backend=gpu_backend()), case)


@pytest.mark.parametrize("name", ["causal", "packed", "lists"])
def test_gradients_in_a_fixed_order_are_right_and_the_same_each_time(name: str) -> None:
    case = CASES[name]()[0]
    check(functools.partial(ca.attention, backend=gpu_backend(), deterministic=True), case)
    leaves = [t.detach().requires_grad_() for t in (case.q, case.k, case.v)]
    out = ca.attention(*leaves, backend=gpu_backend(), mask_mod=case.mask_mod, varlen=case.varlen, deterministic=True)
    runs = [torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True) for _ in range(10)]
    for run in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("name", ["causal", "mla-decode", "packed", "paged"])
def test_it_gives_the_same_bits_each_time(name: str) -> None:
    case, options = CASES[name]()
    given = {"varlen": case.varlen, "paged": case.paged, "mask_mod": case.mask_mod, "return_lse": True, **options}
    runs = [ca.attention(case.q, case.k, case.v, backend=gpu_backend(), **given) for _ in range(20)]
    for out, lse in runs[1:]:
        assert torch.equal(out, runs[0][0]) and torch.equal(lse, runs[0][1])
