"""What a mask shows of a strip's keys, as bits in words: which columns, the same in all tiles, and which rows of them.

Tested pair by pair, a tile of 128 x 128 took a thread 3.6 comparisons and 4 selections for each of its 64 scores (a
neighbourhood's four bounds one by one), more than its products and its softmax.
"""

from __future__ import annotations

import functools
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from ..analysis.residues import terms
from ..analysis.strips import in_columns
from ..graph.expr import Expr
from .emit import WORD, BoundMods, Evaluator
from .score_tile import ScoreTile
from .values import choose


class StripWords:
    """The mods at some rows, whose mask is of strips; a tile of keys begins with a row of the image.

    `tile`: any of those tiles. `wide`: columns of a strip's keys.
    """

    def __init__(self, mods: BoundMods, tile: ScoreTile, wide: int) -> None:
        self.mods = mods
        own = tile.shape.column_offsets
        self.width = sum(offset < wide for offset in own)  # columns of a row of the image that a thread has
        assert WORD % self.width == 0 and all(
            offset == own[c % self.width] + c // self.width * wide for c, offset in enumerate(own)
        ), "each row of the image has the same columns of a thread"
        mask = mods.mods.mask
        assert mask is not None, "strips are a mask's"
        every = list(terms(mask))
        self.of_columns = [term for term in every if in_columns(term, wide)]
        self.of_rows = [term for term in every if not in_columns(term, wide)]
        self.columns = [self._columns(tile, r) for r in range(tile.rows)]

    def _columns(self, tile: ScoreTile, r: int) -> Any:
        """The word of columns that row `r` sees, the same for each row of the image."""
        at = Evaluator(self.mods.mods, self.mods.leaves, tile, self.mods.work)
        shown: Any = Int32(0)
        for c in range(self.width):
            shown = shown | choose(_all(_values(at, self.of_columns, r, c)), Int32(1 << c), Int32(0))
            at.forget_element()
        return _unknown(shown * sum(1 << first for first in range(0, WORD, self.width)))

    def of(self, tile: ScoreTile) -> tuple[Int32, ...]:
        """For each row, and each `WORD` of its columns, bit c of column c: as `visible_words.rows_words`."""
        at = Evaluator(self.mods.mods, self.mods.leaves, tile, self.mods.work)
        end = self.mods.leaves.kv_len - tile.first_kv
        words: list[Any] = []
        for r in range(tile.rows):
            for word in range(0, tile.columns, WORD):
                rows: Any = Int32(0)
                for c in range(word, min(word + WORD, tile.columns), self.width):
                    seen = _all([*_values(at, self.of_rows, r, c), tile.shape.column_offsets[c] < end])
                    rows = rows | choose(seen, Int32(((1 << self.width) - 1) << (c - word)), Int32(0))
                    at.forget_element()
                words.append(self.columns[r] & rows)
        return tuple(words)


def _unknown(word: Int32) -> Any:
    """`word`, of which the compiler knows no bit.

    Columns that it knows to be hidden, as of an image of one strip, would share registers, and are copied apart again
    behind the fence before a product that writes all of them.
    """
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[word])


def _values(at: Evaluator, some: list[Expr], r: int, c: int) -> list[Any]:
    """Values of `some` expressions at an element; masks may have terms of rows, or of columns, alone."""
    return [at.value(term, r, c) for term in some]


def _all(conditions: list[Any]) -> Any:
    """Whether all of them hold; known when compiling where there is none."""
    return functools.reduce(lambda x, y: x & y, conditions) if conditions else True
