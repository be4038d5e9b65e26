"""Rescale thresholds of Hopper forwards without speculative maxima."""

from __future__ import annotations

from ...call.problem import Problem
from ...primitives.rescale_threshold import RescaleThreshold
from ..fused.tiles.traits import keys

# With outliers, errors by sums are 1.00 to 1.01 of those with no lag, by 2^8 whatever sums are 1.06 to 1.13, by 2^3
# 1.02 to 1.04. Of N(0, 1) a warp is rescaled in one tile of 50 and less, in causal calls of 2k in one of 7 to 10; twice
# the share makes half of that, and errors by 0.4 % larger where the output is wide. There sums are read at doublings:
# scores that deviate by 3 and 6 gain 1 to 4 %; narrow outputs lose 0.4 by it
BY_SUMS, BY_SUMS_WIDE = RescaleThreshold(8.0, share=1 / 32), RescaleThreshold(8.0, share=1 / 16, sums_read="doubled")
BY_SUMS_WIDEST = RescaleThreshold(8.0, share=1 / 16)  # D 512 has nothing under the softmax, and loses 0 to 2 % by it
ALONE = RescaleThreshold(3.0)
FEW_KEYS_ALONE = 1024  # up to which noting a row's sums takes 1 to 5 % of a call


def threshold_of(problem: Problem, by_sums: RescaleThreshold | None = None) -> RescaleThreshold:
    """By sums, as asked for or as Dv wants it, but where rows have few keys or may not depend on others.

    A warp notes sums of all its rows when one is rescaled: a row's bits depend on those beside it.
    """
    if keys(problem) <= FEW_KEYS_ALONE or problem.schedule.batch_invariant:
        return ALONE
    return by_sums or (BY_SUMS if problem.head_dim_v <= 128 else BY_SUMS_WIDE)
