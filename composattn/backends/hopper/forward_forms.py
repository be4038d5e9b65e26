"""The tiling of a Hopper forward once its form is known: as many keys of a tile, and columns of Q, as there is room."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.planning.call_class import CallClass
from ..fused.planning.tables import Table, all_of, first, table
from ..fused.tiles.few_queries import sharing_heads
from ..fused.tiles.scheduler import Scheduler
from ..fused.tiles.target import Target
from ..fused.tiles.tiling import key_tiles, keys_by_memory, query_tiles, whole_pages
from ..fused.tiles.traits import bytes_at_pairs, has_opaque_test, keys, reads_any, reads_pairs, sees_at_most
from .byte_tiling import ByteTiling
from .forward_table import LESS, ForwardForm, Shape, shape_of, steps_of
from .tiling import FILE, ROWS, HopperTiling, registers_for, threshold_of

RESIDENT: Table[int] = table(FILE, "resident", int)  # columns of Q in registers
TOGETHER: Table[int | None] = table(FILE, "together", lambda said: said)  # key/value heads; None: as L2 holds
STAYS: Table[bool] = table(FILE, "stays", bool)  # whether blocks are persistent
SHARES: Table[bool] = table(FILE, "shares", bool)  # whether blocks share the last rounds of equal tiles
TAKEN: Table[int] = table(FILE, "taken", int)  # columns of registers beside scores and output, of all rows that match
MOST_KEYS: Table[int] = table(FILE, "most_keys", int)  # of a tile, beside what mods read
IN_ORDER: Table[int] = table(FILE, "invariant", int)  # keys of a batch-invariant tile; 0: of other calls
NARROW = 2048  # keys of a row up to which batch-invariant tiles may have 64 of them


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
        return sharing_heads(self.problem, self.program, ROWS) if self.call.packs else 1

    @property
    def keys(self) -> int:
        return keys(self.problem)

    @property
    def paged(self) -> bool:
        return self.call.layout == "paged"

    @functools.cached_property
    def keys_in_order(self) -> int:
        """Keys of a batch-invariant tile, of which D and the mods decide; 0 for other calls."""
        few, pairs = sees_at_most(NARROW, self.program), reads_pairs(self.program.score)
        return first(IN_ORDER, self.call, few=few, pairs=pairs)

    @property
    def most_read(self) -> int:
        """Keys of a tile: fewer beside what a score mod reads at each pair."""
        return first(MOST_KEYS, self.call, at_pairs=bytes_at_pairs(self.program.score))

    def registers(self, shape: Shape) -> int:
        """Registers of a thread that computes."""
        return registers_for(shape.warpgroups, shape.blocks, self.paged, self.of_bytes).computing

    def keys_by_registers(self, registers: int) -> int:
        """Columns that fit: scores in fp32, probabilities in 16 bits, output in fp32, and room for the rest."""
        program = self.program
        scored, reads, opaque = program.score is not None, reads_any(program.mask), has_opaque_test(program)
        other = sum(all_of(TAKEN, self.call, scored=scored, reads=reads, opaque=opaque))
        return (registers - other - self.call.dv // 2) * 4 // 3 // 16 * 16

    @property
    def of_bytes(self) -> bool:
        """Whether K and V come as 8-bit numbers."""
        return self.problem.narrow is not None

    def tiling(self, **fields: Any) -> HopperTiling:
        """A tiling; of bytes with a stage of each, which is all that a block of many queries needs."""
        return ByteTiling(**{"byte_stages": 1, **fields}) if self.of_bytes else HopperTiling(**fields)


def tiling_of(facts: Facts, form: ForwardForm) -> HopperTiling:
    """A tile has as many keys as its shape, registers and shared memory have room for.

    All of Q, if it waits in registers, goes before keys; some columns of it are held where the keys leave them room.
    """
    shape = shape_of(form, facts.call)
    if facts.of_bytes or facts.keys_by_registers(facts.registers(shape)) < facts.keys_in_order:
        shape = LESS.get(shape.kind, shape)
    scheduler, (d, dv) = _scheduler(facts, form, shape), facts.call.dims
    stays = scheduler is not Scheduler.ONE_TILE
    made = facts.tiling(
        kernel=form.kernel,
        tile_m=ROWS * shape.warpgroups,
        tile_n=64,
        d=d,
        dv=dv,
        heads_together=heads_together(facts),
        packed_heads=facts.heads,
        blocks=shape.blocks,
        scheduler=scheduler,
        threshold=threshold_of(facts.problem, form.kernel),
        stages=2,
        resident=first(RESIDENT, facts.call, warpgroups=shape.warpgroups, stays=stays),
        steps=steps_of(form, shape, facts.call),
    )
    tiling = _filled(facts, shape, made)
    return dataclasses.replace(tiling, scheduler=Scheduler.LATE_STREAM_K) if _shares(facts, tiling) else tiling


def _scheduler(facts: Facts, form: ForwardForm, shape: Shape) -> Scheduler:
    tiles = query_tiles(facts.problem, facts.heads, ROWS * shape.warpgroups) * facts.problem.batch
    stays = first(
        STAYS, facts.call, asked=facts.problem.schedule.persistent, form=form.stays, shape=shape.stays,
        rounds=tiles / facts.target.sms,
    )  # fmt: skip
    return shape.scheduler if stays else Scheduler.ONE_TILE


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
    of_head = 2 * facts.keys * sum(facts.call.dims)
    return facts.problem.schedule.heads_together or first(TOGETHER, facts.call, bytes=of_head)


def _shares(facts: Facts, tiling: HopperTiling) -> bool:
    """Whether blocks share the last rounds of equal tiles, where one of them would leave many idle for long."""
    problem, sms = facts.problem, facts.target.sms
    tiles = query_tiles(problem, tiling.packed_heads, tiling.tile_m) * problem.batch
    return first(
        SHARES, facts.call, split=problem.schedule.split_kv, warpgroups=tiling.warpgroups,
        draws=tiling.scheduler.draws, frees_queries=tiling.frees_queries, rounds=tiles / sms,
        idle=-tiles % sms / sms * facts.keys / tiling.tile_n,  # tiles of keys for which all SMs could be busy
        products=2 * sms**2 * key_tiles(problem, tiling.tile_n),  # in 32 bits, by `Shares`
    )  # fmt: skip
