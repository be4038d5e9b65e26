"""Which tiling the Hopper forward of a call has: by its class a row of the table, a form, by both its fields."""

from __future__ import annotations

import dataclasses
import functools

from ...analysis.program import Program
from ...call.eight_bits import EIGHT_BITS
from ...call.problem import Problem
from ..fused.compiling import tuned
from ..fused.planning.call_class import CallClass, Rounds, class_of
from ..fused.planning.tables import Table, first, row_of, table
from ..fused.tiles.few_queries import packed_heads, sharing_heads
from ..fused.tiles.scheduler import Scheduler
from ..fused.tiles.target import Target
from ..fused.tiles.tiling import fitting, key_tiles, query_tiles, whole_pages
from ..fused.tiles.traits import reads_pairs
from .few_rows import few_rows
from .forward_table import BLOCKS, FORMS, TABLE, Block, ForwardFacts, ForwardForm, serves
from .fp8_choice import fp8_tiling, fp8_words
from .tiling import FILE, ROWS, HopperTiling, RowSteps
from .wide_tiling import WideTiling, wide_tiling

PACKS: Table[float] = table(FILE, "packs")  # heads share tiles if these are at most so many of those they have
STAYS: Table[bool] = table(FILE, "stays")  # whether blocks are persistent
MOST_KEYS: Table[int] = table(FILE, "most_keys")  # of a tile, beside what mods read
STAGES: Table[int] = table(FILE, "stages")
RESIDENT: Table[int] = table(FILE, "resident")  # columns of Q in registers
STEPS: Table[RowSteps] = table(FILE, "steps", lambda said: RowSteps(**said))  # what rows do from tile to tile
SHARES: Table[bool] = table(FILE, "shares")  # whether blocks share the last rounds of equal tiles


def forward_tiling(problem: Problem, program: Program, target: Target) -> HopperTiling | WideTiling:
    """Tiles of the forward kernel."""
    if problem.types.q in EIGHT_BITS:
        return fp8_tiling(problem, program, target)
    call = forward_class(problem, program, target)
    facts, others = ForwardFacts(problem, program, target, call), (form for form in FORMS if serves(form, call))
    return tuned.tiling(call, problem, target, first(TABLE, call), others, lambda form: tiling_of_form(form, facts))


def forward_class(problem: Problem, program: Program, target: Target) -> CallClass:
    """What kind of call it is, in tiles of 64 rows, the least that a warpgroup's product has."""
    of = functools.partial(class_of, problem, program, target, "forward", rows=ROWS)
    call = of(heads=packed_heads(problem, program, ROWS))
    heads = sharing_heads(problem, program, ROWS)
    if not call.packs and heads > 1 and _fewer_tiles(problem, program, heads, call):
        call = of(heads=heads)
    # who asks blocks to stay has work for several rounds
    stays = problem.schedule.persistent and call.work is not Rounds.FEW_ROWS
    return dataclasses.replace(call, work=Rounds.ROUNDS) if stays else call


def _fewer_tiles(problem: Problem, program: Program, heads: int, call: CallClass) -> bool:
    """Whether heads that share tiles have so few of them that it pays. `call`: where each has its own."""
    form = first(TABLE, call)
    of_heads = reads_pairs(program.score, of_heads=True)
    most = first(PACKS, call, kind=form.kind, guesses=form.guesses, pairs_of_heads=of_heads)
    rows = ROWS * first(BLOCKS, call, kind=form.kind, less=False).warpgroups if most else ROWS
    return query_tiles(problem, heads, rows) <= most * query_tiles(problem, 1, rows)


def forward_words(problem: Problem, program: Program, target: Target) -> str:
    """The class of a call, the form it gets, and what says so, for people to read."""
    if problem.types.q in EIGHT_BITS:
        return fp8_words(problem, program)
    call = forward_class(problem, program, target)
    row, known = row_of(TABLE, call), tuned.of_call(call, problem, target)
    chosen = f"{known.form}; {known}; the table says {row.says}" if known else f"{row.says}; {row.evidence}"
    return f"{call}\n    form: {chosen}"


def tiling_of_form(form: ForwardForm, facts: ForwardFacts) -> HopperTiling | WideTiling:
    """A call's tiling by one of the forms."""
    if form.kind == "wide":
        return wide_tiling(facts)
    return few_rows(facts) if form.kind == "few" else _tiling_of(form, facts)


def _tiling_of(form: ForwardForm, facts: ForwardFacts) -> HopperTiling:
    """A tile has as many keys as its block, registers and shared memory have room for.

    All of Q, if it waits in registers, goes before keys; some columns of it are held where the keys leave them room.
    """
    # a warpgroup more makes 16-bit numbers of bytes; a batch-invariant tile's keys may find no registers
    block = first(BLOCKS, facts, kind=form.kind, less=facts.of_bytes)
    if facts.keys_by_registers(facts.registers(block)) < facts.keys_in_order:
        block = first(BLOCKS, facts, kind=form.kind, less=True)
    cut = {"warpgroups": block.warpgroups, "blocks": block.blocks, "guesses": form.guesses}
    rounds = query_tiles(facts.problem, facts.heads, ROWS * block.warpgroups) * facts.problem.batch / facts.target.sms
    stays = first(STAYS, facts, form=form.stays, block=block.stays, rounds=rounds)
    tiling = facts.tiling(
        form.kernel,
        tile_m=ROWS * block.warpgroups,
        tile_n=max(16, facts.keys_in_order),
        blocks=block.blocks,
        scheduler=block.scheduler if stays else Scheduler.ONE_TILE,
        stages=first(STAGES, facts, **cut),
        resident=first(RESIDENT, facts, stays=stays, **cut),
        steps=first(STEPS, facts, **cut),
    )
    tiling = _filled(facts, block, tiling)
    return dataclasses.replace(tiling, scheduler=Scheduler.LATE_STREAM_K) if _shares(facts, tiling) else tiling


def _filled(facts: ForwardFacts, block: Block, tiling: HopperTiling) -> HopperTiling:
    registers, held = facts.registers(block), tiling.resident // 4
    by_registers = facts.keys_by_registers(registers - held * tiling.frees_queries)
    most = min(by_registers, block.keys, first(MOST_KEYS, facts))
    if not facts.keys_in_order:
        wider = (dataclasses.replace(tiling, tile_n=keys) for keys in range(most, 0, -16))
        tiling = fitting(wider, facts.target)
    keys = whole_pages(facts.problem, tiling.tile_n)
    resident = tiling.resident * (facts.keys_by_registers(registers - held) >= tiling.tile_n)
    return dataclasses.replace(tiling, tile_n=keys, resident=resident)


def _shares(facts: ForwardFacts, tiling: HopperTiling) -> bool:
    """Whether blocks share the last rounds of equal tiles, where one of them would leave many idle for long."""
    sms = facts.target.sms
    tiles = query_tiles(facts.problem, tiling.packed_heads, tiling.tile_m) * facts.problem.batch
    return first(
        SHARES, facts, warpgroups=tiling.warpgroups, draws=tiling.scheduler.draws, frees_queries=tiling.frees_queries,
        rounds=tiles / sms,
        idle=-tiles % sms / sms * facts.keys / tiling.tile_n,  # tiles of keys for which all SMs could be busy
        products=2 * sms**2 * key_tiles(facts.problem, tiling.tile_n),  # in 32 bits, by `Shares`
    )  # fmt: skip
