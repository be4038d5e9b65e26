"""The tiles of a Hopper forward whose queries, keys and values are e4m3."""

from __future__ import annotations

from typing import NamedTuple

from ...analysis.program import Program
from ...call.problem import Problem
from ...graph.factors import RUNS, scales_of
from ...primitives.rescale_threshold import ALWAYS_RESCALE
from ..fused.planning.tables import Table, first, table
from ..fused.tiles.few_queries import packed_heads
from ..fused.tiles.scheduler import Scheduler
from ..fused.tiles.target import Target
from ..fused.tiles.tiling import query_tiles
from ..fused.tiles.traits import has_opaque_test, padded, reads_along_keys, reads_any
from .fp8_tiling import Fp8Tiling
from .tiling import FILE, ROWS


class Fp8Form(NamedTuple):
    """How a block is cut: see `Fp8Tiling`. `keys`: of a tile."""

    warpgroups: int
    keys: int
    pieces: int = 1
    in_turns: bool = True


RESULTS = "benchmarks/results/eight-bits/h200-fp8-16k.json"
KEPT: Table[str] = table(FILE, "fp8_kept")  # in registers, by mods
SCHEDULERS: Table[Scheduler] = table(FILE, "fp8_schedulers", Scheduler.__getitem__)
FORMS: Table[Fp8Form] = table(FILE, "fp8", lambda said: Fp8Form(**said))


def fp8_tiling(problem: Problem, program: Program, target: Target) -> Fp8Tiling:
    """Tiles of a call that `multiplies_eight_bits`."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    rest, scales = scales_of(program.score, program.values, max(RUNS), lambda node: node.rate)
    reads = reads_along_keys(rest), reads_any(program.mask), program.keep, has_opaque_test(program)
    kept = first(KEPT, None, reads=any(reads), by_key=scales.by_key > 0, scored=rest is not None)
    form = first(FORMS, None, d=d, dv=dv, mods_keep=kept)
    heads = packed_heads(problem, program, ROWS)
    rounds = query_tiles(problem, heads, ROWS * form.warpgroups) * problem.batch / target.sms
    return Fp8Tiling(
        tile_m=ROWS * form.warpgroups,
        tile_n=form.keys,
        d=d,
        dv=dv,
        heads_together=problem.schedule.heads_together,
        packed_heads=heads,
        scheduler=first(SCHEDULERS, problem.schedule, rounds=rounds),
        threshold=ALWAYS_RESCALE,  # output times factor plus sums is one instruction, whether it is 1 or not
        stages=2,
        pieces=form.pieces if dv // form.pieces % 8 == 0 else 1,
        in_turns=form.in_turns,
        numbers=12 * form.keys * scales.by_key,
    )


def fp8_words(problem: Problem, program: Program) -> str:
    """For people to read."""
    return f"q, k and v of 8 bits; form: by D, Dv and what mods keep in registers ({RESULTS})"
