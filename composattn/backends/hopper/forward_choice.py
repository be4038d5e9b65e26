"""Which tiling the Hopper forward of a call has: by its class a row of the table, a form, by both its fields.

Tables are those of `forward.json`, with what was measured. To change a row: `python -m benchmarks.sweep`, see
docs/design.md. Figures in "why" are of one H200, in turns.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from ...analysis.program import Program
from ...call.eight_bits import EIGHT_BITS
from ...call.problem import Problem
from ...primitives.rescale_threshold import RescaleThreshold
from ..fused.compiling import tuned
from ..fused.planning.call_class import CallClass, Facts, Finders, Rounds, class_of
from ..fused.planning.tables import Table, all_of, first, row_of, table
from ..fused.tiles.few_queries import packed_heads, sharing_heads, time_of
from ..fused.tiles.scheduler import Scheduler
from ..fused.tiles.target import Target
from ..fused.tiles.tiling import Chosen, fitting, key_tiles, query_tiles, slots, whole_pages
from ..fused.tiles.traits import (
    bytes_at_pairs,
    has_opaque_test,
    keys,
    queries,
    reads_along_keys,
    reads_any,
    reads_pairs,
    weighs_keys,
)
from .fp8_tiling import choose_fp8
from .tiling import FILE, GUESSING, ROWS, ByteTiling, HopperTiling, RowSteps, registers_for
from .wide_tiling import GROUPS, SLICE, WideByteTiling, WideTiling

NARROW = 2048  # keys of a row up to which batch-invariant tiles may have 64 of them
# Of K and V in shared memory where one block of few queries has 128 keys a tile: with half as much again, 64 sequences
# of 4k and more lose 2 %
BYTES_ON_THE_WAY = 128 << 10


@dataclasses.dataclass(frozen=True)
class ForwardForm:
    """How a call is cut.

    few: one tile of rows, as many bytes of keys on their way as memory needs. small: one warpgroup a block, two or
    three blocks on an SM. alone: one warpgroup, alone on it. large: two or three warpgroups that share K and
    V. wide: D above 256.

    `guesses`: rows take the maximum before a tile for the tile's own. `stays`: blocks draw one tile after the other.
    """

    kind: Literal["few", "small", "alone", "large", "wide"]
    guesses: bool = False
    stays: bool = False

    def __str__(self) -> str:
        return self.kind + ", guesses" * self.guesses + ", stays" * self.stays

    @staticmethod
    def named(words: str) -> ForwardForm:
        kind, *flags = words.split(", ")
        fields: dict[str, Any] = {"kind": kind, **dict.fromkeys(flags, True)}
        return ForwardForm(**fields)


class Block(NamedTuple):
    """`warpgroups` that share a block; an SM has so many `blocks`, a tile up to so many `keys`.

    `stays`: whether blocks stay whatever the form says.
    """

    warpgroups: int
    blocks: int = 1
    keys: int = 128
    stays: bool = False


class Cut(NamedTuple):
    """How few rows are cut: so many `keys` a tile, `blocks` on an SM, `stages`; of 0 what `BYTES_ON_THE_WAY` says."""

    keys: int
    blocks: int = 1
    stages: int = 8
    resident: bool = False  # all of Q waits in registers
    in_fp16: bool = False  # so is bf16 multiplied beside 8-bit keys, see `scaled_queries`
    parts: int = 1  # stages of bytes for a tile of keys


TABLE: Table[ForwardForm] = table(FILE, "forms", ForwardForm.named)
SERVES: Table[ForwardForm] = table(FILE, "serves", ForwardForm.named)  # what a form can cut, no matter of speed
FORMS = tuple(dict.fromkeys(row.says for row in TABLE if row.says.kind not in ("wide", "few")))  # those that compete
PACKS: Table[float] = table(FILE, "packs")  # heads share tiles if these are at most so many of those they have
TOGETHER: Table[int | None] = table(FILE, "together")  # key/value heads; None: as L2 holds
THRESHOLDS: Table[RescaleThreshold] = table(FILE, "thresholds", lambda said: RescaleThreshold(**said))
IN_ORDER: Table[int] = table(FILE, "invariant")  # keys of a batch-invariant tile; 0: of other calls
# of few rows, and of D above 256
CUTS: Table[list[Cut]] = table(FILE, "few", lambda said: [Cut(**cut) for cut in said])
WIDE_KEYS: Table[int] = table(FILE, "wide_keys")
# of all others
BLOCKS: Table[Block] = table(FILE, "blocks", lambda said: Block(**said))
STAYS: Table[bool] = table(FILE, "stays")  # whether blocks are persistent
TAKEN: Table[int] = table(FILE, "taken")  # columns of registers beside scores and output, of all rows that match
MOST_KEYS: Table[int] = table(FILE, "most_keys")  # of a tile, beside what mods read
STAGES: Table[int] = table(FILE, "stages")
COLUMNS: Table[int] = table(FILE, "columns")  # of rows in shared memory, at least
RESIDENT: Table[int] = table(FILE, "resident")  # columns of Q in registers
STEPS: Table[RowSteps] = table(FILE, "steps", lambda said: RowSteps(**said))  # what rows do from tile to tile
SHARES: Table[bool] = table(FILE, "shares")  # whether blocks share the last rounds of equal tiles


class ForwardFacts(Facts):
    """Facts of a forward that its tables ask for besides its class, and what tilings of all forms ask.

    `heads`: query heads that share the rows of a tile. `head_bytes`: of a head's keys and values. `of_bytes`: K and V
    come as 8-bit numbers. `at_pairs`: bytes that are read at each pair. `narrow`: constants say that rows see few keys.
    `keys_in_order`: keys of a batch-invariant tile, of which D and the mods decide; 0 for other calls.
    `fills_registers`: something waits there along the keys.
    """

    more: ClassVar[Finders] = {
        **Facts.more,
        "heads": lambda f: sharing_heads(f.problem, f.program, ROWS) if f.packs else 1,
        "keys": lambda f: keys(f.problem),
        "head_bytes": lambda f: 2 * f.keys * sum(f.dims),
        "of_bytes": lambda f: f.problem.narrow is not None,
        "at_pairs": lambda f: bytes_at_pairs(f.program.score),
        "mask_reads": lambda f: reads_any(f.program.mask),
        "opaque": lambda f: has_opaque_test(f.program),
        "narrow": lambda f: getattr(f.program.limits, "most", None) is not None and f.program.limits.most <= NARROW,
        "keys_in_order": lambda f: first(IN_ORDER, f),
        "fills_registers": lambda f: reads_along_keys(f.program.score) or weighs_keys(f.program) or f.keys_in_order > 0,
    }

    def keys_by_registers(self, registers: int) -> int:
        """Columns that fit: scores in fp32, probabilities in 16 bits, output in fp32, and room for the rest."""
        return (registers - sum(all_of(TAKEN, self)) - self.call.dv // 2) * 4 // 3 // 16 * 16

    def registers(self, block: Block) -> int:
        """Registers of a thread that computes."""
        return registers_for(block.warpgroups, block.blocks, self.call.layout == "paged", self.of_bytes).computing

    def tiling(self, kernel: str, **fields: Any) -> HopperTiling:
        """A tiling; of bytes with a stage of each, which is all that a block of many queries needs."""
        alike = self.alike(kernel)
        return ByteTiling(**{"byte_stages": 1, **alike, **fields}) if self.of_bytes else HopperTiling(**alike | fields)

    def alike(self, kernel: str) -> dict[str, Any]:
        """Fields that are said in one way for all forms; heads together: as asked for, or a table says."""
        return {
            "kernel": kernel,
            "d": self.call.d,
            "dv": self.call.dv,
            "packed_heads": self.heads,
            "heads_together": self.problem.schedule.heads_together or first(TOGETHER, self),
            "threshold": first(THRESHOLDS, self, kernel=kernel),
        }


def choose_forward(problem: Problem, program: Program, target: Target) -> Chosen:
    """Tiles of the forward kernel."""
    if problem.types.q in EIGHT_BITS:
        return choose_fp8(problem, program, target)
    call = forward_class(problem, program.unscaled, target)
    row, others = row_of(TABLE, call), (form for form in FORMS if serves(form, call))
    facts = ForwardFacts(problem, program.unscaled, target, call)
    said = f"form: {row.says}; {row.evidence}"
    return tuned.chosen(facts, row.says, others, said, lambda form: tiling_of_form(form, facts))


def forward_class(problem: Problem, program: Program, target: Target) -> CallClass:
    """What kind of call it is, in tiles of 64 rows, the least that a warpgroup's product has."""
    of = functools.partial(class_of, problem, program, target, "forward", rows=ROWS)
    call = of(heads=packed_heads(problem, program, ROWS))
    heads = sharing_heads(problem, program, ROWS)
    if not call.packs and heads > 1:
        facts, together = ForwardFacts(problem, program, target, call), of(heads=heads)
        call = together if _takes_less(facts, together, heads) else call
    # who asks blocks to stay has work for several rounds
    stays = problem.schedule.persistent and call.work is not Rounds.FEW_ROWS
    return dataclasses.replace(call, work=Rounds.ROUNDS) if stays else call


def _takes_less(apart: ForwardFacts, together: CallClass, heads: int) -> bool:
    """Whether so many heads that share tiles take so little time that it pays.

    Equal tiles end in whole rounds, those of 192 rows take 1.25 times as long as those of 128: of 60 calls with no mask
    it says the time together over that apart to 0.04 in the mean (sweeps/h200-packing.json, h200-near-claims.json).
    """
    problem, program, form = apart.problem, apart.program, first(TABLE, apart)
    of_heads = reads_pairs(program.score, of_heads=True)
    most = first(PACKS, apart, kind=form.kind, guesses=form.guesses, pairs_of_heads=of_heads)

    def time(call: Any, heads: int) -> int:
        block = first(BLOCKS, call, kind=form.kind, less=False)
        a_round = max(1, apart.target.sms * block.blocks * (program.mask is None))
        tiles = query_tiles(problem, heads, ROWS * block.warpgroups) * problem.batch
        return -(-tiles // a_round) * (block.warpgroups + 2)

    return most > 0 and time(together, heads) <= most * time(apart, 1)


def serves(form: ForwardForm, call: CallClass) -> bool:
    """Whether a form can cut calls of a class."""
    return dataclasses.replace(form, stays=False) in set(all_of(SERVES, call))


def tiling_of_form(form: ForwardForm, facts: ForwardFacts) -> HopperTiling | WideTiling:
    """A call's tiling by one of the forms."""
    if form.kind == "wide":
        return _wide(facts)
    return _few_rows(facts) if form.kind == "few" else _tiling_of(form, facts)


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
    # large blocks draw their tiles, as those that a mask cuts differ: 103 calls of D 72 to 224 take 0.99 of the time of
    # a fixed stride; six masked ones of D 144 to 224 from 1k on, with one tile a block before, 0.95 (h200-wide.json)
    scheduler = Scheduler.LATE if block.warpgroups > 1 else Scheduler.STRIDE
    columns = first(COLUMNS, facts, kind=form.kind, **cut)
    tiling = facts.tiling(
        GUESSING if form.guesses else "forward",
        d=max(facts.d, columns),
        dv=max(facts.dv, columns),
        tile_m=ROWS * block.warpgroups,
        tile_n=max(16, facts.keys_in_order),
        blocks=block.blocks,
        scheduler=scheduler if stays else Scheduler.ONE_TILE,
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
        products=2 * sms**2 * key_tiles(facts.problem, tiling.tile_n),  # in 32 bits, by `StreamK`
    )  # fmt: skip


def _few_rows(facts: ForwardFacts) -> HopperTiling:
    """One warpgroup, and as many bytes of K and V on their way as memory needs to be busy: it is the limit.

    Which of several cuts is best depends on how many tiles there are; the first of those that take as long is taken.
    """
    tilings = (_of_few_rows(facts, cut) for cut in first(CUTS, facts))
    return min(tilings, key=lambda tiling: time_of(facts.problem, tiling, facts.target).least())


def _of_few_rows(facts: ForwardFacts, cut: Cut) -> HopperTiling:
    """With as many stages as shared memory holds."""
    (d, dv), problem = facts.call.dims, facts.problem
    persistent = bool(problem.schedule.persistent)
    room = facts.target.shared_memory // cut.blocks - 1024 - 2 * ROWS * (d + dv if persistent else max(d, dv))
    stage = 2 * cut.keys * (d + dv)
    most, of_bytes = cut.stages or BYTES_ON_THE_WAY // stage, {}
    if facts.of_bytes:  # two stages that are multiplied; what is on its way are bytes
        of_bytes["byte_stages"] = min(most * cut.parts, (2 * room - 4 * stage) * cut.parts // stage)
        of_bytes["parts"], of_bytes["scales_queries"] = cut.parts, cut.in_fp16 and problem.types.q is torch.bfloat16
        most = min(2, most)
    eight = not facts.keys_in_order and _rows(facts) <= 8
    return facts.tiling(
        "forward",
        tile_m=ROWS,
        tile_n=cut.keys,
        blocks=cut.blocks,
        scheduler=Scheduler.asked(persistent),
        stages=min(most, room // stage),
        eight_rows=eight,
        resident=d * cut.resident,
        **of_bytes,
    )


def _wide(facts: ForwardFacts) -> WideTiling:
    """Stages for which there is room; of bytes as many rows are multiplied as are queries' heads, by 16."""
    d, dv = (-(-n // SLICE) * SLICE for n in facts.call.dims)
    kind: Any = WideTiling
    keys, scheduler = first(WIDE_KEYS, facts), Scheduler.asked(facts.persistent)
    made = facts.alike("forward_wide") | {"d": d, "dv": dv, "tile_m": ROWS, "tile_n": keys, "scheduler": scheduler}
    if facts.of_bytes:  # whose columns of V are rows of a product for each warpgroup
        kind, made["dv"], made["rows"] = WideByteTiling, dv + dv % (GROUPS * ROWS), max(16, slots(_rows(facts)))
    none: WideTiling = kind(**made, stages=0)
    return dataclasses.replace(none, stages=(facts.target.shared_memory - none.shared_memory(2)) // none.stage)


def _rows(facts: ForwardFacts) -> int:
    """At most how many rows of a tile are queries' heads; of packed sequences tensors say how many there are."""
    return ROWS if facts.problem.layout.q != "dense" else min(ROWS, queries(facts.problem) * slots(facts.heads))
