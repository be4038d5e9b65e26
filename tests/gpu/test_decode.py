"""Few queries over long keys on a GPU: heads packed into rows, kv split into parts, keys in pages.

COMPOSATTN_FUZZ=300 draws that many random calls instead of a few.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.mods import alibi, causal, sliding_window, softcap
from composattn.testing import FUSED, check, make_case, make_paged_case, random_case
from tests.support import gpu_backend

pytestmark = pytest.mark.gpu

FUZZED = int(os.environ.get("COMPOSATTN_FUZZ", "8"))
SPACE = dataclasses.replace(FUSED, layouts=("dense", "varlen", "paged", "paged"), gradients=False, learned=False)
attend = functools.partial(ca.attention, backend=gpu_backend())


def slopes(heads: int) -> torch.Tensor:
    return torch.exp2(-8.0 * torch.arange(1, heads + 1, device="cuda") / heads)


# query heads, key heads, queries, keys, D, Dv, score mod, mask
LONG: dict[str, tuple[Any, ...]] = {
    "mha": (8, 8, 1, 9000, 128, 128, None, None),
    "gqa4": (32, 8, 1, 20000, 128, 128, None, None),
    "gqa4-alibi-chunk": (16, 4, 37, 5000, 128, 128, lambda: alibi(slopes(16)), lambda: causal("bottom_right")),
    "gqa6-window": (12, 2, 5, 8000, 64, 64, None, lambda: sliding_window(1500, "bottom_right")),
    "mqa64-softcap": (64, 1, 2, 6000, 192, 128, lambda: softcap(20.0), None),
    "gqa8-d256": (16, 2, 3, 4000, 256, 256, lambda: alibi(slopes(16)), lambda: causal("bottom_right")),
}


@pytest.mark.parametrize("split", ["auto", 1, 7], ids=str)
@pytest.mark.parametrize("name", LONG)
def test_decode(name: str, split: Any) -> None:
    heads, kv_heads, q_len, kv_len, dim, v_dim, score, mask = LONG[name]
    case = make_case(
        11, batch=2, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, dim=dim, v_dim=v_dim,
        score_mod=score and score(), mask_mod=mask and mask(), dtype=torch.bfloat16, device="cuda", gradients=False,
    )  # fmt: skip
    check(functools.partial(attend, schedule=ca.Schedule(split_kv=split)), case)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("q_len", [1, 5, 150])
def test_decode_from_pages(page_size: int, q_len: int) -> None:
    case = make_paged_case(
        12, [5000, 1, 0, 777, 2048], page_size=page_size, q_len=q_len, heads=16, kv_heads=4, dim=128,
        score_mod=alibi(slopes(16)), mask_mod=causal("bottom_right"), dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    check(attend, case)


@pytest.mark.parametrize("number", range(FUZZED))
def test_random_calls_under_random_schedules(number: int) -> None:
    seed = random.Random(f"{os.environ.get('COMPOSATTN_TEST_SEED', '0')}:decode:{number}").randrange(2**31)
    draw = random.Random(seed)
    schedule = ca.Schedule(split_kv=draw.choice(("auto", 1, 2, 3, 8)), pack_gqa=draw.choice((None, None, False)))
    try:
        check(functools.partial(attend, schedule=schedule), random_case(seed, SPACE))
    except Exception as error:
        raise AssertionError(f"random_case({seed}, ...) under {schedule}") from error


def test_parts_give_the_same_bits_in_every_run() -> None:
    case = make_case(3, heads=32, kv_heads=8, q_len=1, kv_len=30000, dim=128, dtype=torch.bfloat16, device="cuda")
    attention = ca.Attention(backend=gpu_backend(), schedule=ca.Schedule(split_kv=9))
    first = attention(case.q.detach(), case.k.detach(), case.v.detach())
    for _ in range(20):
        assert torch.equal(attention(case.q.detach(), case.k.detach(), case.v.detach()), first)


def test_a_captured_step_follows_the_lengths() -> None:
    """A CUDA graph of a decode step sees the page table and the lengths of its replay."""
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(2, 8, 1, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(40, 2, 64, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(40, generator=generator, device="cuda").to(torch.int32).view(2, 20)
    used = torch.tensor([1000, 3], dtype=torch.int32, device="cuda")
    attention = ca.Attention(backend=gpu_backend())

    def step() -> Any:
        return attention(q, cache, cache, paged=ca.Paged(table, 64, used))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ((1000, 3), (1280, 700), (0, 1)):
        used.copy_(torch.tensor(lengths, dtype=torch.int32))
        table.copy_(table.flip(1))
        graph.replay()
        torch.testing.assert_close(out, step(), rtol=0, atol=0)
        assert bool((out[0] == 0).all()) == (lengths[0] == 0)
