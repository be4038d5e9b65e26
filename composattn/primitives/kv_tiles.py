"""Which kv tiles a q tile visits, and which of them need a test.

A rule is data, decided by the plan: `Band(lo, hi)` says that the row at q sees at most kv in [lo, hi), both
ends non-decreasing in q. The kernel asks it for a `TileSequence`: tiles in visiting order, cut into segments
that are all tested or all free of tests, so that each becomes one loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from composattn.primitives.values import Fixed, larger, smaller

End = Callable[[Any], Any]  # q -> kv position


@dataclasses.dataclass
class Segment(Fixed):
    """`count` neighbouring tiles from `first` downwards; `tested`: whether any element may be invisible."""

    first: Any
    count: Any
    tested: bool


@dataclasses.dataclass
class TileSequence(Fixed):
    """`count` tiles in visiting order; the first one is always tested and not part of `segments`.

    Tile number i (0 <= i < count) is `first - i`: from the right end to the left, so that the tile that may
    reach beyond the sequence is the first one.
    """

    first: Any
    count: Any
    segments: list[Segment]

    def tile(self, i: Any) -> Any:
        return self.first - i


def band_sequence(
    q_first: Any,
    q_last: Any,
    kv_len: Any,
    tile_n: int,
    lo: End | None,
    hi: End | None,
    exact: bool,
) -> TileSequence:
    """Tiles for rows q_first..q_last (inclusive, inside the sequence).

    `lo`/`hi` None stand for 0 and kv_len. `exact`: inside the band nothing is masked, so inner tiles need no
    test; otherwise every tile does. Takes Python ints (for checks with no GPU) or kernel values.
    """
    end = kv_len if hi is None else smaller(kv_len, larger(hi(q_last), 0))
    stop = (end + (tile_n - 1)) // tile_n
    start = 0 if lo is None else larger(lo(q_first), 0) // tile_n
    count = larger(stop - start, 0)
    rest = stop - 1  # the first tile, stop - 1, is peeled off and tested
    if not exact:
        return TileSequence(rest, count, [Segment(rest - 1, larger(rest - start, 0), True)])
    segments = []
    # tiles below `full_stop` lie left of every row's right end; those from `full_start` on right of every left end
    full_stop = rest
    if hi is not None:
        full_stop = smaller(rest, larger(larger(hi(q_first), 0) // tile_n, start))
        segments.append(Segment(rest - 1, larger(rest - full_stop, 0), True))
    full_start = start
    if lo is not None:
        inside = (larger(lo(q_last), 0) + (tile_n - 1)) // tile_n
        full_start = smaller(larger(inside, start), larger(full_stop, start))
    segments.append(Segment(full_stop - 1, larger(full_stop - full_start, 0), False))
    if lo is not None:
        left_stop = smaller(full_start, rest)
        segments.append(Segment(left_stop - 1, larger(left_stop - start, 0), True))
    return TileSequence(rest, count, segments)
