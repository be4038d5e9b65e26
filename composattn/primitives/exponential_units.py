"""Which unit of an SM computes 2^x for which columns of a tile, as a field of plans."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ExponentialUnits:
    """Columns whose 2^x a polynomial of `degree` 3 to 5 gives: the last `polynomial` of every `period` of a thread.

    Degree 1 is for e4m3 alone, which rounds it, see `e4m3_powers`.

    An SM computes 16 exponentials per clock and 128 multiply-adds; a softmax that waits for the first can
    give a part of its columns to the second (FlashAttention-4, section 3.1.3, has 10 to 25 %). See `exponential`.
    """

    polynomial: int = 0
    period: int = 1
    degree: int = 3

    def is_polynomial(self, column: int) -> bool:
        return column % self.period >= self.period - self.polynomial

    def __str__(self) -> str:
        if not self.polynomial:
            return "all columns by hardware"
        return f"{self.polynomial} of {self.period} columns by a polynomial of degree {self.degree}"


HARDWARE = ExponentialUnits()
