"""Dropout in the generated kernels, emulated with no GPU: the bits of the reference, in every fragment and layout."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.backends.fused.running.emulated import emulating
from composattn.call.schedule import Schedule
from composattn.emulator.mode import LATE, random_mode
from composattn.mods import causal, softcap
from composattn.testing import Case, check, make_case, make_paged_case, make_varlen_case

BACKENDS = ["hopper-emulated", "blackwell-emulated"]
DROPOUT = (0.4, 77 << 40 | 5)
HEADS: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dtype": torch.bfloat16}


def seen(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q != 5)


def dense(**options: Any) -> Case:
    return make_case(3, batch=1, **{**HEADS, "dim": 64, **options})


FORWARD: dict[str, tuple[Case, dict[str, Any]]] = {
    "dense": (dense(q_len=70, kv_len=150, mask_mod=seen), {}),
    "kv in parts": (dense(q_len=3, kv_len=600), {"schedule": Schedule(split_kv=3)}),
    "heads that share a tile": (dense(q_len=9, kv_len=200, heads=8, mask_mod=causal("bottom_right")), {}),
    "queries of one head in a thread": (dense(q_len=5, kv_len=90, heads=32), {}),
    "packed": (make_varlen_case(1, (90, 0, 33), (80, 9, 33), mask_mod=causal(), dim=64, **HEADS), {}),
    "paged": (make_paged_case(2, [300, 17, 0], page_size=16, dim=64, **HEADS), {}),
}


QUICK = {*((name, "hopper-emulated") for name in FORWARD), ("packed", "blackwell-emulated")}
CALLS = [(name, backend) for name in FORWARD for backend in BACKENDS]


@pytest.mark.parametrize(
    "name, backend", [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.slow) for c in CALLS]
)
def test_forward_is_as_close_as_plain_pytorch(name: str, backend: str) -> None:
    case, options = FORWARD[name]
    attend = functools.partial(ca.attention, backend=backend, **options)
    for mode in (LATE, random_mode(7)):
        with emulating(mode):
            check(attend, dataclasses.replace(case.without_gradients(), dropout=DROPOUT))


BACKWARD: dict[str, Case] = {
    "keys as rows": dense(q_len=70, kv_len=150, mask_mod=seen),
    "D 128": dense(q_len=70, kv_len=90, dim=128, mask_mod=causal()),
    "queries as rows": dense(q_len=70, kv_len=90, dim=192, mask_mod=causal()),
    "P and dP apart": dense(q_len=70, kv_len=90, heads=2, dim=256, mask_mod=causal()),
    "P and dP apart, a derivative": dense(
        q_len=70, kv_len=90, heads=2, dim=256, mask_mod=causal(), score_mod=softcap(5.0)
    ),
    "a derivative that sees the score": dense(q_len=70, kv_len=90, mask_mod=causal(), score_mod=softcap(5.0)),
    "packed": make_varlen_case(1, (90, 0, 33), (80, 9, 33), used_q=(80, 0, 33), mask_mod=causal(), dim=64, **HEADS),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_as_close_as_plain_pytorchs(name: str, backend: str) -> None:
    case = dataclasses.replace(BACKWARD[name], dropout=DROPOUT)
    check(functools.partial(ca.attention, backend=backend), case)


def test_sums_of_captured_gradients_have_room_for_what_is_kept() -> None:
    table = torch.randn(4, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def slope(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + table[h] * (q - kv)

    case = dataclasses.replace(dense(q_len=70, mask_mod=causal(), score_mod=slope), dropout=(0.95, 3))
    check(functools.partial(ca.attention, backend="hopper-emulated"), case)
