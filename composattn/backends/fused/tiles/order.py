"""The order in which tiles of queries (in the backward, of keys) run: a formula, or a table on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ....analysis.bands import EVERYTHING, TileInterval
from ....analysis.program import Program
from ....call.problem import DENSE, Problem
from ....graph.expr import index
from .segments import Segments, most_tiles
from .work import (
    SegmentTables,
    TableOrder,
    WorkTables,
    ascends,
    descends,
    entries,
    segment_tables,
    visits_now,
    work_tables,
)

Ordered = tuple[str, WorkTables | None]  # the order in words, and the tables that say so, if any
Intervals = tuple[TileInterval, ...] | None  # of keys that tiles visit; None: lists say which


@dataclasses.dataclass(frozen=True)
class OrderFormula:
    """The order of a kernel that is given no table: longest first, where `is_longest_first` says so of visits.

    `in_order`: it is that of the tiles. `of_sequences`: that of packed ones, and of segments, where none is asked for.
    """

    is_longest_first: Callable[[Problem, tuple[TileInterval, ...], int, int], bool | None]
    words: str
    in_order: bool
    of_sequences: TableOrder


LAST_QUERIES_FIRST = OrderFormula(
    ascends,
    "longest first: the last query tile of a head first, as none visits less than those before it",
    False,
    "longest_first",
)
# what tiles of keys read and add to is eight times what a query tile reads: a document of eight heads is 8 MB of 1k
# tokens. Eight documents gain 1 to 14 % by sequences
FIRST_KEYS_FIRST = OrderFormula(
    descends,
    "longest first: the first keys first, as none are seen by fewer queries than those behind them",
    True,
    "longest_sequences_first",
)
IN_SEGMENTS = "; tiles begin where the mask falls apart"
LAST_KEYS_FIRST = "from the last keys to the first, as are the parts of dQ added"


def order_of_keys(
    problem: Problem, intervals: Intervals, tile_queries: int, tile_keys: int, deterministic: bool, at_once: int
) -> Ordered:
    """The order of the tiles of keys of each key/value head; `deterministic`: dQ is summed in their order.

    `at_once`: how many tiles run. The tables see keys as queries: theirs is the mirrored problem.
    """
    mirrored = mirror(problem)
    if deterministic:
        # shortest first under a causal mask, and who waits for a turn waits for blocks that started before it
        packed = problem.layout.kv == "packed"
        tables = work_tables(mirrored, EVERYTHING, tile_keys, tile_queries, "last_keys_first") if packed else None
        return LAST_KEYS_FIRST, tables
    ends = None if intervals is None else exchanged(intervals)
    return order_of(FIRST_KEYS_FIRST, mirrored, ends, tile_keys, tile_queries, problem.kv_heads, at_once)


def order_of(
    formula: OrderFormula, problem: Problem, intervals: Intervals, tile_m: int, tile_n: int, heads: int, at_once: int
) -> Ordered:
    """The order of the tiles of `tile_m` queries of `heads` for each batch entry, of which so many run `at_once`."""
    packed, wanted = problem.layout.q == "packed", problem.schedule.order
    if formula.in_order and wanted == "in_order" and not packed:
        return "in order", None
    by_formula = wanted in ("auto", "longest_first") and intervals is not None and not packed
    if by_formula and formula.is_longest_first(problem, intervals or (), tile_m, tile_n):
        return formula.words, None
    by_work: TableOrder = formula.of_sequences if packed else "longest_first"
    order, words = _by_table(wanted, by_work, entries(problem, tile_m) * heads <= at_once)
    return words, work_tables(problem, intervals, tile_m, tile_n, order)


def order_in_segments(
    problem: Problem, segments: Segments, tile: int, heads: int, at_once: int
) -> tuple[str, SegmentTables]:
    """The order of tiles of so many queries that begin with segments."""
    all_run = problem.batch * most_tiles(problem.q_len, tile) * heads <= at_once
    order, words = _by_table(problem.schedule.order, LAST_QUERIES_FIRST.of_sequences, all_run)
    return words + IN_SEGMENTS, segment_tables(problem, tile, order, segments, False)


def order_of_keys_in_segments(
    problem: Problem, segments: Segments, tile: int, deterministic: bool, at_once: int
) -> tuple[str, SegmentTables]:
    """`order_of_keys` for tiles that begin with segments."""
    all_run = problem.batch * most_tiles(problem.q_len, tile) * problem.kv_heads <= at_once
    order, words = _by_table(problem.schedule.order, FIRST_KEYS_FIRST.of_sequences, all_run)
    if deterministic:
        return LAST_KEYS_FIRST, segment_tables(problem, tile, "last_keys_first", segments, True)
    return words + IN_SEGMENTS, segment_tables(problem, tile, order, segments, True)


def _by_table(wanted: str, by_work: TableOrder, all_run: bool) -> tuple[TableOrder, str]:
    """The order that a table says, and in words: as asked for, or as tiles lie where `all_run` at once, or by work."""
    if wanted != "auto":
        return wanted, f"{wanted.replace('_', ' ')}: by a table on the device, as asked for"  # type: ignore[return-value]
    if all_run:
        return "in_order", "in order, as all tiles run at once"
    return by_work, f"{by_work.replace('_', ' ')}: by a table on the device"


# --- keys seen as queries ---------------------------------------------------------------------------------------


def mirror(problem: Problem) -> Problem:
    """With queries and keys exchanged."""
    return dataclasses.replace(problem, q_len=problem.kv_len, kv_len=problem.q_len, layout=problem.layout.mirrored)


def exchanged(intervals: tuple[TileInterval, ...]) -> tuple[TileInterval, ...]:
    """Intervals with queries and keys exchanged, as the mirrored problem has them."""
    return tuple(i.mapped({index("q_len"): index("kv_len"), index("kv_len"): index("q_len")}) for i in intervals)


def queries_of_a_key(problem: Problem, program: Program) -> float:
    """How many queries visit a tile of 128 keys, on average, see `keys_of_a_query`."""
    return _mean_visits(mirror(of_mean_length(problem)), exchanged(program.of_keys[0]))


def keys_of_a_query(problem: Problem, program: Program) -> float:
    """How many keys a tile of 128 queries visits, on average, with run-time numbers as they are now.

    As many as there are where captured tensors decide. Of packed sequences, if all were as long as their mean.
    """
    return _mean_visits(of_mean_length(problem), program.intervals)


def _mean_visits(problem: Problem, intervals: tuple[TileInterval, ...]) -> float:
    visits = visits_now(problem, intervals, 128, 1)
    return float(problem.kv_len if visits is None else visits.float().mean())


def of_mean_length(problem: Problem) -> Problem:
    """Packed sequences as a batch of their mean length."""
    if problem.layout.is_dense:
        return problem
    q_len, kv_len = (-(-length // problem.batch) for length in (problem.q_len, problem.kv_len))
    return dataclasses.replace(problem, q_len=q_len, kv_len=kv_len, layout=DENSE)
