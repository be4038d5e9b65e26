"""`Schedule(batch_invariant=True)`: the bits of a row in calls of other sequences, queries and layouts, emulated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn import errors
from composattn.call.schedule import Schedule
from composattn.emulator.opcodes import matrix, tensor_mma
from composattn.mods import alibi, causal, global_tokens, neighborhood, sliding_window, softcap

BACKENDS = ["hopper-emulated", "blackwell-emulated", "warp-emulated"]
INVARIANT = Schedule(batch_invariant=True)
HEADS, KV_HEADS, LENGTH, PAGE = 4, 2, 270, 32
MODS: dict[str, dict[str, Any]] = {
    "plain": {"mask_mod": causal("bottom_right")},
    "alibi and a window": {
        "mask_mod": causal("bottom_right") & sliding_window(150, align="bottom_right"),
        "score_mod": alibi(HEADS, align="bottom_right"),
    },
    "softcap and sinks": {
        "mask_mod": causal("bottom_right"),
        "score_mod": softcap(5.0),
        "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]),
    },
}


@pytest.fixture(autouse=True)
def _products_without_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """BLAS rounds a row by where it stands in a matrix, tensor cores don't: products here are rounded from fp64."""

    def product(left: Any, right: Any) -> Any:
        return (left.astype(np.float64) @ right.astype(np.float64).T).astype(np.float32)

    for module in (matrix, tensor_mma):
        monkeypatch.setattr(module, "product", product)


def rows(backend: str, dim: int, kinds: int, **options: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(out, lse) of the last three queries of one sequence, as calls of so many kinds give them: (3, H, D), (3, H)."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(LENGTH, n, dim, generator=generator).bfloat16() for n in (HEADS, KV_HEADS, KV_HEADS))
    others = [torch.randn(90, n, dim, generator=generator).bfloat16() for n in (HEADS, KV_HEADS, KV_HEADS)]

    def call(*x: torch.Tensor, **more: Any) -> Any:
        return ca.attention(*x, **options, **more, backend=backend, schedule=INVARIANT, return_lse=True)

    def dense(*x: torch.Tensor) -> Any:
        out, lse = call(*(t.transpose(0, 1)[None] for t in x))
        return out[0].transpose(0, 1)[-3:], lse[0].T[-3:]

    def packed() -> Any:
        begins = torch.tensor([0, 90, 90 + LENGTH], dtype=torch.int32)
        out, lse = call(*(torch.cat(pair) for pair in zip(others, (q, k, v), strict=True)), varlen=ca.Varlen(begins))
        return out[-3:], lse.T[-3:]

    def longer() -> Any:
        # 100 more of each: the first tile of their query tile hides all from them
        more = [torch.cat((t, torch.randn(100, *t.shape[1:], generator=generator).bfloat16())) for t in (q, k, v)]
        out, lse = call(*(t.transpose(0, 1)[None] for t in more))
        return out[0].transpose(0, 1)[-103:-100], lse[0].T[-103:-100]

    def paged() -> Any:
        pages = -(-LENGTH // PAGE)
        cache = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, pages * PAGE - LENGTH)) for t in (k, v)]
        cache = [t.unflatten(0, (pages, PAGE)).transpose(1, 2) for t in cache]
        table, used = torch.arange(pages, dtype=torch.int32)[None], torch.tensor([LENGTH], dtype=torch.int32)
        out, lse = call(q[-3:].transpose(0, 1)[None], *cache, paged=ca.Paged(table, PAGE, used))
        return out[0].transpose(0, 1), lse[0].T

    calls: dict[str, Callable[[], Any]] = {
        "prefill": lambda: dense(q, k, v),
        "decode": lambda: dense(q[-3:], k, v),
        "packed beside another": packed,
        "a chunk": lambda: dense(q[-100:], k, v),
        "paged": paged,
        "with later queries and keys": longer,
    }
    return {kind: call() for kind, call in itertools.islice(calls.items(), kinds)}


ALL = 6
# (mods, D, backend): calls of how many kinds run by default, a kernel each, of Blackwell 2.6 s
QUICK = {("plain", 64, "hopper-emulated"): 4, ("softcap and sinks", 64, "blackwell-emulated"): 2}
CALLS = [(name, dim, b) for name, dim in [*((name, 64) for name in MODS), ("plain", 128)] for b in BACKENDS]
CALLS.append(("plain", 512, "hopper-emulated"))


@pytest.mark.parametrize(
    "name, dim, backend, kinds",
    [
        *(pytest.param(*c, kinds) for c, kinds in QUICK.items()),
        *(pytest.param(*c, ALL, marks=pytest.mark.slow) for c in CALLS if QUICK.get(c) != ALL),
    ],
)
def test_a_row_has_the_same_bits_in_every_call(name: str, dim: int, backend: str, kinds: int) -> None:
    found = rows(backend, dim, kinds, **MODS[name])
    assert len(found) == kinds
    out, lse = found.pop("prefill")
    assert not bool(out.isnan().any())
    for kind, (other, other_lse) in found.items():
        assert torch.equal(other, out) and torch.equal(other_lse, lse), kind


def test_without_it_bits_differ() -> None:
    # what the test above would miss if calls were alike anyway: decoding cuts keys in parts, prefill has wider tiles
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 4, 600, 64, generator=generator).bfloat16() for _ in range(3))
    options: Any = {"mask_mod": causal("bottom_right"), "backend": "hopper-emulated", "return_lse": True}
    whole, last = ca.attention(q, k, v, **options), ca.attention(q[:, :, -16:], k, v, **options)
    assert not torch.equal(whole[1][:, :, -16:], last[1])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two runs of keys": ({"mask_mod": causal() & (sliding_window(9) | global_tokens(3, "keys"))}, "runs of keys"),
    "listed tiles": ({"mask_mod": neighborhood((10, 10), (3, 3))}, "listed"),
    "torch's products": ({"backend": "streaming"}, "torch.matmul"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_one_order_is_refused_by_name(name: str) -> None:
    options, words = REFUSED[name]
    q = torch.randn(1, 2, 100, 64).bfloat16()
    with pytest.raises(errors.InvalidSchedule, match=words):
        ca.attention(q, q, q, **{"backend": "hopper-emulated", "schedule": INVARIANT, **options})


def test_it_leaves_no_keys_in_parts() -> None:
    with pytest.raises(errors.InvalidSchedule, match="split_kv"):
        Schedule(batch_invariant=True, split_kv=4)
    with pytest.raises(errors.InvalidSchedule, match="batch_invariant"):
        Schedule(batch_invariant=1)  # type: ignore[arg-type]
