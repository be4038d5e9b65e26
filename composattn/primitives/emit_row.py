"""A score mod that is no sum, over neighbouring columns of a thread's one row: two an instruction, constants together.

What is the same for all elements is multiplied first, so `cap * tanh(score / cap)` is one product in front of tanh and
none behind it.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32
from cutlass.cute import math as cm

from ..graph.expr import DType, Expr, Rate, score
from ..graph.multiples import constant_factor
from .arithmetic import Arithmetic
from .emit_ops import convert, reciprocal
from .exponential import LOG2_E, exp2
from .values import Fixed

TOGETHER = 4  # columns whose reciprocals are one
# 1 + 2^31 to the fourth power is a number, and so is its reciprocal; tanh is 1 from there on, and long before
_LARGEST = 31.0
# tanh(x) / x in x² up to there: absolute error of tanh 2.4e-7, in fp32 3.2e-7
NEAR = 1.0
_NEAR_TANH = (0.99999685, -0.33324003, 0.132535204, -0.050972739, 0.016114042, -0.00283940975)
_OF_TWO = {"add": "sums", "sub": "differences", "mul": "products"}  # as `Arithmetic` calls them
MODERATE = 2.0**64  # constants whose product is beyond it, or below its inverse, are multiplied one after the other


class RowValues(Fixed):
    """Values of nodes at `columns` of the row, times a constant `factor`; None is 1.

    `all_visible`: the mask hides none of the columns. A NaN then is the whole row's, and numbers may share what
    makes it that of their neighbours. `near`: no argument of a tanh is beyond `NEAR`.
    """

    def __init__(
        self, at: Any, arithmetic: Arithmetic, columns: range, all_visible: bool = False, near: bool = False
    ) -> None:
        self.at, self.arithmetic, self.columns = at, arithmetic, columns
        self.all_visible, self.near = all_visible, near
        self.known: dict[tuple[Expr, float | None], list[Any]] = {}

    def of(self, node: Expr, factor: float | None = None) -> list[Any]:
        """`node` times `factor`."""
        if (node, factor) not in self.known:
            self.known[node, factor] = self._times(node, factor)
        return self.known[node, factor]

    def _times(self, node: Expr, factor: float | None) -> list[Any]:
        if node is score():
            raw = [self.at.tile.values[0, c] for c in self.columns]
            scale = self.at.leaves.scale
            return list(self.arithmetic.times(raw, scale if factor is None else scale * factor))
        of_elements = self._is_of_elements(node)
        if of_elements:
            one = 1.0 if factor is None else factor
            rest, number = constant_factor(node)
            if rest is not None and 1.0 / MODERATE < abs(number * one) < MODERATE:
                return self.of(rest, number * one)
            if node.op == "tanh":
                return self.tanh(node.args[0], one)
        if factor is not None:
            return list(self.arithmetic.times(self.of(node), Float32(factor)))
        if of_elements and node.op in _OF_TWO:
            return getattr(self.arithmetic, _OF_TWO[node.op])(*map(self.of, node.args))  # type: ignore[no-any-return]
        return self._one_by_one(node)

    def _one_by_one(self, node: Expr) -> list[Any]:
        if node.dtype.is_integer and not node.is_const:
            return [Float32(self.at.as_float(node, 0, c)) for c in self.columns]
        return [Float32(convert(self.at.value(node, 0, c), DType.FLOAT)) for c in self.columns]

    def _is_of_elements(self, node: Expr) -> bool:
        return node.dtype is DType.FLOAT and self.at.rate(node) is Rate.ELEMENT

    def tanh(self, x: Expr, factor: float) -> list[Any]:
        """1 - 2 / (1 + e^2x) times `factor`: absolute error of tanh 2^-22.

        A reciprocal is the scarce exponential unit's work; of all visible columns four share one. Near 0 a polynomial
        takes none of it.
        """
        if self.near:
            return near_tanh(self.of(x), self.arithmetic, factor)
        exponents = self.of(x, 2.0 * LOG2_E)
        if self.all_visible:
            exponents = [cm.min(Float32(e), Float32(_LARGEST), propagate_nan=True) for e in exponents]
        below = self.arithmetic.plus([exp2(e) for e in exponents], 1.0)
        parts = self.shared_reciprocals(below) if self.all_visible else [reciprocal(b) for b in below]
        return list(self.arithmetic.times_plus(parts, Float32(-2.0 * factor), [Float32(factor)] * len(parts)))

    def shared_reciprocals(self, values: list[Any]) -> list[Any]:
        """1 / x of four numbers from 1 to 2^31 each, by one reciprocal of their product."""
        found = []
        for i in range(0, len(values), TOGETHER):
            first, second = values[i : i + 2], values[i + 2 : i + 4]
            x, y = self.arithmetic.products(first, second)
            both = reciprocal(x * y)
            parts = [both * y, both * x]
            found += self.arithmetic.products(parts, second) + self.arithmetic.products(parts, first)
        return found


def near_tanh(numbers: list[Any], arithmetic: Arithmetic, factor: float = 1.0) -> list[Any]:
    """tanh of numbers that are not beyond `NEAR`, times `factor`."""
    squares = arithmetic.products(numbers, numbers)
    slopes = arithmetic.polynomial([factor * c for c in _NEAR_TANH], squares)
    return list(arithmetic.products(slopes, numbers))
