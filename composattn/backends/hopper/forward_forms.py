"""The tilings of the forms that the Hopper forward's table names: what follows from a call once its form is known."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from ...analysis.captured_gradient import Pattern
from ...analysis.program import Program
from ...call.problem import Problem
from ...primitives.lag import NO_LAG
from ..fused.tiles.stretches import falls_apart
from ..fused.tiles.target import Target
from ..fused.tiles.tiling import invariant_keys, key_tiles, keys_by_memory, query_tiles, whole_pages
from ..fused.tiles.traits import (
    bytes_at_pairs,
    changes_weights,
    has_bounded_documents,
    has_opaque_test,
    keys,
    padded,
    reads_any,
    reads_by,
    reads_pairs,
    sees_at_most,
    tiles_are_equal,
)
from ..fused.tiles.written import Written
from .maxima import lag_of
from .tiling import FROM_FIRST, GUESSING, ROWS, HopperTiling

PAGE_REGISTERS = 40  # of a thread that copies: page numbers beside what all copies need
# Columns of Q in registers by D and Dv, where there is no score mod, in blocks that stay, D 128 in others too. D 192: 3
# to 5 % of 8k with the 80 keys that are left room for; D 128 of 1k and more: 1 to 3 %; D 256 gains nothing
HELD = {(192, 192): 128, (128, 128): 128, (192, 128): 192}
HELD_KEYS = 1024  # from which D 128 holds them
# Bytes of K and V of a head up to which heads without a mask come one after the other: their blocks run in step, and
# want less of L2 at a time. D 128: 1k to 8k gain 6 to 2 %, D 64 2k 3 %, 192/128 8k 2 %; of 16 MiB nothing is gained
ONE_HEAD = 8 << 20
# up to so many keys so many key/value heads of D 128: causal 256 gains 5 %, 512 3; 1024 loses 2 (B 16, 16 heads)
SHORT_TOGETHER = ((256, 16), (512, 32))
# Keys of a row up to which batch-invariant tiles have 64 of them where D is at most 96: windows of 128 to 2,048 reach
# 0.97 to 1.17 of the default by them, 0.74 to 0.91 by tiles of 128 keys
NARROW = 2048
FEW_KEYS = 512  # up to which small blocks take 64 at a time, and stay where D is 64 (9 to 15 % of causal 128 to 512)
LATE_KEYS = 4096  # up to which D 128 draws late
MASKED_256 = 64  # keys of a tile with D 256 and a mask, where 80 fit: 64 cost less at its edges (1 to 2.5 % of 8k)
# Tiles of keys for which multiprocessors would be idle, from which work is shared: with 15 and more 4k to 16k of D 128,
# 8k of D 192 and 256 gain 1 to 2 %, with 6 to 8 their 2k lose 1
SHARED = 10


def alone(problem: Problem, program: Program, target: Target, heads: int) -> HopperTiling:
    """One warpgroup on a multiprocessor: blocks of two would leave half of them idle.

    It takes 1.2 µs for a tile of 128 keys of D 128, two 1.3 for twice as many queries, and begins and ends sooner.
    """
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    widest = max(d, dv)
    most = 64 if widest > 192 or keys(problem) <= 128 else most_read(widest, program)
    return tiling_of(
        problem,
        program,
        heads,
        tile_m=ROWS,
        tile_n=min(keys_by_registers(240, dv, program), keys_by_memory(target, ROWS, widest, d + dv), most),
        producer_registers=PAGE_REGISTERS,
        rescale_early=dv > 128,
        output_wait="first" if program.keep is None else None,
    )


def small(problem: Problem, program: Program, target: Target, heads: int) -> HopperTiling:
    """One warpgroup for each block, and two or three blocks on a multiprocessor."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    in_order = keys_in_order(max(d, dv), program) if problem.schedule.batch_invariant else 0
    three = max(d, dv) <= 96 and in_order <= 64
    # values of a score mod beside those of a mask: 6 spills with D 96 and 64 columns
    both = 10 if program.score is not None and reads_any(program.mask) else 0
    by_registers = keys_by_registers((136 if three else 216) - both, dv, program)
    few = _is_plain(problem, program) and keys(problem) <= FEW_KEYS
    # 37 spills with 96 columns of a table; and 128 keys are two tiles of 64
    few = few or reads_pairs(program.score) or keys(problem) <= 128
    few = few or (program.score is None and sees_at_most(FEW_KEYS, program))
    most = 64 if few or max(d, dv) > 64 else 96
    tiling = tiling_of(
        problem,
        program,
        heads,
        tile_m=ROWS,
        tile_n=in_order or min(by_registers, most),
        blocks=3 if three else 2,
        producer_registers=24 if three else 40,
        rescale_early=three,
        # one warpgroup has no other's softmax under its products (D 64: 1 to 3 %)
        output_wait="first" if three else None,
        persistent=_asked(problem, _is_plain(problem, program) and max(d, dv) == 64 and keys(problem) <= FEW_KEYS),
        # causal 1k and 2k of D 64 lose 1 % by whole ones
        written="by steps" if program.mask is not None else "whole",
    )
    return with_next_queries(tiling, target)


def large(problem: Problem, program: Program, target: Target, heads: int, guesses: bool, stays: bool) -> HopperTiling:
    """Two groups of 64 queries, or three where D is at most 96 and a score mod's values need no registers."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    widest, paged, invariant = max(d, dv), problem.layout.kv == "paged", problem.schedule.batch_invariant
    asked = keys_in_order(widest, program) if invariant else 0
    # what a score mod reads at (q, kv) waits in registers: 240 for each of two warpgroups instead of 160; so do the
    # words of dropout (63 spilled with D 64)
    narrow = widest <= 96 and not reads_pairs(program.score) and program.keep is None
    warpgroups, registers = (3, 160) if narrow and keys_by_registers(160, dv, program) >= asked else (2, 240)
    tile_m = ROWS * warpgroups
    # one tile a block at most: D 128 loses 2 to 4 % by drawing it; wider ones that stay hold columns of Q
    once = widest <= 128 and query_tiles(problem, heads, tile_m) * problem.batch <= target.sms
    persistent = _asked(problem, stays and not once)
    held = _held(problem, program, persistent)
    # 128 keys beside all of Q in registers, and two stages of them beside Q in shared memory
    holds_all = d > dv and held == d and keys_by_registers(registers - held // 4, dv, program) >= 128
    direct = persistent and (holds_all or d == dv == 256)
    rows = d + dv if persistent and not direct else widest
    most = MASKED_256 if widest > 192 and program.mask is not None else most_read(widest, program)
    by_memory = keys_by_memory(target, tile_m, rows, d + dv)
    tile_n = asked or min(keys_by_registers(registers, dv, program), by_memory, most)
    tiling = tiling_of(
        problem,
        program,
        heads,
        kernel=GUESSING if guesses else kernel_of(problem),
        tile_m=tile_m,
        tile_n=whole_pages(tile_n) if paged else tile_n,
        # K's stage is free later where rows guess: of D 64 a third one gains 1 to 3 %
        stages=3 if guesses and tile_n <= keys_by_memory(target, tile_m, rows, d + dv + 64, stages=3) else 2,
        producer_registers=32 if warpgroups == 3 else PAGE_REGISTERS if paged else 24,
        rescale_early=_rescale_early(dv, warpgroups, program, guesses),
        persistent=persistent,
        drawn=_drawn(widest, problem) if persistent else None,
        output_direct=direct,
        output_wait=_output_wait(widest, warpgroups, program, guesses),
        held=held if keys_by_registers(registers - held // 4, dv, program) >= tile_n else 0,
    )
    tiling = with_next_queries(tiling, target)
    return dataclasses.replace(tiling, shares="last" if _shares(problem, program, tiling, target) else None)


def documents(problem: Problem, program: Program, heads: int) -> HopperTiling:
    """Two warpgroups, with 128 keys at a time where tiles begin with documents (H200, 8k: 2 to 16 % before 112).

    Else with 112 (1 to 2 % before 96 and 128). Blocks stay (2 to 12 %), but of full documents with which no tiles
    begin, so that they differ more (4 % lost).
    """
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    apart = falls_apart(problem, program)
    stays = _asked(problem, apart or has_bounded_documents(program.mask))
    return tiling_of(
        problem,
        program,
        heads,
        kernel=FROM_FIRST,
        tile_m=2 * ROWS,
        tile_n=min(keys_by_registers(240, dv, program), 128 if apart else 112),
        producer_registers=24,
        persistent=stays,
        drawn="early" if stays else None,
        # eight documents gain 3 %, causal ones too, twelve nothing
        held=HELD.get((d, dv), 0) if stays else 0,
        output_wait="first",
        written="whole",
    )


def tiling_of(problem: Problem, program: Program, heads: int, kernel: str = "", **chosen: Any) -> HopperTiling:
    """With what hangs on the problem and the kernel alone."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    kernel = kernel or kernel_of(problem)
    fields: dict[str, Any] = {
        "stages": 2,
        # where maxima are guessed, few tiles look for their own
        "lag": NO_LAG if kernel == GUESSING else lag_of(problem),
        "heads_together": heads_together(problem, program),
        "written": written(d, dv, program, kernel == GUESSING),
    }
    return HopperTiling(d=d, dv=dv, kernel=kernel, l2=32 << 20, packed_heads=heads, **fields | chosen)


def kernel_of(problem: Problem) -> str:
    return "forward_in_order" if problem.schedule.batch_invariant else "forward"


def _asked(problem: Problem, stays: bool) -> bool:
    """Whether blocks stay: as asked for, else so."""
    return stays if problem.schedule.persistent is None else problem.schedule.persistent


def _is_plain(problem: Problem, program: Program) -> bool:
    """Whether weights are as the scores have them, no mask reads tensors, and rows may know of others."""
    plain = not changes_weights(program) and not reads_any(program.mask)
    return plain and problem.layout.is_dense and not problem.schedule.batch_invariant


def heads_together(problem: Problem, program: Program) -> int | None:
    """What is asked for, else one head where all query tiles visit the same keys and these are not too many.

    Short masked calls of D 128 have few as well: others would need their keys again when these have left L2. Not with
    biases at pairs, which heads share: 8 heads of 8k gain 4 % at D 64, 2 at D 128.
    """
    asked, d, dv = problem.schedule.heads_together, padded(problem.head_dim), padded(problem.head_dim_v)
    if asked is not None or not problem.layout.is_dense:
        return asked
    if program.mask is not None:
        short = next((heads for most, heads in SHORT_TOGETHER if keys(problem) <= most), None)
        return short if max(d, dv) == 128 else None
    return 1 if not reads_by(program.score, Pattern.PAIR) and 2 * keys(problem) * (d + dv) <= ONE_HEAD else None


def written(d: int, dv: int, program: Program, guesses: bool) -> Written:
    """How products are; whole ones compile fastest. Timed on an H200, in turns.

    Anew, what is read at (q, kv) gains 1 to 3 %, and of rows that guess D 128 3 of 8k, D 96 1, D 64 1 to 2 of causal 4k
    and more. ALiBi loses 2 by it, soft caps 3, documents 5, 192/128 6.
    """
    if d > dv:  # 192/128 with no mask loses 1 % by whole ones
        return "by steps"
    if reads_pairs(program.score):
        return "anew"
    # D 64 with no mask loses 2 % anew
    gains = max(d, dv) > 64 or program.mask is not None
    return "anew" if guesses and program.score is None and gains else "whole"


def most_read(widest: int, program: Program) -> int:
    """Keys of a tile: fewer beside what a score mod reads at each pair; numbers of 16 bits take half of the registers.

    128 keys of such biases gain 5 % of causal calls at D 64, 9 of full ones, 6 and 5 at D 128; of fp32 they lose 57.
    """
    score = program.score
    if score is None or not reads_pairs(score):
        return 128
    return 128 if widest <= 128 and bytes_at_pairs(score) == 2 else 96


def keys_in_order(widest: int, program: Program) -> int:
    """Keys of a tile where results are batch-invariant: fewer where constants of the mask leave a row few."""
    return 64 if widest <= 96 and sees_at_most(NARROW, program) else invariant_keys(widest, program)


def keys_by_registers(registers: int, dv: int, program: Program) -> int:
    """Columns that fit: scores in fp32, probabilities in 16 bits, output in fp32, and room for the rest."""
    other = 30 if program.score is None and not reads_any(program.mask) else 36  # values on their way
    if has_opaque_test(program):
        other += 12  # of a test that is no bound: 25 spilled and read again with D 64 and 128 columns
    free = registers - other - dv // 2
    return free * 4 // 3 // 16 * 16


def with_next_queries(tiling: HopperTiling, target: Target) -> HopperTiling:
    """With two stages of Q, if the block stays and they fit beside its neighbours' memory."""
    if not tiling.separate_o:
        return tiling
    two = dataclasses.replace(tiling, q_stages=2)
    room = target.shared_memory // tiling.blocks - 1024 * (tiling.blocks > 1)
    return two if two.shared_memory(2) <= room else tiling


def _held(problem: Problem, program: Program, persistent: bool) -> int:
    """Columns of Q that a large block's registers should hold, if a tile leaves them room.

    None behind score mods, whose values take registers too (D 192, an ALiBi window: 15 spilled).
    """
    if changes_weights(program) or not problem.layout.is_dense or problem.schedule.batch_invariant:
        return 0
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    wanted = keys(problem) >= HELD_KEYS if d == 128 else persistent
    return HELD.get((d, dv), 0) if wanted else 0


def _rescale_early(dv: int, warpgroups: int, program: Program, guesses: bool) -> bool:
    """Whether a large block rescales early. Three warpgroups fill each other's gaps; two gain from a shorter turn.

    Where rows guess, of tiles that look for their maximum: D 128 gains 1 to 3 % of scores that deviate by 3 and 6, D 64
    loses 0.5 to 2 by it, D 96 nothing.
    """
    return (dv == 128 and program.score is None) if guesses else (warpgroups == 3 or dv > 128)


def _output_wait(widest: int, warpgroups: int, program: Program, guesses: bool) -> Literal["first", "half"] | None:
    """After which exponentials a large block waits for its output. Timed on an H200, in turns.

    Behind the first exponential D 128 gains 3 to 5 % up to 4k, a window of 1,024 7, what is read at (q, kv) 3, D 192
    and 256 0 to 2; a soft cap loses 2, ALiBi 1. Where rows guess, behind half of them, D 128 gains 0 to 5 % from 4k on;
    D 64 and 96, whose three warpgroups fill each other's gaps, lose up to 1.
    """
    if warpgroups != 2 or program.keep is not None:
        return None
    if guesses:
        return "half" if widest == 128 and program.score is None else None
    return "first" if program.score is None or reads_pairs(program.score) else None


def _drawn(widest: int, problem: Problem) -> Literal["early", "late"] | None:
    """When large blocks that stay draw their next tile: late where tiles take long (D 192 causal 8k: 3 %) or differ.

    Packed ones do (eight documents: 3 %, causal 7). D 64 gains 2, 0.4 and 0.2 % of full 4k, 8k and 16k either way.
    D 128 gains 0.5 to 4 % up to 4k keys by late ones, grouped heads most, and loses 1 of groups of 8k.
    """
    if widest not in (64, 128, 192, 256):
        return None
    late = widest != 128 or not problem.layout.is_dense or keys(problem) <= LATE_KEYS
    return "late" if late else "early"


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
