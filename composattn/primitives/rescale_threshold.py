"""Rescale threshold: how far a row's largest score may exceed its running maximum before sums are rescaled."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class RescaleThreshold:
    """A maximum stays where a score is above it by no more than `most`, in log2 units (FlashAttention-4's rule).

    Where there is a `share`, the score's probability is also at most this share of what the row's sum will be if the
    tiles to come add as much as those before. For a probability that is no power of 2 is rounded, as the largest one by
    an exact maximum, which is 1, is not; and a row notices it where it is much of the sum.

    `sums_read`: sums are known behind the first tile, and again whenever a warp was rescaled, or whenever twice as many
    tiles were summed; a maximum that rises in between is exact until then.
    """

    most: float
    share: float | None = None
    sums_read: Literal["rescaled", "doubled"] = "rescaled"

    def __str__(self) -> str:
        if not self.most:
            return "behind each tile that looks for its maximum"
        of_sum = "" if self.share is None else f", or a probability is above 1/{1 / self.share:g} of its row's sum"
        return f"when a maximum rose by 2^{self.most:g}{of_sum}"


ALWAYS_RESCALE = RescaleThreshold(0.0)
BY_LOG2_ALONE = RescaleThreshold(8.0)
