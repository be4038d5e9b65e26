"""Which tiles of keys of a backward are computed in pieces, one block per piece, so that no SM idles."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterable, Sequence

# in query tiles of one tile of keys, on an H200: what a block takes beside its query tiles, what the kernel that adds
# up the pieces takes, and what a piece's sums take on their way through memory with all SMs at it
BLOCK, GATHER, PIECE = 2.0, 1.5, 0.03
SHORTEST = 6  # query tiles of a piece
MOST_PIECES = 16
MANY = 4  # tiles per SM; where there are more, none is cut, but of equally long ones those of a last round


@dataclasses.dataclass(frozen=True)
class Cut:
    """The first `whole` of `tiles` tiles in their order have a block each, the others `pieces` blocks each.

    `tiles` None: all that a call has, each cut.
    """

    tiles: int | None
    whole: int
    pieces: int

    @property
    def cut(self) -> int:
        assert self.tiles is not None, "only a call knows how many tiles it has"
        return self.tiles - self.whole

    def __str__(self) -> str:
        tiles = "each" if self.tiles is None else f"of {self.tiles} the last {self.cut}"
        return f"{tiles} in {self.pieces} pieces"


def best_cut(lengths: Sequence[int], repeats: int, sms: int) -> Cut:
    """For `repeats` sequences of tiles that visit so many query tiles, longest first.

    Many tiles are left whole: those of many lengths even out by themselves, and of equally long ones whole blocks go
    over the queries in step, so that what they read and add to stays in L2 (24 heads on 3 with no mask, cut, took 1.12
    times as long), but for what is left over of whole rounds where all its pieces run at once: of 31.03 rounds (D 64,
    8k) 5 %, of 19.4 (D 192, 8k, pairs of blocks) 2. Few are all cut alike, if at all, or of equally long ones those of
    the last round.
    """
    tiles = len(lengths) * repeats
    longest, candidates = max(lengths, default=0), [Cut(tiles, tiles, 1)]
    equal = min(lengths, default=0) == longest
    left = tiles % sms
    if tiles > MANY * sms and equal and left:
        pieces = min(MOST_PIECES, longest // SHORTEST, sms // left)
        return Cut(tiles, tiles - left, pieces) if pieces > 1 else candidates[0]
    if tiles > (2 if equal else MANY) * sms:
        return candidates[0]
    whole = tiles - tiles % sms if equal else 0
    counts = range(2, min(MOST_PIECES, longest // SHORTEST) + 1)
    candidates += [Cut(tiles, whole, pieces) for pieces in counts if tiles * pieces <= 8 * sms]
    ordered = [length for length in sorted(lengths, reverse=True) for _ in range(repeats)]
    return min(candidates, key=lambda cut: _makespan(_pieces(ordered, cut), sms) + _gather(cut))


def cut_in_order(lengths: Sequence[int], heads: int, group: int, sms: int, asked: int | None = None) -> tuple[Cut, int]:
    """Which tiles are cut, and of how many heads a section is, where dQ has a fixed order and ends backwards.

    `lengths`: query tiles that the tiles of a head visit for one of the `group` of query heads, in their order. Pieces
    are some of these heads: those along queries would wait for each other's turns. Sections are of as many heads as are
    `asked` for, or fill the SMs, and then at least two; or there is one, of tiles that all run at once.
    """
    tiles, longest = len(lengths) * heads, max(lengths, default=0) * group
    best = math.inf, Cut(tiles, tiles, 1), heads
    for pieces in range(1, min(MOST_PIECES, group, max(1, longest // SHORTEST)) + 1):
        if group % pieces:
            continue
        cut = Cut(tiles, 0, pieces) if pieces > 1 else Cut(tiles, tiles, 1)
        wave = max(1, round(sms / (pieces * max(1, len(lengths)))))
        together = min(asked, heads) if asked else heads if tiles * pieces <= sms else min(wave, -(-heads // 2))
        ordered = [length * group for length in _in_order(lengths, heads, together)]
        time = _makespan(_pieces(ordered, cut), sms) + _gather(cut)
        best = min(best, (time, cut, together), key=lambda found: found[0])
    return best[1:]


def _in_order(lengths: Sequence[int], heads: int, together: int) -> Iterable[int]:
    """Lengths for all heads, section after section: the last tiles first, but of the last section (`TileScheduler`)."""
    sections = -(-heads // together)
    each = -(-heads // sections)
    for section in range(sections):
        count = each if section else heads - (sections - 1) * each
        backwards = 0 < section == sections - 1
        for length in lengths if backwards else reversed(lengths):
            yield from itertools.repeat(length, count)


def _gather(cut: Cut) -> float:
    return GATHER + PIECE * cut.cut * cut.pieces if cut.cut else 0.0


def _pieces(lengths: Sequence[int], cut: Cut) -> Iterable[float]:
    """Times of blocks, in their order."""
    yield from (length + BLOCK for length in lengths[: cut.whole])
    yield from (length / cut.pieces + BLOCK for length in lengths[cut.whole :] for _ in range(cut.pieces))


def _makespan(times: Iterable[float], sms: int) -> float:
    """When the last block ends, each started on the SM that is free first."""
    free = [0.0] * sms
    for time in times:
        heapq.heapreplace(free, free[0] + time)
    return max(free)


__all__ = ["MANY", "Cut", "best_cut", "cut_in_order"]
