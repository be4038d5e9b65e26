"""Dropout in the kernels on a GPU: the bits of the reference, forward and gradients held to fp64, in every layout."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.call.schedule import Schedule
from composattn.mods import causal, sliding_window, softcap
from composattn.testing import Case, check, make_case, make_paged_case, make_varlen_case
from tests.support import gpu_backend

SIZES: dict[str, Any] = {"heads": 8, "kv_heads": 2, "dtype": torch.bfloat16, "device": "cuda"}


def dense(q_len: int, kv_len: int, dim: int, **mods: Any) -> Case:
    return make_case(5, batch=2, q_len=q_len, kv_len=kv_len, dim=dim, **mods, **SIZES)


# a call, and how its work is divided
CASES: dict[str, Any] = {
    "window-d64": lambda: (dense(1000, 1000, 64, mask_mod=causal() & sliding_window(128)), {}),
    "causal-d128": lambda: (dense(1000, 1000, 128, mask_mod=causal()), {}),
    "causal-d192": lambda: (dense(500, 500, 192, mask_mod=causal()), {}),
    "softcap-d256": lambda: (dense(300, 300, 256, score_mod=softcap(20.0)), {}),
    "parts-of-kv": lambda: (dense(1, 5000, 128).without_gradients(), {"schedule": Schedule(split_kv=7)}),
    "packed": lambda: (make_varlen_case(6, (900, 0, 33), used_q=(800, 0, 33), dim=128, mask_mod=causal(), **SIZES), {}),
    "paged": lambda: (make_paged_case(7, [3000, 17, 0], page_size=64, dim=128, **SIZES), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_as_close_as_plain_pytorch(name: str) -> None:
    case, options = CASES[name]()
    case = dataclasses.replace(case, dropout=(0.2, 77 << 40 | 5))
    check(functools.partial(ca.attention, backend=gpu_backend(), **options), case)


def test_a_cuda_graph_reads_its_seed_from_a_tensor() -> None:
    case = dense(300, 300, 64).without_gradients()
    seed = torch.zeros((), dtype=torch.int64, device="cuda")
    attend = ca.Attention(dropout_p=0.5, dropout_seed=seed, backend=gpu_backend())
    attend(case.q, case.k, case.v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(case.q, case.k, case.v)
    for number in (3, 4):
        seed.fill_(number)
        graph.replay()
        wanted = ca.attention(case.q, case.k, case.v, dropout_p=0.5, dropout_seed=number, backend=gpu_backend())
        assert torch.equal(out, wanted)
