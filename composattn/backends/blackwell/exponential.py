"""Which columns of the forward take their exponentials from multiply-adds: as many as leave the busiest unit the least.

What an element of a tile takes was counted in the machine code of these kernels (`benchmarks.tile_model`,
benchmarks/log/2026-11.md#the-forward-for-blackwell-as-counted); the rates are the target's. Nothing of it was timed.
"""

from __future__ import annotations

import dataclasses

import torch

from ...analysis.program import Program
from ...graph.expr import Expr, Rate, walk
from ...primitives.exponential_units import ExponentialUnits
from ..fused.tiles.target import Target

PERIOD = 32  # columns, which every tile and both parts of its probabilities are made of
# Of the tensor core's time that exponentials may take, as they wait for a maximum first: with a quarter to an eighth by
# multiply-adds, flash-attn-4 leaves them 0.82 to 0.88 of it at D 128.
BESIDE_PRODUCTS = 7 / 8


@dataclasses.dataclass(frozen=True)
class ExponentialWork:
    """Results of each unit: exponentials, other special functions, multiply-adds, other arithmetic, instructions."""

    exp: float = 0.0
    special: float = 0.0
    fma: float = 0.0
    alu: float = 0.0
    issue: float = 0.0

    def plus(self, other: ExponentialWork, times: float = 1.0) -> ExponentialWork:
        fields = [f.name for f in dataclasses.fields(self)]
        return ExponentialWork(**{name: getattr(self, name) + times * getattr(other, name) for name in fields})

    def clocks(self, target: Target) -> float:
        """Clocks of an SM's busiest unit."""
        return max(
            self.exp / target.exp2_per_clock + self.special / target.special_per_clock,
            self.fma / target.fma_per_clock,
            self.alu / target.alu_per_clock,
            self.issue / target.issue_per_clock,
        )


SOFTMAX = ExponentialWork(
    exp=1, fma=2.05, alu=1.15, issue=4.0
)  # with its share of the correction and of the warp of products
BY_POLYNOMIAL = ExponentialWork(
    exp=-1, fma=7, alu=2, issue=4.5
)  # of degree 3, two an instruction, in place of the hardware's
# Degree 3 errs by 8.8e-5, less than bf16 rounds; but LSE of an fp16 call was off by 6.6e-5, where 4.6e-5 are allowed.
# Degree 4 errs by 4e-6.
DEGREE = {torch.bfloat16: 3, torch.float16: 4}
OPERATIONS = {
    "tanh": ExponentialWork(exp=1, special=0.25, fma=5.25, alu=1, issue=5.25),
    "sigmoid": ExponentialWork(exp=1, special=1, fma=2, issue=4),
    **dict.fromkeys(("exp", "exp2", "expm1"), ExponentialWork(exp=1, fma=1, issue=2)),
    **dict.fromkeys(
        ("log", "log2", "log1p", "sqrt", "rsqrt", "sin", "cos"), ExponentialWork(special=1, fma=1, issue=2)
    ),
}
ANOTHER = ExponentialWork(fma=1, issue=0.5)  # two an instruction


def exponential_units(program: Program, target: Target, d: int, dv: int, dtype: torch.dtype) -> ExponentialUnits:
    """The fewest columns for which the clocks of an element are least, in pairs, of head dimensions `d` and `dv`."""
    element = SOFTMAX.plus(_of_score(program.score))
    products = BESIDE_PRODUCTS * 2 * (d + dv) / target.matrix_per_clock

    def clocks(columns: int) -> float:
        return max(products, element.plus(BY_POLYNOMIAL, columns / PERIOD).clocks(target))

    best = min(range(0, PERIOD, 2), key=clocks)
    return ExponentialUnits(best, PERIOD, DEGREE[dtype]) if best else ExponentialUnits()


def _of_score(score: Expr | None) -> ExponentialWork:
    """What a score mod computes for each element."""
    total = ExponentialWork()
    for node in walk(score) if score is not None else ():
        by_constant = node.op == "neg" or (node.op in ("mul", "div") and any(a.is_const for a in node.args))
        if node.rate is Rate.ELEMENT and node.args and not by_constant:
            total = total.plus(OPERATIONS.get(node.op, ANOTHER))
    return total
