"""Quotients and remainders of fp32 numbers with the bits that torch gives them.

They decide what is visible: of `(kv / 41).int() == (q / 41).int()` a quotient that is one bit short puts key 41 into
the block before its own. So nothing here is a product with a reciprocal, and a remainder is the exact one.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32
from cutlass.cute import math as cm

from .values import choose

_STAGE = 2.0**22  # of the quotient; one of up to 24 bits is a whole number in fp32


def quotient(x: Any, y: Any) -> Any:
    """x / y, rounded once."""
    return cm.div(Float32(x), Float32(y))


def truncated(x: Any, y: Any) -> Any:
    """x / y towards zero."""
    return cm.trunc(quotient(x, y))


def remainder(x: Any, y: Any) -> Any:
    """x - y * n with the sign of x, n whole: `torch.fmod`; exact where x / y is below 2^46."""
    x, y = Float32(x), Float32(y)
    left = _reduced(_reduced(x, cm.abs(y) * _STAGE), cm.abs(y))
    return choose(left == 0.0, x * 0.0, left)  # a zero has the sign of x as well


def _reduced(x: Any, y: Any) -> Any:
    """x less a multiple of y > 0, which leaves less than y; itself where it is less than y, infinite ones too."""
    left = cm.fma(-cm.trunc(quotient(x, y)), y, x)  # exact; the quotient may have been rounded up to the next number
    left = choose((left < 0.0) & (x > 0.0), left + y, choose((left > 0.0) & (x < 0.0), left - y, left))
    return choose(cm.abs(x) < y, x, left)


def modulo(x: Any, y: Any) -> Any:
    """`x % y` with the sign of y, as `torch.remainder`."""
    x, y = Float32(x), Float32(y)
    left = remainder(x, y)
    return choose(_other_side(left, y), left + y, left)


def floored(x: Any, y: Any) -> Any:
    """`x // y`, that of `modulo`: 3.0 // 0.1 is 29, as 0.1 is a little more than a tenth."""
    x, y = Float32(x), Float32(y)
    left = remainder(x, y)
    whole = quotient(x - left, y)
    whole = cm.roundeven(choose(_other_side(left, y), whole - 1.0, whole))
    exact = quotient(x, y)
    whole = choose(whole == 0.0, exact * 0.0, whole)  # a zero has the sign of x / y
    return choose(y == 0.0, exact, whole)


def _other_side(left: Any, y: Any) -> Any:
    """Whether a remainder is on the other side of zero than the divisor."""
    return ((left < 0.0) & (y > 0.0)) | ((left > 0.0) & (y < 0.0))
