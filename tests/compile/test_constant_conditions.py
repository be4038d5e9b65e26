"""Conditions that are the same at all pairs, which only the emitter sees through, in the emulator against fp64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.testing import Case, check
from tests.support import qkv

pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

WEIGHTS = torch.tensor([0.5, 2.0])
SCORES: dict[str, Callable[..., Any]] = {
    "not of a next one": lambda s, b, h, q, kv: torch.where(~(kv + 1 <= kv), s, WEIGHTS[kv % 2]),
    "of a sum": lambda s, b, h, q, kv: s + torch.where(q + 2 > q + 1, torch.maximum(q + 1 - q, kv % 3), 0),
}


@pytest.mark.parametrize("backend", ["hopper-emulated", "blackwell-emulated"])
def test_a_derivative_by_blocks_that_reads_the_score_is_another_one_at_each_pair(
    backend: str, generator: torch.Generator
) -> None:
    """Its condition is the same in a block of pairs, the score that it chooses is not."""

    def score(s: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        return torch.where(q // 64 >= kv // 64, s, s * torch.sigmoid(s) - 0.5)

    q, k, v = qkv(generator=generator, batch=1, heads=1, q_len=130, dim=64, dtype=torch.float16)
    dout = torch.randn(q.shape, generator=generator).to(q.dtype)
    check(functools.partial(ca.attention, backend=backend), Case(q, k, v, score_mod=score, dout=dout))


OF_HEADS, OF_SEQUENCES = torch.tensor([-0.4, 0.9, 0.3]), torch.tensor([0.6, -0.7])
BESIDE_BLOCKS: dict[str, Callable[..., Any]] = {
    "the larger of a score and one of two by blocks": lambda s, b, h, q, kv: torch.maximum(
        s + kv * 0.05, torch.where(q // 128 != kv // 128, OF_HEADS[h % 3], OF_SEQUENCES[b])
    ),
    "the smaller of a score and a line by blocks": lambda s, b, h, q, kv: torch.minimum(
        s, torch.where(q // 64 < kv // 64, OF_HEADS[h + 0], q * -0.19)
    ),
}


@pytest.mark.parametrize("name", BESIDE_BLOCKS)
def test_a_score_beside_a_number_by_blocks_is_another_one_at_each_pair(name: str, generator: torch.Generator) -> None:
    q, k, v = qkv(generator=generator, batch=2, heads=2, q_len=130, dim=64, dtype=torch.float16)
    dout = torch.randn(q.shape, generator=generator).to(q.dtype)
    case = Case(q, k, v, score_mod=BESIDE_BLOCKS[name], dout=dout)
    check(functools.partial(ca.attention, backend="hopper-emulated"), case)


@pytest.mark.parametrize("name", SCORES)
def test_emulated_conditions_that_are_the_same_everywhere(name: str, generator: torch.Generator) -> None:
    q, k, v = qkv(generator=generator, batch=1, heads=1, q_len=70, dim=64, dtype=torch.float16)
    mods = {"score_mod": SCORES[name], "mask_mod": lambda b, h, q, kv: (q + 3 > q) & (q - kv < 40)}
    out = ca.attention(q, k, v, **mods, backend="hopper-emulated")
    wanted = ca.attention(q.double(), k.double(), v.double(), **mods, backend="reference")
    assert float((out.double() - wanted).norm()) <= 2 * torch.finfo(torch.float16).eps * float(wanted.norm())
