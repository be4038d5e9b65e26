"""The largest score of each row, as torch's `AuxRequest(max_scores=True)` means it, on the PyTorch backends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import composattn as ca
from composattn.mods import alibi, causal, softcap
from tests.support import qkv

BACKENDS = ["reference", "streaming"]
SCORES: dict[str, Any] = {
    "none": None,
    "by a row": lambda s, b, h, q, kv: 2 * s - 3 * q,  # a row's constant has a say in the maximum
    "alibi then softcap": alibi(torch.tensor([0.5, 0.25])) >> softcap(5.0),
}


def hidden_row(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q != 5)


def largest(q: torch.Tensor, k: torch.Tensor, mask: Any, score: Any) -> torch.Tensor:
    """By the definition, dense in fp64."""
    scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    b, h, i, j = (torch.arange(n).view(shape) for n, shape in zip(
        scores.shape, [(-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,)], strict=True))  # fmt: skip
    if score is not None:
        scores = score(scores, b, h, i, j)
    return scores.masked_fill(~mask(b, h, i, j), -torch.inf).amax(-1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("score", SCORES)
def test_it_is_that_of_the_scores_after_score_mod_and_mask(
    backend: str, score: str, generator: torch.Generator
) -> None:
    q, k, v = qkv(generator=generator, heads=2, q_len=90, kv_len=70)
    options: Any = {"score_mod": SCORES[score], "mask_mod": hidden_row, "backend": backend}
    out, _, found = ca.attention(q, k, v, **options, return_lse=True, return_max_scores=True)
    assert found.dtype is torch.float32
    assert bool((found[:, :, 5] == -torch.inf).all())
    torch.testing.assert_close(found.double(), largest(q, k, hidden_row, SCORES[score]), rtol=1e-5, atol=1e-5)
    alone, again = ca.attention(q, k, v, **options, return_max_scores=True)
    assert torch.equal(alone, out)
    assert torch.equal(again, found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_gradient_flows_through_it_and_the_others_stay(backend: str, generator: torch.Generator) -> None:
    q, k, v = qkv(generator=generator, q_len=20, requires_grad=True)
    out, lse, found = ca.attention(q, k, v, mask_mod=causal(), backend=backend, return_lse=True, return_max_scores=True)
    assert not found.requires_grad
    other = ca.attention(q, k, v, mask_mod=causal(), backend=backend, return_lse=True)
    of_three = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    of_two = torch.autograd.grad(other[0].sum() + other[1].sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(of_three, of_two, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences_have_theirs_and_rows_of_none_have_minus_infinity(
    backend: str, generator: torch.Generator
) -> None:
    q, k, v = (torch.randn(30, 2, 16, generator=generator) for _ in range(3))
    offsets, used = torch.tensor([0, 12, 30], dtype=torch.int32), torch.tensor([12, 10], dtype=torch.int32)
    packed = ca.Varlen(offsets, seqused_q=used)
    _, found = ca.attention(q, k, v, mask_mod=causal(), backend=backend, varlen=packed, return_max_scores=True)
    for rows in (slice(0, 12), slice(12, 22)):
        one = largest(q[None, rows].transpose(1, 2), k[None, rows].transpose(1, 2), causal(), None)
        torch.testing.assert_close(found[:, rows].double(), one[0], rtol=1e-5, atol=1e-5)
    assert bool((found[:, 22:] == -torch.inf).all())


def test_a_number_that_is_none_shows_in_it(generator: torch.Generator) -> None:
    q, k, v = qkv(generator=generator, q_len=20)
    q[0, 0, 3, 0] = torch.nan
    _, found = ca.attention(q, k, v, return_max_scores=True)
    assert found.isnan().nonzero().tolist() == [[0, 0, 3]]


def test_compiled_code_gives_it_too(generator: torch.Generator) -> None:
    q, k, v = qkv(generator=generator, q_len=20, requires_grad=True)
    attention = ca.Attention(mask_mod=causal())
    compiled = torch.compile(lambda *x: attention(*x, return_max_scores=True), fullgraph=True, backend="aot_eager")
    found, wanted = compiled(q, k, v), attention(q, k, v, return_max_scores=True)
    assert not found[1].requires_grad
    torch.testing.assert_close(found, wanted)
    assert isinstance(wanted, tuple)
    torch.testing.assert_close(*(torch.autograd.grad(x[0].sum(), q) for x in (found, wanted)))


def test_transforms_of_torch_give_it_too(generator: torch.Generator) -> None:
    def attend(*x: torch.Tensor) -> Any:
        return ca.attention(*x, mask_mod=causal(), return_lse=True, return_max_scores=True)

    def loss(*x: torch.Tensor) -> Any:
        out, lse, top = attend(*x)
        return out.sum() + lse.sum(), top

    calls = [torch.randn(3, 2, 2, 10, 8, generator=generator) for _ in range(3)]
    one_by_one = [attend(*x) for x in zip(*calls, strict=True)]
    wanted = tuple(torch.stack(x) for x in zip(*one_by_one, strict=True))
    torch.testing.assert_close(torch.func.vmap(attend)(*calls), wanted)
    _, tops = torch.func.vmap(torch.func.grad(loss, has_aux=True))(*calls)
    torch.testing.assert_close(tops, wanted[2])
    first = tuple(x[0] for x in calls)
    (_, _, top), (_, _, moved) = torch.func.jvp(attend, first, first)
    torch.testing.assert_close(top, wanted[2][0])
    assert not bool(moved.any())
