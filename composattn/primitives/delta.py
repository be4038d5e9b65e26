"""Statistics of a query row that the backward needs: its normalizer, and D, what the softmax subtracts from dP."""

import math

import cutlass.cute as cute
from cutlass import Float32

from composattn.primitives.values import choose


def row_product(part: Float32, lanes: int) -> Float32:
    """Sum of `part` over `lanes` neighbouring lanes, in all of them, in a fixed order."""
    distance = 1
    while distance < lanes:
        part = part + cute.arch.shuffle_sync_bfly(part, distance)
        distance *= 2
    return part


def row_statistics(lse: Float32, product: Float32, dlse: Float32) -> tuple[Float32, Float32]:
    """(log2(e)·LSE, D) with D = rowsum(dO·O) - dLSE, as d LSE / dS is P (FlashAttention-2, section 3.1).

    A row with nothing to attend (LSE = -inf) gets inf, so that 2^(s - inf) is 0, and D = 0, whatever its dLSE is.
    """
    nothing = lse == -Float32.inf
    return (
        choose(nothing, Float32.inf, lse * math.log2(math.e)),
        choose(nothing, Float32(0.0), product - dlse),
    )
