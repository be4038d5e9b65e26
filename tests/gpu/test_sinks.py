"""Sinks in the kernels on a GPU: forward and gradients held to fp64, in every layout."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.call.schedule import Schedule
from composattn.mods import alibi, causal, sliding_window, softcap
from composattn.testing import Case, check, make_case, make_paged_case, make_varlen_case
from tests.support import gpu_backend

SIZES: dict[str, Any] = {"heads": 8, "kv_heads": 2, "dtype": torch.bfloat16, "device": "cuda"}


def dense(q_len: int, kv_len: int, dim: int, **mods: Any) -> Case:
    return make_case(5, batch=2, q_len=q_len, kv_len=kv_len, dim=dim, **mods, **SIZES)


def hidden_rows(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q % 7 != 3)


# a call, and how its work is divided
CASES: dict[str, Any] = {
    "window-d64": lambda: (dense(1000, 1000, 64, mask_mod=causal() & sliding_window(128)), {}),
    "rows-of-nothing-d128": lambda: (dense(1000, 1000, 128, mask_mod=hidden_rows), {}),
    "alibi-d64": lambda: (dense(700, 900, 64, mask_mod=causal(), score_mod=alibi(8)), {}),
    "softcap-d256": lambda: (dense(300, 300, 256, score_mod=softcap(20.0)), {}),
    "parts-of-kv": lambda: (dense(1, 5000, 128).without_gradients(), {"schedule": Schedule(split_kv=7)}),
    "packed": lambda: (make_varlen_case(6, (900, 0, 33), used_q=(800, 0, 33), dim=128, mask_mod=causal(), **SIZES), {}),
    "paged": lambda: (make_paged_case(7, [3000, 17, 0], page_size=64, dim=128, **SIZES), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_as_close_as_plain_pytorch(name: str) -> None:
    case, options = CASES[name]()
    sinks = torch.linspace(-2.0, 4.0, 8, device="cuda").requires_grad_(case.dout is not None)
    check(functools.partial(ca.attention, backend=gpu_backend(), **options), dataclasses.replace(case, sinks=sinks))


@pytest.mark.parametrize("name", ["window-d64", "packed"])
def test_two_runs_have_the_same_bits(name: str) -> None:
    case, _ = CASES[name]()
    sinks = torch.linspace(-2.0, 4.0, 8, device="cuda").requires_grad_()
    attend = ca.Attention(mask_mod=case.mask_mod, sinks=sinks, backend=gpu_backend(), deterministic=True)
    found = []
    for _ in range(2):
        x = [t.detach().nan_to_num().requires_grad_() for t in (case.q, case.k, case.v)]
        out = attend(*x, varlen=case.varlen)
        found.append((out, *torch.autograd.grad(out, (*x, sinks), case.dout.nan_to_num())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
