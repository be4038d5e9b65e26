"""Block-sparse masks and lists of tiles on a GPU: right, as on a CPU, and made without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import composattn as ca
from composattn.analysis.tile_lists import Extent, KeyLists, QueryLists
from composattn.mods import causal, masks
from composattn.mods.mask import Mask
from tests.support import gpu_backend, has_backward

pytestmark = pytest.mark.gpu

S = 2048


@contextmanager
def never_waiting() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def drawn(device: str) -> dict[str, Mask]:
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(-1, 32, (2, 4, 32, 6), generator=generator).to(device)
    kinds = torch.randint(0, 3, (1, 4, 43, 64), generator=generator, dtype=torch.int8).to(device)
    ids = torch.randint(0, 9, (S,), generator=generator).to(device)
    heights = torch.rand(4, S, generator=generator).sort().values.to(device)
    return {
        "topk": ca.BlockSparse.topk(picked, 64, S, S),
        "topk_causal": ca.BlockSparse.topk(picked, 64, S, S) & causal(),
        "kinds": ca.BlockSparse(kinds, (48, 32), partial=causal()),
        "grid": masks.neighborhood((32, 64), (5, 7)),
        "grid_cut": masks.neighborhood((16, 80), (5, 9)) & (lambda b, h, q, kv: q + kv > 5),
        "documents_apart": masks.document(ids),
        "floats": ca.mask(lambda b, h, q, kv: heights[h, q] - heights[h, kv] < 0.05),
    }


@pytest.mark.parametrize("name", drawn("cpu"))
@pytest.mark.parametrize("kind", [KeyLists, QueryLists])
def test_lists_are_made_without_waiting_and_as_on_a_cpu(name: str, kind: type[KeyLists | QueryLists]) -> None:
    mask = drawn("cuda")[name]
    with never_waiting():
        lists = kind(mask.expr, Extent(S, S, 2, 4, torch.device("cuda")), (128, 112))
        found = lists.of_call()
    expected = kind(drawn("cpu")[name].expr, Extent(S, S, 2, 4, torch.device("cpu")), (128, 112)).of_call()
    counts = expected[0] if kind is QueryLists else expected[0].sum(0)
    used = torch.arange(expected[1].shape[-1]) < counts[..., None]
    assert torch.equal(found[0].cpu(), expected[0])
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(ours.cpu()[used], theirs[used])


@pytest.mark.parametrize("name", ["topk", "topk_causal", "kinds", "grid", "documents_apart"])
@pytest.mark.parametrize("in_order", [False, True], ids=["any-order", "deterministic"])
def test_kernels_with_lists_agree_with_streaming(name: str, in_order: bool) -> None:
    mask = drawn("cuda")[name]
    q, k, v = (torch.randn(2, h, S, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
    weight = torch.randn_like(q)
    outs, grads, learns = [], [], has_backward(gpu_backend())
    for backend in (gpu_backend(), "streaming"):
        inputs = [t if backend != "streaming" else t.detach().float().requires_grad_() for t in (q, k, v)]
        with torch.set_grad_enabled(learns):
            out = ca.attention(*inputs, mask_mod=mask, backend=backend, deterministic=in_order)
        outs.append(out.float())
        found = torch.autograd.grad(out, inputs, weight.to(out.dtype)) if learns else ()
        grads.append([g.float() for g in found])
    torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-2)
    for ours, exact in zip(*grads, strict=True):
        assert (ours - exact).norm() < 1e-2 * exact.norm()


def test_new_indices_are_seen_with_nothing_planned_again() -> None:
    indices = torch.zeros(1, 1, 32, 1, device="cuda", dtype=torch.int32)
    attend = ca.Attention(mask_mod=ca.BlockSparse.topk(indices, 64, S, S))
    q, k, v = (torch.randn(1, 2, S, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    attend(q, k, v)
    indices.copy_(torch.arange(32, device="cuda").view(32, 1))
    with never_waiting():
        out = attend(q, k, v)
    exact = ca.attention(q.float(), k.float(), v.float(), mask_mod=masks.block_diagonal(64), backend="streaming")
    torch.testing.assert_close(out.float(), exact, rtol=2e-2, atol=2e-2)
