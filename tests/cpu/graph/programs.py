"""Random graphs from lists of small integers: a stack machine, quick to draw from and easy to shrink."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from composattn.graph.expr import Capture, DType, Expr, const, index, make, read, score
from composattn.graph.expr import Dep as _Dep
from composattn.graph.ops import apply
from composattn.graph.scalar import Scalar

SIZE = 5  # of every captured tensor in every dimension: indices in 0..4

_CONSTANTS = (0.0, 1.0, -1.0, 0.5, 2.0, -0.25, 3.0)
_FLOAT1 = (
    "neg", "abs", "sign", "tanh", "sigmoid", "sin", "cos", "erf", "floor", "round", "cast_float",
    "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "trunc", "ceil",
)  # fmt: skip
_FLOAT2 = (
    "add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max", "add", "mul", "mod", "fmod",
    "floordiv", "pow",
)  # fmt: skip
_COMPARE = ("lt", "le", "gt", "ge", "eq", "ne")
_BOUNDED = {"exp", "exp2", "expm1", "pow"}  # of a bounded argument only, or everything overflows


class ScoreProgram:
    """The score mod that a list of integers spells, and the tensors and scalars it captures."""

    def __init__(self, code: Sequence[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(shape, dtype=torch.float64, generator=generator)  # noqa: E731
        self.tensors = [draw(SIZE), draw(SIZE, SIZE), draw()]
        for t in self.tensors:
            t.requires_grad_()
        self.scalar = Scalar(0.75)
        self.expr = self._run(list(code))

    def _leaves(self) -> list[Expr]:
        b, h, q, kv = (index(n) for n in ("b", "h", "q", "kv"))
        table, grid, number = (Capture(t) for t in self.tensors)
        clipped = apply("clamp_max", apply("abs", apply("sub", q, kv)), const(SIZE - 1))
        return [
            score(), score(), read(table, (h,)), read(grid, (q, kv)), read(table, (clipped,)), read(number, ()),
            read(grid, (kv, b)), self.scalar.expr, apply("cast_float", apply("sub", q, kv)), q,
        ]  # fmt: skip

    def _run(self, code: list[int]) -> Expr:
        leaves = self._leaves()
        stack: list[Expr] = [score()]
        for word in code:
            kind, which = word % 8, word // 8
            if kind <= 1:
                stack.append(leaves[which % len(leaves)])
            elif kind == 2:
                stack.append(const(_CONSTANTS[which % len(_CONSTANTS)]))
            elif kind <= 4 or len(stack) < 2:
                self._one(stack, _FLOAT1[which % len(_FLOAT1)])
            elif kind <= 6 or len(stack) < 3:
                self._two(stack, _FLOAT2[which % len(_FLOAT2)])
            else:
                y, x = stack.pop(), stack.pop()
                condition = apply(_COMPARE[which % len(_COMPARE)], stack[-1], const(_CONSTANTS[which % 5]))
                stack.append(apply("where", condition, x, y if which % 3 else const(float("-inf"))))
        out = stack.pop()
        while stack:
            out = apply("add", stack.pop(), out)
        return out if out.dtype is DType.FLOAT else apply("cast_float", out)

    @staticmethod
    def _one(stack: list[Expr], name: str) -> None:
        x = stack.pop()
        stack.append(apply(name, apply("tanh", x) if name in _BOUNDED else x))

    @staticmethod
    def _two(stack: list[Expr], name: str) -> None:
        y, x = stack.pop(), stack.pop()
        if name == "pow":
            x, y = apply("tanh", x), apply("clamp_max", y, const(3.0))
        if name in ("mod", "fmod", "floordiv"):
            x = apply("cast_float", x)  # integers have no remainder by 0
        stack.append(apply(name, x, y))


def scalar_leaf(value: float) -> Expr:
    """A fresh run-time scalar."""
    holder = Scalar(value)
    return make("scalar", (), DType.FLOAT, holder, _Dep.RUNTIME)
