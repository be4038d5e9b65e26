"""Every ready score mod against its formula in plain torch, its gradients against autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composattn import errors
from composattn.graph.expr import captures, scalars
from composattn.graph.scalar import Scalar
from composattn.mods import scores
from composattn.mods.score import Score

B, H, SQ, SKV = 2, 3, 11, 13


def grid(q_len: int = SQ, kv_len: int = SKV, heads: int = H) -> tuple[torch.Tensor, ...]:
    return torch.meshgrid(*map(torch.arange, (B, heads, q_len, kv_len)), indexing="ij")


def check(mod: Score, formula: Callable[..., torch.Tensor], *learned: torch.Tensor, places: Any = None) -> None:
    """Values and every gradient of `mod` equal those of `formula(score, b, h, q, kv)` in fp64."""
    b, h, q, kv = places or grid()
    x = torch.randn(b.shape, dtype=torch.float64, requires_grad=True)
    leaves = (x, *learned)
    got, wanted = mod(x, b, h, q, kv), formula(x, b, h, q, kv)
    torch.testing.assert_close(got.expand(b.shape), wanted, rtol=1e-6, atol=1e-9, check_dtype=False)
    weight = torch.randn(b.shape, dtype=torch.float64)
    ours = torch.autograd.grad((got * weight).sum(), leaves)
    theirs = torch.autograd.grad((wanted * weight).sum(), leaves)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def parameter(*shape: int) -> torch.Tensor:
    return (0.5 + torch.rand(*shape, dtype=torch.float64)).requires_grad_()


def paper_slopes(heads: int) -> list[float]:
    """The reference recipe of the ALiBi paper, in its recursive form."""
    if math.log2(heads).is_integer():
        first = 2.0 ** (-8.0 / heads)
        return [first ** (i + 1) for i in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return paper_slopes(below) + paper_slopes(2 * below)[0::2][: heads - below]


@pytest.mark.parametrize("heads", [*range(1, 18), 24, 32, 40])
def test_alibi_by_number_of_heads(heads: int) -> None:
    slopes = torch.tensor(paper_slopes(heads), dtype=torch.float64)
    places = grid(3, 4, heads)
    check(scores.alibi(heads), lambda x, b, h, q, kv: x + slopes[h] * (kv - q), places=places)
    assert captures(scores.alibi(heads).expr) == (), "no table that would have to be on the right device"


@pytest.mark.parametrize("symmetric", [False, True])
def test_alibi_with_learned_slopes(symmetric: bool) -> None:
    slopes = parameter(H)

    def formula(x: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return x + slopes[h] * (-(kv - q).abs() if symmetric else kv - q)

    mod = scores.alibi(slopes, symmetric=symmetric)
    check(mod, formula, slopes)
    assert captures(mod.expr)[0].tensor is slopes


def test_alibi_with_slopes_of_each_sequence() -> None:
    slopes = parameter(B, H)
    check(scores.alibi(slopes), lambda x, b, h, q, kv: x + slopes[b, h] * (kv - q), slopes)


@pytest.mark.parametrize("form", ["number", "scalar", "tensor"])
def test_softcap(form: str) -> None:
    cap: Any = {
        "number": 0.7,
        "scalar": Scalar(0.7),
        "tensor": torch.tensor(0.7, dtype=torch.float64, requires_grad=True),
    }[form]
    value = cap if form == "tensor" else 0.7
    learned = (cap,) if form == "tensor" else ()
    mod = scores.softcap(cap)
    check(mod, lambda x, b, h, q, kv: value * torch.tanh(x / value), *learned)
    assert scalars(mod.expr) == ((cap,) if form == "scalar" else ())


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_relative_bias(per_head: bool, bidirectional: bool) -> None:
    n = 9
    table = parameter(H, n) if per_head else parameter(n)

    def formula(x: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        distance = (q - kv).clamp(-4, 4) + 4 if bidirectional else (q - kv).clamp(0, 8)
        return x + (table[h, distance] if per_head else table[distance])

    check(scores.relative_bias(table, bidirectional=bidirectional), formula, table)


def t5_bucket(relative: torch.Tensor, bidirectional: bool, buckets: int, max_distance: int) -> torch.Tensor:
    """The formula of the T5 paper's appendix as published code states it, on memory position minus query position."""
    offset = torch.zeros_like(relative)
    n = -relative
    if bidirectional:
        buckets //= 2
        offset = offset + (n < 0).to(torch.int64) * buckets
        n = n.abs()
    else:
        n = n.clamp(min=0)
    exact = buckets // 2
    ratio = torch.log(n.float() / exact) / math.log(max_distance / exact)
    # at n = 0 the logarithm is -inf, and its cast undefined; that branch is not taken
    large = exact + torch.where(n > 0, ratio * (buckets - exact), 0.0).to(torch.int64)
    return offset + torch.where(n < exact, n, large.clamp(max=buckets - 1))


@given(st.sampled_from([2, 4, 8, 16, 32, 64]), st.sampled_from([20, 64, 128, 200, 256]), st.booleans())
def test_t5_buckets_at_every_distance(buckets: int, max_distance: int, bidirectional: bool) -> None:
    if bidirectional and buckets < 4:
        buckets = 4
    if max_distance <= buckets // 2:
        max_distance = buckets
    table = scores.t5_buckets(buckets, max_distance, bidirectional)
    relative = torch.arange(-3 * max_distance, 3 * max_distance)
    got = table[relative.clamp(-max_distance, max_distance if bidirectional else 0) + max_distance]
    assert torch.equal(got.long(), t5_bucket(relative, bidirectional, buckets, max_distance))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_t5_bucket_bias(bidirectional: bool) -> None:
    table = parameter(8, H)

    def formula(x: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return x + table[t5_bucket(kv - q, bidirectional, 8, 10), h]

    mod = scores.t5_bucket_bias(table, max_distance=10, bidirectional=bidirectional)
    check(mod, formula, table, places=grid(29, 31))
    assert captures(mod.expr)[-1].tensor is table


@pytest.mark.parametrize(
    "shape",
    [(B, H, SQ, SKV), (1, H, SQ, SKV), (B, 1, SQ, SKV), (1, 1, 1, SKV), (H, SQ, 1), (SQ, SKV), (1, SKV)],
    ids=str,
)
def test_bias(shape: tuple[int, ...]) -> None:
    values = parameter(*shape)
    wide = values.expand(B, H, SQ, SKV)
    check(scores.bias(values), lambda x, b, h, q, kv: x + wide[b, h, q, kv], values)


def test_scale_by_head() -> None:
    factors = parameter(H)
    check(scores.scale_by_head(factors), lambda x, b, h, q, kv: x * factors[h], factors)


def test_temperature() -> None:
    value = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    check(scores.temperature(value), lambda x, b, h, q, kv: x / value, value)
    check(scores.temperature(2), lambda x, b, h, q, kv: x / 2)
    scalar = Scalar(4.0)
    mod = scores.temperature(scalar)
    check(mod, lambda x, b, h, q, kv: x / 4.0)
    scalar.value = 0.5
    check(mod, lambda x, b, h, q, kv: x / 0.5)


def test_combinations_follow_their_order() -> None:
    slopes, table = parameter(H), parameter(9)
    capped = scores.alibi(slopes) >> scores.softcap(2.0)
    check(capped, lambda x, b, h, q, kv: 2.0 * torch.tanh((x + slopes[h] * (kv - q)) / 2.0), slopes)
    both = scores.alibi(slopes) + scores.relative_bias(table)

    def formula(x: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return x + slopes[h] * (kv - q) + table[(q - kv).clamp(-4, 4) + 4]

    check(both, formula, slopes, table)
    doubled = scores.temperature(0.5) + (lambda s, b, h, q, kv: s * 3)
    check(doubled, lambda x, b, h, q, kv: x * 2 + (x * 3 - x))


VECTOR = torch.ones(3)
REFUSED: dict[str, Callable[[], Any]] = {
    "alibi of no head": lambda: scores.alibi(0),
    "alibi of a float": lambda: scores.alibi(8.0),  # type: ignore[arg-type]
    "alibi of integer slopes": lambda: scores.alibi(torch.arange(3)),
    "alibi of three dimensions": lambda: scores.alibi(torch.ones(2, 2, 2)),
    "alibi of nothing": lambda: scores.alibi(torch.ones(0)),
    "softcap of 0": lambda: scores.softcap(0.0),
    "softcap below 0": lambda: scores.softcap(-30.0),
    "softcap of NaN": lambda: scores.softcap(math.nan),
    "softcap of infinity": lambda: scores.softcap(math.inf),
    "softcap of a bool": lambda: scores.softcap(True),
    "softcap of a string": lambda: scores.softcap("30"),  # type: ignore[arg-type]
    "softcap of a vector": lambda: scores.softcap(VECTOR),
    "softcap of an integer tensor": lambda: scores.softcap(torch.tensor(30)),
    "relative bias of even length": lambda: scores.relative_bias(torch.ones(8)),
    "relative bias of integers": lambda: scores.relative_bias(torch.arange(9)),
    "relative bias of 3 dimensions": lambda: scores.relative_bias(torch.ones(1, 1, 9)),
    "relative bias of a list": lambda: scores.relative_bias([1.0, 2.0, 3.0]),  # type: ignore[arg-type]
    "t5 of a vector": lambda: scores.t5_bucket_bias(torch.ones(32)),
    "t5 of oddly many buckets": lambda: scores.t5_bucket_bias(torch.ones(31, 4)),
    "t5 of too few buckets": lambda: scores.t5_bucket_bias(torch.ones(2, 4)),
    "t5 of a short distance": lambda: scores.t5_bucket_bias(torch.ones(32, 4), max_distance=8),
    "t5 of no distance": lambda: scores.t5_bucket_bias(torch.ones(32, 4), max_distance=0),
    "bias of bools": lambda: scores.bias(torch.ones(2, 2, dtype=torch.bool)),
    "bias of a vector": lambda: scores.bias(VECTOR),
    "bias of five dimensions": lambda: scores.bias(torch.ones(1, 1, 1, 2, 2)),
    "factors of a matrix": lambda: scores.scale_by_head(torch.ones(2, 2)),
    "factors of a number": lambda: scores.scale_by_head(2.0),  # type: ignore[arg-type]
    "temperature of 0": lambda: scores.temperature(0),
    "temperature of a vector": lambda: scores.temperature(VECTOR),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    with pytest.raises(errors.InvalidModArgument):
        REFUSED[case]()
