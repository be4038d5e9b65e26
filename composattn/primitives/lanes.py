"""Sums and maxima over lanes of a warp, always in the same order; each of these lanes gets the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import cutlass.cute as cute

from .values import choose

LANES = 32


def neighbours(lanes: int) -> tuple[int, ...]:
    """What tells `lanes` neighbouring lanes apart, a power of two of them: the value of each bit of their numbers."""
    return tuple(1 << bit for bit in range(lanes.bit_length() - 1))


WARP = neighbours(LANES)


def over_lanes(op: Callable[[Any, Any], Any], value: Any, distances: Iterable[int]) -> Any:
    """`value` of all lanes that differ in the bits `distances`, one `op` for each: a butterfly."""
    for distance in distances:
        value = op(value, cute.arch.shuffle_sync_bfly(value, distance))
    return value


def a_lane_each(values: list[Any]) -> Any:
    """The sum of `values[lane]` over all lanes, of which there are as many as values.

    A lane hands on half of what it still sums, and keeps the half that its own is in: 31 exchanges, not 5 for each.
    """
    assert len(values) == LANES
    lane = cute.arch.lane_idx()
    for distance in reversed(WARP):
        upper, half = lane & distance != 0, len(values) // 2
        pairs = list(zip(values[:half], values[half:], strict=True))
        kept = [choose(upper, b, a) for a, b in pairs]
        given = [choose(upper, a, b) for a, b in pairs]
        values = [k + cute.arch.shuffle_sync_bfly(g, distance) for k, g in zip(kept, given, strict=True)]
    return values[0]


def transposed_words(words: list[Any], lane: Any) -> list[Any]:
    """Transposes 4 x 4 words of four neighbouring lanes: lane i gets the i-th word of each, in the lanes' order."""
    for distance in neighbours(len(words)):
        upper, found = lane & distance != 0, list(words)
        for i in (i for i in range(len(words)) if not i & distance):
            j = i | distance
            got = cute.arch.shuffle_sync_bfly(choose(upper, words[i], words[j]), distance)
            found[i], found[j] = choose(upper, got, words[i]), choose(upper, words[j], got)
        words = found
    return words


def first_of(lane: Any, distances: tuple[int, ...]) -> Any:
    """Whether `lane` is the first of those that differ in these bits; all are where there is no such bit."""
    if not distances:
        return True
    mask = sum(distances)
    upper = mask + min(distances) == LANES  # a comparison says it with no mask
    return lane < min(distances) if upper else lane & mask == 0
