"""A fragment of scores as rows and columns with their logical coordinates: the seam between graph and kernels.

Each backend delivers one thread's part of S = Q Kᵀ in registers; what lies above (score mods, masks, softmax
statistics) sees only this view. How rows and columns lie over registers and lanes is data (`FragmentShape`).
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import cutlass.cute as cute
from cutlass import Int32

from .lanes import first_of, over_lanes
from .values import Fixed, smaller

LaneMoves = tuple[tuple[int, int], ...]

LIFTED = 32  # neighbouring columns with one lift

ROW_PER_LANE: LaneMoves = ((1, 0), (2, 0), (4, 0), (8, 0), (16, 0))


@dataclasses.dataclass(frozen=True)
class FragmentShape:
    """How a warp's registers spread over a score tile.

    A thread's elements are its first one moved by each of `row_offsets` and of `column_offsets`. Where the first one
    is, its lane says: `lanes[n]` is (rows, columns) that bit n of the lane's number moves it by, one of them 0. Where
    each lane has a row of its own (`ROW_PER_LANE`), sums along a row need no other lane.

    `head_offsets` are added to the thread's first head where rows are of several heads (see `gqa_packing`;
    `row_offsets` are queries then, and `lanes` move rows of the tile still, which `packed` says), elsewhere there are
    none. Positions whose
    offsets have the same quotient by `block` lie in one block of so many, counted from 0; 1 promises nothing.
    """

    row_offsets: tuple[int, ...]
    column_offsets: tuple[int, ...]
    lanes: LaneMoves
    head_offsets: tuple[int, ...] = ()
    block: int = 1
    packed: bool = False

    @property
    def rows(self) -> int:
        return len(self.row_offsets)

    @property
    def columns(self) -> int:
        return len(self.column_offsets)

    @property
    def has_neighbours(self) -> bool:
        """Whether a thread's columns are neighbours."""
        return self.column_offsets == tuple(range(self.columns))

    @property
    def transposed(self) -> "FragmentShape":
        """These registers with rows called columns: for a product whose operands changed places."""
        lanes = tuple((row, column) for column, row in self.lanes)
        return FragmentShape(self.column_offsets, self.row_offsets, lanes, block=self.block)

    @property
    def row_moves(self) -> tuple[int, ...]:
        """By how many rows each bit of the lane moves, 0 for those that move columns."""
        return tuple(row for row, _ in self.lanes)

    @property
    def column_moves(self) -> tuple[int, ...]:
        return tuple(column for _, column in self.lanes)

    @property
    def warp_rows(self) -> int:
        """How many rows a warp has something of."""
        return self.rows << len(_distances(self.row_moves))

    @property
    def warp_columns(self) -> int:
        return self.columns << len(_distances(self.column_moves))

    def lane_row(self, lane: Any) -> Any:
        """Row of the first element of `lane`, from the warp's first one."""
        return _moved(lane, self.row_moves)

    def lane_column(self, lane: Any) -> Any:
        return _moved(lane, self.column_moves)

    def along_row(self, op: Callable[[Any, Any], Any], value: Any) -> Any:
        """A thread's sum (or maximum, ...) of its elements of a row over all lanes that have some of the same row."""
        return over_lanes(op, value, _distances(self.column_moves))

    def along_column(self, op: Callable[[Any, Any], Any], value: Any) -> Any:
        return over_lanes(op, value, _distances(self.row_moves))

    def first_in_row(self, lane: Any) -> Any:
        """Whether `lane` is the first of those that share its rows."""
        return first_of(lane, _distances(self.column_moves))

    def first_in_column(self, lane: Any) -> Any:
        return first_of(lane, _distances(self.row_moves))

    def first_row(self, r: int) -> int:
        """The first row in the block of row `r`."""
        return _first_of_block(self.row_offsets, r, self.block)

    def first_column(self, c: int) -> int:
        """The first column in the block of column `c`."""
        return _first_of_block(self.column_offsets, c, self.block)

    @property
    def of_one_head(self) -> bool:
        """Whether all rows of a thread are of one query head."""
        return not any(self.head_offsets)

    def columns_before(self, x: Any) -> Any:
        """How many of the thread's columns lie before its first one + `x`, for `x` from 0; beyond the last: all."""
        return _count_before(self.column_offsets, x)

    def rows_before(self, x: Any) -> Any:
        """How many of the thread's rows lie before its first one + `x`, likewise."""
        return _count_before(self.row_offsets, x)


def _distances(moves: tuple[int, ...]) -> tuple[int, ...]:
    """The bits that move, as values of the lane's number."""
    return tuple(1 << bit for bit, move in enumerate(moves) if move)


def _moved(lane: Any, moves: tuple[int, ...]) -> Any:
    """The sum of the moves of the bits of `lane` that are set; bits whose moves double are one number."""
    total: Any = 0
    for bit, move in enumerate(moves):
        doubles = bit > 0 and move == 2 * moves[bit - 1]
        if not move or doubles:
            continue
        bits = next((n for n, m in enumerate(moves[bit:]) if m != move << n), len(moves) - bit)
        number = lane >> bit
        if bit + bits < len(moves):
            number = number & ((1 << bits) - 1)
        total = total + number * move
    return total


def _count_before(offsets: tuple[int, ...], x: Any) -> Any:
    """How many offsets are below `x`, where they are runs of neighbours at even distances."""
    run = next((n for n, offset in enumerate(offsets) if offset != n), len(offsets))
    if run == len(offsets):
        return x
    period = offsets[run]
    return x // period * run + smaller(x % period, run)


def _first_of_block(offsets: tuple[int, ...], i: int, block: int) -> int:
    return next(n for n, offset in enumerate(offsets) if offset // block == offsets[i] // block)


@dataclasses.dataclass
class Runs(Fixed):
    """What values of a tile are short of, for each so many neighbouring columns of a thread: alike for all lanes.

    Scores are values times `factors` (by run and row), plus `lifts` (by run). `back`: probabilities of a run times this
    are those that the row's sum has, where the lift is none of the score's own. Empty: 1, 0, and 1.
    """

    columns: int
    factors: Sequence[Sequence[Any]] = ()
    lifts: Sequence[Any] = ()
    back: Sequence[Any] = ()


class Lifts(Protocol):
    """What scores have of V's scales, where each key has its own: of `together` of a thread's columns at a time."""

    together: int

    def lifts(self, first: int) -> list[Any]:
        """What was added to scores of the next columns from the `first` on."""

    def back(self, first: int) -> list[Any]:
        """Probabilities of these columns times this are those that a row's sum has."""


@dataclasses.dataclass
class ScoreTile(Fixed):
    """One thread's scores of one (q tile, kv tile).

    `values[r, c]` is fp32 in registers. `b` and `h` are the batch entry and the query head (of the first row, see
    `head_index`); `q_index(r)` and `kv_index(c)` are positions inside the sequence (Int32), also beyond its end on a
    partial tile. `runs`: what the values are short of, where that is left to who computes with them; None: of nothing.
    `lifts`: what they have of V's scales, where each key has its own.
    """

    shape: FragmentShape
    values: cute.Tensor
    b: Int32
    h: Int32
    first_q: Int32
    first_kv: Int32
    runs: Runs | None = None
    lifts: Lifts | None = None

    @property
    def rows(self) -> int:
        return self.shape.rows

    @property
    def columns(self) -> int:
        return self.shape.columns

    def q_index(self, r: int) -> Int32:
        return self.first_q + self.shape.row_offsets[r]

    def head_index(self, r: int) -> Int32:
        return self.h if self.shape.of_one_head else self.h + self.shape.head_offsets[r]

    def kv_index(self, c: int) -> Int32:
        return self.first_kv + self.shape.column_offsets[c]

    def runs_of(self, r: int, columns: Sequence[int]) -> list[tuple[Sequence[int], Any, Any]]:
        """These columns, those of a run together, with what their values in row `r` are short of: a factor, a lift."""
        runs = self.runs
        if runs is None:
            return [(columns, None, None)]
        found: list[tuple[Sequence[int], Any, Any]] = []
        for n, some in itertools.groupby(columns, lambda c: c // runs.columns):
            factor, lift = runs.factors[n][r] if runs.factors else None, runs.lifts[n] if runs.lifts else None
            found.append((list(some), factor, lift))
        return found
