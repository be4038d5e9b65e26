"""How the Hopper forward cuts calls whose queries see few keys, or that are few: blocks of 64 queries."""

from __future__ import annotations

import functools

from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.few_queries import packed_heads
from ..fused.order import keys_of_a_query
from ..fused.target import Target
from ..fused.tiling import keys_by_memory, query_tiles
from ..fused.traits import changes_weights, keys, padded, reads_any, reads_pairs, sees_at_most
from ..fused.work import captured_decide
from .forward_fields import (
    PAGE_REGISTERS,
    heads_together,
    kernel_of,
    keys_by_registers,
    keys_in_order,
    most_read,
    tiling_of,
    with_next_queries,
    written,
)
from .maxima import BY_SUMS_AT_ONCE, lag_of, rows_guess
from .tiling import ROWS, HopperTiling

# Keys of a query, on average, up to which several small blocks beat a large one: they fill each other's beginnings and
# ends, and tiles of 64 queries visit less beside a mask's edge. D 64: 2,048 keys gain 4 %, 4,096 lose 2 %
FEW_KEYS = {64: 2304, 96: 1152}
# The same where a large block's rows guess their maxima. D 64: 2,048 keys gain 4 % by the large block, causal 2,048
# queries nothing; D 96: 1,024 keys gain 10 %, causal 2,048 queries 14 %
FEW_KEYS_GUESSED = {64: 1536, 96: 768}
# Keys up to which small blocks of D 64 stay, with 64 keys at a time (causal calls in a graph: 128, 256 and 512 gain 9,
# 15 and 13 %)
SHORT_SMALL = 512
# Keys by head dimension, more than and up to which tiles of 64 queries that run at once beat larger ones, which would
# leave multiprocessors idle: one sequence of 128 to 1,024 gains 17 to 30 % at D 128, 26 to 35 at D 192, of D 256 27 to
# 35, of D 64 and 96 3 to 10, of 128 nothing. With a mask and wider than 128 by two rounds of half full ones too (15 to
# 25 %). Longer ones, of which large blocks would take parts, were not timed, but 2,048 of D 256: 27 %
AT_ONCE = {96: (128, 1024), 192: (0, 1024), 256: (0, 2048)}
# Keys of a row up to which tiles have 64 of them where results need no order (`NARROW` where they do), D is at most 64
# and there is a mask alone: so tiled, batch-invariant windows of 128, 256 and 512 keys had 1.17, 1.09 and 1.05 of the
# default, which took 96
NARROW_MASK = 512


def is_short(problem: Problem, program: Program, widest: int) -> bool:
    """Whether query tiles visit few keys, or tensors say how many, which is few as a rule (documents)."""
    if problem.layout.kv == "paged" or widest > 128:
        return False
    if captured_decide(program.intervals):
        return True
    if widest > 96:
        return False
    mean_keys = functools.cache(lambda: keys_of_a_query(problem, program))
    guesses = rows_guess(problem, program, packed_heads(problem, program, ROWS), mean_keys)
    few = next(few for d, few in (FEW_KEYS_GUESSED if guesses else FEW_KEYS).items() if widest <= d)
    return keys(problem) <= few or mean_keys() <= few


def run_at_once(problem: Problem, program: Program, target: Target, heads: int) -> bool:
    """Whether tiles of 64 queries are so few, and keys too, that each has a multiprocessor of its own to its end."""
    schedule, widest = problem.schedule, max(padded(problem.head_dim), padded(problem.head_dim_v))
    if not problem.layout.is_dense or schedule.batch_invariant or schedule.persistent:
        return False
    least, most = next(found for d, found in AT_ONCE.items() if widest <= d)
    tiles = query_tiles(problem, heads, ROWS) * problem.batch
    room = target.sms * (3 if widest > 128 and program.mask is not None else 2) // 2
    return least < keys(problem) <= most and tiles <= room


def alone(problem: Problem, program: Program, target: Target, heads: int) -> HopperTiling:
    """One warpgroup on a multiprocessor: blocks of two would leave half of them idle.

    It takes 1.2 µs for a tile of 128 keys of D 128, two 1.3 for twice as many queries, and begins and ends sooner.
    """
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    widest, gathers = max(d, dv), reads_pairs(program.score)
    most = 64 if widest > 192 or keys(problem) <= 128 else most_read(widest, program) if gathers else 128
    return tiling_of(
        problem,
        heads,
        tile_m=ROWS,
        tile_n=min(keys_by_registers(240, dv, program), keys_by_memory(target, ROWS, widest, d + dv), most),
        stages=2,
        warpgroups=1,
        consumer_registers=240,
        producer_registers=PAGE_REGISTERS,
        rescale_early=dv > 128,
        lag=lag_of(problem, BY_SUMS_AT_ONCE),
        output_wait="first" if program.keep is None else None,
        heads_together=heads_together(problem, program),
        kernel=kernel_of(problem),
        written=written(d, dv, program, False),
    )


def small(problem: Problem, program: Program, target: Target, heads: int) -> HopperTiling:
    """One warpgroup for each block, and two or three blocks on a multiprocessor."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    invariant = problem.schedule.batch_invariant
    in_order = keys_in_order(max(d, dv), program) if invariant else 0
    narrow = max(d, dv) <= 96 and in_order <= 64
    registers = 136 if narrow else 216
    # values of a score mod beside those of a mask: 6 spills with D 96 and 64 columns
    both = 10 if program.score is not None and reads_any(program.mask) else 0
    tile_n = min(keys_by_registers(registers - both, dv, program), 96 if max(d, dv) <= 64 else 64)
    few = max(d, dv) <= 64 and program.score is None and sees_at_most(NARROW_MASK, program)
    short = _is_short_and_plain(problem, program)
    # 37 spills with 96 columns of a table; and 128 keys are two tiles of 64
    if few or short or reads_pairs(program.score) or keys(problem) <= 128:
        tile_n = min(tile_n, 64)
    persistent = problem.schedule.persistent
    tiling = tiling_of(
        problem,
        heads,
        tile_m=ROWS,
        tile_n=in_order or tile_n,
        stages=2,
        warpgroups=1,
        consumer_registers=registers,
        producer_registers=24 if narrow else 40,
        rescale_early=narrow,
        # one warpgroup has no other's softmax under its products (D 64: 1 to 3 %)
        output_wait="first" if narrow else None,
        blocks=3 if narrow else 2,
        persistent=short if persistent is None else persistent,
        heads_together=heads_together(problem, program),
        kernel=kernel_of(problem),
        # causal 1k and 2k of D 64 lose 1 % by whole ones
        written="by steps" if program.mask is not None else "whole",
    )
    return with_next_queries(tiling, target)


def _is_short_and_plain(problem: Problem, program: Program) -> bool:
    """Whether small blocks stay, and have 64 keys at a time."""
    plain = not changes_weights(program) and not reads_any(program.mask)
    plain = plain and problem.layout.is_dense and not problem.schedule.batch_invariant
    return plain and max(padded(problem.head_dim), padded(problem.head_dim_v)) == 64 and keys(problem) <= SHORT_SMALL
