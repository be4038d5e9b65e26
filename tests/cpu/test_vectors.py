"""Short vectors in mods: rows of captured tensors, reduced, with gradients; held to plain torch over all pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from composattn import errors
from composattn.graph.vectors import LONGEST
from composattn.mods.mask import Mask
from tests.support import qkv

BATCH, HEADS, LENGTH = 2, 2, 21
Tensors = dict[str, torch.Tensor]
Mod = Callable[..., Any]


def tensors(generator: torch.Generator) -> Tensors:
    def learned(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    return {
        "means": learned(LENGTH, 3), "others": learned(LENGTH, 3), "weights": learned(HEADS, 3), "vector": learned(3),
        "alike": torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64).repeat(LENGTH, 1).requires_grad_(),
        "picked": torch.randint(0, 6, (BATCH, HEADS, 6, 2), generator=generator),
        "limits": torch.tensor([[2, 9], [5, 17]]),
    }  # fmt: skip


SCORES: dict[str, Callable[[Tensors], Mod]] = {
    "distance of rows": lambda t: lambda s, b, h, q, kv: s - (t["means"][q] - t["others"][kv]).pow(2).sum(-1).sqrt(),
    "dot by star and sum": lambda t: lambda s, b, h, q, kv: s + (t["weights"][h] * t["means"][kv]).sum(),
    "torch.dot": lambda t: lambda s, b, h, q, kv: s + torch.dot(t["means"][q], t["others"][kv]),
    "matmul": lambda t: lambda s, b, h, q, kv: s + t["means"][q] @ t["others"][kv],
    "mean of a function": lambda t: lambda s, b, h, q, kv: s * torch.tanh(t["means"][kv] - 1).mean(dim=-1),
    "norm": lambda t: lambda s, b, h, q, kv: s - torch.linalg.vector_norm(t["means"][q] + t["others"][kv], dim=-1),
    "norm of order 1": lambda t: lambda s, b, h, q, kv: s - (t["means"][q] - t["others"][kv]).norm(1, -1),
    "norm of zeros": lambda t: lambda s, b, h, q, kv: s - (t["means"][q] - t["means"][kv]).norm(),
    "amax": lambda t: lambda s, b, h, q, kv: s + (t["weights"][h] - t["means"][kv]).amax(-1),
    "amin of absolute values": lambda t: lambda s, b, h, q, kv: s + abs(t["means"][q]).amin(dim=-1),
    "amax of alike ones": lambda t: lambda s, b, h, q, kv: s + t["alike"][kv, :3].amax(-1),
    "amin of three alike in four": lambda t: lambda s, b, h, q, kv: s * (1 + t["alike"][kv].amin(-1)),
    "largest norm of alike ones": lambda t: lambda s, b, h, q, kv: s - (t["alike"][kv, :3] - 1).norm(torch.inf, -1),
    "prod": lambda t: lambda s, b, h, q, kv: s * t["means"][q].prod(-1),
    "a whole vector": lambda t: lambda s, b, h, q, kv: s + torch.dot(t["vector"], t["means"][kv]),
    "a slice": lambda t: lambda s, b, h, q, kv: s + t["means"][q, :2].sum() * t["others"][kv][1:].sum(),
    "where over a row": lambda t: (
        lambda s, b, h, q, kv: s + torch.where(t["means"][q] > 0, t["means"][q], 0.1 * t["others"][kv]).sum(-1)
    ),
    "stacked numbers": lambda t: lambda s, b, h, q, kv: torch.stack([s, s * t["weights"][h, 0]]).amax(),
    "elements by name": lambda t: lambda s, b, h, q, kv: (lambda x, y, z: s + x * y - z)(*t["means"][q]),
}
MASKS: dict[str, Callable[[Tensors], Mod]] = {
    "a tile among those picked": lambda t: (
        lambda b, h, q, kv: (t["picked"][b, h, q // 4] == (kv // 4).unsqueeze(-1)).any(-1) | (q == kv)
    ),
    "a tile among those picked by None": lambda t: (
        lambda b, h, q, kv: (t["picked"][b, h, q // 4] == (kv // 4)[..., None]).any(dim=-1) | (q == kv)
    ),
    "isin": lambda t: lambda b, h, q, kv: torch.isin(kv // 4, t["picked"][b, h, q // 4]) | (q == kv),
    "all beyond": lambda t: lambda b, h, q, kv: (t["limits"][b] > kv).all() | (q == kv),
    "a count": lambda t: lambda b, h, q, kv: ((t["limits"][b] > kv).sum(-1) == 1) | (q == kv),
    "a cast row": lambda t: lambda b, h, q, kv: (t["limits"][b].float() * 0.5 > kv).any() | (q == kv),
}


def places() -> tuple[torch.Tensor, ...]:
    return torch.meshgrid(*map(torch.arange, (BATCH, HEADS, LENGTH, LENGTH)), indexing="ij")


def mapped(mod: Mod, *values: torch.Tensor) -> torch.Tensor:
    """`mod` on 0-d tensors mapped over all pairs, as FlexAttention defines it."""
    shape = values[0].shape
    return torch.vmap(mod)(*(v.reshape(-1) for v in values)).reshape(shape)


def plain(q: Any, k: Any, v: Any, score: Mod | None, mask: Mod | None) -> torch.Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores if score is None else mapped(score, scores, *places())
    scores = scores if mask is None else scores.masked_fill(~mapped(mask, *places()), float("-inf"))
    return scores.softmax(-1) @ v  # type: ignore[no-any-return]


@pytest.mark.parametrize("backend", ["reference", "streaming"])
@pytest.mark.parametrize("name", [*SCORES, *MASKS])
def test_vectors_are_as_in_plain_torch_forward_and_backward(
    name: str, backend: str, generator: torch.Generator
) -> None:
    held = tensors(generator)
    score, mask = (made[name](held) if name in made else None for made in (SCORES, MASKS))
    q, k, v = qkv(
        generator=generator, batch=BATCH, heads=HEADS, q_len=LENGTH, dim=8, dtype=torch.float64, requires_grad=True
    )
    leaves = [q, k, v, *(t for t in held.values() if t.requires_grad)]
    dout = torch.randn(q.shape, generator=generator, dtype=torch.float64)
    got = ca.attention(q, k, v, score_mod=score, mask_mod=mask, backend=backend)
    want = plain(q, k, v, score, mask)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    found, wanted = (torch.autograd.grad(o, leaves, dout, allow_unused=True) for o in (got, want))
    for x, y in zip(found, wanted, strict=True):
        x, y = (torch.zeros(()) if g is None else g for g in (x, y))
        torch.testing.assert_close(x, y.expand(x.shape), rtol=1e-7, atol=1e-7, check_dtype=False)


@pytest.mark.parametrize("name", MASKS)
def test_tiles_of_masks_with_vectors_are_sound(name: str, generator: torch.Generator) -> None:
    mask = Mask.of(MASKS[name](tensors(generator)))
    dense = mask.dense(LENGTH, LENGTH, BATCH, HEADS).expand(BATCH, HEADS, -1, -1)
    kinds = mask.tiles(LENGTH, LENGTH, (4, 4), BATCH, HEADS).expand(BATCH, HEADS, -1, -1)
    for b, h, i, j in kinds.new_ones(kinds.shape).nonzero().tolist():
        tile = dense[b, h, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
        assert int(kinds[b, h, i, j]) in (1, 2 * int(tile.all()) if tile.all() or not tile.any() else 1)


ROW = torch.randn(8, LONGEST + 1)
GRID = torch.randn(4, 3, 3)
REFUSED: dict[str, tuple[type[errors.TraceError], Mod, str]] = {
    "too long": (errors.UnindexedTensor, lambda s, b, h, q, kv: s + ROW[h].sum(), "BlockSparse.topk"),
    "too long and whole": (errors.UnindexedTensor, lambda s, b, h, q, kv: s + (ROW[h] * ROW[q])[kv], "up to 32"),
    "two dimensions": (errors.UnindexedTensor, lambda s, b, h, q, kv: s + GRID[h].sum(), "(3, 3)"),
    "a computed vector at a position": (
        errors.UnindexedTensor,
        lambda s, b, h, q, kv: s * torch.stack([s, s * 2])[h],
        "constant positions",
    ),
    "not reduced": (errors.UnindexedTensor, lambda s, b, h, q, kv: s + GRID[h, q], "not reduced"),
    "lengths that differ": (
        errors.UnsupportedOperation,
        lambda s, b, h, q, kv: s + (GRID[h, q] * ROW[h, :2]).sum(),
        "3",
    ),
    "positions of the largest": (errors.ReductionInMod, lambda s, b, h, q, kv: s + GRID[h, q].max(-1)[0], "amax(-1)"),
    "mean of integers": (errors.TypeMismatch, lambda s, b, h, q, kv: s + torch.stack([q, kv]).mean(), "float"),
    "softmax of a row": (errors.ReductionInMod, lambda s, b, h, q, kv: s + GRID[h, q].softmax(-1)[0], "outside"),
    "an element that is not there": (
        errors.ConstantIndexOutOfRange,
        lambda s, b, h, q, kv: s + (GRID[h, q] * 2)[3],
        "3",
    ),
    "a truth value": (errors.DataDependentBranch, lambda s, b, h, q, kv: s if GRID[h, q] > 0 else -s, "where"),
    "a write": (errors.InPlaceWrite, lambda s, b, h, q, kv: s + GRID[h, q].add_(1).sum(), "add"),
    "another dimension": (errors.UnsupportedOperation, lambda s, b, h, q, kv: s + GRID[h, q].sum(1), "-1 alone"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_short_vector_serves_is_refused_with_the_way_out(name: str) -> None:
    error, mod, words = REFUSED[name]
    with pytest.raises(error) as refusal:
        ca.Score.of(mod)
    assert type(refusal.value) is error and words in str(refusal.value)
