"""Exponentials of fp32 numbers: by the hardware's exp2 unit, or by a polynomial on the units that multiply and add."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cutlass import Float32, Int32
from cutlass.cute import math as cm

from .arithmetic import ONE_BY_ONE, Arithmetic
from .exponential_units import ExponentialUnits

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)

# 1 + c1 f + c2 f² + ...: the least largest relative error to 2^f for f in [0, 1) of those that are exact at 0; in fp32
# 8.6e-5, 3.0e-6 and 1.5e-7. As bf16, 99 % of degree 3's results are those of 2^x, the others next to it.
COEFFICIENTS = {
    3: (0.6951167906709532, 0.22764497230007144, 0.07706705934568382),
    4: (0.6930448446807697, 0.2412802065120319, 0.05224247045874944, 0.013426686615862549),
    5: (0.6931513118135184, 0.24016445004609707, 0.05579991350206087, 0.009017029764740128, 0.00186713033337442),
}
# Columns whose polynomials of a degree go step by step. Beside 128 scores, of degree 3 with 2, 4, 8, 10 or all one
# kernel or another spilled 2 to 15, of degree 4 with 6 or 8 packed ALiBi spilled 3.
TOGETHER = {3: 6, 4: 4, 5: 4}
_LOWEST = -127.0  # below it the result is 0
# what is added to it is rounded to whole numbers, and its last bits are they, with the bias of an exponent
_WHOLE = 1.5 * 2**23 + 127


def exp2(x: Any) -> Float32:
    """2^x by hardware: relative error 2^-22; results below 2^-126 are 0."""
    return cm.exp2(x, approx=True, ftz=True)


def log2(x: Any) -> Float32:
    """By hardware, within 2^-22, or that much of the result; of what is below 2^-126 it is -inf."""
    return cm.log2(x, approx=True, ftz=True)


def polynomial_exp2(values: Sequence[Any], degree: int, arithmetic: Arithmetic = ONE_BY_ONE) -> list[Float32]:
    """2^x of each by multiply-adds, for x below 128: relative errors of `COEFFICIENTS`; results below 2^-126 are 0.

    x is its floor n and a rest f in [0, 1) (Cody and Waite): the polynomial gives 2^f, and 2^n is n in the bits of an
    exponent. Their product, not a sum of bits, keeps NaN.
    """
    x = [cm.max(Float32(value), Float32(_LOWEST), propagate_nan=True) for value in values]
    whole = arithmetic.plus(x, _WHOLE, down=True)
    rest = arithmetic.differences(x, arithmetic.plus(whole, -_WHOLE))
    powers = [(n.bitcast(Int32) << 23).bitcast(Float32) for n in whole]
    return arithmetic.products(arithmetic.polynomial((1.0, *COEFFICIENTS[degree]), rest), powers)


def exp2_of_columns(
    units: ExponentialUnits, columns: Sequence[int], exponents: Iterable[Any], arithmetic: Arithmetic = ONE_BY_ONE
) -> Iterator[Float32]:
    """2^x of each exponent as the plan has it for its one of a thread's columns; polynomials of neighbours together."""
    every = zip(columns, exponents, strict=True)
    for polynomial, run in itertools.groupby(every, lambda item: units.is_polynomial(item[0])):
        given = (x for _, x in run)
        if not polynomial:
            yield from map(exp2, given)
        while polynomial and (some := list(itertools.islice(given, TOGETHER[units.degree]))):
            yield from polynomial_exp2(some, units.degree, arithmetic)
