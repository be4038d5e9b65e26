"""Which query tiles of a forward are cut by keys: those left over of whole rounds of blocks, where no mask is."""

from __future__ import annotations

import dataclasses

from ...analysis.program import Program
from ...call.problem import Problem
from .target import Target
from .tiling import ForwardTiling
from .traits import keys, queries

# in kv tiles of 128 x 128 on an H200 (1.5 us): what the kernel takes that adds up, and a MiB on its way through memory
GATHER, MIB = 3.0, 0.4
LEAST_KEYS = 8  # kv tiles of the smaller piece
LEAST_GAIN = 0.01  # of the time


@dataclasses.dataclass(frozen=True)
class Remainder:
    """The first `whole` tiles are whole; of the next `cut` a second block has the last of `parts` parts of the keys."""

    whole: int
    cut: int
    parts: int

    def __str__(self) -> str:
        tiles = self.whole + self.cut
        return f"the last {self.cut} of {tiles} tiles: 1 of {self.parts} parts of their keys by other blocks"


def remainder(problem: Problem, program: Program, tiling: ForwardTiling, target: Target) -> Remainder | None:
    """Of equally long tiles in rounds over all multiprocessors, or None where nothing is gained.

    Those of the last round leave a part of their keys to the multiprocessors that have none of them.
    """
    plain = program.mask is None and program.keep is None and problem.layout.is_dense
    schedule = problem.schedule
    if not plain or schedule.batch_invariant or schedule.split_kv != "auto" or not tiling.cuts_remainder:
        return None
    tiles = problem.batch * problem.q_heads * -(-queries(problem) // tiling.tile_m)
    whole, left = divmod(tiles, target.sms)
    if not whole or not left:
        return None
    parts = 1 + -(-left // (target.sms - left))
    visited = keys(problem) // tiling.tile_n
    if visited < LEAST_KEYS * parts:
        return None
    mib = 2 * left * tiling.tile_m * tiling.dv * 4 / 2**20
    gained = visited / parts - (GATHER + MIB * mib)
    if gained < LEAST_GAIN * visited * (whole + 1):
        return None
    return Remainder(whole * target.sms, left, parts)
