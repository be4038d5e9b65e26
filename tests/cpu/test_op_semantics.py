"""Every operation that a mod may use gives what eager PyTorch gives on 0-d tensors, odd values included."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from composattn.graph.dynamo_versions import version_of_torch
from composattn.graph.gradient import derivative
from composattn.graph.trace import trace_score
from composattn.mods.score import Score

Mod = Callable[[Any, Any, Any], Any]  # of a float x and two integers i, j


@pytest.fixture(autouse=True, scope="module")
def fp64() -> Iterator[None]:
    """Eager integer-to-float promotion goes to the default type; the graph is evaluated in fp64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def as_number(value: Any) -> Any:
    """Bools as 1.0 and 0.0, so that one kind of mod carries every result."""
    return torch.where(value, 1.0, 0.0) if value.dtype is torch.bool else value


def score_mod(mod: Mod) -> Callable[..., Any]:
    return lambda score, b, h, q, kv: as_number(mod(score, q, kv))


def both(mod: Mod, x: float, i: int, j: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the graph gives and what eager gives."""
    zero = torch.tensor(0)
    given_ = torch.tensor(x), zero, zero, torch.tensor(i), torch.tensor(j)
    fn = score_mod(mod)
    return Score.of(fn)(*given_), fn(*given_).to(torch.float64)


def assert_same(mod: Mod, x: float, i: int, j: int) -> None:
    got, wanted = both(mod, x, i, j)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-300, equal_nan=True)


INTEGERS: dict[str, Mod] = {
    "add": lambda x, i, j: i + j,
    "sub": lambda x, i, j: i - j,
    "mul": lambda x, i, j: i * j,
    "true division": lambda x, i, j: i / (j + 0.5),
    "floor division by 3": lambda x, i, j: i // 3,
    "floor division by -3": lambda x, i, j: i // -3,
    "floor division of a constant": lambda x, i, j: 7 // (j * 2 + 1),
    "floor division by a float": lambda x, i, j: i // 2.5,
    "modulo 3": lambda x, i, j: i % 3,
    "modulo -3": lambda x, i, j: i % -3,
    "modulo of a constant": lambda x, i, j: -7 % (j * 2 + 1),
    "modulo a float": lambda x, i, j: i % 2.5,
    "fmod": lambda x, i, j: torch.fmod(i, 3),
    "div trunc": lambda x, i, j: torch.div(i, 3, rounding_mode="trunc"),
    "div floor": lambda x, i, j: torch.div(i, -3, rounding_mode="floor"),
    "floor_divide": lambda x, i, j: torch.floor_divide(i, 4),
    "remainder": lambda x, i, j: torch.remainder(i, -4),
    "power": lambda x, i, j: i**3,
    "power of two": lambda x, i, j: 2 ** (j % 8),
    "float power of a negative": lambda x, i, j: 2.0**-i,
    "neg": lambda x, i, j: -i,
    "pos": lambda x, i, j: +i,
    "abs": lambda x, i, j: abs(i - j),
    "sign": lambda x, i, j: torch.sign(i - j),
    "minimum": lambda x, i, j: torch.minimum(i, j),
    "maximum": lambda x, i, j: torch.maximum(i, j),
    "max of two": lambda x, i, j: torch.max(i, j),
    "clamp": lambda x, i, j: (i - j).clamp(-2, 5),
    "clamp with crossed ends": lambda x, i, j: torch.clamp(i, min=5, max=2),
    "clip by a value": lambda x, i, j: torch.clip(i, max=j),
    "and": lambda x, i, j: i & 6,
    "or": lambda x, i, j: i | j,
    "xor": lambda x, i, j: i ^ j,
    "not": lambda x, i, j: ~i,
    "lshift": lambda x, i, j: i << 3,
    "rshift": lambda x, i, j: i >> 1,
    "comparisons": lambda x, i, j: (i < j).int() + 2 * (i <= j) + 4 * (i > j) + 8 * (i >= j) + 16 * (i == j),
    "not equal": lambda x, i, j: i != j,
    "compare with a float": lambda x, i, j: i * 2 > j + 0.5,
    "logical_and": lambda x, i, j: torch.logical_and(i, j),
    "logical_or": lambda x, i, j: torch.logical_or(i, j),
    "logical_xor": lambda x, i, j: torch.logical_xor(i, j),
    "logical_not": lambda x, i, j: torch.logical_not(i),
    "bool arithmetic": lambda x, i, j: (i > j) * i + (i < j) * j,
    "bool sum": lambda x, i, j: (i > 2) + (j > 2),
    "bool product": lambda x, i, j: (i > 2) * (j > 2),
    "bool and int": lambda x, i, j: (i > 2) & j,
    "where": lambda x, i, j: torch.where(i > j, i, -j),
    "where promotes": lambda x, i, j: torch.where(i > j, i, 0.5),
    "floor of an int": lambda x, i, j: torch.floor(i),
    "to int8 wraps": lambda x, i, j: (i * 37).to(torch.int8),
    "to uint8 wraps": lambda x, i, j: (i * 37).to(torch.uint8),
    "to int16 wraps": lambda x, i, j: (i * 5000).to(torch.int16),
    "to bool": lambda x, i, j: i.bool(),
    "to long": lambda x, i, j: i.long() * 2,
    "to half": lambda x, i, j: (i / 3).half().double(),
    "exp of an int": lambda x, i, j: torch.exp(-i),
    "relu of an int": lambda x, i, j: torch.relu(i),
    "full_like keeps the type": lambda x, i, j: torch.full_like(i, 2.7) + i,
    "new_ones of bool": lambda x, i, j: i.new_ones((), dtype=torch.bool) & (j > 1),
    "new_zeros": lambda x, i, j: i.new_zeros(()) + j,
    "zeros_like": lambda x, i, j: torch.zeros_like(x) + j,
    "a constant tensor": lambda x, i, j: i + torch.tensor(2.5),
    "a constant with a dtype": lambda x, i, j: i * torch.tensor(2.5, dtype=x.dtype, device=x.device),
    "constants are folded in fp64": lambda x, i, j: i + torch.tensor(1) / 3 + torch.exp(torch.tensor(2)),
}

FLOATS: dict[str, Mod] = {
    "add": lambda x, i, j: x + i,
    "alpha": lambda x, i, j: torch.add(x, i, alpha=3) - torch.sub(x, j, alpha=2),
    "rsub": lambda x, i, j: 3 - x,
    "division": lambda x, i, j: x / 3,
    "reciprocal": lambda x, i, j: 1 / x,
    "floor division": lambda x, i, j: x // 0.75,
    "modulo": lambda x, i, j: x % 0.75,
    "modulo of a negative": lambda x, i, j: x % -0.75,
    "fmod": lambda x, i, j: torch.fmod(x, 0.75),
    "div trunc": lambda x, i, j: torch.div(x, 0.75, rounding_mode="trunc"),
    "square": lambda x, i, j: x**2,
    "power": lambda x, i, j: abs(x) ** 1.5,
    "power of a negative": lambda x, i, j: x**3,
    "power to zero": lambda x, i, j: x**0,
    "power of a constant": lambda x, i, j: 1.5**x,
    "sqrt": lambda x, i, j: torch.sqrt(x),
    "rsqrt": lambda x, i, j: torch.rsqrt(x),
    "exp": lambda x, i, j: torch.exp(x),
    "exp2": lambda x, i, j: x.exp2(),
    "expm1": lambda x, i, j: torch.expm1(x),
    "log": lambda x, i, j: torch.log(x),
    "log2": lambda x, i, j: torch.log2(x),
    "log10": lambda x, i, j: torch.log10(abs(x)),
    "log1p": lambda x, i, j: torch.log1p(x),
    "tanh": lambda x, i, j: torch.tanh(x),
    "sigmoid": lambda x, i, j: torch.sigmoid(x),
    "expit": lambda x, i, j: torch.special.expit(x),
    "sin and cos": lambda x, i, j: torch.sin(x) - torch.cos(x),
    "tan": lambda x, i, j: torch.tan(x.clamp(-1.0, 1.0)),
    "erf": lambda x, i, j: torch.erf(x),
    "floor": lambda x, i, j: torch.floor(x),
    "ceil": lambda x, i, j: torch.ceil(x),
    "math.floor": lambda x, i, j: math.floor(x) if not isinstance(x, torch.Tensor) else torch.floor(x),
    "round half to even": lambda x, i, j: torch.round(x),
    "trunc": lambda x, i, j: torch.trunc(x),
    "frac": lambda x, i, j: torch.frac(x),
    "sign": lambda x, i, j: torch.sign(x),
    "minimum": lambda x, i, j: torch.minimum(x, torch.tensor(1.0)),
    "maximum": lambda x, i, j: torch.maximum(x, torch.tensor(-1.0)),
    "fmin": lambda x, i, j: torch.fmin(x, torch.tensor(1.0)),
    "fmax": lambda x, i, j: torch.fmax(torch.tensor(-1.0), x),
    "clamp": lambda x, i, j: torch.clamp(x, -1.0, 2.0),
    "clamp_min": lambda x, i, j: x.clamp_min(0.5),
    "isnan": lambda x, i, j: torch.isnan(x),
    "isinf": lambda x, i, j: torch.isinf(x),
    "isfinite": lambda x, i, j: torch.isfinite(x),
    "isposinf": lambda x, i, j: torch.isposinf(x),
    "isneginf": lambda x, i, j: torch.isneginf(x),
    "comparisons": lambda x, i, j: (x < 1).int() + 2 * (x <= 1) + 4 * (x > 1) + 8 * (x >= 1) + 16 * (x == 1),
    "not equal": lambda x, i, j: x != x,
    "where": lambda x, i, j: torch.where(x > 0, x, -torch.inf),
    "masked_fill": lambda x, i, j: x.masked_fill(i > j, -1e9),
    "logical": lambda x, i, j: torch.logical_and(x > 0, x < 2) | torch.logical_not(x),
    "to bfloat16 and back": lambda x, i, j: x.bfloat16().double(),
    "to half and back": lambda x, i, j: x.to(torch.float16).to(torch.float64),
    "type_as": lambda x, i, j: i.type_as(x) * x,
    "relu": lambda x, i, j: F.relu(x),
    "gelu": lambda x, i, j: F.gelu(x.clamp(-4.0)),  # eager loses all digits of its left tail
    "gelu tanh": lambda x, i, j: F.gelu(x.clamp(-4.0), approximate="tanh"),
    "silu": lambda x, i, j: F.silu(x),
    "softplus": lambda x, i, j: F.softplus(x),
    "softplus beta": lambda x, i, j: F.softplus(x, beta=0.5, threshold=3.0),
    "logsigmoid": lambda x, i, j: F.logsigmoid(x),
    "elu": lambda x, i, j: F.elu(x, alpha=0.7),
    "leaky_relu": lambda x, i, j: F.leaky_relu(x, 0.2),
    "hardtanh": lambda x, i, j: F.hardtanh(x),
    "relu6": lambda x, i, j: F.relu6(x),
    "erfc": lambda x, i, j: torch.erfc(x.clamp(max=1.0)),
    "sinh": lambda x, i, j: torch.sinh(x),
    "sinh near 0": lambda x, i, j: torch.sinh(x.clamp(-1.0, 1.0) * 1e-6) * 1e6,
    "cosh": lambda x, i, j: torch.cosh(x),
    "lerp": lambda x, i, j: torch.lerp(x, torch.tensor(2.0), 0.25),
    "lerp to the end": lambda x, i, j: torch.lerp(x.clamp(-8.0, 8.0) * 1e30, x, 1.0),
    "lerp by a value": lambda x, i, j: torch.lerp(x * 1e30, torch.tensor(2.0).type_as(x), x.clamp(0.0, 1.0)),
    "float_power": lambda x, i, j: torch.float_power(i + 1, 0.5),
    "aten overload": lambda x, i, j: torch.ops.aten.tanh.default(x),
    "keyword arguments": lambda x, i, j: torch.mul(input=torch.pow(x, exponent=2), other=torch.tanh(input=x)),
}

integers = st.integers(-9, 20)
floats = st.floats(-8, 8, width=32) | st.sampled_from([0.0, -0.0, 0.5, 1.5, -2.5, math.inf, -math.inf, math.nan])


@pytest.mark.parametrize("name", INTEGERS)
@settings(max_examples=40)
@given(i=integers, j=st.integers(0, 20))
@example(i=-7, j=3)
@example(i=0, j=0)
def test_integers(name: str, i: int, j: int) -> None:
    assert_same(INTEGERS[name], 0.25, i, j)


@pytest.mark.parametrize("name", FLOATS)
@settings(max_examples=40)
@given(x=floats, i=integers)
@example(x=math.nan, i=1)
@example(x=-math.inf, i=-3)
@example(x=0.0, i=2)
def test_floats(name: str, x: float, i: int) -> None:
    assert_same(FLOATS[name], x, i, 3)


CLAMPED_AT = {0.5, 1.0, 2.0}  # where clamps of `FLOATS` end, and torch gives no gradient since 2.14


@pytest.mark.parametrize("name", [name for name in FLOATS if name != "floor division"])  # torch has no derivative of it
@settings(max_examples=30)
@given(x=st.floats(0.0625, 3.9375, width=32), i=integers)
def test_derivative_by_score(name: str, x: float, i: int) -> None:
    assume(version_of_torch() < (2, 14) or x not in CLAMPED_AT)
    mod = FLOATS[name]
    expr = trace_score(score_mod(mod))
    leaf = torch.tensor(x, requires_grad=True)
    out = mod(leaf, torch.tensor(i), torch.tensor(3))
    wanted = torch.zeros(())
    if out.requires_grad:
        (wanted,) = torch.autograd.grad(out, leaf)
    zero = torch.tensor(0)
    got = Score(derivative(expr))(torch.tensor(x), zero, zero, torch.tensor(i), torch.tensor(3))
    torch.testing.assert_close(got.to(torch.float64), wanted, rtol=1e-9, atol=1e-12)
