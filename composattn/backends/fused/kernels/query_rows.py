"""A thread's query rows of one work tile: which they are, what tests their tiles, what they store."""

import dataclasses
from typing import Any, Generic

import cutlass.cute as cute
from cutlass import Float32, Int32

from ....analysis.captured_gradient import Pattern, pattern_of
from ....primitives.branches import store_if
from ....primitives.emit import BoundMods, Leaves, Mods
from ....primitives.emit_strips import KeyWords
from ....primitives.gqa_packing import HeadRows
from ....primitives.kv_tiles import WHOLE, TileSequence
from ....primitives.online_softmax import OnlineSoftmax
from ....primitives.score_tile import FragmentShape, ScoreTile
from ....primitives.values import Fixed, choose
from ....primitives.visible_words import hide, hide_of_rows, rows_words, rows_words_by_mask, visible_words
from ..planning.plan import AnyForwardTiling
from ..tiles.traits import reads
from .forward_call import ForwardCall, ForwardWork


class RowPlaces(Fixed, Generic[AnyForwardTiling]):
    """Where the rows of one thread are; the first one is packed row `row` of the head."""

    def __init__(
        self, tiling: AnyForwardTiling, shape: FragmentShape, heads: HeadRows, work: ForwardWork, row: Any
    ) -> None:
        self.tiling, self.shape, self.work = tiling, shape, work
        first_q, self.slot = heads.place(row)
        self.first_q = work.queries.from_start(first_q)
        self.head = work.h * tiling.packed_heads + self.slot

    def row_place(self, r: int):
        """Query and head of the thread's row `r`, and whether there are such."""
        q, h = self.first_q + self.shape.row_offsets[r], self.head + self.shape.head_offsets[r]
        inside = self.work.queries.has(q)
        if self.tiling.packed_heads < self.tiling.slots:
            inside = inside & (self.slot + self.shape.head_offsets[r] < self.tiling.packed_heads)
        return q, h, inside


class QueryRows(RowPlaces[AnyForwardTiling]):
    """A thread's rows with the mods at them; its first column of a kv tile is `column`."""

    def __init__(
        self,
        tiling: AnyForwardTiling,
        shape: FragmentShape,
        heads: HeadRows,
        mods: Mods,
        work: ForwardWork,
        leaves: Leaves,
        row: Any,
        column: Any,
    ) -> None:
        super().__init__(tiling, shape, heads, work, row)
        origin = work.keys.origin
        self.column = column if isinstance(origin, int) and origin == 0 else column + origin
        self.mods = mods.at(self.tile(None, Int32(0)), leaves)
        self.strip_words: KeyWords | None = None

    def tile(self, scores: Any, n: Any) -> ScoreTile:
        """The score tile at kv tile `n`; `scores`, by row and column: registers, None where there are none yet."""
        first_kv = n * self.tiling.tile_n + self.column
        return ScoreTile(self.shape, scores, self.work.b, self.head, self.first_q, first_kv)

    def loops(self, tiles: TileSequence) -> int:
        """Over the ranges of tiles, those that test in two ways counted twice."""
        tests = 1 if isinstance(self.mods.limits_hold, bool) else 2
        return sum(tests if tile_range.tested else 1 for tile_range in tiles.tile_ranges())

    def look(self, n) -> Any:
        """What `hide` has to know of kv tile `n`, asked before there are scores; None: nothing."""
        if self.strip_words is not None:
            return self.strip_words.of(self.tile(None, n))
        is_known = isinstance(self.mods.limits_hold, bool)
        # a table of pairs: its words are 1.3 to 1.7 times as fast as reading it beside the scores
        if is_known and not self.mods.limits_hold and Pattern.PAIR in map(pattern_of, reads(self.mods.mods.mask)):
            return rows_words_by_mask(self.mods, self.tile(None, n))
        return None if is_known else rows_words(self.mods, self.tile(None, n))

    def hide(self, tile: ScoreTile, seen: Any) -> None:
        """Scores that the rows don't see to -inf, in place: by the rows' limits where they hold, else by the mask."""
        if seen is not None:
            hide_of_rows(tile, seen)
        elif self.mods.limits_hold:
            self.mods.apply_limits(tile)
        else:
            self.mods.apply_mask(tile)

    def tests_of(self, tiles: TileSequence) -> list["Test"]:
        """The tests of all tiles of a sequence, for one loop over them whose inner loops each have one test."""
        holds, mods = self.mods.limits_hold, self.mods
        if isinstance(holds, bool):
            tests: list[Test] = [(ByLimits if holds else ByMask)(mods, tiles, True, True)]
        else:
            tests = [ByLimits(mods, tiles, True, holds), ByMask(mods, tiles, True, ~holds)]
        return tests if tiles.tested(Int32(1), tiles.first) is True else [*tests, Test(mods, tiles, False, True)]

    def sinks(self) -> list[Any]:
        """The sink of each row, None where there is none; of parts of kv the first has it."""
        found = [self.mods.row_sink(r) for r in range(self.shape.rows)]
        if self.work.part is WHOLE:
            return found
        is_first = self.work.part.index == 0
        return [None if sink is None else choose(is_first, sink, -Float32.inf) for sink in found]

    def store_statistics(self, call: ForwardCall, softmax: OnlineSoftmax, row_lse: cute.Tensor, lane) -> None:
        """What is asked for of LSE and the largest score of each row."""
        if call.lse is not None:
            self._store_statistic(call.lse, row_lse, lane)
        if call.max_scores is not None:
            self._store_statistic(call.max_scores, softmax.highest_scores(row_lse), lane)

    def _store_statistic(self, target, of_rows, lane) -> None:
        """A number per row, with what does not change along a row and was left out of the scores."""
        queries: Any = self.work.queries
        for r in range(self.shape.rows):
            shift = self.mods.row_shift[r]
            value = of_rows[r] if shift is None else of_rows[r] + shift
            q, h, inside = self.row_place(r)
            mine = inside & self.shape.first_in_row(lane)
            store_if(mine, queries.head(of_part(target, self.work.part), h), q, value)


@dataclasses.dataclass
class Test(Fixed):
    """Hides elements of tiles that are `tested`, or are not, where it `holds` for the rows. This one hides nothing."""

    mods: BoundMods
    tiles: TileSequence
    tested: bool
    holds: Any

    def goes_on(self, i: Any, anyway: Any = None) -> Any:
        """Whether there is an i-th tile, and it takes this test; `anyway`: it takes a test."""
        tested = self.tiles.tested(i, self.tiles.tile(i))
        tested = tested if tested is True or anyway is None else tested | anyway
        more = i < self.tiles.count
        if tested is not True:
            more = more & (tested if self.tested else ~tested)
        return more if self.holds is True else more & self.holds

    def look(self, tile: ScoreTile) -> Any:
        """What `hide` has to know of a tile, asked before there are scores."""

    def hide(self, tile: ScoreTile, seen: Any) -> None:
        """Scores that the rows don't see to -inf, in place."""


class ByLimits(Test):
    """Each row sees the keys from its first one to its last one."""

    def hide(self, tile: ScoreTile, seen: Any) -> None:
        self.mods.apply_limits(tile)


class ByMask(Test):
    def look(self, tile: ScoreTile) -> tuple[Int32, ...]:
        return visible_words(self.mods, tile)

    def hide(self, tile: ScoreTile, seen: tuple[Int32, ...]) -> None:
        hide(tile, seen)


def of_part(tensor: cute.Tensor, part) -> cute.Tensor:
    """What belongs to a part of kv: all of it where there is but one."""
    if part is WHOLE:
        return tensor
    place = (part.index, *(None,) * (cute.rank(tensor) - 1))
    return tensor[place]
