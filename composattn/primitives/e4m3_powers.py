"""2^x as numbers of e4m3, a part of them by no exponential: the bits of a float are nearly its logarithm.

2^x is 1 + f times a power of two, f the fraction of x, but for at most 6.1 %: a polynomial of degree 1. `BENT` takes
away what it is too large in the mean. With the three digits of e4m3 its errors are 3.1 % in the root mean square, where
rounding 2^x itself leaves 2.6; a whole x is exact, and small numbers have the digits that e4m3 has for them.

Bits of fp16 below its least normal number count its 2^-24: what rounds n 2^-24 to fp16 leaves n, below 1024, and 0 for
what is less. With 8 of them an octave they are the upper bits of the fp16 number 1 + f, times a power of two. So two
numbers take two conversions and a shift, where hardware takes two exponentials and a conversion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute import math as cm

from .exponential import exp2
from .exponential_units import ExponentialUnits
from .online_softmax import OnlineSoftmax
from .score_tile import ScoreTile

STEPS = 8  # of an octave
SHIFT = 7  # to where fp16 has them
BIAS = 15  # of fp16's exponent
BENT = -0.0573  # octaves
LEAST = 2.0**-24  # of fp16
UNIT, FIRST = STEPS * LEAST, STEPS * (BIAS + BENT) * LEAST  # what x is multiplied by, and what is added


class E4m3Softmax(OnlineSoftmax):
    """`OnlineSoftmax` that leaves in some columns, those of a polynomial, what `e4m3` makes probabilities of."""

    def exponentials(
        self, tile: ScoreTile, r: int, columns: Sequence[int], units: ExponentialUnits | None = None
    ) -> None:
        assert not self.adds, "sums are of what products round"
        units = units or self.units
        shift = cm.fma(self.scaled_shift[r], UNIT, -FIRST)
        for some, factor, lift in tile.runs_of(r, columns):
            assert lift is None, "lifts are taken back from sums"
            scale = self.scale_of(r) if factor is None else factor * self.scale_of(r)
            kinds = [c for c in some if not units.is_polynomial(c)], [c for c in some if units.is_polynomial(c)]
            by_hardware = self.arithmetic.scaled((tile.values[r, c] for c in kinds[0]), scale, self.scaled_shift[r])
            others = self.arithmetic.scaled((tile.values[r, c] for c in kinds[1]), scale * UNIT, shift)
            for c, exponent in zip(kinds[0], by_hardware, strict=True):
                tile.values[r, c] = exp2(exponent)
            for c, number in zip(kinds[1], others, strict=True):
                tile.values[r, c] = number


def e4m3(numbers: Sequence[Any], powers: tuple[bool, bool] = (False, False)) -> Any:
    """Four numbers as a word of e4m3; `powers`: which two of them are what `E4m3Softmax` leaves."""
    pairs = ("low", "{$r1}, {$r0}", powers[0]), ("high", "{$r3}, {$r2}", powers[1])
    lines = "\n".join(_rounded(*pair) for pair in pairs)
    return cute.arch.inline_ptx(
        f"{{\n.reg .b16 low, high;\n{lines}\nmov.b32 {{$w0}}, {{low, high}};\n}}",
        write_only_types=[Int32],
        read_only_args=list(numbers),
    )


def _rounded(half: str, two: str, powers: bool) -> str:
    if not powers:
        return f"cvt.rn.satfinite.e4m3x2.f32 {half}, {two};"
    in_fp16 = f"{{\n.reg .b32 two;\ncvt.rn.relu.f16x2.f32 two, {two};\nshl.b32 two, two, {SHIFT};"
    return f"{in_fp16}\ncvt.rn.satfinite.e4m3x2.f16x2 {half}, two;\n}}"


__all__ = ["E4m3Softmax", "e4m3"]
