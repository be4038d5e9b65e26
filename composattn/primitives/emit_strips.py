"""What a mask shows of strips, as bits in words: which columns, the same in all tiles, and which rows of them.

Tested pair by pair, a tile of 128 x 128 took a thread 3.6 comparisons and 4 selections for each of its 64 scores (a
neighbourhood's four bounds one by one), more than its products and its softmax.
"""

from __future__ import annotations

import abc
import functools
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from ..analysis.residues import terms
from ..analysis.strips import by_rows, in_columns
from ..graph.expr import Expr
from .emit import WORD, Evaluator
from .score_tile import ScoreTile
from .values import choose


class StripWords(abc.ABC):
    """The mods at some lines of scores, whose mask is of strips; a tile begins with a row of the image.

    A line is a row of scores, or a column: its word has a bit for each of its places. `tile`: any of the tiles. `wide`:
    columns of a strip, of what lies along a line.
    """

    name: str  # of what lies along a line

    def __init__(self, mods: Any, tile: ScoreTile, wide: int) -> None:
        self.mods = mods
        own = self.places(tile)
        self.width = columns_of_row(own, wide)
        assert self.width, "each row of the image has the same columns of a thread"
        mask = mods.mods.mask
        assert mask is not None, "strips are a mask's"
        every = list(terms(mask))
        self.of_columns = [term for term in every if in_columns(term, wide, self.name)]
        others = [term for term in every if not in_columns(term, wide, self.name)]
        self.by_rows = [found for term in others if (found := by_rows(term, wide, self.name)) is not None]
        self.of_rows = [term for term in others if by_rows(term, wide, self.name) is None]
        lines = range(self.lines(tile))
        self.columns = [self._columns(tile, line, self.of_columns) for line in lines]
        self.in_rows = [[[self._columns(tile, line, [t]) for t in both] for _, *both in self.by_rows] for line in lines]

    @abc.abstractmethod
    def places(self, tile: ScoreTile) -> tuple[int, ...]:
        """Where a thread's places of a line are, from the first one on."""

    @abc.abstractmethod
    def lines(self, tile: ScoreTile) -> int:
        """How many lines a thread has."""

    @abc.abstractmethod
    def value(self, at: Evaluator, term: Expr, line: int, place: int) -> Any:
        """What a term of the mask is there."""

    @abc.abstractmethod
    def inside(self, tile: ScoreTile, line: int, place: int) -> list[Any]:
        """Whether the sequences have the line and the place, as far as the mask does not say it."""

    def evaluator(self, tile: ScoreTile) -> Evaluator:
        return Evaluator(self.mods.mods, self.mods.leaves, tile, self.mods.work)

    def _columns(self, tile: ScoreTile, line: int, of_columns: list[Expr]) -> Any:
        """The word of columns that a line shows by these terms, the same for each row of the image."""
        at = self.evaluator(tile)
        shown: Any = Int32(0)
        for c in range(self.width):
            seen = _all([self.value(at, term, line, c) for term in of_columns])
            shown = shown | choose(seen, Int32(1 << c), Int32(0))
            at.forget_element()
        return _unknown(shown * sum(1 << first for first in range(0, WORD, self.width)))

    def of(self, tile: ScoreTile) -> tuple[Int32, ...]:
        """For each line, and each `WORD` of its places, bit c of place c: as `visible_words.rows_words`."""
        at, count = self.evaluator(tile), len(self.places(tile))
        words: list[Any] = []
        for line in range(self.lines(tile)):
            for word in range(0, count, WORD):
                rows: Any = Int32(0)
                ours: list[Any] = [Int32(0) for _ in self.by_rows]
                for c in range(word, min(word + WORD, count), self.width):
                    seen = [self.value(at, term, line, c) for term in self.of_rows]
                    shown = Int32(((1 << self.width) - 1) << (c - word))
                    rows = rows | choose(_all([*seen, *self.inside(tile, line, c)]), shown, Int32(0))
                    for i, (row, *_) in enumerate(self.by_rows):
                        ours[i] = ours[i] | choose(self.value(at, row, line, c), shown, Int32(0))
                    at.forget_element()
                found = self.columns[line] & rows
                for chosen, (there, elsewhere) in zip(ours, self.in_rows[line], strict=True):
                    found = found & ((chosen & there) | (~chosen & elsewhere))
                words.append(found)
        return tuple(words)


class KeyWords(StripWords):
    """Which keys each row of a forward's scores sees."""

    name = "kv"

    def places(self, tile: ScoreTile) -> tuple[int, ...]:
        return tile.shape.column_offsets

    def lines(self, tile: ScoreTile) -> int:
        return tile.rows

    def value(self, at: Evaluator, term: Expr, line: int, place: int) -> Any:
        return at.value(term, line, place)

    def inside(self, tile: ScoreTile, line: int, place: int) -> list[Any]:
        return [tile.shape.column_offsets[place] < self.mods.leaves.kv_len - tile.first_kv]


class QueryWords(StripWords):
    """Which queries see each key of a backward's scores."""

    name = "q"

    def places(self, tile: ScoreTile) -> tuple[int, ...]:
        return tile.shape.row_offsets

    def lines(self, tile: ScoreTile) -> int:
        return tile.columns

    def value(self, at: Evaluator, term: Expr, line: int, place: int) -> Any:
        return at.value(term, place, line)

    def inside(self, tile: ScoreTile, line: int, place: int) -> list[Any]:
        """A query behind the last one has P = 0, but for what a score mod may make of it."""
        leaves = self.mods.leaves
        key = tile.shape.column_offsets[line] < leaves.kv_len - tile.first_kv
        query = tile.shape.row_offsets[place] < leaves.q_len - tile.first_q
        return [key] if self.mods.mods.score is None else [key, query]

    def evaluator(self, tile: ScoreTile) -> Evaluator:
        found: Evaluator = self.mods.evaluator(tile)
        return found


def columns_of_row(offsets: tuple[int, ...], wide: int) -> int:
    """How many places of a thread lie in each row of so `wide` columns; 0 where words have no whole rows of such."""
    width = sum(offset < wide for offset in offsets)
    alike = all(offset == offsets[c % width] + c // width * wide for c, offset in enumerate(offsets))
    return width if alike and WORD % width == 0 else 0


def _unknown(word: Int32) -> Any:
    """`word`, of which the compiler knows no bit.

    Columns that it knows to be hidden, as of an image of one strip, would share registers, and are copied apart again
    behind the fence before a product that writes all of them.
    """
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[word])


def _all(conditions: list[Any]) -> Any:
    """Whether all of them hold; known when compiling where there is none."""
    return functools.reduce(lambda x, y: x & y, conditions) if conditions else True
