"""How the Hopper forward cuts the work: tile sizes by head dimension."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

from ...analysis.captured_gradient import Pattern
from ...analysis.program import Program
from ...call.problem import Problem
from ...primitives.lag import NO_LAG, Lag
from ..fused.few_queries import packed_heads, time_of
from ..fused.order import keys_of_a_query
from ..fused.stretches import falls_apart
from ..fused.target import HOPPER, Target
from ..fused.tiling import STATISTICS, ForwardTiling, invariant_keys, query_tiles, slots
from ..fused.traits import (
    bytes_at_pairs,
    has_bounded_documents,
    has_opaque_test,
    is_line,
    keys,
    padded,
    queries,
    reads_along_keys,
    reads_any,
    reads_by,
    reads_pairs,
)
from ..fused.work import captured_decide
from ..fused.written import Written
from .lag import lag_of
from .wide_tiling import WideTiling, wide_tiling

ROWS = 64  # of one warpgroup's product
# Keys of a query, on average, up to which several small blocks beat a large one: they fill each other's beginnings and
# ends, and tiles of 64 queries visit less beside a mask's edge. D 64: 2,048 keys gain 4 %, 4,096 lose 2 %
FEW_KEYS = {64: 2304, 96: 1152}
# The same where a large block's rows guess their maxima. D 64: 2,048 keys gain 4 % by the large block, causal 2,048
# queries nothing; D 96: 1,024 keys gain 10 %, causal 2,048 queries 14 %
FEW_KEYS_GUESSED = {64: 1536, 96: 768}
# Keys of a query, on average, from which D 128 guesses: 8k and 16k gain 1 %, causal 2k and windows of 1,024 nothing
MANY_KEYS_GUESSED = 2304
# The same with a score mod: ALiBi gains 10 % of causal 2k, 11 % of 8k
MANY_KEYS_LINE = 1024
# Keys of a query, on average, up to which D 128 gains from blocks that stay and draw their tiles, the next one copied
# under this one's end: 1 to 9 % of full 1k to 4k, 19, 8 and 0 to 1 % of causal 1k, 2k and 4k, 8 % of a window of 1,024.
# By a fixed stride causal 2k loses 7 %
FEW_KEYS_DRAWN = 4224
# Keys up to which D 256 gains from them with no mask: 1.1 % of 2k, 0.5 % of 8k
LONG_DRAWN_256 = 8192
LONG_PERSISTENT = 16384  # queries up to which D 64 gains from blocks that stay
# Keys up to which small blocks of D 64 stay, with 64 keys at a time (causal calls in a graph: 128, 256 and 512 gain 9,
# 15 and 13 %)
SHORT_SMALL = 512
# Keys by head dimension, more than and up to which tiles of 64 queries that run at once beat larger ones, which would
# leave multiprocessors idle: one sequence of 128 to 1,024 gains 17 to 30 % at D 128, 26 to 35 at D 192, of D 256 27 to
# 35, of D 64 and 96 3 to 10, of 128 nothing. With a mask and wider than 128 by two rounds of half full ones too (15 to
# 25 %). Longer ones, of which large blocks would take parts, were not timed, but 2,048 of D 256: 27 %
AT_ONCE = {96: (128, 1024), 192: (0, 1024), 256: (0, 2048)}
# Bytes of K and V of a head up to which heads without a mask come one after the other: their blocks run in step, and
# want less of L2 at a time. D 128: 1k to 8k gain 6 to 2 %, D 64 2k 3 %, 192/128 8k 2 %; of 16 MiB nothing is gained
ONE_HEAD = 8 << 20
# Keys of a row up to which batch-invariant tiles have 64 of them where D is at most 96: windows of 128 to 2,048 reach
# 0.97 to 1.17 of the default by them, 0.74 to 0.91 by tiles of 128 keys
NARROW = 2048
# The same where results need no order, D is at most 64 and there is a mask alone: so tiled, batch-invariant windows of
# 128, 256 and 512 keys had 1.17, 1.09 and 1.05 of the default, which took 96
NARROW_MASK = 512
# Keys of a tile with D 256 and a mask, where 80 fit: 64 cost less at its edges (1 and 2.5 % of causal 8k; no mask: 0 to
# -2 %)
MASKED_256 = 64
# Columns of Q in registers by D and Dv, where there is no score mod. In blocks that stay: D 192 3 to 5 % of 8k with the
# 80 keys that are left room for; D 128 1, 3 and 3 % of causal 1k, 2k and 8k, in blocks that leave 3 % of causal 16k
HELD = {(192, 192): 128, (128, 128): 128, (192, 128): 192}  # 8k causal 1 %; D 256 gains nothing
HELD_KEYS = 1024  # from which D 128 holds them
# up to so many keys so many key/value heads of D 128: causal 256 gains 5 %, 512 3; 1024 loses 2 (B 16, 16 heads)
SHORT_TOGETHER = ((256, 16), (512, 32))
LATE_KEYS = 4096  # up to which D 128 draws late
PAGE_REGISTERS = 40  # of a thread that copies: page numbers beside what all copies need
# Stages of K and V in each of several blocks of few queries: with more, a multiprocessor's only block is far ahead of
# two of another one, and all wait for these (D 128 4 to 9 % of 136 to 192 tiles up to 4k keys, D 64 to 6)
EVEN_STAGES = 2
# Of K and V in shared memory where one block of few queries has 128 keys a tile: with half as much again, 64 sequences
# of 4k and more lose 2 %
BYTES_ON_THE_WAY = 128 << 10
FULL_ROUNDS = 0.04  # of their places idle, up to which nothing is gained by equal shares
GUESSING = "forward_guessing"  # probabilities by the maximum before their tile
SUMS = 8  # columns of the output there that are sums: the least by which a product can be wider
EIGHT_ROWS = "forward_eight_rows"  # of a tile of few queries: 8 % of short calls, 0 to 2 % where memory is the limit
APART = "forward_apart"  # warpgroups pass by kv tiles that only others' rows see
FROM_FIRST = "forward_from_first"  # so, and tiles begin where the first key is that the block's rows see
# Keys above which documents by ids take two warpgroups that share K and V and pass by what only the other sees (D 128,
# 8k: 3 % of eight causal documents, 7 % of full ones), not blocks of one
LONG_DOCUMENTS = 4096
# Keys from which 192/128 gains from blocks that stay, whose next Q comes once registers hold this one: 8k full 1 %,
# causal 2; fewer were not timed
LONG_HELD_ALL = 8192
# Tiles of keys for which multiprocessors would be idle, from which work is shared: with 15 and more 4k to 16k of D 128,
# 8k of D 192 and 256 gain 1 to 2 %, with 6 to 8 their 2k lose 1
SHARED = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperTiling(ForwardTiling):
    """K and V lie in a ring of `stages` each; each of the `warpgroups` has 64 of the query rows.

    `pingpong`: warpgroups take turns at the matrix unit. `rescale_early`: the output is rescaled while scores are
    computed, not after it was accumulated. `lag`: how far a row's maximum may be below its largest score. `q_stages`: Q
    lies in a ring of so many; with two, in blocks that stay, the next work tile's is copied while this one is computed.
    `held`: so many columns of Q wait in registers for all tiles of keys, so that the matrix unit reads only the other
    ones from shared memory. `output_wait`: behind which of a thread's exponentials the output's product is waited for,
    the first one or half of them; None: wherever the compiler likes, which may be before any. `written`: how products
    are, see `fused/written.py`. `risen`: a tile whose guess was too low is computed again, or lifted
    (`kernels/lifting_rows.py`; of no default, as a lag beside guesses: not timed yet, 62. of Forward in
    benchmarks/LOG.md).
    """

    stages: int
    warpgroups: int
    consumer_registers: int
    producer_registers: int
    pingpong: bool = False
    rescale_early: bool = False
    lag: Lag
    q_stages: int = 1
    held: int = 0
    written: Written = "whole"
    output_wait: Literal["first", "half"] | None = None
    risen: Literal["again", "lifted"] = "again"

    def __post_init__(self) -> None:
        if self.output_direct and (self.q_stages > 1 or not self.drawn):
            raise ValueError("output_direct is of blocks that draw their tiles, whose one place of Q is Q's alone")
        launched = launched_registers(self.warpgroups, self.blocks)
        if self.warpgroups * self.consumer_registers + self.producer_registers > launched * (self.warpgroups + 1):
            raise ValueError(
                f"threads would wait for ever for more than the {launched} registers they are launched with"
            )
        if self.shares and not (self.drawn if self.shares == "last" else self.persistent and not self.drawn):
            raise ValueError("the last tiles are shared by blocks that draw them, all by others that stay")

    @property
    def dealt(self) -> str:
        return super().dealt + ", O from registers" * self.output_direct

    @property
    def most_rows(self) -> int:
        return 8 if self.kernel == EIGHT_ROWS else super().most_rows

    @property
    def reads_far_ahead(self) -> bool:
        return self.stages > EVEN_STAGES

    @property
    def computing_warps(self) -> int:
        return self.tile_m // 16

    @property
    def left_numbers(self) -> int:
        columns = self.dv + (SUMS if self.kernel == GUESSING else 0)
        rows = self.tile_m // 2 if self.kernel == EIGHT_ROWS else self.tile_m  # of a thread's two rows one
        of_tile = rows * (columns + 4 * STATISTICS)  # each row is four lanes'
        return of_tile if self.shares == "last" else 2 * of_tile  # of the tile it begins in, and ends in

    @property
    def in_stretches(self) -> bool:
        return self.kernel == FROM_FIRST

    @property
    def separate_o(self) -> bool:
        """Whether the output has shared memory of its own instead of Q's, which may be the next tile's by then."""
        return self.persistent and not (self.output_direct or self.shares == "all")

    @property
    def frees_queries(self) -> bool:
        """Whether Q's place is free once registers have it, so that the next tile's comes under all of this one."""
        return self.output_direct and self.held == self.d

    @property
    def ones(self) -> int:
        """Columns of ones beside each V in shared memory: as many as lie together, of which 8 are multiplied."""
        return next(wide for wide in (64, 32, 16) if self.dv % wide == 0) if self.kernel == GUESSING else 0

    def shared_memory(self, element_bytes: int) -> int:
        rows = self.q_stages * self.d + self.dv if self.separate_o else self.q_stages * max(self.d, self.dv)
        columns = self.d + self.dv + self.ones
        return element_bytes * (self.tile_m * rows + self.stages * self.tile_n * columns) + 1024

    def describe(self) -> dict[str, str]:
        order = "ping-pong" if self.pingpong else "warpgroups at will"
        rescale = "under the next scores" if self.rescale_early else "after the product"
        apart = "; each passes by kv tiles that only others' rows see" if self.kernel in (APART, FROM_FIRST) else ""
        apart += "; tiles begin at the first key seen" if self.kernel == FROM_FIRST else ""
        of_q = f", {self.q_stages} of Q" if self.q_stages > 1 else ""
        guess = "; of most tiles with no test, probabilities by the maximum before" if self.kernel == GUESSING else ""
        guess += ", lifted where that was too low" if self.risen == "lifted" else ""
        held = f"; {self.held} columns of Q in registers" if self.held else ""
        wait = "the first exponential" if self.output_wait == "first" else "half of the exponentials"
        held += f"; waits for O behind {wait}" if self.output_wait else ""
        return {
            "roles": f"1 copying warp, {self.stages} stages{of_q}; {self.warpgroups} warpgroups of {ROWS} rows; "
            f"registers {self.consumer_registers}/{self.producer_registers}; blocks on a multiprocessor: {self.blocks}",
            "overlap": f"{order}, rescale {rescale} {self.lag}{apart}{guess}{held}",
        }


def forward_tiling(problem: Problem, program: Program, target: Target) -> HopperTiling | WideTiling:
    """Tiles of the forward kernel; the choices were measured on an H200 (benchmarks/LOG.md)."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    if max(d, dv) > 256:
        return wide_tiling(problem, program, target)
    heads = packed_heads(problem, program, ROWS)
    if queries(problem) * slots(heads) <= ROWS:
        return _few_rows(problem, program, target, heads)
    widest = max(d, dv)
    invariant = problem.schedule.batch_invariant
    if _run_at_once(problem, program, target, heads):
        return _alone(problem, program, target, heads)
    if widest == 128 and _has_long_documents(problem, program, heads):
        return _documents(problem, program, heads)
    # 128 keys of D 128 leave a multiprocessor room for one such block
    if _is_short(problem, program, widest) and not (invariant and widest > 96):
        return _small(problem, program, target, heads)
    # what a score mod reads at (q, kv) waits in registers: 240 for each of two warpgroups instead of 160; so do the
    # words of dropout (63 spilled with D 64)
    gathers = reads_pairs(program.score)
    asked = _keys_in_order(widest, program) if invariant else 0
    narrow = widest <= 96 and not gathers and program.keep is None
    warpgroups = 3 if narrow and _by_registers(160, dv, program) >= asked else 2
    tile_m = 64 * warpgroups
    mean_keys = functools.cache(lambda: keys_of_a_query(problem, program))  # asked for twice, some 20 operations
    guesses = _guesses(problem, program, heads, mean_keys)
    persistent = problem.schedule.persistent
    if persistent is None:
        # one tile a block at most: D 128 loses 2 to 4 % by drawing it
        once = widest == 128 and query_tiles(problem, heads, tile_m) * problem.batch <= target.sms
        persistent = not once and _stays(problem, program, warpgroups, guesses, mean_keys)
    registers = 160 if warpgroups == 3 else 240
    held = _held(problem, program, persistent)
    # 128 keys beside all of Q in registers, and two stages of them beside Q in shared memory
    holds_all = d > dv and held == d and _by_registers(registers - held // 4, dv, program) >= 128
    direct = persistent and (holds_all or d == dv == 256)
    rows = d + dv if persistent and not direct else widest
    by_registers, by_memory = _by_registers(registers, dv, program), _by_memory(target, tile_m, rows, d + dv)
    most = _most_read(widest, program) if gathers else MASKED_256 if widest > 192 and program.mask is not None else 128
    tile_n = asked or min(by_registers, by_memory, most)
    paged = problem.layout.kv == "paged"
    consumers, producer = (160, 32) if warpgroups == 3 else (232, 40) if paged else (240, 24)
    passes = warpgroups == 3 and widest == 64 and _may_pass(problem, program, heads)
    tiling = _tiling(
        problem,
        heads,
        tile_m=tile_m,
        tile_n=_whole_pages(tile_n) if paged else tile_n,
        # K's stage is free later where rows guess: of D 64 a third one gains 1 to 3 %
        stages=3 if guesses and tile_n <= _by_memory(target, tile_m, rows, d + dv + 64, stages=3) else 2,
        warpgroups=warpgroups,
        consumer_registers=consumers,
        producer_registers=producer,
        pingpong=widest <= 192,
        # three warpgroups fill each other's gaps; two gain from a shorter turn
        rescale_early=(warpgroups == 3 and not guesses) or dv > 128,
        persistent=persistent,
        drawn=_drawn(widest, problem) if persistent else None,
        output_direct=direct,
        output_wait=_output_wait(widest, warpgroups, program, guesses),
        heads_together=_heads_together(problem, program),
        kernel=GUESSING if guesses else APART if passes else _kernel(problem),
        held=held if _by_registers(registers - held // 4, dv, program) >= tile_n else 0,
        written=_written(d, dv, program, guesses),
    )
    tiling = _with_next_queries(tiling, target)
    return dataclasses.replace(tiling, shares="last" if _shares(problem, program, tiling, target) else None)


def _shares(problem: Problem, program: Program, tiling: HopperTiling, target: Target) -> bool:
    """Whether blocks share the last rounds of equal tiles, where one of them would leave many idle for long.

    Not three warpgroups, whose loops have no register to spare (D 64 loses 2 to 4 %), nor with all of Q in registers
    (192/128: 16 spilled). With score mods it was not timed.
    """
    schedule, changed = problem.schedule, program.score is not None or program.keep is not None
    equal = _tiles_are_equal(problem, program)
    can = tiling.drawn is not None and tiling.warpgroups == 2 and not tiling.frees_queries
    if not (equal and can) or changed or schedule.batch_invariant:
        return False
    tiles = query_tiles(problem, tiling.packed_heads, tiling.tile_m) * problem.batch
    idle = -tiles % target.sms / target.sms
    fits = 2 * target.sms**2 * -(-keys(problem) // tiling.tile_n) < 1 << 31  # what `Shares` multiplies
    return fits and tiles > 2 * target.sms and idle * keys(problem) > SHARED * tiling.tile_n


def _tiles_are_equal(problem: Problem, program: Program) -> bool:
    """Whether each work tile has all keys, and nobody asked for parts of them."""
    return program.mask is None and problem.layout.is_dense and problem.schedule.split_kv == "auto"


def _most_read(widest: int, program: Program) -> int:
    """Keys of a tile beside what a score mod reads at each pair; numbers of 16 bits take half of the registers.

    128 keys of such biases gain 5 % of causal calls at D 64, 9 of full ones, 6 and 5 at D 128; of fp32 they lose 57.
    """
    assert program.score is not None
    halves = widest <= 128 and bytes_at_pairs(program.score) == 2
    return 128 if halves else 96


def _written(d: int, dv: int, program: Program, guesses: bool) -> Written:
    """How a large block's products are; whole ones compile fastest. Timed on an H200, in turns.

    Anew, what is read at (q, kv) gains 1 to 3 %, and of rows that guess D 128 3 of 8k, D 96 1, D 64 1 to 2 of causal 4k
    and more. ALiBi loses 2 by it, soft caps 3, documents 5, 192/128 6.
    """
    if d > dv:  # 192/128 with no mask loses 1 % by whole ones
        return "by steps"
    if reads_pairs(program.score):
        return "anew"
    # D 64 with no mask loses 2 % anew
    gains = max(d, dv) > 64 or program.mask is not None
    return "anew" if guesses and program.score is None and gains else "whole"


def _output_wait(widest: int, warpgroups: int, program: Program, guesses: bool) -> Literal["first", "half"] | None:
    """Of a large block. Timed on an H200, in turns.

    Behind the first exponential D 128 gains 3 to 5 % up to 4k, a window of 1,024 7, what is read at (q, kv) 3, D 192
    and 256 0 to 2; a soft cap loses 2, ALiBi 1. Where rows guess, behind half of them, D 128 gains 0 to 5 % from 4k on;
    D 64 and 96, whose three warpgroups fill each other's gaps, lose up to 1.
    """
    if warpgroups != 2 or program.keep is not None:
        return None
    if guesses:
        return "half" if widest == 128 and program.score is None else None
    return "first" if program.score is None or reads_pairs(program.score) else None


def _stays(problem: Problem, program: Program, warpgroups: int, guesses: bool, mean_keys: Callable[[], float]) -> bool:
    """Whether large blocks stay for many work tiles, where nothing is asked for."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    changed = program.score is not None or program.keep is not None or problem.schedule.batch_invariant
    plain = program.mask is None and not changed
    if not problem.layout.is_dense:
        return problem.layout.q == problem.layout.kv == "packed" and max(d, dv) == 128
    if max(d, dv) == 128:
        # ALiBi, whose rows guess their maxima, loses 7 % of causal 8k
        few = mean_keys() <= FEW_KEYS_DRAWN and not (guesses and program.score is not None)
        return few or plain  # which shares the last rounds: of 4k to 8k keys 1 to 7 %
    if d == dv == 192:
        return not changed
    if (d, dv) == (192, 128):
        holds_all = _by_registers(240 - d // 4, dv, program) >= 128
        return not changed and holds_all and keys(problem) >= LONG_HELD_ALL
    if d == dv == 256:
        return not changed and (program.mask is not None or keys(problem) <= LONG_DRAWN_256)
    # D 64 gains 1 to 2 % of 4k to 16k: its work tiles are equal, and there are many. It loses 2 to 3 % of 32k
    return plain and warpgroups == 3 and max(d, dv) == 64 and FEW_KEYS[64] < queries(problem) <= LONG_PERSISTENT


def _drawn(widest: int, problem: Problem) -> Literal["early", "late"] | None:
    """When large blocks that stay draw their next tile: late where tiles take long (D 192 causal 8k: 3 %) or differ.

    Packed ones do (eight documents: 3 %, causal 7). D 64 gains 2, 0.4 and 0.2 % of full 4k, 8k and 16k either way.
    D 128 gains 0.5 to 4 % up to 4k keys by late ones, grouped heads most, and loses 1 of groups of 8k.
    """
    if widest not in (64, 128, 192, 256):
        return None
    late = widest != 128 or not problem.layout.is_dense or keys(problem) <= LATE_KEYS
    return "late" if late else "early"


def _held(problem: Problem, program: Program, persistent: bool) -> int:
    """Columns of Q that a large block's registers should hold, if a tile leaves them room.

    None behind score mods, whose values take registers too (D 192, an ALiBi window: 15 spilled).
    """
    changed = program.score is not None or program.keep is not None
    if changed or problem.layout.kv == "paged" or problem.schedule.batch_invariant:
        return 0
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    # of 192/128 with no mask blocks that leave gain nothing
    of_those_that_stay = d == 192 and (dv == 192 or program.mask is None)
    if (d == 128 and keys(problem) < HELD_KEYS) or (of_those_that_stay and not persistent):
        return 0
    return HELD.get((d, dv), 0) if problem.layout.is_dense else 0


def _guesses(problem: Problem, program: Program, heads: int, mean_keys: Callable[[], float]) -> bool:
    """Whether a large block's rows guess their maxima: most tiles need no test, and a softmax is what they wait for.

    Behind score mods that are no lines they wait for its operations and loads (D 64 lost 3 % by a soft cap,
    spilled 48 in the loop by a table), or find tiles hidden (D 128 lost 5 % by `where(q >= kv, score, -1e9)`).
    """
    if program.keep is not None or not problem.layout.is_dense or problem.schedule.batch_invariant:
        return False
    if program.mask is not None and not _may_pass(problem, program, heads):
        return False
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    wide = max(d, dv) > 96
    unmasked = program.score is not None and program.mask is None  # ALiBi to both sides rises far
    if unmasked or not is_line(program.score) or (wide and not d == dv == 128):
        return False
    few = MANY_KEYS_GUESSED if wide else 0
    if program.score is not None:
        few = min(few, MANY_KEYS_LINE)
    return few == 0 or mean_keys() > few


def _may_pass(problem: Problem, program: Program, heads: int) -> bool:
    """Whether a query tile's warpgroups may visit other keys, neighbouring ones."""
    apart = program.mask is not None and len(program.intervals) == 1
    return apart and problem.layout.is_dense and heads == 1 and not problem.schedule.batch_invariant


def _has_long_documents(problem: Problem, program: Program, heads: int) -> bool:
    plain = program.score is None and program.keep is None and _may_pass(problem, program, heads)
    return plain and captured_decide(program.intervals) and keys(problem) > LONG_DOCUMENTS


def _documents(problem: Problem, program: Program, heads: int) -> HopperTiling:
    """Two warpgroups, with 128 keys at a time where tiles begin with documents (H200, 8k: 2 to 16 % before 112).

    Else with 112 (1 to 2 % before 96 and 128). Blocks stay (2 to 12 %), but of full documents with which no tiles
    begin, so that they differ more (4 % lost).
    """
    asked, apart = problem.schedule.persistent, falls_apart(problem, program)
    stays = apart or has_bounded_documents(program.mask) if asked is None else asked
    return _tiling(
        problem,
        heads,
        tile_m=2 * ROWS,
        tile_n=min(_by_registers(240, padded(problem.head_dim_v), program), 128 if apart else 112),
        stages=2,
        warpgroups=2,
        consumer_registers=240,
        producer_registers=24,
        pingpong=True,
        persistent=stays,
        drawn="early" if stays else None,
        # eight documents gain 3 %, causal ones too, twelve nothing
        held=HELD.get((padded(problem.head_dim), padded(problem.head_dim_v)), 0) if stays else 0,
        output_wait="first",
        heads_together=problem.schedule.heads_together,
        kernel=FROM_FIRST,
    )


def _heads_together(problem: Problem, program: Program) -> int | None:
    """What is asked for, else one head where all query tiles visit the same keys and these are not too many.

    Short masked calls of D 128 have few as well: others would need their keys again when these have left L2. Not with
    biases at pairs, which heads share: 8 heads of 8k gain 4 % at D 64, 2 at D 128.
    """
    asked = problem.schedule.heads_together
    if asked is not None or not problem.layout.is_dense:
        return asked
    if program.mask is not None:
        widest = max(padded(problem.head_dim), padded(problem.head_dim_v))
        short = next((heads for most, heads in SHORT_TOGETHER if keys(problem) <= most), None)
        return short if widest == 128 else None
    if reads_by(program.score, Pattern.PAIR):
        return None
    kv_bytes = 2 * keys(problem) * (padded(problem.head_dim) + padded(problem.head_dim_v))
    return 1 if kv_bytes <= ONE_HEAD else None


def _tiling(problem: Problem, heads: int, kernel: str, **chosen: Any) -> HopperTiling:
    """With what hangs on the problem and the kernel alone."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    return HopperTiling(
        d=d,
        dv=dv,
        kernel=kernel,
        # where maxima are guessed, few tiles look for their own
        lag=NO_LAG if kernel == GUESSING else lag_of(problem),
        l2=32 << 20,
        packed_heads=heads,
        **chosen,
    )


def _kernel(problem: Problem) -> str:
    return "forward_in_order" if problem.schedule.batch_invariant else "forward"


def _keys_in_order(widest: int, program: Program) -> int:
    """Keys of a tile where results are batch-invariant: fewer where constants of the mask leave a row few."""
    return 64 if widest <= 96 and _sees_at_most(NARROW, program) else invariant_keys(widest, program)


def _sees_at_most(keys: int, program: Program) -> bool:
    """Whether constants of the mask leave a row so few."""
    return program.limits is not None and program.limits.most is not None and program.limits.most <= keys


def _is_short(problem: Problem, program: Program, widest: int) -> bool:
    """Whether query tiles visit few keys, or tensors say how many, which is few as a rule (documents)."""
    if problem.layout.kv == "paged" or widest > 128:
        return False
    if captured_decide(program.intervals):
        return True
    if widest > 96:
        return False
    mean_keys = functools.cache(lambda: keys_of_a_query(problem, program))
    guesses = _guesses(problem, program, packed_heads(problem, program, ROWS), mean_keys)
    few = next(few for d, few in (FEW_KEYS_GUESSED if guesses else FEW_KEYS).items() if widest <= d)
    return keys(problem) <= few or mean_keys() <= few


def _run_at_once(problem: Problem, program: Program, target: Target, heads: int) -> bool:
    """Whether tiles of 64 queries are so few, and keys too, that each has a multiprocessor of its own to its end."""
    schedule, widest = problem.schedule, max(padded(problem.head_dim), padded(problem.head_dim_v))
    if not problem.layout.is_dense or schedule.batch_invariant or schedule.persistent:
        return False
    least, most = next(found for d, found in AT_ONCE.items() if widest <= d)
    tiles = query_tiles(problem, heads, ROWS) * problem.batch
    room = target.sms * (3 if widest > 128 and program.mask is not None else 2) // 2
    return least < keys(problem) <= most and tiles <= room


def _alone(problem: Problem, program: Program, target: Target, heads: int) -> HopperTiling:
    """One warpgroup on a multiprocessor: blocks of two would leave half of them idle.

    It takes 1.2 µs for a tile of 128 keys of D 128, two 1.3 for twice as many queries, and begins and ends sooner.
    """
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    widest, gathers = max(d, dv), reads_pairs(program.score)
    most = 64 if widest > 192 or keys(problem) <= 128 else _most_read(widest, program) if gathers else 128
    return _tiling(
        problem,
        heads,
        tile_m=ROWS,
        tile_n=min(_by_registers(240, dv, program), _by_memory(target, ROWS, widest, d + dv), most),
        stages=2,
        warpgroups=1,
        consumer_registers=240,
        producer_registers=PAGE_REGISTERS,
        rescale_early=dv > 128,
        output_wait="first" if program.keep is None else None,
        heads_together=_heads_together(problem, program),
        kernel=_kernel(problem),
        written=_written(d, dv, program, False),
    )


def _small(problem: Problem, program: Program, target: Target, heads: int) -> HopperTiling:
    """One warpgroup for each block, and two or three blocks on a multiprocessor."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    invariant = problem.schedule.batch_invariant
    in_order = _keys_in_order(max(d, dv), program) if invariant else 0
    narrow = max(d, dv) <= 96 and in_order <= 64
    registers = 136 if narrow else 216
    # values of a score mod beside those of a mask: 6 spills with D 96 and 64 columns
    both = 10 if program.score is not None and reads_any(program.mask) else 0
    tile_n = min(_by_registers(registers - both, dv, program), 96 if max(d, dv) <= 64 else 64)
    few = max(d, dv) <= 64 and program.score is None and _sees_at_most(NARROW_MASK, program)
    short = _is_short_and_plain(problem, program)
    # 37 spills with 96 columns of a table; and 128 keys are two tiles of 64
    if few or short or reads_pairs(program.score) or keys(problem) <= 128:
        tile_n = min(tile_n, 64)
    persistent = problem.schedule.persistent
    tiling = _tiling(
        problem,
        heads,
        tile_m=ROWS,
        tile_n=in_order or tile_n,
        stages=2,
        warpgroups=1,
        consumer_registers=registers,
        producer_registers=24 if narrow else 40,
        rescale_early=narrow,
        # one warpgroup has no other's softmax under its products (D 64: 1 to 3 %)
        output_wait="first" if narrow else None,
        blocks=3 if narrow else 2,
        persistent=short if persistent is None else persistent,
        heads_together=_heads_together(problem, program),
        kernel=_kernel(problem),
        # causal 1k and 2k of D 64 lose 1 % by whole ones
        written="by steps" if program.mask is not None else "whole",
    )
    return _with_next_queries(tiling, target)


def _is_short_and_plain(problem: Problem, program: Program) -> bool:
    """Whether small blocks stay, and have 64 keys at a time."""
    plain = program.score is None and program.keep is None and not reads_any(program.mask)
    plain = plain and problem.layout.is_dense and not problem.schedule.batch_invariant
    return plain and max(padded(problem.head_dim), padded(problem.head_dim_v)) == 64 and keys(problem) <= SHORT_SMALL


def _with_next_queries(tiling: HopperTiling, target: Target) -> HopperTiling:
    """With two stages of Q, if the block stays and they fit beside its neighbours' memory."""
    if not tiling.separate_o:
        return tiling
    two = dataclasses.replace(tiling, q_stages=2)
    room = target.shared_memory // tiling.blocks - 1024 * (tiling.blocks > 1)
    return two if two.shared_memory(2) <= room else tiling


def _few_rows(problem: Problem, program: Program, target: Target, heads: int) -> HopperTiling:
    """One warpgroup, and as many bytes of K and V on their way as memory needs to be busy: it is the limit.

    Two blocks on a multiprocessor, of 64 keys, or with D 64 of 128, fill each other's beginnings and ends; with D 64
    three of 64 keys have half as many places again; one of 128 keys has half as many; equal shares leave none idle, and
    take longest to end. Which is best depends on how many tiles there are.
    """
    widest, schedule = max(padded(problem.head_dim), padded(problem.head_dim_v)), problem.schedule
    in_order = schedule.batch_invariant or reads_along_keys(program.score)  # these wait in registers
    small = widest == 64 and not in_order and program.keep is None  # dropout's words: 14 and 24 spilled
    tile_n = _keys_in_order(widest, program) if schedule.batch_invariant else 128 if small else 64
    blocks = 2 if widest <= (128 if tile_n == 64 else 96) and not schedule.persistent else 1
    deep = _of_few_rows(problem, target, heads, tile_n, blocks, 8)
    if blocks == 1:
        return deep
    cuts = [dataclasses.replace(deep, stages=EVEN_STAGES), deep]  # the first of those that take as long
    if small:
        cuts.append(_of_few_rows(problem, target, heads, 64, 3, EVEN_STAGES))
    if not in_order:
        alone = _of_few_rows(problem, target, heads, 128, 1, BYTES_ON_THE_WAY // (2 * 128 * (deep.d + deep.dv)))
        shared = _has_equal_shares(problem, program, alone, target)
        cuts += [alone, in_equal_shares(alone)] if shared else [alone]
    return min(cuts, key=lambda tiling: time_of(problem, tiling, target).least())


def _has_equal_shares(problem: Problem, program: Program, tiling: HopperTiling, target: Target) -> bool:
    """Whether blocks may share all keys alike: tiles are equal, none has more than three portions, and places are idle.

    Where rounds are full, 128 tiles and multiples of them, shares lose up to 27 % (an end of 6 µs more than others').
    """
    if not _tiles_are_equal(problem, program) or problem.schedule.persistent is not None:
        return False
    tiles = problem.q_heads // tiling.packed_heads * problem.batch
    few = 2 * tiles >= target.sms  # as one warp adds up all portions
    idle = -tiles % target.sms
    counted = (tiles * -(-keys(problem) // tiling.tile_n) + 1) * target.sms < 1 << 31  # what `EqualShares` multiplies
    return few and idle >= FULL_ROUNDS * (tiles + idle) and counted


def _of_few_rows(problem: Problem, target: Target, heads: int, tile_n: int, blocks: int, most: int) -> HopperTiling:
    """With as many stages as shared memory holds, up to `most`."""
    d, dv, persistent = padded(problem.head_dim), padded(problem.head_dim_v), problem.schedule.persistent or False
    room = target.shared_memory // blocks - 1024 - 2 * ROWS * (d + dv if persistent else max(d, dv))
    return _tiling(
        problem,
        heads,
        tile_m=ROWS,
        tile_n=tile_n,
        stages=min(most, room // (2 * tile_n * (d + dv))),
        warpgroups=1,
        consumer_registers=few_registers(blocks),
        producer_registers=PAGE_REGISTERS,
        persistent=persistent,
        blocks=blocks,
        heads_together=problem.schedule.heads_together,
        kernel=EIGHT_ROWS if _are_eight(problem, heads) else _kernel(problem),
    )


def _are_eight(problem: Problem, heads: int) -> bool:
    """Whether eight rows of a tile are all queries' heads there can be; of packed sequences tensors say how many."""
    schedule = problem.schedule
    return problem.layout.q == "dense" and not schedule.batch_invariant and queries(problem) * slots(heads) <= 8


def launched_registers(warpgroups: int, blocks: int) -> int:
    """Of a thread, where so many warpgroups of a block compute, one copies, and `blocks` run on a multiprocessor."""
    return min(HOPPER.registers // (128 * (warpgroups + 1) * blocks), 255) // 8 * 8


def few_registers(blocks: int) -> int:
    """Of a thread that computes, where `blocks` of few queries run on a multiprocessor: what a copying one leaves."""
    return min(240, 2 * launched_registers(1, blocks) - PAGE_REGISTERS)


def in_equal_shares(tiling: HopperTiling) -> HopperTiling:
    """The same for blocks of few rows that stay, with the next tile's Q beside this one's, and share all keys alike."""
    return dataclasses.replace(tiling, persistent=True, shares="all", q_stages=2)


def _whole_pages(tile_n: int) -> int:
    """Keys of a tile that are whole pages, or a part of one: pages are powers of two."""
    return 1 << tile_n.bit_length() - 1


def _by_registers(registers: int, dv: int, program: Program) -> int:
    """Columns that fit: scores in fp32, probabilities in 16 bits, output in fp32, and room for the rest."""
    other = 30 if program.score is None and not reads_any(program.mask) else 36  # values on their way
    if has_opaque_test(program):
        other += 12  # of a test that is no bound: 25 spilled and read again with D 64 and 128 columns
    free = registers - other - dv // 2
    return free * 4 // 3 // 16 * 16


def _by_memory(target: Target, tile_m: int, rows: int, keys: int, stages: int = 2) -> int:
    """Columns for which Q and O (`rows` wide) and stages of K and V (`keys` wide) fit in shared memory."""
    free = target.shared_memory - 1024 - tile_m * rows * 2
    return free // (2 * stages * keys) // 16 * 16
