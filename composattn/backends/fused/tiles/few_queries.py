"""Work where queries are few: how many heads share the rows of a tile, and into how many parts the keys are cut."""

from __future__ import annotations

import math
from collections.abc import Callable

from ....analysis.program import Program
from ....call.problem import Problem
from ....call.schedule import MOST_SPLITS
from ....errors import InvalidSchedule
from ....graph.expr import Dep
from .target import Target
from .tiling import ForwardTiling, key_tiles, query_tiles, slots
from .traits import depends

Time = Callable[[int], float]  # what a call takes by the number of parts its keys are cut into


def sharing_heads(problem: Problem, program: Program, rows: int) -> int:
    """How many query heads of a key/value head may share `rows` rows of a tile; 1 where none may, or none is to.

    Raises `InvalidSchedule` where packing is asked for and can't be done.
    """
    wanted, group = problem.schedule.pack_gqa, problem.group
    # tiles of strips are boxes of one head
    allowed = problem.layout.strips is None if wanted is None else wanted
    if not allowed:
        return 1
    by_head = depends(program.mask, Dep.H)  # heads that see different keys visit different tiles
    heads = 1 if by_head else max(n for n in range(1, min(group, rows) + 1) if group % n == 0)
    if wanted and heads == 1 < group:
        why = "the mask depends on the head" if by_head else f"{group} heads share no tile of {rows} rows"
        raise InvalidSchedule(f"pack_gqa=True, but {why}; leave pack_gqa=None")
    return heads


def packed_heads(problem: Problem, program: Program, rows: int) -> int:
    """How many heads share the rows of a tile, `rows` where queries are few, else twice them: if that halves the tiles.

    1 where each has tiles of its own. Raises `InvalidSchedule` where packing is asked for and can't be done.
    """
    heads = sharing_heads(problem, program, rows)
    halved = _tiles(problem, heads, rows) * 2 <= _tiles(problem, 1, rows)
    return heads if problem.schedule.pack_gqa or halved else 1


def _tiles(problem: Problem, heads: int, rows: int) -> int:
    """Query tiles of all heads."""
    return query_tiles(problem, heads, rows if problem.queries * slots(heads) <= rows else 2 * rows)


def splits(problem: Problem, tiling: ForwardTiling, target: Target) -> int:
    """Into how many parts the keys of a query tile are cut: as asked for, or so that the call takes least time."""
    whole = problem.schedule.batch_invariant or tiling.scheduler.shares
    return 1 if whole else best_cut(problem, tiling, target)[0]


def best_cut(problem: Problem, tiling: ForwardTiling, target: Target) -> tuple[int, float]:
    """The parts that are asked for, or the fewest by which a call takes least; and that time, in a unit of its own."""
    work = query_tiles(problem, tiling.packed_heads, tiling.tile_m)
    tiles = key_tiles(problem, tiling.tile_n)
    reads = tiling.tile_m < 128 and problem.queries * tiling.slots <= tiling.tile_m
    time = (_reading if reads else _computing)(problem, tiling, target, work, tiles)
    asked, most = problem.schedule.split_kv, max(1, min(MOST_SPLITS, tiles if reads else tiles // 2))
    best = min(range(1, most + 1), key=time) if asked == "auto" else asked
    if asked == "auto" and not reads and time(best) >= 0.9 * time(1):
        best = 1
    return best, time(best)


def _computing(problem: Problem, tiling: ForwardTiling, target: Target, work: int, tiles: int) -> Time:
    """In kv tiles (1.5 µs on an H200): all rounds of blocks over the SMs, each block its tiles and two more
    to begin and end; where there are parts, the kernel that combines them, and what passes through memory.

    A small tile that is one of many takes as much less as it is smaller than 128 queries and keys.
    """
    each = tiling.tile_m * tiling.tile_n / 128**2 if tiling.tile_m < 128 and work > target.sms else 1.0
    part = 8 * problem.queries * problem.batch * problem.q_heads * tiling.dv / 5e6  # fp32, written and read

    def time(parts: int) -> float:
        rounds = -(-work * parts // target.sms)
        return rounds * (each * -(-tiles // parts) + 2) + (0 if parts == 1 else 3 + parts * part)

    return time


MADE_UP = 0.83  # of the time of idle places in the last round, as others' keys come faster
SHALLOW = 1.02  # of the time, where an SM has one block of two stages alone
FIRST, FURTHER = 3.6, 1.1  # beginnings and ends of the first round, and of each further one
COMBINE, EACH_PART = 2.65, 0.035
OF_RATE = 0.964  # of what memory can give, where all SMs read
TO_FEW = 0.08  # of the time, how much more it takes as fewer of them do
# Up to so many bytes lie in L2 behind a call that had them, which gives so many times as much
KEPT, OF_L2 = 45 << 20, 1.7
# A tile by itself: a beginning, and of 64 keys the softmax of eight rows, or of all, and each 64 columns of K and V
BEGIN, EIGHT_ROWS, ALL_ROWS, COLUMNS = 0.107, 0.179, 0.25, 0.053


def _reading(problem: Problem, tiling: ForwardTiling, target: Target, work: int, tiles: int) -> Time:
    """In µs, of blocks of few rows, which take as long as their keys take from memory.

    Fitted to calls of eight rows, each cut in all ways there are (H200, D 64, 96 and 128, 16 to 512 tiles of 1,024 to
    8,192 keys, up to 8 parts; benchmarks/decode_cuts.py): what it chooses takes 0.8 % more than the best of 224 that
    were timed.
    """
    types, blocks = problem.types, tiling.blocks
    row = tiling.d * types.k.itemsize + tiling.dv * types.v.itemsize
    lies_in_l2 = problem.batch * problem.kv_heads * problem.keys * row <= KEPT
    # a tile of keys for each SM, and one for one block with all of the memory's rate
    tile = tiling.tile_n * row * target.sms / (OF_RATE * target.memory_rate * 1e3 * (OF_L2 if lies_in_l2 else 1.0))
    softmax = EIGHT_ROWS if tiling.most_rows < tiling.tile_m else ALL_ROWS
    alone = BEGIN + tiling.tile_n / 64 * (softmax + COLUMNS * (tiling.d + tiling.dv) / 64)

    def of_rounds(filled: float, rounds: int) -> float:
        """The time of one tile of keys of each block; `filled`: blocks per SM."""
        if filled > blocks:
            return max((filled + (rounds * blocks - filled) * (1 - MADE_UP)) * tile, rounds * alone)
        reading = max(filled * tile * (1 + TO_FEW * max(0.0, 1 - filled)), alone)
        return reading * (SHALLOW if filled <= 1 and blocks > 1 and not tiling.reads_far_ahead else 1.0)

    def time(parts: int) -> float:
        filled = work * parts / target.sms
        rounds, of_block = math.ceil(filled / blocks), -(-tiles // parts)
        ends = FIRST + FURTHER * (rounds - 1) + (COMBINE + EACH_PART * parts) * (parts > 1)
        # of bytes in one stage one tile is read, or one computed
        return of_rounds(filled, rounds) * (of_block + (of_block - 1) * (tiling.byte_stages == 1)) + ends

    return time
