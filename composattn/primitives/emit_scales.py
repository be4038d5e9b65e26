"""Scales of quantised q, k and v folded into the softmax: what changes with rows or runs of keys costs no instruction.

A probability is 2^(score * scale - shift), one multiply-add for each score. Scales of a head, a row or a run of keys
make its `scale`. That of V of a run makes its shift: P by a scale is a score plus the scale's logarithm, so that the
largest P of a row, scaled, is 1, whatever scales are, as a P of 8 bits needs it. The row's sum takes each run's scale
back. Where a tile is one run, V's scale is the unit of the output instead, and P has nothing of it. Scales of each key
are three numbers of it: one multiply-add for each score, and one in the row's sum, more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute import math as cm

from ..graph.expr import DType, Expr
from ..graph.factors import RUNS, Scales
from .emit_ops import convert
from .exponential import LN_2, exp2, log2
from .lanes import LANES
from .pipelines import Slot
from .score_tile import Runs, ScoreTile
from .values import Fixed, aligned, choose, move

LEAST_SCALE = 2.0**-100  # above 0, as -inf times 0 is NaN
RUNS_AT_MOST = max(RUNS) // min(RUNS)  # in a tile


class KeptScales(Fixed):
    """What keys of a tile are multiplied by, in shared memory: written once, by a warp that copies, for all.

    Three numbers of each run of keys: the factor of its scores, what is added for V, and what takes that back from
    sums. Each thread that found them itself took a quarter of a tile's instructions for it.
    """

    def __init__(self, scales: Scales, bends: bool, kept: cute.Tensor) -> None:
        self.scales, self.bends, self.kept = scales, bends, kept

    def begin(self) -> None:
        """By the warp that writes, before a row's first tile."""

    def numbers(self, at: Any) -> list[Any]:
        """The three of the run in which the tile of `at` begins; None: as if there was none."""
        factor = self.factor(at)
        if self.scales.values is None:
            return [factor, None, None]
        logarithm = log2(_number(at, self.scales.values) + LEAST_SCALE)
        return [factor, logarithm * LN_2 if self.bends else logarithm, exp2(-logarithm)]

    def factor(self, at: Any) -> Any:
        factor = _product(_number(at, node) for node in self.scales.runs)
        if factor is None or self.scales.by_key:  # a key's multiplies the score itself
            return factor
        return choose(factor >= 0.0, factor, Float32(math.nan))

    @property
    def there(self) -> tuple[bool, bool, bool]:
        """Which of the three are."""
        return bool(self.scales.runs), self.scales.values is not None, self.scales.values is not None


class TileScales(KeptScales):
    """Scales of tiles that are one run each. V's scale is the unit of an output that is summed tile by tile.

    `start`: four numbers for each of `stages`. The factor of scores, what an output in the unit of the tile before is
    multiplied by to be in the tile's, and that unit: V's scale, but no less than 2^-60 of the largest before, so that
    no output in it overflows.
    """

    def __init__(self, scales: Scales, bends: bool, start: cute.Pointer, stages: int) -> None:
        super().__init__(scales, bends, cute.make_tensor(start, cute.make_layout((1, 4, stages), stride=(1, 1, 4))))

    def begin(self) -> None:
        self.unit, self.most = (cute.make_rmem_tensor(1, Float32) for _ in range(2))
        self.unit.fill(1.0)
        self.most.fill(0.0)

    def found(self, of_key: Callable[[Any], Any], lane: Any) -> list[Any]:
        """The three numbers; `of_key` evaluates at a key of the tile."""
        at, values = of_key(Int32(0)), self.scales.values
        if values is None:
            return [self.factor(at), None, None]
        scale, before = _number(at, values), self.unit[0]
        self.unit[0] = cute.arch.fmax(cute.arch.fmax(scale, self.most[0] * 2.0**-60), Float32(LEAST_SCALE))
        self.most[0] = cute.arch.fmax(scale, self.most[0])
        return [self.factor(at), before / self.unit[0], choose(scale >= 0.0, self.unit[0], Float32(math.nan))]

    def put(self, found: list[Any], lane: Any, slot: Slot) -> None:
        """All four, as they are read at once."""
        four = [Float32(0.0) if number is None else number for number in [*found, None]]
        _put_if(self.kept, four, Int32(0), slot.index, lane == 0)

    def get(self, slot: Slot, lane: Any) -> ReadScales:
        factor, change, unit = (self.kept[0, i, slot.index] if there else None for i, there in enumerate(self.there))
        return ReadScales([] if factor is None else [factor], change=change, unit=unit)


class RunScales(KeptScales):
    """Scales of `count` runs in a tile; `start`: three rows of `RUNS_AT_MOST` numbers for each of `stages`."""

    def __init__(self, scales: Scales, bends: bool, start: cute.Pointer, stages: int, count: int) -> None:
        layout = cute.make_layout((RUNS_AT_MOST, 3, stages), stride=(1, RUNS_AT_MOST, 3 * RUNS_AT_MOST))
        super().__init__(scales, bends, cute.make_tensor(start, layout))
        self.count = count

    def found(self, of_key: Callable[[Any], Any], lane: Any) -> list[Any]:
        """The numbers of the lane-th run; `of_key` evaluates at a key of the tile."""
        return self.numbers(of_key(lane * self.scales.keys))

    def put(self, found: list[Any], lane: Any, slot: Slot) -> None:
        """By each of the first lanes; those behind the last run too, as four numbers are read at once."""
        _put_if(self.kept, found, lane, slot.index, lane < RUNS_AT_MOST)

    def get(self, slot: Slot, lane: Any) -> ReadScales:
        """All of them; none where all are 1."""
        stage = slot.index
        factors, lifts, back = (
            [self.kept[n, i, stage] for n in range(self.count)] if has else [] for i, has in enumerate(self.there)
        )
        return ReadScales(factors, lifts, back)


class KeyScales(KeptScales):
    """Scales of each key of a tile of `count`; at `start` three rows of so many numbers for each of twice K's stages.

    They are read while scores become probabilities, when K's stage may be filled again: what is written there comes
    from the lap behind. In memory the four keys of 16 that a lane has columns of (2 i, 2 i + 1, 2 i + 8, 2 i + 9) lie
    together.
    """

    def __init__(self, scales: Scales, bends: bool, start: cute.Pointer, stages: int, count: int) -> None:
        layout = cute.make_layout((count, 3, 2 * stages), stride=(1, count, 3 * count))
        super().__init__(scales, bends, cute.make_tensor(start, layout))
        self.stages, self.count = stages, count

    def found(self, of_key: Callable[[Any], Any], lane: Any) -> list[Any]:
        """The numbers of every 32nd key from the lane-th on."""
        return [self.numbers(of_key(lane + LANES * i)) for i in range(self.count // LANES)]

    def put(self, found: list[Any], lane: Any, slot: Slot) -> None:
        inside = lane % 16
        place = lane // 16 * 16 + inside % 8 // 2 * 4 + inside // 8 * 2 + inside % 2
        for i, numbers in enumerate(found):
            _put_if(self.kept, numbers, place + LANES * i, self._stage(slot), Boolean(True))

    def get(self, slot: Slot, lane: Any) -> ReadScales:
        start = self.kept.iterator + self._stage(slot) * (3 * self.count) + lane % 4 * OfKeys.together
        return ReadScales(of_keys=OfKeys(start, self.count, self.there))

    def _stage(self, slot: Slot) -> Any:
        return slot.index + slot.phase * self.stages


class OfKeys(Fixed):
    """The numbers of a thread's columns, in shared memory from `start` on, read where they are used.

    `wide`: how many lie between the first, second and third of a key. `there`: which of these are.
    """

    together = 4  # columns

    def __init__(self, start: cute.Pointer, wide: int, there: tuple[bool, bool, bool]) -> None:
        self.start, self.wide, self.there = start, wide, there

    def factors(self, first: int) -> list[Any]:
        """What scores of the next columns from the `first` on are multiplied by; None: 1."""
        return self._four(0, first)

    def lifts(self, first: int) -> list[Any]:
        """What is added to their scores for V; None: nothing."""
        return self._four(1, first)

    def back(self, first: int) -> list[Any]:
        """What takes that back from their probabilities."""
        return self._four(2, first)

    def _four(self, i: int, first: int) -> list[Any]:
        if not self.there[i]:
            return [None] * self.together
        found = cute.make_rmem_tensor((self.together, 1), Float32)
        place = aligned(self.start + (i * self.wide + first * self.together))  # of 16 keys, four lanes' columns
        move(cute.make_tensor(place, found.layout), found)
        return [found[n] for n in range(self.together)]


@cute.jit
def _put_if(kept, found: cutlass.Constexpr, run: Int32, stage: Int32, condition: Boolean):
    if condition:
        for i, number in enumerate(found):
            if cutlass.const_expr(number is not None):
                kept[run, i, stage] = number


@dataclasses.dataclass
class ReadScales(Fixed):
    """Scales of a tile of keys, by run or by key: see `KeptScales`."""

    factors: list[Any] = dataclasses.field(default_factory=list)
    lifts: list[Any] = dataclasses.field(default_factory=list)
    back: list[Any] = dataclasses.field(default_factory=list)
    of_keys: OfKeys | None = None
    change: Any = None
    unit: Any = None


class BoundScales(Fixed):
    """The scales at a work tile; `at` has what its rows know. `bends`: a score mod needs true scores."""

    def __init__(self, scales: Scales, at: Any, bends: bool) -> None:
        self.scales, self.bends = scales, bends
        self.of_head = _product(_number(at, factor) for factor in scales.heads)
        rows = range(at.tile.rows)
        self.of_rows = [_product(_number(at, factor, r) for factor in scales.rows) for r in rows]
        self.softmax_scales = [None for _ in rows]

    @property
    def by_rows(self) -> bool:
        """Whether the softmax multiplies by numbers of rows or runs."""
        return bool(self.scales.rows or self.scales.keys) and not self.bends

    def of_leaves(self, scale: Any) -> Any:
        """The user's scale with that of the head, where a score mod follows."""
        return scale * self.of_head if self.bends and self.of_head is not None else scale

    def of_softmax(self, scale: Any) -> Any:
        """What the softmax multiplies all scores by: `scale` with that of the head; 1 where it goes by rows."""
        if self.bends:
            return scale
        if self.of_head is not None:
            scale = scale * self.of_head
        if self.by_rows:  # what is lifted key by key is in the softmax's unit before
            self.softmax_scales = [_checked(scale if row is None else scale * row) for row in self.of_rows]
            return Float32(1.0)
        return scale if self.of_head is None else _checked(scale)

    def apply(self, tile: ScoreTile, read: ReadScales) -> None:
        """Scores by scales that the softmax does not multiply by, in place; gives the tile those that it does."""
        if read.of_keys is not None:
            self._apply_of_keys(tile, read.of_keys)
            return
        wide = _columns(tile, self.scales.keys)
        for r in range(tile.rows if self.bends else 0):
            for c in range(tile.columns):
                factor = _product([self.of_rows[r], read.factors[c // wide] if read.factors else None])
                if factor is not None:
                    tile.values[r, c] = tile.values[r, c] * factor
        if self.by_rows or read.lifts:
            tile.runs = Runs(wide, self._factors(read, tile.columns // wide), read.lifts, read.back)

    def _apply_of_keys(self, tile: ScoreTile, numbers: OfKeys) -> None:
        for first in range(0, tile.columns, numbers.together):
            factors = numbers.factors(first)
            lifts = [None] * numbers.together if self.bends else numbers.lifts(first)
            for c, factor, lift in zip(range(first, tile.columns), factors, lifts, strict=False):
                for r in range(tile.rows):
                    score = _product([tile.values[r, c], factor, self.of_rows[r] if self.bends else None])
                    tile.values[r, c] = score if lift is None else cm.fma(score, self.softmax_scales[r], lift)
        if self.scales.values is None and not self.bends:
            tile.runs = Runs(tile.columns, [self.softmax_scales])
        if self.scales.values is not None:
            tile.lifts = numbers

    def lift(self, tile: ScoreTile) -> None:
        """What is added to true scores for V's scales of each key, behind the score mod that saw them."""
        if not self.bends or tile.lifts is None:
            return
        for first in range(0, tile.columns, tile.lifts.together):
            for c, lift in zip(range(first, tile.columns), tile.lifts.lifts(first), strict=False):
                for r in range(tile.rows):
                    tile.values[r, c] = tile.values[r, c] + lift

    def _factors(self, read: ReadScales, count: int) -> Sequence[Sequence[Any]]:
        """Factors of each run, by row."""
        if self.bends:
            return ()
        if read.factors:
            least = Float32(LEAST_SCALE)
            return [[cm.fma(of_row, scale, least) for of_row in self.softmax_scales] for scale in read.factors]
        return [self.softmax_scales] * count


def _columns(tile: ScoreTile, keys: int) -> int:
    """How many of the thread's columns a run of so many keys has; 0: all."""
    return sum(offset < keys for offset in tile.shape.column_offsets) if keys else tile.columns


def _number(at: Any, node: Expr, r: int = 0, c: int = 0) -> Any:
    return Float32(convert(at.value(node, r, c), DType.FLOAT))


def _product(factors: Iterable[Any]) -> Any:
    """The product of those that are there; None: there is none."""
    found: Any = None
    for factor in factors:
        if factor is not None:
            found = factor if found is None else found * factor
    return found


def _checked(scale: Any) -> Any:
    """NaN where it is negative."""
    return choose(scale >= 0.0, cm.max(scale, Float32(LEAST_SCALE)), Float32(math.nan))
