"""Which tiles of keys of a backward are computed in pieces, one block per piece, so that no SM idles."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterator, Sequence

# in tiles of 64 queries by one of keys, on an H200: what a block takes beside these, what the kernel that adds
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
    tiles, longest = len(lengths) * repeats, max(lengths, default=0)
    equal = min(lengths, default=0) == longest
    whole = tiles - tiles % sms if equal else 0
    most = 8 * sms // max(1, tiles) if tiles <= MANY * sms else sms // max(1, tiles - whole)
    counts = range(1, max(1, min(MOST_PIECES, longest // SHORTEST, most)) + 1)
    if len(counts) == 1:  # of billions of tiles too
        return _cut(tiles, whole, 1)
    # whole rounds of equal tiles before them take as long whatever follows
    rest = [longest] * (tiles - whole) if equal else sorted([*lengths] * repeats, reverse=True)
    return _cut(tiles, whole, min(counts, key=lambda pieces: _time(rest, pieces, sms)))


def cut_in_order(lengths: Sequence[int], heads: int, group: int, sms: int, asked: int | None = None) -> tuple[Cut, int]:
    """Which tiles are cut, and of how many heads a section is, where dQ has a fixed order and ends backwards.

    `lengths`: query tiles that the tiles of a head visit for one of the `group` of query heads, in their order. Pieces
    are some of these heads: those along queries would wait for each other's turns. Sections are of as many heads as are
    `asked` for, or fill the SMs, and then at least two; or there is one, of tiles that all run at once.
    """
    tiles, of_group = len(lengths) * heads, [length * group for length in lengths]

    def sections(pieces: int) -> tuple[float, int, int]:
        """Time, pieces, heads of a section."""
        wave = min(max(1, round(sms / (pieces * max(1, len(lengths))))), -(-heads // 2))
        together = min(asked, heads) if asked else heads if tiles * pieces <= sms else wave
        return _time(list(_in_order(of_group, heads, together)), pieces, sms), pieces, together

    counts = range(1, min(MOST_PIECES, group, max(1, max(of_group, default=0) // SHORTEST)) + 1)
    _, pieces, together = min(sections(pieces) for pieces in counts if group % pieces == 0)
    return _cut(tiles, 0, pieces), together


def _cut(tiles: int, whole: int, pieces: int) -> Cut:
    return Cut(tiles, whole if pieces > 1 else tiles, pieces)


def _in_order(lengths: Sequence[int], heads: int, together: int) -> Iterator[int]:
    """Lengths for all heads, section after section: the last tiles first, but of the last section (`TileScheduler`)."""
    sections = -(-heads // together)
    each = -(-heads // sections)
    for section, count in enumerate([heads - (sections - 1) * each, *[each] * (sections - 1)]):
        backwards = 0 < section == sections - 1
        for length in lengths if backwards else reversed(lengths):
            yield from itertools.repeat(length, count)


def _time(lengths: Sequence[int], pieces: int, sms: int) -> float:
    """When all pieces have run, each started on the SM that is free first, and are added up."""
    free = [0.0] * sms
    for length in lengths:
        for _ in range(pieces):
            heapq.heapreplace(free, free[0] + length / pieces + BLOCK)
    return max(free) + (GATHER + PIECE * len(lengths) * pieces if pieces > 1 else 0.0)
