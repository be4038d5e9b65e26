"""`Schedule(batch_invariant=True)` on a GPU: the bits of a row in calls of other sequences, queries and layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import composattn as ca
from composattn.call.schedule import Schedule
from composattn.mods import alibi, causal, sliding_window, softcap
from tests.support import gpu_backend

INVARIANT = Schedule(batch_invariant=True)
HEADS, KV_HEADS, LENGTH, PAGE = 8, 2, 2000, 64
MODS: dict[str, Any] = {
    "plain": lambda: {"mask_mod": causal("bottom_right")},
    "alibi and a window": lambda: {
        "mask_mod": causal("bottom_right") & sliding_window(700, align="bottom_right"),
        "score_mod": alibi(HEADS, align="bottom_right"),
    },
    "softcap and sinks": lambda: {
        "mask_mod": causal("bottom_right"),
        "score_mod": softcap(5.0),
        "sinks": torch.linspace(-1.0, 2.0, HEADS, device="cuda"),
    },
}


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", MODS)
def test_a_row_has_the_same_bits_in_every_call(name: str, dim: int) -> None:
    options = MODS[name]()
    q, k, v = (torch.randn(LENGTH, n, dim, device="cuda").bfloat16() for n in (HEADS, KV_HEADS, KV_HEADS))
    others = [torch.randn(777, n, dim, device="cuda").bfloat16() for n in (HEADS, KV_HEADS, KV_HEADS)]

    def call(*x: torch.Tensor, **more: Any) -> Any:
        given = {**options, **more, "backend": gpu_backend(), "schedule": INVARIANT, "return_lse": True}
        return ca.attention(*x, **given)

    def dense(*x: torch.Tensor) -> Any:
        out, lse = call(*(t.transpose(0, 1)[None] for t in x))
        return out[0].transpose(0, 1), lse[0].T

    out, lse = dense(q, k, v)
    found = {n: dense(q[-n:], k, v) for n in (1, 3, 17, 64, 500, 1999)}
    begins = torch.tensor([0, 777, 777 + LENGTH], dtype=torch.int32, device="cuda")
    packed = [torch.cat(pair) for pair in zip(others, (q, k, v), strict=True)]
    of_packed = call(*packed, varlen=ca.Varlen(begins))
    found[LENGTH] = of_packed[0][777:], of_packed[1][:, 777:].T
    pages = -(-LENGTH // PAGE)
    cache = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, pages * PAGE - LENGTH)) for t in (k, v)]
    cache = [t.unflatten(0, (pages, PAGE)).transpose(1, 2) for t in cache]
    table = torch.arange(pages, dtype=torch.int32, device="cuda")[None]
    paged = ca.Paged(table, PAGE, torch.tensor([LENGTH], dtype=torch.int32, device="cuda"))
    of_pages = call(q[-2:].transpose(0, 1)[None], *cache, paged=paged)
    found[2] = of_pages[0][0].transpose(0, 1), of_pages[1][0].T
    first = dense(q[:1000], k[:1000], v[:1000])
    assert torch.equal(first[0], out[:1000]) and torch.equal(first[1], lse[:1000]), "without later queries and keys"
    for n, (other, other_lse) in found.items():
        assert torch.equal(other, out[-n:]) and torch.equal(other_lse, lse[-n:]), n
