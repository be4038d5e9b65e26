"""Exponentials of fp32 numbers: by the hardware's exp2 unit, or by a polynomial on the units that multiply and add."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute import math as cm

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
_LOWEST = -127.0  # below it the result is 0
# what is added to it is rounded to whole numbers, and its last bits are they, with the bias of an exponent
_WHOLE = 1.5 * 2**23 + 127


def exp2(x: Any) -> Float32:
    """2^x by hardware: relative error 2^-22; results below 2^-126 are 0."""
    return cm.exp2(x, approx=True, ftz=True)


def polynomial_exp2(x: Any, degree: int) -> Float32:
    """2^x by multiply-adds, for x below 128: relative errors of `COEFFICIENTS`; results below 2^-126 are 0.

    x is its floor n and a rest f in [0, 1) (Cody and Waite): the polynomial gives 2^f, and 2^n is n in the bits of an
    exponent. Their product, not a sum of bits, keeps NaN.
    """
    x = cm.max(Float32(x), Float32(_LOWEST), propagate_nan=True)
    whole = cute.arch.inline_ptx(
        "add.rm.ftz.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, Float32(_WHOLE)]
    )
    rest = x - (whole - _WHOLE)
    *first, last = COEFFICIENTS[degree]
    total: Any = Float32(last)
    for coefficient in (*first[::-1], 1.0):
        total = cm.fma(total, rest, Float32(coefficient))
    return total * (whole.bitcast(Int32) << 23).bitcast(Float32)


def exp2_of_column(units: ExponentialUnits, column: int) -> Callable[[Any], Float32]:
    """2^x as the plan has it for a thread's `column`."""
    return (lambda x: polynomial_exp2(x, units.degree)) if units.is_polynomial(column) else exp2
