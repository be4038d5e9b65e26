"""A rotation of rows in registers by signs and Hadamard's matrix, as `composattn.quantising.rotated` has it."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from .lanes import neighbours
from .values import Fixed, choose


class Rotation(Fixed):
    """Rotates blocks of `size` channels, of which each of neighbouring lanes has `elements` side by side.

    Sums and differences of channels 1, 2, 4, ... apart: first those of a thread, then those of two lanes.
    """

    def __init__(self, size: int, elements: int, lane: Int32):
        self.size, self.elements, self.lane = size, elements, lane
        self.distances = neighbours(max(1, size // elements))
        self.sign = Float32(1.0) if not self.distances else _sign(lane % (size // elements))
        self.upper = [choose(lane & distance != 0, Float32(-1.0), Float32(1.0)) for distance in self.distances]

    def __call__(self, values: list[Float32]) -> list[Float32]:
        signs = self.sign, -self.sign
        values = [x * signs[_is_odd(e % self.size)] for e, x in enumerate(values)]
        distance = 1
        while distance < min(self.size, self.elements):
            for a in (i for i in range(self.elements) if not i & distance):
                b = a | distance
                values[a], values[b] = values[a] + values[b], values[a] - values[b]
            distance *= 2
        for distance, upper in zip(self.distances, self.upper, strict=True):
            values = [cute.arch.shuffle_sync_bfly(x, distance) + x * upper for x in values]
        return [x * self.size**-0.5 for x in values]


def _is_odd(i: int) -> int:
    """Whether an odd number of the pairs of bits of `i` are both set."""
    return (i & i >> 1 & 0x5555).bit_count() % 2


def _sign(block: Int32) -> Float32:
    """What a lane's channels share of their signs: no pair of bits is cut between lane and channel."""
    pairs: Any = block & block >> 1
    odd = (pairs ^ pairs >> 2 ^ pairs >> 4) & 1
    return choose(odd == 1, Float32(-1.0), Float32(1.0))
