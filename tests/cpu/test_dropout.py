"""Dropout of weights: its bits, their statistics, and what attention makes of them on the PyTorch backends."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import composattn as ca
from composattn import errors
from composattn.dispatch import plan_cache
from composattn.graph.philox import kept, philox
from composattn.mods import causal
from tests.support import docs_script

SEED, P = 77 << 40 | 5, 0.3
LEAST = round(P * 65536)
BACKENDS = ["reference", "streaming"]


def bits(
    batch: int, heads: int, q_len: int, kv_len: int, least: int | torch.Tensor = LEAST, seed: int = SEED
) -> torch.Tensor:
    """(B, H, Sq, Skv): which pairs are kept."""
    sizes = batch, heads, q_len, kv_len
    at = [torch.arange(n).view([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate(sizes)]
    return kept(torch.tensor(seed), *at, torch.as_tensor(least))


# --- the bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "rounds", "wanted"),
    [
        (0, 10, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (0xFFFFFFFF, 10, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (0, 7, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ],
)
def test_words_are_those_of_the_papers_library(word: int, rounds: int, wanted: str) -> None:
    one = torch.tensor(word)
    found = philox((one, one, one, one), (one, one), rounds)
    assert " ".join(f"{int(w):08x}" for w in found) == wanted


def test_each_pair_has_bits_of_its_own() -> None:
    # 16 bits of all pairs, by bisection; neighbours in every index share a call or not, and no two are alike throughout
    value = torch.zeros(2, 2, 32, 32, dtype=torch.int64)
    for bit in reversed(range(16)):
        value += bits(2, 2, 32, 32, least=value + (1 << bit)).long() << bit
    rows = value.flatten(0, 1).flatten(1)
    assert int(value.flatten().unique().numel()) > 0.9 * value.numel() * (1 - value.numel() / 2 / 65536)
    for a, b in itertools.combinations(rows, 2):
        assert float((a == b).double().mean()) < 0.01


# --- their statistics, of a fixed seed: 4.5 standard deviations are left by one of 10^5 runs -------------------------


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_as_many_are_kept_as_asked_for(p: float) -> None:
    found = bits(4, 8, 256, 256, least=round(p * 65536))
    share = 1 - round(p * 65536) / 65536
    assert abs(float(found.double().mean()) - share) < 4.5 * math.sqrt(share * (1 - share) / found.numel())
    for dim in range(4):  # and at every single index
        others = [d for d in range(4) if d != dim]
        one = found.double().mean(others)
        spread = math.sqrt(share * (1 - share) / (found.numel() / found.shape[dim]))
        assert float((one - share).abs().max()) < 5 * spread


@pytest.mark.parametrize("dim", range(4))
def test_neighbours_are_independent_along_each_index(dim: int) -> None:
    found = (bits(8, 16, 128, 128, least=32768).double() - 0.5) * 2
    for lag in (1, 2, 3, 4, 7):
        product = found.narrow(dim, lag, found.shape[dim] - lag) * found.narrow(dim, 0, found.shape[dim] - lag)
        assert abs(float(product.mean())) < 4.5 / math.sqrt(product.numel())


@pytest.mark.parametrize("lag", [(0, 1), (0, 8), (8, 0), (8, 8), (8, 9), (1, 1), (16, 0), (0, 16), (64, 64)])
def test_pairs_that_share_a_call_are_independent(lag: tuple[int, int]) -> None:
    found = (bits(4, 8, 256, 256, least=32768).double() - 0.5) * 2
    rows, columns = lag
    product = found[:, :, rows:, columns:] * found[:, :, : 256 - rows, : 256 - columns]
    assert abs(float(product.mean())) < 4.5 / math.sqrt(product.numel())


def test_patterns_of_a_call_are_equally_frequent() -> None:
    # the eight pairs of a call as a number of 8 bits: 256 kinds, chi-square with 255 degrees of freedom
    found = bits(4, 8, 256, 256, least=32768).long()
    number = torch.zeros(4, 8, 128, 64, dtype=torch.int64)
    blocks = found.unflatten(3, (16, 2, 4, 2)).unflatten(2, (16, 2, 8))  # b, h, Q, q3, q, K, k3, k, k0
    eight = blocks.permute(0, 1, 2, 4, 5, 7, 3, 6, 8).flatten(6)
    number = (eight << torch.arange(8)).sum(-1)
    counts = number.flatten().bincount(minlength=256).double()
    expected = number.numel() / 256
    chi = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi - 255) < 4.5 * math.sqrt(2 * 255)


def test_other_seeds_drop_others() -> None:
    one = bits(1, 2, 128, 128, least=32768)
    for seed in (SEED + 1, SEED ^ 1 << 40, 0):
        same = float((bits(1, 2, 128, 128, least=32768, seed=seed) == one).double().mean())
        assert abs(same - 0.5) < 4.5 * 0.5 / math.sqrt(one.numel())


def test_the_picture_is_what_its_script_makes() -> None:
    maker = docs_script("make_dropout")
    assert maker.PICTURE.read_text() == maker.picture(), "run docs/make_dropout.py"


# --- attention --------------------------------------------------------------------------------------------------------


def inputs(generator: torch.Generator) -> Any:
    q = torch.randn(2, 4, 70, 16, generator=generator, dtype=torch.float64).requires_grad_()
    k, v = (torch.randn(2, 2, 90, n, generator=generator, dtype=torch.float64).requires_grad_() for n in (16, 8))
    return q, k, v


def by_definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (q @ k.mT / 4).masked_fill(~torch.ones(70, 90).tril().bool(), -torch.inf)
    return (scores.softmax(-1) * bits(2, 4, 70, 90) * (65536 / (65536 - LEAST))) @ v, scores.logsumexp(-1)


WAYS: dict[str, Any] = {
    "attention": ca.attention,
    "an Attention": lambda *x, return_lse, **options: ca.Attention(**options)(*x, return_lse=return_lse),
    "compiled": torch.compile(lambda *x, **options: ca.attention(*x, **options), fullgraph=True, backend="aot_eager"),
}


@pytest.mark.parametrize("seed", ["an int", "a tensor"])
@pytest.mark.parametrize("way, backend", [("attention", "reference"), *((way, "streaming") for way in WAYS)])
def test_weights_behind_the_softmax_are_dropped(way: str, backend: str, seed: str, generator: torch.Generator) -> None:
    x = inputs(generator)
    given = SEED if seed == "an int" else torch.tensor(SEED)
    found = WAYS[way](*x, mask_mod=causal(), dropout_p=P, dropout_seed=given, return_lse=True, backend=backend)
    wanted = by_definition(*x)
    torch.testing.assert_close(found, wanted)
    loss = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in wanted]
    torch.testing.assert_close(*(torch.autograd.grad(y, x, loss) for y in (found, wanted)))


REPEATED: dict[str, Any] = {
    "attention": lambda *x: ca.attention(*x, dropout_p=P),
    "an Attention": ca.Attention(dropout_p=P),
    "a copy of one": copy.deepcopy(ca.Attention(dropout_p=P)),
    "a pickled one": pickle.loads(pickle.dumps(ca.Attention(dropout_p=P))),
    "a module": ca.nn.Attention(dropout_p=P),
    "compiled": torch.compile(lambda *x: ca.attention(*x, dropout_p=P), fullgraph=True, backend="aot_eager"),
}


@pytest.mark.parametrize("way", REPEATED)
def test_torchs_generator_gives_the_seed_of_a_call(way: str, generator: torch.Generator) -> None:
    x = inputs(generator)
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append((REPEATED[way](*x), REPEATED[way](*x)))
    first, second = found
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(*first)


def test_a_module_drops_nothing_in_evaluation(generator: torch.Generator) -> None:
    x = inputs(generator)
    assert torch.equal(ca.nn.Attention(dropout_p=P).eval()(*x), ca.attention(*x))


def test_a_backward_drops_what_its_forward_did(generator: torch.Generator) -> None:
    x = inputs(generator)
    torch.manual_seed(5)
    out = checkpoint(lambda *x: ca.attention(*x, dropout_p=P), *x, use_reentrant=False)
    again = torch.autograd.grad(out.sum(), x)
    torch.manual_seed(5)
    out = ca.attention(*x, dropout_p=P)
    ca.attention(*x, dropout_p=P)  # with another seed, before the backward
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(out.sum(), x), again, strict=True))


def test_seeds_of_two_attentions_are_their_own(generator: torch.Generator) -> None:
    x = inputs(generator)
    one, other = (ca.Attention(dropout_p=P, dropout_seed=seed) for seed in (1, 2))
    first = one(*x)
    other(*x), ca.attention(*x, dropout_p=P, dropout_seed=3)
    assert torch.equal(one(*x), first)


def test_a_new_seed_plans_nothing_again(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(generator)
    made, found = plan_cache.made_plan, []
    monkeypatch.setattr(plan_cache, "made_plan", lambda *a: (found.append(a[0]), made(*a))[1])
    plan_cache._plans.clear()
    for seed in (None, None, 4):
        ca.attention(*x, dropout_p=P, dropout_seed=seed)
    assert len(found) == 2  # one for seeds of torch's generator, one for seeds that are given


def test_derivatives_have_derivatives(generator: torch.Generator) -> None:
    q, k, v = (x.detach()[:1, :2, :6, :4].requires_grad_() for x in inputs(generator))
    assert torch.autograd.gradgradcheck(lambda *x: ca.attention(*x, dropout_p=P, dropout_seed=1), (q, k, v))


def test_vmap_takes_a_seed_per_sample_and_names_those_that_it_would_draw(generator: torch.Generator) -> None:
    x, seeds = torch.randn(2, 1, 2, 9, 8, generator=generator), torch.tensor([3, 4])
    found = torch.vmap(lambda a, seed: ca.attention(a, a, a, dropout_p=P, dropout_seed=seed))(x, seeds)
    wanted = [ca.attention(a, a, a, dropout_p=P, dropout_seed=seed) for a, seed in zip(x, (3, 4), strict=True)]
    torch.testing.assert_close(found, torch.stack(wanted))
    with pytest.raises(errors.UnsupportedTransform, match="dropout_seed=seed"):
        torch.vmap(lambda a: ca.attention(a, a, a, dropout_p=P), randomness="different")(x)


@pytest.mark.parametrize("p", [-0.1, 1.0, 0.99999, True, "0.1"])
def test_what_is_no_probability_is_refused_by_name(p: Any, generator: torch.Generator) -> None:
    with pytest.raises(errors.UnsupportedOption, match="dropout_p"):
        ca.attention(*inputs(generator), dropout_p=p)


@pytest.mark.parametrize("seed", [-1, 2**63, 0.5, True, torch.tensor(1, dtype=torch.int32), torch.tensor([1])])
def test_what_is_no_seed_is_refused_by_name(seed: Any, generator: torch.Generator) -> None:
    with pytest.raises(errors.UnsupportedOption, match="dropout_seed"):
        ca.attention(*inputs(generator), dropout_p=P, dropout_seed=seed)


def test_ranks_that_share_a_sequence_refuse_it(generator: torch.Generator) -> None:
    shared: Any = object()
    with pytest.raises(errors.UnsupportedOption, match="ranks"):
        ca.attention(*inputs(generator), dropout_p=P, context_parallel=shared)
    with pytest.raises(errors.UnsupportedOption, match="ranks"):
        ca.Attention(dropout_p=P)(*inputs(generator), context_parallel=shared)
