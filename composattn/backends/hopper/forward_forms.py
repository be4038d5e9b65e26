"""The tiling of a Hopper forward once its form is known: as many keys of a tile, and columns of Q, as there is room."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from ...analysis.program import Program
from ...call.problem import Problem
from ...primitives.rescale_threshold import ALWAYS_RESCALE
from ..fused.planning.call_class import BEYOND, CallClass, MaskKind, ModsKind
from ..fused.tiles.few_queries import packed_heads
from ..fused.tiles.patterns import Pattern, Span, first
from ..fused.tiles.scheduler import Scheduler
from ..fused.tiles.target import Target
from ..fused.tiles.tiling import invariant_keys, key_tiles, keys_by_memory, query_tiles, whole_pages
from ..fused.tiles.traits import (
    bytes_at_pairs,
    changes_weights,
    has_opaque_test,
    keys,
    reads_any,
    sees_at_most,
    tiles_are_equal,
    weighs_keys,
)
from .byte_tiling import ByteTiling
from .forward_shapes import LESS, Shape, shape_of, steps_of
from .forward_table import ForwardForm
from .maxima import threshold_of
from .tiling import GUESSING, ROWS, HopperTiling, registers_for

FREE: Pattern = {"mods": (ModsKind.PLAIN,), "layout": ("dense",), "order": ("any", "fixed")}
DENSE: Pattern = {"layout": ("dense",)}
MASKED: Pattern = {"mask": tuple(m for m in MaskKind if m is not MaskKind.NONE)}
# Columns of Q in registers of two warpgroups. D 128 of 1k and more: 1 to 3 %. D 192, in blocks that stay: 3 to 5 % of
# 8k with the 80 keys that are left room for; D 256 gains nothing. None behind score mods, whose values take registers
# too (D 192, an ALiBi window: 15 spilled)
RESIDENT: tuple[tuple[int, Pattern], ...] = (
    (128, FREE | {"dims": ((128, 128),), "length": Span(768, BEYOND)}),
    (192, FREE | {"dims": ((192, 128),)}),
    (128, FREE | {"dims": ((192, 192),)}),
    (0, {}),
)
# Key/value heads that run together. Without a mask one after the other up to so many bytes of K and V: their blocks run
# in step, and want less of L2 at a time. D 128: 1k to 8k gain 6 to 2 %, D 64 2k 3 %, 192/128 8k 2 %; of 16 MiB nothing
# is gained. Not with biases at pairs, which heads share: 8 heads of 8k gain 4 % at D 64, 2 at D 128. With a mask few of
# short ones of D 128, as others would need their keys again when these have left L2: causal 256 gains 5 %, 512 3; 1024
# loses 2 (B 16, 16 heads)
ONE_HEAD = 8 << 20
TOGETHER: tuple[tuple[int | None, Pattern], ...] = (
    (16, MASKED | DENSE | {"widest": (128,), "length": Span(0, 256)}),
    (32, MASKED | DENSE | {"widest": (128,), "length": Span(0, 512)}),
    (None, MASKED),
    (None, {"mods": (ModsKind.PAIRS,)}),
    (1, DENSE),
    (None, {}),
)
# Keys of a row up to which batch-invariant tiles have 64 of them where D is at most 96: windows of 128 to 2,048 reach
# 0.97 to 1.17 of the default by them, 0.74 to 0.91 by tiles of 128 keys
NARROW = 2048
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
    call: CallClass

    @functools.cached_property
    def heads(self) -> int:
        """Query heads that share the rows of a tile."""
        return packed_heads(self.problem, self.program, ROWS)

    @property
    def keys(self) -> int:
        return keys(self.problem)

    @property
    def paged(self) -> bool:
        return self.call.layout == "paged"

    @functools.cached_property
    def keys_in_order(self) -> int:
        """Keys of a batch-invariant tile: fewer where constants of the mask leave a row few; 0 for other calls."""
        if not self.problem.schedule.batch_invariant:
            return 0
        few = self.call.widest <= 96 and sees_at_most(NARROW, self.program)
        return 64 if few else invariant_keys(self.call.widest, self.program)

    @property
    def most_read(self) -> int:
        """Keys of a tile: fewer beside what a score mod reads at each pair; numbers of 16 bits take half of the room.

        128 keys of such biases gain 5 % of causal calls at D 64, 9 of full ones, 6 and 5 at D 128; of fp32 they lose
        57.
        """
        few = bytes_at_pairs(self.program.score) <= (2 if self.call.widest <= 128 else 0)
        return 128 if few and not weighs_keys(self.program) else 96

    def registers(self, shape: Shape) -> int:
        """Registers of a thread that computes."""
        return registers_for(shape.warpgroups, shape.blocks, self.paged, self.of_bytes).computing

    def keys_by_registers(self, registers: int) -> int:
        """Columns that fit: scores in fp32, probabilities in 16 bits, output in fp32, and room for the rest.

        Values on their way take 30 or 36, of a score mod beside those of a mask 46 (6 spills with D 96 and 64 columns);
        a test that is no bound 12 more, or 25 spilled with D 64 and 128 columns; numbers of keys that weights are times
        24, one for each of a thread's columns.
        """
        scored, reads = self.program.score is not None, reads_any(self.program.mask)
        other = 30 + 6 * (scored or reads) + 10 * (scored and reads) + 12 * has_opaque_test(self.program)
        other += 24 * weighs_keys(self.program)
        return (registers - other - self.call.dv // 2) * 4 // 3 // 16 * 16

    @property
    def of_bytes(self) -> bool:
        """Whether K and V come as 8-bit numbers."""
        return self.problem.narrow is not None

    def tiling(self, **fields: Any) -> HopperTiling:
        """A tiling; of bytes with a stage of each, which is all that a block of many queries needs."""
        return ByteTiling(**{"byte_stages": 1, **fields}) if self.of_bytes else HopperTiling(**fields)

    def stays(self, chosen: bool) -> bool:
        """Whether blocks are persistent: as asked for, else so."""
        asked = self.problem.schedule.persistent
        return chosen if asked is None else asked


def tiling_of(facts: Facts, form: ForwardForm) -> HopperTiling:
    """A tile has as many keys as its shape, registers and shared memory have room for.

    All of Q, if it waits in registers, goes before keys; some columns of it are held where the keys leave them room.
    """
    shape = shape_of(form, facts.call)
    if facts.of_bytes or facts.keys_by_registers(facts.registers(shape)) < facts.keys_in_order:
        shape = LESS.get(shape.kind, shape)
    kernel, (d, dv) = shape.kernel(form), facts.call.dims
    scheduler = _scheduler(facts, form, shape)
    made = facts.tiling(
        kernel=kernel,
        tile_m=ROWS * shape.warpgroups,
        tile_n=64,
        d=d,
        dv=dv,
        heads_together=heads_together(facts),
        packed_heads=facts.heads,
        blocks=shape.blocks,
        scheduler=scheduler,
        # where maxima are guessed, few tiles look for their own
        threshold=ALWAYS_RESCALE if kernel == GUESSING else threshold_of(facts.problem),
        stages=2,
        resident=_resident(facts, shape, scheduler),
        steps=steps_of(form, shape, facts.call),
    )
    tiling = _filled(facts, shape, made)
    return dataclasses.replace(tiling, scheduler=Scheduler.LATE_STREAM_K) if _shares(facts, tiling) else tiling


def _scheduler(facts: Facts, form: ForwardForm, shape: Shape) -> Scheduler:
    """One tile a block at most: D 128 loses 2 to 4 % by drawing it; wider ones that stay hold columns of Q."""
    tiles = query_tiles(facts.problem, facts.heads, ROWS * shape.warpgroups) * facts.problem.batch
    once = form.stays and facts.call.widest <= 128 and tiles <= facts.target.sms
    return shape.scheduler if facts.stays(shape.stays or (form.stays and not once)) else Scheduler.ONE_TILE


def _resident(facts: Facts, shape: Shape, scheduler: Scheduler) -> int:
    holds = shape.warpgroups == 2 and (facts.call.d == 128 or scheduler is not Scheduler.ONE_TILE)
    return first(RESIDENT, facts.call) if holds else 0


def _filled(facts: Facts, shape: Shape, made: HopperTiling) -> HopperTiling:
    (d, dv), registers, resident = facts.call.dims, facts.registers(shape), made.resident
    rows = d + dv if made.separate_o else facts.call.widest
    by_registers = facts.keys_by_registers(registers - (resident // 4 if made.frees_queries else 0))
    beside = d + dv + 4 * made.ones if facts.of_bytes else 0
    by_memory = keys_by_memory(facts.target, made.tile_m, rows, d + dv, beside=beside)
    tile_n = facts.keys_in_order or min(by_registers, by_memory, shape.keys, facts.most_read)
    # K's stage is free later where rows guess: of D 64 a third one gains 1 to 3 %
    wider = d + dv + 64
    third = made.ones and tile_n <= keys_by_memory(facts.target, made.tile_m, rows, wider, stages=3, beside=beside)
    return dataclasses.replace(
        made,
        tile_n=whole_pages(tile_n) if facts.paged else tile_n,
        stages=3 if third else 2,
        resident=resident if facts.keys_by_registers(registers - resident // 4) >= tile_n else 0,
    )


def heads_together(facts: Facts) -> int | None:
    """What is asked for, else one head where all query tiles visit the same keys and these are not too many."""
    together = first(TOGETHER, facts.call)
    if together == 1 and 2 * facts.keys * sum(facts.call.dims) > ONE_HEAD:
        together = None
    return facts.problem.schedule.heads_together or together


def _shares(facts: Facts, tiling: HopperTiling) -> bool:
    """Whether blocks share the last rounds of equal tiles, where one of them would leave many idle for long.

    With score mods it was not timed.
    """
    problem, sms = facts.problem, facts.target.sms
    equal = tiles_are_equal(problem, facts.program) and not (changes_weights(facts.program) or facts.keys_in_order)
    if not (equal and tiling.scheduler.draws and tiling.warpgroups == 2) or tiling.frees_queries:
        return False
    tiles = query_tiles(problem, tiling.packed_heads, tiling.tile_m) * problem.batch
    idle = -tiles % sms / sms
    fits = 2 * sms**2 * key_tiles(problem, tiling.tile_n) < 1 << 31  # what `Shares` multiplies
    return fits and tiles > 2 * sms and idle * facts.keys > SHARED * tiling.tile_n
