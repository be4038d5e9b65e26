"""Which query tiles a tile of keys visits, in which order, and which of them need a test.

The transposed twin of `kv_tiles`: runs of queries (`TileInterval`, evaluated for the kv tile at hand) become tiles, in
ascending order, each at most once. Takes Python ints as well as kernel values, so the rule is checked with no GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .values import Fixed, choose, larger, opaque, smaller


@dataclasses.dataclass
class QueryRun(Fixed):
    """`count` tiles from `first` upwards, or back to it; those in [full_start, full_stop) need no test."""

    first: Any
    count: Any
    full_start: Any
    full_stop: Any
    backwards: Any = False

    def tile(self, i: Any) -> Any:
        """The tile visited `i`-th, 0 <= i < count."""
        if self.backwards is False:
            return self.first + i
        return choose(self.backwards, self.first + self.count - 1, self.first) + i * choose(self.backwards, -1, 1)

    def tested(self, i: Any) -> Any:
        """Whether an element of the `i`-th tile may be invisible."""
        tile = self.tile(i)
        return (tile < self.full_start) | (tile >= self.full_stop)

    def tested_where(self, everywhere: Any) -> QueryRun:
        """This run, of which all tiles need a test where `everywhere`: no number more that a loop over them keeps."""
        return dataclasses.replace(self, full_stop=opaque(choose(everywhere, 0, self.full_stop)))

    def visits(self, tile: Any) -> Any:
        return (tile >= self.first) & (tile < self.first + self.count)

    def piece(self, index: Any, count: Any, head: Any = 0) -> QueryRun:
        """One of `count` runs that together are this one: the `index`-th, for each `head` another.

        Six tiles in five pieces leave two to one of them. If it was the same for all eight heads of a group, its block
        had 16 tiles and the others 8.
        """
        index, length = (index + head) % count, larger(self.count, 0)
        start, stop = length * index // count, length * (index + 1) // count
        return dataclasses.replace(self, first=self.first + start, count=stop - start)


@dataclasses.dataclass
class ListedQueryRun(Fixed):
    """`count` tiles of a list, ascending: `row` has 2 * tile + (1 if it needs a test).

    Tiles from `whole` on have rows beyond the last query, and need a test for them.
    """

    row: Any
    earlier: Any
    count: Any
    whole: Any

    def tile(self, i: Any) -> Any:
        """The tile visited `i`-th, 0 <= i < count."""
        return self.row[i] // 2

    def tested(self, i: Any) -> Any:
        """Whether an element of the `i`-th tile may be invisible."""
        return (self.row[i] % 2 == 1) | (self.tile(i) >= self.whole)

    def tested_where(self, everywhere: Any) -> ListedQueryRun:
        """This run, each of whose tiles needs a test if `everywhere`."""
        return dataclasses.replace(self, whole=opaque(choose(everywhere, 0, self.whole)))

    def before(self, i: Any) -> Any:
        """How many tiles of keys beyond this one visit the `i`-th tile too: in a fixed order they come before."""
        return self.earlier[i]


def query_runs(
    intervals: list[tuple[Any, Any, Any, Any]], q_len: Any, tile_m: int, padding_is_harmless: bool
) -> list[QueryRun]:
    """Tiles for `intervals` (begin, end, full_begin, full_end), ascending.

    `padding_is_harmless`: rows of a tile beyond the last query need no test.
    """
    tiles = (q_len + (tile_m - 1)) // tile_m
    seen: Any = 0  # tiles below it have been visited
    runs = []
    for begin, end, full_begin, full_end in intervals:
        begin, end = larger(begin, 0), smaller(end, q_len)
        end = choose(end > begin, end, 0)  # else an empty interval within a tile would visit it
        start = larger(begin // tile_m, seen)
        count = larger((end + (tile_m - 1)) // tile_m - start, 0)
        seen = choose(count > 0, start + count, seen)
        full_start = (larger(full_begin, 0) + (tile_m - 1)) // tile_m
        full_stop = larger(smaller(full_end, q_len), 0) // tile_m
        if padding_is_harmless:
            full_stop = choose(full_end >= q_len, tiles, full_stop)
        runs.append(QueryRun(start, count, full_start, full_stop))
    return runs
