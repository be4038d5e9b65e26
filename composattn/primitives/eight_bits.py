"""8-bit floats in registers: the least scale of a range, what rounding costs, four numbers to a word."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute import math as cm

from .values import larger


class EightBitFormat(NamedTuple):
    """`name` in PTX; the largest number is 1.75 · 2^`top`; `digits` of a number, its first one among them."""

    name: str
    top: int
    digits: int

    def scale(self, largest: Float32, mantissa: Any, inverse: Any) -> tuple[Float32, Float32]:
        """The least `mantissa` · 2^n, n at least -126, by which `largest` fits, and what to multiply by."""
        bits = (largest * inverse).bitcast(Int32)
        exponent = larger((bits + ABOVE_1_75 >> 23) - self.top, 1)
        scale, factor = (e << 23 for e in (exponent, 254 - exponent))
        return scale.bitcast(Float32) * mantissa, factor.bitcast(Float32) * inverse

    def rounding_error(self, x: Float32, mantissa: float) -> Float32:
        """What rounding `x` at this scale, times any power of two, adds to it, in units of the scale."""
        scaled = x * (1 / mantissa)
        above = float((1 << 24 - self.digits) + 1)  # times it, a number keeps the digits wanted (Veltkamp)
        return cm.fma(scaled, -above, scaled * above)

    def word(self, four: list[Float32]) -> Int32:
        """Four numbers as bytes, the first one lowest; what is beyond the largest becomes that."""
        narrow = f"cvt.rn.satfinite.{self.name}x2.f32"
        return cute.arch.inline_ptx(
            "{\n.reg .b16 low, high;\n"
            f"{narrow} low, {{$r1}}, {{$r0}};\n{narrow} high, {{$r3}}, {{$r2}};\nmov.b32 {{$w0}}, {{low, high}};\n"
            "}",
            write_only_types=[cutlass.Int32],
            read_only_args=four,
        )


ABOVE_1_75 = 0x1FFFFF  # added to the bits of a number, it makes the exponent one more where the mantissa is beyond 1.75
E4M3 = EightBitFormat("e4m3", 8, 4)
E5M2 = EightBitFormat("e5m2", 15, 3)
