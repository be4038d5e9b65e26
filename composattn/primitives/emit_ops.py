"""One row per operation: its CuTe form. The twin of `graph/ops.py`; accuracy is stated where it is not exact.

Arguments arrive converted to the node's own type (to the common type for comparisons), as DSL values or Python
numbers, at least one of them a DSL value. A cheap instruction is chosen only where its error, as an absolute
error of the score (hence of the exponent), stays near fp32 rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64
from cutlass.cute import math as cm

from ..graph.expr import DType
from . import quotients
from .exponential import LN_2, LOG2_E, exp2
from .values import choose, plain

KIND = {DType.BOOL: Boolean, DType.INT32: Int32, DType.INT64: Int64, DType.FLOAT: Float32}

_TWO_PI_HIGH = 6.28125  # exact in 9 bits, so k * high is exact for k < 2^15
_TWO_PI_LOW = 2.0 * math.pi - 6.28125


def reciprocal(x: Any) -> Any:
    return cm.rcp(x, approx=True, ftz=True)  # 1 ulp


def _division(x: Any, y: Any) -> Any:
    if isinstance(y, (int, float)) and y != 0 and math.isfinite(1.0 / y):
        return x * (1.0 / y)  # 1 ulp from the division
    return cm.div(Float32(x), Float32(y), full=True)  # 2 ulp over the whole range


def tanh_of(exponent: Any) -> Any:
    """tanh of a number that was multiplied by 2 log2(e), 1 - 2 / (1 + e^2x): absolute error 2^-23.

    The tanh instruction errs by 2^-11, times a cap of 30 is 1.5 % of P.
    """
    return 1.0 - 2.0 * reciprocal(exp2(exponent) + 1.0)


def _turns(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """sin and cos after reduction to one turn: absolute error 2^-20 for |x| < 2 * 10^5."""

    def reduced(x: Any) -> Any:
        k = cm.roundeven(x * (1.0 / (2.0 * math.pi)))
        return function((x - k * _TWO_PI_HIGH) - k * _TWO_PI_LOW, fastmath=True)

    return reduced


def _is_float(*values: Any) -> bool:
    return any(isinstance(v, (float, Float32)) for v in values)


def _kind_of(*values: Any) -> Any:
    return next(type(v) for v in values if isinstance(v, cutlass.Numeric))


def _extreme(pick: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def of_two(x: Any, y: Any) -> Any:
        kind = _kind_of(x, y)
        return pick(kind(x), kind(y), propagate_nan=kind is Float32)  # torch's give NaN for NaN

    return of_two


maximum, minimum = _extreme(cm.max), _extreme(cm.min)


def _floordiv(x: Any, y: Any) -> Any:
    return quotients.floored(x, y) if _is_float(x, y) else plain(x) // plain(y)


def _mod(x: Any, y: Any) -> Any:
    if _is_float(x, y):
        return quotients.modulo(x, y)
    return x - _floordiv(x, y) * y  # Python's sign: that of the divisor


def _truncdiv(x: Any, y: Any) -> Any:
    if _is_float(x, y):
        return quotients.truncated(x, y)
    down = _floordiv(x, y)  # not by magnitudes: the least number has none
    return choose((down * y != x) & ((x < 0) ^ (y < 0)), down + 1, down)


def _fmod(x: Any, y: Any) -> Any:
    if _is_float(x, y):
        return quotients.remainder(x, y)
    return x - _truncdiv(x, y) * y


def _abs(x: Any) -> Any:
    if isinstance(x, (int, float)):
        return abs(x)
    return cm.abs(x) if isinstance(x, Float32) else maximum(x, -x)


def _sign(x: Any) -> Any:
    one = type(x)(1)
    return choose(x > 0, one, choose(x < 0, -one, one - one))  # 0 of NaN too, as in torch


def _power(x: Any, y: Any) -> Any:
    if isinstance(y, (int, float)) and float(y).is_integer() and 0 <= y <= 8:
        result = None
        for _ in range(int(y)):
            result = x if result is None else result * x
        return type(x)(1) if result is None else result
    if isinstance(y, float) and y == 0.5:
        return cm.sqrt(x)
    if not _is_float(x, y):
        return _integer_power(x, y)
    return cm.pow(Float32(x), Float32(y))


def _integer_power(x: Any, y: Any) -> Any:
    """Square and multiply over the bits that the result leaves to an exponent: five of 32; negative ones give 0."""
    kind = _kind_of(x, y)
    bits = 6 if kind is Int64 else 5
    base, exponent, result = kind(x), kind(y), kind(1)
    for bit in range(bits):
        result = choose(((exponent >> bit) & 1) == 1, result * base, result)
        if bit < bits - 1:
            base = base * base
    return choose(exponent < 0, kind(0), result)


def _logical(x: Any, y: Any, op: Callable[[Any, Any], Any]) -> Any:
    kind = _kind_of(x, y)
    return op(kind(x), kind(y))


def _round_to(narrow: Any) -> Callable[[Any], Any]:
    return lambda x: Float32(x).to(narrow).to(Float32)


def _where(condition: Any, x: Any, y: Any) -> Any:
    if isinstance(x, (bool, int, float)) and isinstance(y, (bool, int, float)):
        narrow = Boolean if isinstance(x, bool) else Int32 if all(-(2**31) <= v < 2**31 for v in (x, y)) else Int64
        kind = Float32 if _is_float(x, y) else narrow
        return choose(condition, kind(x), kind(y))
    return choose(condition, x, y)


CUTE: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": _division,
    "floordiv": _floordiv,
    "truncdiv": _truncdiv,
    "mod": _mod,
    "fmod": _fmod,
    "pow": _power,
    "neg": lambda x: -x,
    "whole": lambda x: x,
    "scale": lambda x: x,
    "abs": _abs,
    "sign": _sign,
    "relu": lambda x: choose(x <= 0, type(x)(0), x),  # of -0.0 it is 0.0, as torch's on a GPU
    "maximum": maximum,
    "minimum": minimum,
    "clamp_min": maximum,
    "clamp_max": minimum,
    "where": _where,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "and": lambda x, y: _logical(x, y, lambda a, b: a & b),
    "or": lambda x, y: _logical(x, y, lambda a, b: a | b),
    "xor": lambda x, y: _logical(x, y, lambda a, b: a ^ b),
    "not": lambda x: ~x,
    "lshift": lambda x, y: x << y,
    "rshift": lambda x, y: x >> y,
    "isnan": lambda x: x != x if isinstance(x, Float32) else Boolean(False),
    "isinf": lambda x: _abs(x) == math.inf if isinstance(x, Float32) else Boolean(False),
    "exp": lambda x: exp2(x * LOG2_E),  # relative error 2^-22 + |x| 2^-23
    "exp2": exp2,
    "expm1": lambda x: cm.expm1(x),
    "log": lambda x: cm.log2(x, fastmath=True) * LN_2,  # absolute error 2^-22 near 1
    "log2": lambda x: cm.log2(x, fastmath=True),
    "log1p": lambda x: cm.log1p(x),
    "sqrt": lambda x: cm.sqrt(x),
    "rsqrt": lambda x: cm.rsqrt(x),
    "tanh": lambda x: tanh_of(x * (2.0 * LOG2_E)),
    "sigmoid": lambda x: reciprocal(exp2(x * -LOG2_E) + 1.0),
    "sin": _turns(cm.sin),
    "cos": _turns(cm.cos),
    "erf": lambda x: cm.erf(x),
    "floor": lambda x: cm.floor(x),
    "ceil": lambda x: cm.ceil(x),
    "round": lambda x: cm.roundeven(x),
    "trunc": lambda x: cm.trunc(x),
    "cast_bool": lambda x: x != 0,
    "cast_int32": lambda x: x.to(Int32),
    "cast_int64": lambda x: x.to(Int64),
    "cast_float": lambda x: x.to(Float32),
    "cast_float16": _round_to(Float16),
    "cast_bfloat16": _round_to(BFloat16),
}


def convert(value: Any, wanted: DType) -> Any:
    """`value` (DSL value or Python number) as a value of graph type `wanted`."""
    if isinstance(value, (bool, int, float)):
        return float(value) if wanted is DType.FLOAT else bool(value) if wanted is DType.BOOL else int(value)
    kind = KIND[wanted]
    return value if isinstance(value, kind) else value.to(kind)
