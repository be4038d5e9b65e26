"""Functions and operators that bring a backward, or a meaning, of their own into a mod: right, or refused by name.

In eager mode and in compiled regions alike, where Dynamo follows a `torch.autograd.Function` by its forward alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.function import once_differentiable

import composattn as ca
from composattn import errors

WEIGHTS = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
NUMBER = torch.nn.Parameter(torch.tensor(1.5))


@pytest.fixture(autouse=True)
def forget_compiled_code() -> None:
    torch._dynamo.reset()


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


class Clipped(torch.autograd.Function):
    """Changes no gradient between -1 and 1."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.clamp(-1, 1)


class SetUp(torch.autograd.Function):
    @staticmethod
    def forward(x: Any) -> Any:
        return x * 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


class WrongSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 3 * ctx.saved_tensors[0]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2 * ctx.saved_tensors[0]


class Product(torch.autograd.Function):
    """The product of two numbers that learn and one that does not."""

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any, factor: Any) -> Any:
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        return x * y * factor

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, y = ctx.saved_tensors
        return grad * y * ctx.factor, grad * x * ctx.factor, None


class HalfProduct(Product):
    """The gradient by its second number is lost."""

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * ctx.saved_tensors[1] * ctx.factor, None, None


class Tanh(torch.autograd.Function):
    """Around an operator whose name and meaning are tanh's."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y = torch.ops.composattn_tests.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


class Hidden(torch.autograd.Function):
    """Reads what learns, and is not given it."""

    @staticmethod
    def forward(ctx: Any, x: Any, h: Any) -> Any:
        return x + WEIGHTS[h]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, None


torch.library.define("composattn_tests::tanh", "(Tensor x) -> Tensor")
torch.library.impl("composattn_tests::tanh", "CompositeExplicitAutograd", lambda x: torch.tanh(x))


@torch.library.custom_op("composattn_tests::relu", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("composattn_tests::square", mutates_args=())
def steep_square(x: torch.Tensor) -> torch.Tensor:
    return x * x


for operator in (doubled, steep_square):
    operator.register_fake(torch.empty_like)
    operator.register_autograd(lambda ctx, grad: grad * 5)


def attend(mod: Any) -> Callable[..., Any]:
    return lambda q: ca.attention(q, q, q, score_mod=mod)


WAYS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "eager": attend,
    "one graph": lambda mod: torch.compile(attend(mod), fullgraph=True, backend="aot_eager"),
    "breaks allowed": lambda mod: torch.compile(attend(mod), backend="aot_eager"),
    "flex_attention": lambda mod: torch.compile(
        lambda q: ca.flex_attention(q, q, q, score_mod=mod), fullgraph=True, backend="aot_eager"
    ),
    "a lambda of the region": lambda mod: torch.compile(
        lambda q: ca.attention(q, q, q, score_mod=lambda s, b, h, i, j: mod(s, b, h, i, j) + 1.0),
        fullgraph=True,
        backend="aot_eager",
    ),
    "a module": lambda mod: (lambda module: lambda q: module(q, q, q))(
        torch.compile(ca.nn.Attention(score_mod=mod), fullgraph=True, backend="aot_eager")
    ),
}


def drawn(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(1, 2, 9, 8, dtype=torch.float64, generator=generator).mul(3).requires_grad_()


REFUSED: dict[str, Callable[..., Any]] = {
    "straight-through": lambda s, b, h, q, kv: StraightThrough.apply(s),
    "by another name": (lambda apply: lambda s, b, h, q, kv: apply(s))(StraightThrough.apply),
    "of an element": lambda s, b, h, q, kv: s * StraightThrough.apply(WEIGHTS[h]),
    "of a captured number": lambda s, b, h, q, kv: s * StraightThrough.apply(NUMBER),
    "clipped at 1": lambda s, b, h, q, kv: Clipped.apply(s),
    "a context set up": lambda s, b, h, q, kv: SetUp.apply(s),
    "once differentiable": lambda s, b, h, q, kv: WrongSquare.apply(s),
    "wrong in its second number": lambda s, b, h, q, kv: HalfProduct.apply(s, WEIGHTS[h], 2.0),
    "of what it is not given": lambda s, b, h, q, kv: Hidden.apply(s, h),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", REFUSED)
def test_a_backward_of_its_own_is_refused(name: str, way: str, generator: torch.Generator) -> None:
    with pytest.raises(errors.UnsupportedOperation, match="its backward is not the gradient"):
        WAYS[way](REFUSED[name])(drawn(generator))


RIGHT: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "a square": (lambda s, b, h, q, kv: Square.apply(s), lambda s, b, h, q, kv: s * s),
    "a product": (
        lambda s, b, h, q, kv: Product.apply(s, WEIGHTS[h], 2.0),
        lambda s, b, h, q, kv: s * WEIGHTS[h] * 2.0,
    ),
    "a product by a distance": (
        lambda s, b, h, q, kv: Product.apply(s, WEIGHTS[h], q - kv),
        lambda s, b, h, q, kv: s * WEIGHTS[h] * (q - kv),
    ),
    "a captured number": (
        lambda s, b, h, q, kv: s + Square.apply(NUMBER) * h,
        lambda s, b, h, q, kv: s + NUMBER**2 * h,
    ),
    "an operator that is tanh": (
        lambda s, b, h, q, kv: Tanh.apply(s) * WEIGHTS[h],
        lambda s, b, h, q, kv: s.tanh() * WEIGHTS[h],
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RIGHT)
def test_a_backward_that_is_the_gradient_is_taken(name: str, way: str, generator: torch.Generator) -> None:
    mod, plain = RIGHT[name]
    learned, q = [WEIGHTS, NUMBER], drawn(generator)
    found, wanted = (WAYS[w](m)(q) for w, m in ((way, mod), ("eager", plain)))
    gradients = [torch.autograd.grad(o.sin().sum(), [q, *learned], allow_unused=True) for o in (found, wanted)]
    torch.testing.assert_close(found, wanted)
    for x, y in zip(*gradients, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["eager", "one graph", "breaks allowed"])
@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, kv: doubled(s),
        lambda s, b, h, q, kv: torch.ops.composattn_tests.relu(s),
        lambda s, b, h, q, kv: torch.ops.composattn_tests.relu.default(s),
        lambda s, b, h, q, kv: s * doubled(WEIGHTS[h]),
        lambda s, b, h, q, kv: steep_square(s),
    ],
)
def test_an_operator_is_not_taken_for_torchs_by_its_name(mod: Any, way: str, generator: torch.Generator) -> None:
    with pytest.raises(errors.UnsupportedOperation, match="composattn_tests::"):
        WAYS[way](mod)(drawn(generator))


@pytest.mark.parametrize("way", ["eager", "one graph"])
@pytest.mark.parametrize("of", [lambda s, h: s, lambda s, h: s.tanh(), lambda s, h: WEIGHTS[h], lambda s, h: NUMBER])
def test_a_hook_is_refused_by_its_name(of: Any, way: str, generator: torch.Generator) -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        value = of(s, h)
        value.register_hook(lambda grad: grad * 9)
        return s * value

    with pytest.raises(errors.UnsupportedOperation, match="register_hook"):
        WAYS[way](mod)(drawn(generator))


def test_the_data_of_a_score_is_refused_in_one_graph(generator: torch.Generator) -> None:
    with pytest.raises(errors.UnsupportedOperation, match="cuts a gradient"):
        WAYS["one graph"](lambda s, b, h, q, kv: s * s.data)(drawn(generator))


def test_a_mask_has_no_gradient_to_lose(generator: torch.Generator) -> None:
    def layer(q: torch.Tensor) -> torch.Tensor:
        return ca.attention(q, q, q, mask_mod=lambda b, h, i, j: StraightThrough.apply(i * 0.3) >= j * 0.3)

    q = drawn(generator)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(q), layer(q))


def test_outside_of_a_mod_a_function_keeps_its_backward(generator: torch.Generator) -> None:
    def layer(q: torch.Tensor) -> torch.Tensor:
        weights = StraightThrough.apply(WEIGHTS * 1.7)
        return ca.attention(StraightThrough.apply(q), q, q, score_mod=lambda s, b, h, i, j: s * weights[h])

    q = drawn(generator)
    found, wanted = torch.compile(layer, fullgraph=True, backend="aot_eager")(q), layer(q)
    for x, y in zip(*(torch.autograd.grad(o.sin().sum(), [q, WEIGHTS]) for o in (found, wanted)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
        assert x.abs().max() > 0
