"""How the Hopper forward cuts long calls: blocks of two or three groups of 64 queries."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.order import keys_of_a_query
from ..fused.target import Target
from ..fused.tiling import key_tiles, keys_by_memory, query_tiles, whole_pages
from ..fused.traits import changes_weights, keys, may_pass, padded, queries, reads_pairs, tiles_are_equal
from .forward_fields import (
    HELD,
    heads_together,
    kernel_of,
    keys_by_registers,
    keys_in_order,
    most_read,
    tiling_of,
    with_next_queries,
    written,
)
from .maxima import rows_guess
from .small_blocks import FEW_KEYS
from .tiling import APART, GUESSING, HopperTiling

# Keys of a query, on average, up to which D 128 gains from blocks that stay and draw their tiles, the next one copied
# under this one's end: 1 to 9 % of full 1k to 4k, 19, 8 and 0 to 1 % of causal 1k, 2k and 4k, 8 % of a window of 1,024.
# By a fixed stride causal 2k loses 7 %
FEW_KEYS_DRAWN = 4224
# Keys up to which D 256 gains from them with no mask: 1.1 % of 2k, 0.5 % of 8k
LONG_DRAWN_256 = 8192
LONG_PERSISTENT = 16384  # queries up to which D 64 gains from blocks that stay
# Keys of a tile with D 256 and a mask, where 80 fit: 64 cost less at its edges (1 and 2.5 % of causal 8k; no mask: 0 to
# -2 %)
MASKED_256 = 64
HELD_KEYS = 1024  # from which D 128 holds them
LATE_KEYS = 4096  # up to which D 128 draws late
# Keys from which 192/128 gains from blocks that stay, whose next Q comes once registers hold this one: 8k full 1 %,
# causal 2; fewer were not timed
LONG_HELD_ALL = 8192
# Tiles of keys for which multiprocessors would be idle, from which work is shared: with 15 and more 4k to 16k of D 128,
# 8k of D 192 and 256 gain 1 to 2 %, with 6 to 8 their 2k lose 1
SHARED = 10


def large(problem: Problem, program: Program, target: Target, heads: int) -> HopperTiling:
    """Two groups of 64 queries, or three where D is at most 96 and a score mod's values need no registers."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    widest, invariant = max(d, dv), problem.schedule.batch_invariant
    # what a score mod reads at (q, kv) waits in registers: 240 for each of two warpgroups instead of 160; so do the
    # words of dropout (63 spilled with D 64)
    gathers = reads_pairs(program.score)
    asked = keys_in_order(widest, program) if invariant else 0
    narrow = widest <= 96 and not gathers and program.keep is None
    warpgroups = 3 if narrow and keys_by_registers(160, dv, program) >= asked else 2
    tile_m = 64 * warpgroups
    mean_keys = functools.cache(lambda: keys_of_a_query(problem, program))  # asked for twice, some 20 operations
    guesses = rows_guess(problem, program, heads, mean_keys)
    persistent = problem.schedule.persistent
    if persistent is None:
        # one tile a block at most: D 128 loses 2 to 4 % by drawing it
        once = widest == 128 and query_tiles(problem, heads, tile_m) * problem.batch <= target.sms
        persistent = not once and _stays(problem, program, warpgroups, guesses, mean_keys)
    registers = 160 if warpgroups == 3 else 240
    held = _held(problem, program, persistent)
    # 128 keys beside all of Q in registers, and two stages of them beside Q in shared memory
    holds_all = d > dv and held == d and keys_by_registers(registers - held // 4, dv, program) >= 128
    direct = persistent and (holds_all or d == dv == 256)
    rows = d + dv if persistent and not direct else widest
    by_registers, by_memory = keys_by_registers(registers, dv, program), keys_by_memory(target, tile_m, rows, d + dv)
    most = most_read(widest, program) if gathers else MASKED_256 if widest > 192 and program.mask is not None else 128
    tile_n = asked or min(by_registers, by_memory, most)
    paged = problem.layout.kv == "paged"
    consumers, producer = (160, 32) if warpgroups == 3 else (232, 40) if paged else (240, 24)
    passes = warpgroups == 3 and widest == 64 and may_pass(problem, program, heads)
    tiling = tiling_of(
        problem,
        heads,
        tile_m=tile_m,
        tile_n=whole_pages(tile_n) if paged else tile_n,
        # K's stage is free later where rows guess: of D 64 a third one gains 1 to 3 %
        stages=3 if guesses and tile_n <= keys_by_memory(target, tile_m, rows, d + dv + 64, stages=3) else 2,
        warpgroups=warpgroups,
        consumer_registers=consumers,
        producer_registers=producer,
        pingpong=widest <= 192,
        rescale_early=_rescale_early(dv, warpgroups, program, guesses),
        persistent=persistent,
        drawn=_drawn(widest, problem) if persistent else None,
        output_direct=direct,
        output_wait=_output_wait(widest, warpgroups, program, guesses),
        heads_together=heads_together(problem, program),
        kernel=GUESSING if guesses else APART if passes else kernel_of(problem),
        held=held if keys_by_registers(registers - held // 4, dv, program) >= tile_n else 0,
        written=written(d, dv, program, guesses),
    )
    tiling = with_next_queries(tiling, target)
    return dataclasses.replace(tiling, shares="last" if _shares(problem, program, tiling, target) else None)


def _shares(problem: Problem, program: Program, tiling: HopperTiling, target: Target) -> bool:
    """Whether blocks share the last rounds of equal tiles, where one of them would leave many idle for long.

    Not three warpgroups, whose loops have no register to spare (D 64 loses 2 to 4 %), nor with all of Q in registers
    (192/128: 16 spilled). With score mods it was not timed.
    """
    plain = tiles_are_equal(problem, program) and not changes_weights(program)
    can = tiling.drawn is not None and tiling.warpgroups == 2 and not tiling.frees_queries
    if not (plain and can) or problem.schedule.batch_invariant:
        return False
    tiles = query_tiles(problem, tiling.packed_heads, tiling.tile_m) * problem.batch
    idle = -tiles % target.sms / target.sms
    fits = 2 * target.sms**2 * key_tiles(problem, tiling.tile_n) < 1 << 31  # what `Shares` multiplies
    return fits and tiles > 2 * target.sms and idle * keys(problem) > SHARED * tiling.tile_n


def _rescale_early(dv: int, warpgroups: int, program: Program, guesses: bool) -> bool:
    """Of a large block. Three warpgroups fill each other's gaps; two gain from a shorter turn.

    Where rows guess, of tiles that look for their maximum: D 128 gains 1 to 3 % of scores that deviate by 3 and 6, D 64
    loses 0.5 to 2 by it, D 96 nothing.
    """
    return (dv == 128 and program.score is None) if guesses else (warpgroups == 3 or dv > 128)


def _output_wait(widest: int, warpgroups: int, program: Program, guesses: bool) -> Literal["first", "half"] | None:
    """Of a large block. Timed on an H200, in turns.

    Behind the first exponential D 128 gains 3 to 5 % up to 4k, a window of 1,024 7, what is read at (q, kv) 3, D 192
    and 256 0 to 2; a soft cap loses 2, ALiBi 1. Where rows guess, behind half of them, D 128 gains 0 to 5 % from 4k on;
    D 64 and 96, whose three warpgroups fill each other's gaps, lose up to 1.
    """
    if warpgroups != 2 or program.keep is not None:
        return None
    if guesses:
        return "half" if widest == 128 and program.score is None else None
    return "first" if program.score is None or reads_pairs(program.score) else None


def _stays(problem: Problem, program: Program, warpgroups: int, guesses: bool, mean_keys: Callable[[], float]) -> bool:
    """Whether large blocks stay for many work tiles, where nothing is asked for."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    changed = changes_weights(program) or problem.schedule.batch_invariant
    plain = program.mask is None and not changed
    if not problem.layout.is_dense:
        return problem.layout.q == problem.layout.kv == "packed" and max(d, dv) == 128
    if max(d, dv) == 128:
        # ALiBi, whose rows guess their maxima, loses 7 % of causal 8k
        few = mean_keys() <= FEW_KEYS_DRAWN and not (guesses and program.score is not None)
        return few or plain  # which shares the last rounds: of 4k to 8k keys 1 to 7 %
    if d == dv == 192:
        return not changed
    if (d, dv) == (192, 128):
        holds_all = keys_by_registers(240 - d // 4, dv, program) >= 128
        return not changed and holds_all and keys(problem) >= LONG_HELD_ALL
    if d == dv == 256:
        return not changed and (program.mask is not None or keys(problem) <= LONG_DRAWN_256)
    # D 64 gains 1 to 2 % of 4k to 16k: its work tiles are equal, and there are many. It loses 2 to 3 % of 32k
    return plain and warpgroups == 3 and max(d, dv) == 64 and FEW_KEYS[64] < queries(problem) <= LONG_PERSISTENT


def _drawn(widest: int, problem: Problem) -> Literal["early", "late"] | None:
    """When large blocks that stay draw their next tile: late where tiles take long (D 192 causal 8k: 3 %) or differ.

    Packed ones do (eight documents: 3 %, causal 7). D 64 gains 2, 0.4 and 0.2 % of full 4k, 8k and 16k either way.
    D 128 gains 0.5 to 4 % up to 4k keys by late ones, grouped heads most, and loses 1 of groups of 8k.
    """
    if widest not in (64, 128, 192, 256):
        return None
    late = widest != 128 or not problem.layout.is_dense or keys(problem) <= LATE_KEYS
    return "late" if late else "early"


def _held(problem: Problem, program: Program, persistent: bool) -> int:
    """Columns of Q that a large block's registers should hold, if a tile leaves them room.

    None behind score mods, whose values take registers too (D 192, an ALiBi window: 15 spilled).
    """
    if changes_weights(program) or problem.layout.kv == "paged" or problem.schedule.batch_invariant:
        return 0
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    # of 192/128 with no mask blocks that leave gain nothing
    of_those_that_stay = d == 192 and (dv == 192 or program.mask is None)
    if (d == 128 and keys(problem) < HELD_KEYS) or (of_those_that_stay and not persistent):
        return 0
    return HELD.get((d, dv), 0) if problem.layout.is_dense else 0
