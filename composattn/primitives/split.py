"""The weights of the parts of a row of attention that was split over kv: exact, from sums of exponentials.

A part s has its own output O_s and LSE_s = log sum exp(scores of the part). The whole has LSE = log sum exp(LSE_s) and
O = sum O_s exp(LSE_s - LSE) (Dao et al. 2023, Flash-Decoding; the rule is Milakov and Gimelshein's, 2018).
"""

from __future__ import annotations

import functools
from operator import add

import cutlass.cute as cute
from cutlass import Float32, Int32

from .exponential import LN_2, LOG2_E, exp2
from .lanes import LANES, WARP, over_lanes
from .values import Fixed, choose, smaller

MOST_PARTS = 4 * LANES


class Weights(Fixed):
    """Weights of a row's parts, the same in all lanes of a warp; `lse` is the whole's, -inf if nothing is visible."""

    def __init__(self, parts: cute.Tensor, lane: Int32) -> None:
        """`parts`: LSE of each part, fp32 (splits,), natural logarithm; -inf where a part saw nothing.

        At most `MOST_PARTS`, each read by one lane: with no loop what else is read need not wait for these.
        """
        self.parts = parts
        mine = [_of_lane(parts, lane + n) for n in range(0, MOST_PARTS, LANES)]
        maximum = over_lanes(cute.arch.fmax, functools.reduce(cute.arch.fmax, mine), WARP)
        # nothing visible: subtract 0, so that exp(-inf - 0) is 0 and not NaN
        self.shift = choose(maximum == -Float32.inf, Float32(0.0), maximum)
        own = functools.reduce(add, (_exp(lse - self.shift) for lse in mine))
        total = over_lanes(add, own, WARP)
        nothing = (maximum == -Float32.inf) & (total == 0.0)
        self.factor = choose(nothing, Float32(0.0), cute.arch.rcp_approx(total))
        log = cute.math.log2(total, fastmath=True) * LN_2
        self.lse = choose(nothing, -Float32.inf, self.shift + log)

    def of(self, s: Int32) -> Float32:
        """The weight of part `s`; exactly 0 if it saw nothing."""
        return _exp(self.parts[s] - self.shift) * self.factor


def _exp(x: Float32) -> Float32:
    return exp2(x * LOG2_E)


def _of_lane(parts: cute.Tensor, s: Int32) -> Float32:
    """LSE of part `s`, of one that is not there -inf."""
    last = cute.size(parts) - 1
    return choose(s <= last, parts[smaller(s, last)], -Float32.inf)
