"""Which tiling the Hopper forward of a call has: by its facts a row of the table, a form, by both its fields.

Tables are those of `forward.json`, with what was measured. To change a row: `python -m benchmarks.sweep`, see
docs/design.md. Figures in "why" are of one H200, in turns.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from ...analysis.program import Program
from ...call.eight_bits import EIGHT_BITS
from ...call.problem import Problem
from ...primitives.rescale_threshold import RescaleThreshold
from ..fused.compiling import tuned
from ..fused.planning.facts import FORWARD, Facts, Finders, equal_rounds
from ..fused.planning.tables import first, row_of, rows_of
from ..fused.tiles.few_queries import best_cut, packed_heads, sharing_heads
from ..fused.tiles.scheduler import Scheduler
from ..fused.tiles.target import Target
from ..fused.tiles.tiling import Chosen, filled, key_tiles, query_tiles, slots, whole_pages
from .fp8_tiling import choose_fp8
from .tiling import GUESSING, ROWS, TABLES, ByteTiling, HopperTiling
from .wide_tiling import GROUPS, SLICE, WideByteTiling, WideTiling

MOST_ROUNDED = 32768  # keys: rows that guess are divided by rounded weights, of which fp16 loses those below 2^-25
NARROW = 2048  # keys of a row up to which batch-invariant tiles may have 64 of them
# Of K and V in shared memory where one block of few queries has 128 keys a tile: with half as much again, 64 sequences
# of 4k and more lose 2 %
BYTES_ON_THE_WAY = 128 << 10


# What forms mean, by their words.
# few: one tile of rows, as many bytes of keys on their way as memory needs. small: one warpgroup a block, two or three
# blocks on an SM. alone: one warpgroup, alone on it. large: two or three warpgroups that share K and V. wide: D above
# 256. guesses: rows take the maximum before a tile for the tile's own. stays: blocks take one tile after the other
FORMS: dict[str, dict[str, Any]] = {
    row.says: {"kind": row.says.split(",")[0], "guesses": "guesses" in row.says, "stays": "stays" in row.says}
    for row in TABLES["forms"]
}
FINDERS: Finders = {
    **FORWARD,
    "head_bytes": lambda f: 2 * f.keys * sum(f.dims),  # of a head's keys and values
    "of_bytes": lambda f: f.problem.narrow is not None,  # K and V come as 8-bit numbers
    "in_bf16": lambda f: f.types.q is torch.bfloat16,
    # constants say that rows see few keys
    "narrow": lambda f: getattr(f.program.limits, "most", None) is not None and f.program.limits.most <= NARROW,
    # of a batch-invariant tile, of which D and the mods decide; 0 for other calls
    "keys_in_order": lambda f: first(TABLES["invariant"], f),
    # something waits there along the keys
    "fills_registers": lambda f: f.reads_along_keys or f.weighs_keys or f.keys_in_order > 0,
}


def choose_forward(problem: Problem, program: Program, target: Target) -> Chosen:
    """Tiles of the forward kernel."""
    if problem.types.q in EIGHT_BITS:
        return choose_fp8(problem, program, target)
    call = forward_facts(problem, program.unscaled, target)
    row, others = row_of(TABLES["forms"], call), (form for form in FORMS if serves(form, call))
    return tuned.chosen(call, row.says, others, f"form: {row.says}; {row.evidence}", tiling_of_form)


def forward_facts(problem: Problem, program: Program, target: Target) -> Facts:
    """A call in tiles of 64 rows, the least that a warpgroup's product has; heads share them where that takes less."""
    call = Facts(FINDERS, problem, program, target, rows=ROWS, heads=packed_heads(problem, program, ROWS))
    together = call.but(heads=sharing_heads(problem, program, ROWS))
    if together.packs > call.packs and _takes_less(call, together):
        call = together
    # who asks blocks to stay has work for several rounds
    return call.but(work="rounds") if problem.schedule.persistent and not call.few else call


def _takes_less(apart: Facts, together: Facts) -> bool:
    """Whether heads that share tiles take so little time that it pays.

    Equal tiles end in whole rounds, those of 192 rows take 1.25 times as long as those of 128: of 60 calls with no mask
    it says the time together over that apart to 0.04 in the mean (sweeps/h200-packing.json, h200-near-claims.json).
    """
    form = first(TABLES["forms"], apart)
    most = first(TABLES["packs"], apart, **FORMS[form])

    def time(call: Facts) -> int:
        cut = _block(form, call, less=False)
        return equal_rounds(call, ROWS * cut["warpgroups"], cut["blocks"]) * (cut["warpgroups"] + 2)

    return most > 0 and time(together) <= most * time(apart)


def _block(form: str, call: Facts, less: bool) -> dict[str, Any]:
    """What a form means, and its `warpgroups` that share a block, the `blocks` of an SM, a tile's most keys, `tile_n`.

    `less`: of those where others leave no registers.
    """
    said = dict(FORMS[form])
    said["guesses"] &= call.in_bf16 or call.keys <= MOST_ROUNDED
    return {"blocks": 1, "tile_n": 128, **said, **first(TABLES["blocks"], call, kind=said["kind"], less=less)}


def serves(form: str, call: Facts) -> bool:
    """Whether a form can cut calls of a class."""
    return any(form.removesuffix(", stays") == row.says for row in rows_of(TABLES["serves"], call))


def tiling_of_form(form: str, call: Facts) -> HopperTiling | WideTiling:
    """A call's tiling by one of the forms."""
    if form == "wide":
        return _wide(call, **first(TABLES["wide"], call))
    return _few_rows(call) if form == "few" else _tiling_of(form, call)


def _alike(call: Facts, kernel: str) -> dict[str, Any]:
    """Fields that are said in one way for all forms; heads together: as asked for, or a table says."""
    return {
        "kernel": kernel,
        "d": call.d,
        "dv": call.dv,
        "packed_heads": call.heads,
        "heads_together": call.problem.schedule.heads_together or first(TABLES["together"], call),
        "threshold": RescaleThreshold(**first(TABLES["thresholds"], call, kernel=kernel)),
    }


def _tiling(call: Facts, kernel: str, **fields: Any) -> HopperTiling:
    """A tiling of this call; K and V of bytes get a stage each, which is all that a block of many queries needs."""
    fields = _alike(call, kernel) | fields
    return ByteTiling(**{"byte_stages": 1} | fields) if call.of_bytes else HopperTiling(**fields)


def _keys_by_registers(call: Facts, tiling: HopperTiling, held: int = 0) -> int:
    """Columns that fit: scores in fp32, probabilities in 16 bits, output in fp32; queries that are `held`; the rest."""
    taken = held + sum(row.says for row in rows_of(TABLES["taken"], call)) + call.dv // 2
    return (tiling.registers(call.layout == "paged").computing - taken) * 4 // 3 // 16 * 16


def _tiling_of(form: str, call: Facts) -> HopperTiling:
    """A tile has as many keys as its block, registers and shared memory have room for."""
    # a warpgroup more makes 16-bit numbers of bytes; a batch-invariant tile's keys may find no registers
    tiling = _of_block(_block(form, call, less=call.of_bytes), call)
    if _keys_by_registers(call, tiling) < call.keys_in_order:
        tiling = _of_block(_block(form, call, less=True), call)
    tiling = _filled(call, tiling)
    return dataclasses.replace(tiling, scheduler=Scheduler.LATE_STREAM_K) if _shares(call, tiling) else tiling


def _of_block(cut: dict[str, Any], call: Facts) -> HopperTiling:
    """A tiling with as many keys as such a block may have."""
    rows = ROWS * cut["warpgroups"]
    rounds = query_tiles(call.problem, call.heads, rows) / call.target.sms
    cut["scheduler"] = first(TABLES["schedulers"], call, **cut, rounds=rounds)
    fields = {name: first(TABLES[name], call, **cut) for name in ("stages", "resident", "spared")}
    fields |= first(TABLES["steps"], call, **cut) | first(TABLES["columns"], call, **cut)
    fields["spared"] *= fields.get("dv", call.dv) - call.problem.head_dim_v
    return _tiling(
        call,
        GUESSING if cut["guesses"] else "forward",
        tile_m=rows,
        tile_n=call.keys_in_order or cut["tile_n"],
        blocks=cut["blocks"],
        scheduler=Scheduler[cut["scheduler"]],
        **fields,
    )


def _filled(call: Facts, tiling: HopperTiling) -> HopperTiling:
    """With keys that fit, in a batch-invariant call those that it has.

    All of Q, if it waits in registers, goes before keys; some columns of it wait where keys leave them room.
    """
    held = tiling.resident // 4
    by_registers = _keys_by_registers(call, tiling, held * tiling.frees_queries)
    most = min(by_registers, tiling.tile_n, first(TABLES["most_keys"], call))
    if not call.keys_in_order:
        tiling = filled(functools.partial(dataclasses.replace, tiling), "tile_n", range(most, 0, -16), call.target)
    keys = whole_pages(call.problem, tiling.tile_n)
    resident = tiling.resident * (_keys_by_registers(call, tiling, held) >= tiling.tile_n)
    return dataclasses.replace(tiling, tile_n=keys, resident=resident)


def _shares(call: Facts, tiling: HopperTiling) -> bool:
    """Whether blocks share the last rounds of equal tiles, where one of them would leave many idle for long."""
    sms, tiles = call.target.sms, query_tiles(call.problem, call.heads, tiling.tile_m)
    return bool(first(
        TABLES["shares"], call, warpgroups=tiling.warpgroups, draws=tiling.scheduler.draws,
        frees_queries=tiling.frees_queries, rounds=tiles / sms,
        idle=-tiles % sms / sms * call.keys / tiling.tile_n,  # tiles of keys for which all SMs could be busy
        products=2 * sms**2 * key_tiles(call.problem, tiling.tile_n),  # in 32 bits, by `StreamK`
    ))  # fmt: skip


def _few_rows(call: Facts) -> HopperTiling:
    """One warpgroup, and as many bytes of K and V on their way as memory needs to be busy: it is the limit.

    Which of several cuts is best depends on how many tiles there are; the first of those that take as long is taken.
    """
    tilings = (_of_few_rows(call, **cut) for cut in first(TABLES["few"], call))
    return min(tilings, key=lambda tiling: best_cut(call.problem, tiling, call.target)[1])


def _of_few_rows(call: Facts, keys: int, stages: int = 8, parts: int = 1, **flags: Any) -> HopperTiling:
    """A tile of so many `keys`, and up to so many `stages` as there is room for; 0: what `BYTES_ON_THE_WAY` says.

    `parts`: stages of bytes for a tile of keys. `flags`: whether bf16 is multiplied `in_fp16` beside 8-bit keys, see
    `scaled_queries`; whether all of Q waits in registers, `resident`; others are fields of the tiling.
    """
    in_fp16, resident = flags.pop("in_fp16", False), flags.pop("resident", False)
    fields = {"tile_m": ROWS, "tile_n": keys, "scheduler": Scheduler.asked(call.persistent), **flags}
    fields |= {"resident": call.d * resident, "eight_rows": not call.keys_in_order and _rows(call) <= 8}
    name, most = "stages", stages or BYTES_ON_THE_WAY // (2 * keys * sum(call.dims))
    if call.of_bytes:  # two stages that are multiplied; what is on its way are bytes
        fields |= {"stages": min(2, most), "parts": parts, "scales_queries": in_fp16 and call.in_bf16}
        name, most = "byte_stages", most * parts
    return filled(functools.partial(_tiling, call, "forward", **fields), name, range(most, 0, -1), call.target)


def _wide(call: Facts, keys: int, in_fp16: bool = False) -> WideTiling:
    """Stages for which there is room; of bytes as many rows are multiplied as are queries' heads, by 16."""
    d, dv = (-(-n // SLICE) * SLICE for n in call.dims)
    kind: Any = WideTiling
    fields = {"d": d, "dv": dv, "tile_m": ROWS, "tile_n": keys, "scheduler": Scheduler.asked(call.persistent)}
    if call.of_bytes:  # whose columns of V are rows of a product for each warpgroup
        kind, rows = WideByteTiling, max(16, slots(_rows(call)))
        fields |= {"dv": dv + dv % (GROUPS * ROWS), "rows": rows, "scales_queries": in_fp16 and call.in_bf16}
    made = functools.partial(kind, **_alike(call, "forward_wide") | fields)
    return filled(made, "stages", range(call.target.shared_memory // kind.stage, 0, -1), call.target)


def _rows(call: Facts) -> int:
    """At most how many rows of a tile are queries' heads; of packed sequences tensors say how many there are."""
    return ROWS if call.problem.layout.q != "dense" else min(ROWS, call.queries * slots(call.heads))
