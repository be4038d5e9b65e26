"""How the Hopper forward cuts few queries: decoding, where memory is the limit."""

from __future__ import annotations

import dataclasses

from ..fused.tiles.few_queries import time_of
from ..fused.tiles.scheduler import Scheduler
from ..fused.tiles.tiling import key_tiles, slots
from ..fused.tiles.traits import queries, reads_along_keys, tiles_are_equal, weighs_keys
from .forward_forms import Facts
from .maxima import threshold_of
from .tiling import EVEN_STAGES, ROWS, HopperTiling

# Of K and V in shared memory where one block of few queries has 128 keys a tile: with half as much again, 64 sequences
# of 4k and more lose 2 %
BYTES_ON_THE_WAY = 128 << 10
FULL_ROUNDS = 0.04  # of their places idle, up to which nothing is gained by equal shares


def few_rows(facts: Facts) -> HopperTiling:
    """One warpgroup, and as many bytes of K and V on their way as memory needs to be busy: it is the limit.

    Two blocks on an SM, of 64 keys, or with D 64 of 128, fill each other's beginnings and ends; with D 64
    three of 64 keys have half as many places again; one of 128 keys has half as many; equal shares leave none idle, and
    take longest to end. Which is best depends on how many tiles there are.
    """
    problem, program, widest, fixed = facts.problem, facts.program, facts.call.widest, facts.keys_in_order
    in_order = fixed or reads_along_keys(program.score) or weighs_keys(program)  # these wait in registers
    if facts.of_bytes:
        return _of_bytes(facts, bool(in_order))
    small = widest == 64 and not in_order and program.keep is None  # dropout's words: 14 and 24 spilled
    tile_n = fixed or (128 if small else 64)
    blocks = 2 if widest <= (128 if tile_n == 64 else 96) and not problem.schedule.persistent else 1
    deep = _of_few_rows(facts, tile_n, blocks, 8)
    if blocks == 1:
        return deep
    cuts = [dataclasses.replace(deep, stages=EVEN_STAGES), deep]  # the first of those that take as long
    if small:
        cuts.append(_of_few_rows(facts, 64, 3, EVEN_STAGES))
    if not in_order:
        alone = _of_few_rows(facts, 128, 1, BYTES_ON_THE_WAY // (2 * 128 * sum(facts.call.dims)))
        cuts.append(alone)
        if _has_equal_shares(facts, alone):
            cuts.append(dataclasses.replace(alone, scheduler=Scheduler.STREAM_K))
    return min(cuts, key=lambda tiling: time_of(problem, tiling, facts.target).least())


def _has_equal_shares(facts: Facts, tiling: HopperTiling) -> bool:
    """Whether blocks may share all keys alike: tiles are equal, none has more than three portions, and places are idle.

    Where rounds are full, 128 tiles and multiples of them, shares lose up to 27 % (an end of 6 µs more than others').
    """
    problem, sms = facts.problem, facts.target.sms
    if not tiles_are_equal(problem, facts.program) or problem.schedule.persistent is not None:
        return False
    tiles = problem.q_heads // tiling.packed_heads * problem.batch
    few = 2 * tiles >= sms  # as one warp adds up all portions
    idle = -tiles % sms
    counted = (tiles * key_tiles(problem, tiling.tile_n) + 1) * sms < 1 << 31  # what `EqualShares` multiplies
    return few and idle >= FULL_ROUNDS * (tiles + idle) and counted


def _of_bytes(facts: Facts, in_order: bool) -> HopperTiling:
    """K and V of 8 bits: one block on an SM, whose converting warps have registers for what they read ahead.

    Of 32k keys, 16 sequences, D 128 it takes 0.70 of 16 bits' time, two blocks of 64 keys 0.72; one sequence 0.76 and
    1.17; D 64 0.88 and 0.90; 16-bit numbers of fp16 0.60 and 0.69 (one H200).
    """
    fixed = facts.keys_in_order
    if in_order and not fixed and facts.call.widest <= 128 and not facts.problem.schedule.persistent:
        return _of_few_rows(facts, 64, 2, 8)
    return _of_few_rows(facts, fixed or (128 if facts.call.widest <= 128 and not in_order else 64), 1, 8)


def _of_few_rows(facts: Facts, tile_n: int, blocks: int, most: int) -> HopperTiling:
    """With as many stages as shared memory holds, up to `most`."""
    (d, dv), problem = facts.call.dims, facts.problem
    persistent = problem.schedule.persistent or False
    room = facts.target.shared_memory // blocks - 1024 - 2 * ROWS * (d + dv if persistent else max(d, dv))
    stage = 2 * tile_n * (d + dv)
    of_bytes = {}
    if facts.of_bytes:  # two stages that are multiplied; what is on its way are bytes
        most, of_bytes["byte_stages"] = 2, min(most, (room - 2 * stage) // (tile_n * (d + dv)))
    # of packed sequences tensors say how many rows there are
    eight = problem.layout.q == "dense" and not facts.keys_in_order and queries(problem) * slots(facts.heads) <= 8
    return facts.tiling(
        tile_m=ROWS,
        tile_n=tile_n,
        d=d,
        dv=dv,
        heads_together=problem.schedule.heads_together,
        packed_heads=facts.heads,
        blocks=blocks,
        scheduler=Scheduler.STRIDE if persistent else Scheduler.ONE_TILE,
        threshold=threshold_of(problem),
        stages=min(most, room // stage),
        eight_rows=eight,
        **of_bytes,
    )
