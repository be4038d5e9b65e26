"""How the Hopper forward cuts the work whose q, k and v are e4m3."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ...analysis.program import Program
from ...call.problem import Problem
from ...graph.factors import RUNS, scales_of
from ...primitives.rescale_threshold import ALWAYS_RESCALE
from ..fused.planning.facts import FORWARD, Facts
from ..fused.planning.tables import first, row_of
from ..fused.tiles.few_queries import packed_heads
from ..fused.tiles.scheduler import Scheduler
from ..fused.tiles.target import Target
from ..fused.tiles.tiling import Chosen, query_tiles
from ..fused.tiles.traits import ALONG_KEYS, reads
from .tiling import ROWS, SUMS, TABLES, HopperTiling, Registers, registers_for

FP8 = "forward_fp8"
LARGEST = 448.0  # of e4m3
ALIGNED = 1024  # bytes where each part of shared memory begins
TURNING = 3  # warps that turn V: those beside the copying one
MOST_ROUNDED = 0  # keys up to which rounded weights divide rows: equal ones are rounded alike, small ones are lost


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Tiling(HopperTiling):
    """Sums of a tile's P V lie apart and are added to the output in fp32, as the unit keeps 14 bits of its sums.

    Scores and these sums have the same registers, one after the other: larger tiles fit, and a third warpgroup.
    `pieces`: so many times a part of the output's columns is multiplied and added. `in_turns`: warpgroups take turns,
    with the output of a tile and the next scores. `numbers`: see `KeyScales`. `passes_by`: tiles that only others see.
    `logarithms`: so many of 8 exponentials are, see `e4m3_powers`, where rows are divided by sums of rounded weights
    (`rounds_sums`). `beside_sums`: fields that differ where they are not, as where sums are asked for.
    """

    kernel: str = FP8
    pieces: int = 1
    in_turns: bool = True
    numbers: int = 0
    passes_by: bool = False
    logarithms: int = 0
    rounds_sums: bool = True
    beside_sums: tuple[tuple[str, Any], ...] = ()  # type: ignore[misc]

    @property
    def offset(self) -> float:
        """P is as large as e4m3 holds where its maximum may lag: a number beyond would be cut without a word."""
        return float(math.floor(math.log2(LARGEST) - self.threshold.most))

    @property
    def pingpong(self) -> bool:
        return self.warpgroups > 1 and self.in_turns

    @property
    def output_direct(self) -> bool:
        """O of D 256 has no room beside two stages."""
        return max(self.d, self.dv) > 192

    @property
    def separate_o(self) -> bool:
        """O has 16 bits, Q 8: it never fits in Q's place."""
        return not self.output_direct

    @property
    def turned_at_once(self) -> int:
        """Blocks of 32 keys of V on their way through a warp's registers, of which D 256 leaves the fewest."""
        return 2 if self.output_direct else 4

    def registers(self, paged: bool) -> Registers:
        others = "turning few" if self.output_direct else "turning"
        return registers_for(self.warpgroups, self.blocks, paged, others)

    def _bytes(self, q_stages: int) -> int:
        rows = q_stages * self.d + 2 * self.dv * self.separate_o
        keys = self.stages * self.tile_n
        turned = -(-keys * (self.dv + SUMS) // ALIGNED) * ALIGNED
        return self.tile_m * rows + keys * (self.d + self.dv) + turned + 4 * self.numbers + ALIGNED


def choose_fp8(problem: Problem, program: Program, target: Target) -> Chosen:
    """Tiles of a call that `multiplies_eight_bits`."""
    call = Facts(FORWARD, problem, program, target, rows=ROWS, heads=packed_heads(problem, program, ROWS))
    rest, scales = scales_of(program.score, program.values, max(RUNS), lambda node: node.rate)
    along = any((reads(rest, ALONG_KEYS), call.mask_reads, program.keep, call.opaque))
    kept = first(TABLES["fp8_kept"], None, reads=along, by_key=scales.by_key > 0, scored=rest is not None)
    form = row_of(TABLES["fp8"], call, mods_keep=kept, runs=scales.keys)
    rounds = query_tiles(problem, call.heads, form.says["tile_m"]) / target.sms
    beside = {"logarithms": 0, "rounds_sums": False, **form.says.get("beside_sums", {})}
    tiling = Fp8Tiling(
        **form.says | {"beside_sums": tuple(beside.items())} | (beside if problem.kv_len > MOST_ROUNDED else {}),
        d=call.d,
        dv=call.dv,
        heads_together=call.heads_together,
        packed_heads=call.heads,
        threshold=ALWAYS_RESCALE,  # output times factor plus sums is one instruction, whether it is 1 or not
        stages=2,
        scheduler=Scheduler[first(TABLES["schedulers"], call, kind="fp8", stays=True, rounds=rounds)],
        numbers=12 * form.says["tile_n"] * scales.by_key,
    )
    tiling = dataclasses.replace(tiling, pieces=tiling.pieces if call.dv // tiling.pieces % 8 == 0 else 1)
    return Chosen(tiling, f"q, k and v of 8 bits, in registers beside products: {kept}; {form.why}")
