"""How the Hopper forward cuts few queries: decoding, where memory is the limit."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..fused.planning.tables import Table, first, table
from ..fused.tiles.few_queries import time_of
from ..fused.tiles.scheduler import Scheduler
from ..fused.tiles.tiling import key_tiles, slots
from ..fused.tiles.traits import queries
from .forward_table import ForwardFacts
from .tiling import FILE, ROWS, HopperTiling

# Of K and V in shared memory where one block of few queries has 128 keys a tile: with half as much again, 64 sequences
# of 4k and more lose 2 %
BYTES_ON_THE_WAY = 128 << 10


class Cut(NamedTuple):
    """Tiles of so many keys, `blocks` on an SM, up to so many stages; 0: as `BYTES_ON_THE_WAY` says."""

    keys: int
    blocks: int = 1
    stages: int = 8
    shared: bool = False  # all keys, alike
    resident: bool = False  # all of Q waits in registers
    in_fp16: bool = False  # so is bf16 multiplied beside 8-bit keys, see `scaled_queries`


CUTS: Table[list[Cut]] = table(FILE, "few", lambda said: [Cut(**cut) for cut in said])
EQUAL_SHARES: Table[bool] = table(FILE, "equal_shares", bool)


def few_rows(facts: ForwardFacts) -> HopperTiling:
    """One warpgroup, and as many bytes of K and V on their way as memory needs to be busy: it is the limit.

    Which of several cuts is best depends on how many tiles there are; the first of those that take as long is taken.
    """
    tilings = (_of_few_rows(facts, cut) for cut in first(CUTS, facts) if _serves(facts, cut))
    return min(tilings, key=lambda tiling: time_of(facts.problem, tiling, facts.target).least())


def _serves(facts: ForwardFacts, cut: Cut) -> bool:
    """Whether blocks may share all keys alike: tiles are equal, of three portions at most, and places are idle."""
    problem, sms = facts.problem, facts.target.sms
    tiles = problem.q_heads // facts.heads * problem.batch
    return first(
        EQUAL_SHARES, facts, shared=cut.shared, sms_a_tile=sms / tiles, filled=tiles / (tiles + -tiles % sms),
        products=(tiles * key_tiles(problem, cut.keys) + 1) * sms,  # in 32 bits, by `EqualShares`
    )  # fmt: skip


def _of_few_rows(facts: ForwardFacts, cut: Cut) -> HopperTiling:
    """With as many stages as shared memory holds."""
    (d, dv), problem = facts.call.dims, facts.problem
    persistent = bool(problem.schedule.persistent)
    room = facts.target.shared_memory // cut.blocks - 1024 - 2 * ROWS * (d + dv if persistent else max(d, dv))
    stage = 2 * cut.keys * (d + dv)
    most, of_bytes = cut.stages or BYTES_ON_THE_WAY // stage, {}
    if facts.of_bytes:  # two stages that are multiplied; what is on its way are bytes
        most, of_bytes["byte_stages"] = 2, min(most, (room - 2 * stage) // (cut.keys * (d + dv)))
        of_bytes["scales_queries"] = cut.in_fp16 and problem.types.q is torch.bfloat16
    # of packed sequences tensors say how many rows there are
    eight = problem.layout.q == "dense" and not facts.keys_in_order and queries(problem) * slots(facts.heads) <= 8
    return facts.tiling(
        "forward",
        tile_m=ROWS,
        tile_n=cut.keys,
        blocks=cut.blocks,
        scheduler=Scheduler.STREAM_K if cut.shared else Scheduler.asked(persistent),
        stages=min(most, room // stage),
        eight_rows=eight,
        resident=d * cut.resident,
        **of_bytes,
    )
