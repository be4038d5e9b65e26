"""How the Hopper forward cuts few queries: decoding, where memory is the limit."""

from __future__ import annotations

import dataclasses

from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.tiles.few_queries import time_of
from ..fused.tiles.target import Target
from ..fused.tiles.tiling import key_tiles, slots
from ..fused.tiles.traits import padded, queries, reads_along_keys, tiles_are_equal
from .forward_forms import PAGE_REGISTERS, kernel_of, keys_in_order, tiling_of
from .tiling import EIGHT_ROWS, EVEN_STAGES, ROWS, HopperTiling, in_equal_shares

# Of K and V in shared memory where one block of few queries has 128 keys a tile: with half as much again, 64 sequences
# of 4k and more lose 2 %
BYTES_ON_THE_WAY = 128 << 10
FULL_ROUNDS = 0.04  # of their places idle, up to which nothing is gained by equal shares


def few_rows(problem: Problem, program: Program, target: Target, heads: int) -> HopperTiling:
    """One warpgroup, and as many bytes of K and V on their way as memory needs to be busy: it is the limit.

    Two blocks on a multiprocessor, of 64 keys, or with D 64 of 128, fill each other's beginnings and ends; with D 64
    three of 64 keys have half as many places again; one of 128 keys has half as many; equal shares leave none idle, and
    take longest to end. Which is best depends on how many tiles there are.
    """
    widest, schedule = max(padded(problem.head_dim), padded(problem.head_dim_v)), problem.schedule
    in_order = schedule.batch_invariant or reads_along_keys(program.score)  # these wait in registers
    small = widest == 64 and not in_order and program.keep is None  # dropout's words: 14 and 24 spilled
    tile_n = keys_in_order(widest, program) if schedule.batch_invariant else 128 if small else 64
    blocks = 2 if widest <= (128 if tile_n == 64 else 96) and not schedule.persistent else 1
    deep = _of_few_rows(problem, program, target, heads, tile_n, blocks, 8)
    if blocks == 1:
        return deep
    cuts = [dataclasses.replace(deep, stages=EVEN_STAGES), deep]  # the first of those that take as long
    if small:
        cuts.append(_of_few_rows(problem, program, target, heads, 64, 3, EVEN_STAGES))
    if not in_order:
        most = BYTES_ON_THE_WAY // (2 * 128 * (deep.d + deep.dv))
        alone = _of_few_rows(problem, program, target, heads, 128, 1, most)
        shared = _has_equal_shares(problem, program, alone, target)
        cuts += [alone, in_equal_shares(alone)] if shared else [alone]
    return min(cuts, key=lambda tiling: time_of(problem, tiling, target).least())


def _has_equal_shares(problem: Problem, program: Program, tiling: HopperTiling, target: Target) -> bool:
    """Whether blocks may share all keys alike: tiles are equal, none has more than three portions, and places are idle.

    Where rounds are full, 128 tiles and multiples of them, shares lose up to 27 % (an end of 6 µs more than others').
    """
    if not tiles_are_equal(problem, program) or problem.schedule.persistent is not None:
        return False
    tiles = problem.q_heads // tiling.packed_heads * problem.batch
    few = 2 * tiles >= target.sms  # as one warp adds up all portions
    idle = -tiles % target.sms
    counted = (tiles * key_tiles(problem, tiling.tile_n) + 1) * target.sms < 1 << 31  # what `EqualShares` multiplies
    return few and idle >= FULL_ROUNDS * (tiles + idle) and counted


def _of_few_rows(
    problem: Problem, program: Program, target: Target, heads: int, tile_n: int, blocks: int, most: int
) -> HopperTiling:
    """With as many stages as shared memory holds, up to `most`."""
    d, dv, persistent = padded(problem.head_dim), padded(problem.head_dim_v), problem.schedule.persistent or False
    room = target.shared_memory // blocks - 1024 - 2 * ROWS * (d + dv if persistent else max(d, dv))
    return tiling_of(
        problem,
        program,
        heads,
        kernel=EIGHT_ROWS if _are_eight(problem, heads) else kernel_of(problem),
        tile_m=ROWS,
        tile_n=tile_n,
        stages=min(most, room // (2 * tile_n * (d + dv))),
        producer_registers=PAGE_REGISTERS,
        persistent=persistent,
        blocks=blocks,
        heads_together=problem.schedule.heads_together,
        written="whole",
    )


def _are_eight(problem: Problem, heads: int) -> bool:
    """Whether eight rows of a tile are all queries' heads there can be; of packed sequences tensors say how many."""
    schedule = problem.schedule
    return problem.layout.q == "dense" and not schedule.batch_invariant and queries(problem) * slots(heads) <= 8
