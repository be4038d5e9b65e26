"""Tensors that mods capture, read in every form that PyTorch users write."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from tests.cpu.flex_conformance.catalogue import causal, only_past
from tests.cpu.flex_conformance.truth import Mods, blocks_of, check, draw

B, H, S = 2, 4, 48
Sized = Callable[..., torch.Tensor]


def read_at_once(at: Callable[..., Any], *shape: int) -> Callable[[Sized], Mods]:
    """A bias of this shape, read at `at`."""

    def made(rand: Sized) -> Mods:
        return Mods(lambda t: lambda s, b, h, q, kv: s + at(t, b, h, q, kv), tensors=(rand(*shape),))

    return made


def read_in_turns(turns: Callable[..., Any], at: Callable[..., Any], *shape: int) -> Callable[[Sized], Mods]:
    """Mods that read a tensor by one index after another; `at` reads it for whole index tensors."""

    def made(rand: Sized) -> Mods:
        return Mods(
            lambda t: lambda s, b, h, q, kv: s + turns(t, b, h, q, kv),
            tensors=(rand(*shape),),
            meaning=lambda t: lambda s, b, h, q, kv: s + at(t, b, h, q, kv),
        )

    return made


ZERO = torch.tensor(0)
BIASES: dict[str, Callable[[Sized], Mods]] = {
    "by (q, kv)": read_at_once(lambda t, b, h, q, kv: t[q, kv], S, S),
    "by (b, q, kv)": read_at_once(lambda t, b, h, q, kv: t[b, q, kv], B, S, S),
    "by (b, h, q, kv)": read_at_once(lambda t, b, h, q, kv: t[b, h, q, kv], B, H, S, S),
    "transposed": read_at_once(lambda t, b, h, q, kv: t[h, kv, q], H, S, S),
    "by distance": read_at_once(lambda t, b, h, q, kv: t[q - kv + S], 2 * S),
    "by a bucket of the distance": read_at_once(lambda t, b, h, q, kv: t[h, ((q - kv) // 5 + 10).clamp(0, 19)], H, 20),
    "by (b, h, q, column of a grid)": read_at_once(lambda t, b, h, q, kv: t[b, h, q, kv // 8], B, H, S, S // 8),
    "of a view": read_at_once(lambda t, b, h, q, kv: t[q, h], S, H),
    "b then q": read_in_turns(lambda t, b, h, q, kv: t[b][q], lambda t, b, h, q, kv: t[b, q], B, S),
    "q then kv": read_in_turns(lambda t, b, h, q, kv: t[q][kv], lambda t, b, h, q, kv: t[q, kv], S, S),
    "a number, (b, h), q": read_in_turns(
        lambda t, b, h, q, kv: t[1][b, h][q], lambda t, b, h, q, kv: t[1, b, h, q], 3, B, H, S
    ),
    "b, h, (a captured index, q)": read_in_turns(
        lambda t, b, h, q, kv: t[b][h][ZERO, q], lambda t, b, h, q, kv: t[b, h, 0, q], B, H, 3, S
    ),
    "as a factor a head": lambda rand: Mods(lambda t: lambda s, b, h, q, kv: s * t[h], tensors=(rand(H),)),
    "as a factor a row": lambda rand: Mods(lambda t: lambda s, b, h, q, kv: s * t[q], tensors=(rand(S),)),
    "three of them": lambda rand: Mods(
        lambda x, y, z: lambda s, b, h, q, kv: s + x[q] + y[b] + z[h], tensors=(rand(S), rand(B), rand(H))
    ),
    "of rows and of columns, masked": lambda rand: Mods(
        lambda x, y: lambda s, b, h, q, kv: s + x[q] + y[kv], lambda *_: causal, (rand(S), rand(S))
    ),
}


@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BIASES)
def test_a_bias_read(name: str, dtype: torch.dtype, learned: bool, generator: torch.Generator) -> None:
    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_(learned)

    check(BIASES[name](rand), *draw(generator, B, H, S, dtype=dtype), generator)


IDS = (torch.arange(S) // 11).to(torch.int32)
STARTS = torch.tensor([0, 11, 22, 33, 44], dtype=torch.int32)
HALF = torch.arange(S) >= S // 2
LENGTHS = torch.tensor([40, 7], dtype=torch.int32)
TABLE = torch.ones(B, 1, S, S, dtype=torch.bool).tril()

HIDING: dict[str, Callable[..., Any]] = {
    "documents": lambda b, h, q, kv: (q >= kv) & (IDS[q] == IDS[kv]),
    "documents, clamped": lambda b, h, q, kv: IDS[q.clamp(0, S - 1)] == IDS[kv.clamp(0, S - 1)],
    "positions inside of documents": lambda b, h, q, kv: q - STARTS[IDS[q]] >= kv - STARTS[IDS[kv]],
    "bools": lambda b, h, q, kv: HALF[q] == HALF[kv],
    "a prefix a batch": lambda b, h, q, kv: (kv <= q) | ((q <= LENGTHS[b]) & (kv <= LENGTHS[b])),
    "padding": lambda b, h, q, kv: (q < LENGTHS[b]) & (kv < LENGTHS[b]),
    "a dense table": lambda b, h, q, kv: TABLE[b, h * 0, q, kv],
}


@pytest.mark.parametrize("where", ["mask", "score"])
@pytest.mark.parametrize("name", HIDING)
def test_what_hides_pairs(name: str, where: str, generator: torch.Generator) -> None:
    hides = HIDING[name]

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where(hides(b, h, q, kv), s, -math.inf)

    check(Mods.of(None, hides) if where == "mask" else Mods.of(score), *draw(generator, B, H, S), generator)


def test_a_wrapper_gives_another_mod_the_positions_inside_of_its_document(generator: torch.Generator) -> None:
    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return only_past(s, b, h, q - STARTS[IDS[q]], kv - STARTS[IDS[kv]])

    check(Mods.of(score), *draw(generator, B, H, S), generator)


def test_a_number_without_dimensions(generator: torch.Generator) -> None:
    amount = torch.ones((), dtype=torch.int32)
    check(Mods.of(lambda s, b, h, q, kv: s + amount), *draw(generator), generator)


def test_zeros_like_an_index(generator: torch.Generator) -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return TABLE[b, torch.zeros_like(h), q, kv]

    check(Mods.of(None, mask), *draw(generator, B, H, S), generator)


def test_buffers_that_were_computed_a_moment_ago(generator: torch.Generator) -> None:
    """Their history is theirs: the gradient flows on."""
    q, k, v = draw(generator, B, H, S)
    weight = torch.randn(H, generator=generator, requires_grad=True)
    bias = (weight.sin() * 2)[:, None].expand(H, S)
    out = ca.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, j] * j, blocks_of(causal, q, k))
    (found,) = torch.autograd.grad(out.square().sum(), weight)
    wide = weight.detach().double().requires_grad_()
    wide_bias = (wide.sin() * 2)[None, :, None, None]
    positions = torch.arange(S)
    scores = q.double() @ k.double().mT / 4 + wide_bias * positions
    scores = scores.masked_fill(positions[:, None] < positions, -math.inf)
    (wanted,) = torch.autograd.grad((scores.softmax(-1) @ v.double()).square().sum(), wide)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
