"""Exponentials of fp32 numbers, and what turns natural units into those of base 2."""

from __future__ import annotations

import math
from typing import Any

import cutlass.cute as cute
from cutlass import Float32

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


def exp2(x: Any) -> Float32:
    """2^x by hardware: relative error 2^-22; results below 2^-126 are 0."""
    return cute.math.exp2(x, fastmath=True)
