"""Statistics of a query row that the backward needs: its normalizer, and D, which is subtracted from dP."""

from cutlass import Float32

from .exponential import LOG2_E
from .values import choose


def row_statistics(lse: Float32, product: Float32, dlse: Float32) -> tuple[Float32, Float32]:
    """(log2(e)·LSE, D) with D = rowsum(dO·O) - dLSE, as d LSE / dS is P (FlashAttention-2, section 3.1).

    A row with nothing to attend (LSE = -inf) gets inf, so that 2^(s - inf) is 0, and D = 0, whatever its dLSE is.
    """
    nothing = lse == -Float32.inf
    return (
        choose(nothing, Float32.inf, lse * LOG2_E),
        choose(nothing, Float32(0.0), product - dlse),
    )
