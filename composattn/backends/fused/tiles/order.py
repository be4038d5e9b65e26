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
    """The order of a kernel that is given no table. `in_order`: it is that of the tiles.

    `of_sequences`: that of packed ones, and of segments, where nothing is asked for.
    """

    is_longest_first: Callable[[Problem, tuple[TileInterval, ...], int, int], bool | None]
    words: str
    in_order: bool
    of_sequences: TableOrder


LAST_QUERIES_FIRST = OrderFormula(
    ascends, "the last query tile of a head first, as none visits less than those before it", False, "longest_first"
)
# what tiles of keys read and add to is eight times what a query tile reads: a document of eight heads is 8 MB of 1k
# tokens. Eight documents gain 1 to 14 % by sequences
FIRST_KEYS_FIRST = OrderFormula(
    descends,
    "the first keys first, as none are seen by fewer queries than those behind them",
    True,
    "longest_sequences_first",
)
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
    packed = problem.layout.q == "packed"
    wanted = problem.schedule.order
    order: TableOrder = (formula.of_sequences if packed else "longest_first") if wanted == "auto" else wanted
    words = order.replace("_", " ")
    if order == "in_order" and formula.in_order and not packed:
        return words, None
    if packed:
        why = "sequences differ in length"
    elif intervals is None:
        why = "lists say what each visits"
    else:
        sorted_so = formula.is_longest_first(problem, intervals, tile_m, tile_n)
        if order == "longest_first" and sorted_so:
            return f"{words}: {formula.words}", None
        why = "the mask reads what it leaves" if sorted_so is None else "the mask leaves later query tiles less"
    if wanted == "auto" and entries(problem, tile_m) * heads <= at_once:
        return "in order, as all tiles run at once", work_tables(problem, intervals, tile_m, tile_n, "in_order")
    made = f"{words}: by a table on the device, as {why if wanted == 'auto' else 'asked for'}"
    return made, work_tables(problem, intervals, tile_m, tile_n, order)


def order_in_segments(
    problem: Problem, segments: Segments, tile: int, heads: int, at_once: int, of_keys: bool = False, groups: int = 0
) -> tuple[str, SegmentTables]:
    """The order of tiles of so many queries, or keys (in `groups`), that begin with segments."""
    wanted = problem.schedule.order
    formula = FIRST_KEYS_FIRST if of_keys else LAST_QUERIES_FIRST
    order: TableOrder = formula.of_sequences if wanted == "auto" else wanted
    words = order.replace("_", " ")
    if wanted == "auto" and problem.batch * most_tiles(problem.q_len, tile) * heads <= at_once:
        order, words = "in_order", "in order, as all tiles run at once"
    made = f"{words}: by a table on the device, as tiles begin where the mask falls apart"
    return made, segment_tables(problem, tile, order, segments, of_keys, groups)


def order_of_keys_in_segments(
    problem: Problem, segments: Segments, tile: int, deterministic: bool, at_once: int, groups: int
) -> tuple[str, SegmentTables]:
    """`order_of_keys` for tiles that begin with segments, with metadata of `groups` of keys."""
    if deterministic:
        return LAST_KEYS_FIRST, segment_tables(problem, tile, "last_keys_first", segments, True, groups)
    return order_in_segments(problem, segments, tile, problem.kv_heads, at_once, True, groups)


# --- keys seen as queries ---------------------------------------------------------------------------------------


def mirror(problem: Problem) -> Problem:
    """With queries and keys exchanged."""
    return dataclasses.replace(problem, q_len=problem.kv_len, kv_len=problem.q_len, layout=problem.layout.mirrored)


def exchanged(intervals: tuple[TileInterval, ...]) -> tuple[TileInterval, ...]:
    """Intervals with queries and keys exchanged, as the mirrored problem has them."""
    return tuple(i.mapped({index("q_len"): index("kv_len"), index("kv_len"): index("q_len")}) for i in intervals)


def queries_of_a_key(problem: Problem, program: Program) -> float:
    """How many queries visit a tile of 128 keys, on average, with run-time numbers as they are now.

    As many as there are where captured tensors decide. Of packed sequences, if all were as long as their mean.
    """
    mean = of_mean_length(problem)
    visits = visits_now(mirror(mean), exchanged(program.of_keys[0]), 128, 1)
    return float(mean.q_len if visits is None else visits.float().mean())


def keys_of_a_query(problem: Problem, program: Program) -> float:
    """How many keys a tile of 128 queries visits, on average, as of `queries_of_a_key`."""
    mean = of_mean_length(problem)
    visits = visits_now(mean, program.intervals, 128, 1)
    return float(mean.kv_len if visits is None else visits.float().mean())


def of_mean_length(problem: Problem) -> Problem:
    """Packed sequences as a batch of their mean length."""
    if problem.layout.is_dense:
        return problem
    q_len, kv_len = (-(-length // problem.batch) for length in (problem.q_len, problem.kv_len))
    return dataclasses.replace(problem, q_len=q_len, kv_len=kv_len, layout=DENSE)
