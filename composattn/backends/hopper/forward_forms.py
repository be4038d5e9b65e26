"""The tilings of the forms that the Hopper forward's table names: what follows from a call once its form is known."""

from __future__ import annotations

import dataclasses
import functools

from ...analysis.captured_gradient import Pattern
from ...analysis.program import Program
from ...call.problem import Problem
from ...primitives.rescale_threshold import ALWAYS_RESCALE
from ..fused.tiles.few_queries import packed_heads
from ..fused.tiles.scheduler import Scheduler
from ..fused.tiles.segments import falls_apart
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
from .maxima import threshold_of
from .row_steps import Kind, row_steps
from .tiling import FROM_FIRST, GUESSING, ROWS, HopperTiling, registers_for

# Columns of Q in registers by D and Dv, where there is no score mod, in blocks that stay, D 128 in others too. D 192: 3
# to 5 % of 8k with the 80 keys that are left room for; D 128 of 1k and more: 1 to 3 %; D 256 gains nothing. None behind
# score mods, whose values take registers too (D 192, an ALiBi window: 15 spilled)
RESIDENT = {(192, 192): 128, (128, 128): 128, (192, 128): 192}
HELD_KEYS = 1024  # from which D 128 holds them
# Bytes of K and V of a head up to which heads without a mask come one after the other: their blocks run in step, and
# want less of L2 at a time. D 128: 1k to 8k gain 6 to 2 %, D 64 2k 3 %, 192/128 8k 2 %; of 16 MiB nothing is gained.
# Not with biases at pairs, which heads share: 8 heads of 8k gain 4 % at D 64, 2 at D 128
ONE_HEAD = 8 << 20
# Up to so many keys so many key/value heads of D 128 with a mask, as others would need their keys again when these have
# left L2: causal 256 gains 5 %, 512 3; 1024 loses 2 (B 16, 16 heads)
SHORT_TOGETHER = ((256, 16), (512, 32))
# Keys of a row up to which batch-invariant tiles have 64 of them where D is at most 96: windows of 128 to 2,048 reach
# 0.97 to 1.17 of the default by them, 0.74 to 0.91 by tiles of 128 keys
NARROW = 2048
FEW_KEYS = 512  # up to which small blocks take 64 at a time, and stay where D is 64 (9 to 15 % of causal 128 to 512)
# D whose blocks that stay draw their tiles; others were not timed so, and go by a fixed stride
DRAWN = (64, 128, 192, 256)
# Tiles of keys for which SMs would be idle, from which work is shared: with 15 and more 4k to 16k of D 128,
# 8k of D 192 and 256 gain 1 to 2 %, with 6 to 8 their 2k lose 1. Not three warpgroups, whose loops have no register to
# spare (D 64 loses 2 to 4 %), nor with all of Q in registers (192/128: 16 spilled)
SHARED = 10


@dataclasses.dataclass(frozen=True)
class Facts:
    """A call, and what all forms ask of it: D and Dv on chip, and keys of a sequence."""

    problem: Problem
    program: Program
    target: Target

    @functools.cached_property
    def heads(self) -> int:
        """Query heads that share the rows of a tile."""
        return packed_heads(self.problem, self.program, ROWS)

    @functools.cached_property
    def dims(self) -> tuple[int, int]:
        return padded(self.problem.head_dim), padded(self.problem.head_dim_v)

    @property
    def widest(self) -> int:
        return max(self.dims)

    @property
    def keys(self) -> int:
        return keys(self.problem)

    @property
    def masked(self) -> bool:
        return self.program.mask is not None

    @functools.cached_property
    def keys_in_order(self) -> int:
        """Keys of a batch-invariant tile: fewer where constants of the mask leave a row few; 0 for other calls."""
        if not self.problem.schedule.batch_invariant:
            return 0
        few = self.widest <= 96 and sees_at_most(NARROW, self.program)
        return 64 if few else invariant_keys(self.widest, self.program)

    @functools.cached_property
    def most_read(self) -> int:
        """Keys of a tile: fewer beside what a score mod reads at each pair; numbers of 16 bits take half of the room.

        128 keys of such biases gain 5 % of causal calls at D 64, 9 of full ones, 6 and 5 at D 128; of fp32 they lose
        57.
        """
        most = 2 if self.widest <= 128 else 0
        return 128 if bytes_at_pairs(self.program.score) <= most else 96

    def keys_by_registers(self, registers: int) -> int:
        """Columns that fit: scores in fp32, probabilities in 16 bits, output in fp32, and room for the rest.

        Values on their way take 30 or 36; a test that is no bound 12 more, or 25 spilled with D 64 and 128 columns.
        """
        other = 36 if self.program.score is not None or reads_any(self.program.mask) else 30
        free = registers - other - 12 * has_opaque_test(self.program) - self.dims[1] // 2
        return free * 4 // 3 // 16 * 16

    def stays(self, chosen: bool) -> bool:
        """Whether blocks are persistent: as asked for, else so."""
        asked = self.problem.schedule.persistent
        return chosen if asked is None else asked


def alone(call: Facts) -> HopperTiling:
    """One warpgroup on an SM: blocks of two would leave half of them idle.

    It takes 1.2 µs for a tile of 128 keys of D 128, two 1.3 for twice as many queries, and begins and ends sooner.
    """
    most = 64 if call.widest > 192 or call.keys <= 128 else call.most_read
    return tiling_of(call, "alone", warpgroups=1, most=most)


def small(call: Facts) -> HopperTiling:
    """One warpgroup for each block, and two or three blocks on an SM."""
    program, dense = call.program, call.problem.layout.is_dense
    three = call.widest <= 96 and call.keys_in_order <= 64
    # weights are as the scores have them, no mask reads tensors, and rows may know of others
    plain = dense and not (changes_weights(program) or reads_any(program.mask) or call.keys_in_order)
    short = plain and call.keys <= FEW_KEYS
    # 37 spills with 96 columns of a table; and 128 keys are two tiles of 64
    few = short or reads_pairs(program.score) or call.keys <= 128
    few = few or (program.score is None and sees_at_most(FEW_KEYS, program))
    stays = call.stays(short and call.widest == 64)
    return tiling_of(
        call,
        "three blocks" if three else "two blocks",
        warpgroups=1,
        blocks=3 if three else 2,
        most=64 if few or call.widest > 64 else 96,
        # values of a score mod beside those of a mask: 6 spills with D 96 and 64 columns
        spare=10 if program.score is not None and reads_any(program.mask) else 0,
        scheduler=Scheduler.STRIDE if stays else Scheduler.ONE_TILE,
    )


def large(call: Facts, guesses: bool, stays: bool) -> HopperTiling:
    """Two groups of 64 queries, or three where D is at most 96 and a score mod's values need no registers."""
    problem, program = call.problem, call.program
    # what a score mod reads at (q, kv) waits in registers: 240 for each of two warpgroups instead of 160; so do the
    # words of dropout (63 spilled with D 64)
    narrow = call.widest <= 96 and not reads_pairs(program.score) and program.keep is None
    warpgroups = 3 if narrow and call.keys_by_registers(160) >= call.keys_in_order else 2
    # one tile a block at most: D 128 loses 2 to 4 % by drawing it; wider ones that stay hold columns of Q
    once = call.widest <= 128 and query_tiles(problem, call.heads, ROWS * warpgroups) * problem.batch <= call.target.sms
    scheduler = Scheduler.ONE_TILE
    if call.stays(stays and not once):
        scheduler = Scheduler.LATE if call.widest in DRAWN else Scheduler.STRIDE
    holds = problem.layout.is_dense and not (changes_weights(program) or call.keys_in_order)
    holds = holds and (call.keys >= HELD_KEYS if call.dims[0] == 128 else scheduler is not Scheduler.ONE_TILE)
    tiling = tiling_of(
        call,
        "guesses" if guesses else "three warpgroups" if warpgroups == 3 else "two warpgroups",
        warpgroups=warpgroups,
        # D 256 with a mask has room for 80 keys; 64 cost less at its edges (1 to 2.5 % of 8k)
        most=64 if call.widest > 192 and call.masked else call.most_read,
        scheduler=scheduler,
        resident=RESIDENT.get(call.dims, 0) if holds else 0,
    )
    shares = _shares(call, tiling)
    return dataclasses.replace(tiling, scheduler=Scheduler.LATE_STREAM_K) if shares else tiling


def documents(call: Facts) -> HopperTiling:
    """Two warpgroups, with 128 keys at a time where tiles begin with documents (H200, 8k: 2 to 16 % before 112).

    Else with 112 (1 to 2 % before 96 and 128). Blocks stay (2 to 12 %), but of full documents with which no tiles
    begin, so that they differ more (4 % lost). They draw early: drawn late, twelve lose 3 %, eight causal ones 4. Eight
    gain 3 % by columns of Q in registers, causal ones too, twelve nothing.
    """
    apart = falls_apart(call.problem, call.program)
    stays = call.stays(apart or has_bounded_documents(call.program.mask))
    return tiling_of(
        call,
        "documents",
        warpgroups=2,
        most=128 if apart else 112,
        scheduler=Scheduler.EARLY if stays else Scheduler.ONE_TILE,
        resident=RESIDENT.get(call.dims, 0) if stays else 0,
    )


def tiling_of(
    call: Facts,
    kind: Kind,
    *,
    warpgroups: int,
    blocks: int = 1,
    most: int,
    spare: int = 0,
    scheduler: Scheduler = Scheduler.ONE_TILE,
    resident: int = 0,
) -> HopperTiling:
    """A tile has as many keys, up to `most`, as registers, but `spare` ones, and shared memory have room for.

    All of Q, `resident` in registers, goes before keys; some columns of it are held where the keys leave them room.
    """
    (d, dv), kernel = call.dims, {"guesses": GUESSING, "documents": FROM_FIRST}.get(kind, "forward")
    paged = call.problem.layout.kv == "paged"
    room = registers_for(warpgroups, blocks, paged).computing - spare
    made = HopperTiling(
        kernel=kernel,
        tile_m=ROWS * warpgroups,
        tile_n=64,
        d=d,
        dv=dv,
        heads_together=heads_together(call),
        packed_heads=call.heads,
        blocks=blocks,
        scheduler=scheduler,
        # where maxima are guessed, few tiles look for their own
        threshold=ALWAYS_RESCALE if kernel == GUESSING else threshold_of(call.problem),
        stages=2,
        resident=resident,
        steps=row_steps(kind, dv, call.program),
    )
    rows = d + dv if made.separate_o else call.widest
    by_registers = call.keys_by_registers(room - (resident // 4 if made.frees_queries else 0))
    by_memory = keys_by_memory(call.target, made.tile_m, rows, d + dv)
    tile_n = call.keys_in_order or min(by_registers, by_memory, most)
    # K's stage is free later where rows guess: of D 64 a third one gains 1 to 3 %
    third = kernel == GUESSING and tile_n <= keys_by_memory(call.target, made.tile_m, rows, d + dv + 64, stages=3)
    return dataclasses.replace(
        made,
        tile_n=whole_pages(tile_n) if paged else tile_n,
        stages=3 if third else 2,
        resident=resident if call.keys_by_registers(room - resident // 4) >= tile_n else 0,
    )


def heads_together(call: Facts) -> int | None:
    """What is asked for, else one head where all query tiles visit the same keys and these are not too many."""
    asked = call.problem.schedule.heads_together
    if asked is not None or not call.problem.layout.is_dense:
        return asked
    if call.masked:
        short = next((heads for most, heads in SHORT_TOGETHER if call.keys <= most), None)
        return short if call.widest == 128 else None
    few = 2 * call.keys * sum(call.dims) <= ONE_HEAD
    return 1 if few and not reads_by(call.program.score, Pattern.PAIR) else None


def _shares(call: Facts, tiling: HopperTiling) -> bool:
    """Whether blocks share the last rounds of equal tiles, where one of them would leave many idle for long.

    With score mods it was not timed.
    """
    problem, sms = call.problem, call.target.sms
    equal = tiles_are_equal(problem, call.program) and not (changes_weights(call.program) or call.keys_in_order)
    if not (equal and tiling.scheduler.draws and tiling.warpgroups == 2) or tiling.frees_queries:
        return False
    tiles = query_tiles(problem, tiling.packed_heads, tiling.tile_m) * problem.batch
    idle = -tiles % sms / sms
    fits = 2 * sms**2 * key_tiles(problem, tiling.tile_n) < 1 << 31  # what `Shares` multiplies
    return fits and tiles > 2 * sms and idle * call.keys > SHARED * tiling.tile_n
