"""How the Hopper backward kernels cut the work: tile sizes by head dimension."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, ClassVar, Literal, NamedTuple

from ...analysis.captured_gradient import Pattern
from ...analysis.program import Program
from ...call.problem import Problem
from ...graph.multiples import is_of_score
from ..fused.coverage import all_are_seen, differ, end_together, has_documents_apart, has_whole_documents
from ..fused.cut import MANY
from ..fused.order import queries_of_a_key
from ..fused.stretches import falls_apart
from ..fused.target import Target
from ..fused.tiling import BackwardTiling
from ..fused.traits import (
    bounds_queries,
    has_costly_test,
    has_opaque_test,
    is_line,
    padded,
    reads_any,
    reads_pairs,
    sums_by,
)
from ..fused.written import Written

ROWS = 64  # of one warpgroup's product
OVERLAPPING = 96  # columns of dQ of which two warpgroups compute 64 each
DK, DV = 0, 1  # the results that stay in registers
L2 = 50 << 20  # bytes
TOGETHER = 16 << 20  # bytes of the heads that run together, if their tiles of keys meet the same queries
# Of documents only some are at work at a time. Eight causal ones (2 sequences of 8k, 17 MB a head) gain 2 % by three
# heads, twelve 0 to 0.6; by five 0.5 and -3, by six -3 and -8, by all 16 -28
TOGETHER_OF_DOCUMENTS = 56 << 20
SHORT = 2304  # queries that see a tile of keys, on average: of causal masks 4k tokens; half of it 2k
COMPLETE_AT_ONCE = 1024  # keys: all tiles of a head run side by side, and nothing of its dQ is complete before the rest
SLOW_MEMORY = 4000  # GB/s
AT_A_DOCUMENT = 8  # pieces of its tiles, or heads, that run together, next to those of the tile behind it
IN_ORDER_AT_A_DOCUMENT = 16  # query heads, in a fixed order: fewer tiles of one head wait for each other
MANY_HEADS = 6  # of a group, whose tiles of keys are cut in pieces of some of them


class Way(NamedTuple):
    """What else is done to dQ of plain D 128 in any order where so many queries see a tile of keys, on average.

    `causal`: whether tiles of keys begin with different queries; all end with the last ones. `group`: query heads of a
    key/value head, at least.
    """

    causal: bool
    least: int
    below: int
    changes: dict[str, Any]
    group: int = 1


CLAIMED: dict[str, Any] = {"claimed_parts": 2, "clears": False, "tries_first": True}
BACKWARDS: dict[str, Any] = {"last_queries_first": True, "written": "by steps"}  # whole products lose 1 %
# those who send and wait for turns want more than 24 registers (18 spills with 32), and who computes spares 8; waits of
# these kernels sleep in the loop, so they look first
STAYING_IN_ORDER: dict[str, Any] = {
    "persistent": True, "tries_first": True, "consumer_registers": 232, "producer_registers": 40,
}  # fmt: skip
WAYS = (
    Way(False, 768, 1600, CLAIMED),  # 1k gains 5 %; 2k and 8k lose 4
    Way(True, 768, 1600, CLAIMED),  # 2k gains 0.5 to 1 %; 1k and 8k lose
    Way(True, 6144, 1 << 31, BACKWARDS),  # 16k gains 2 %, 32k 1; claimed too they lose 7 and 6
    Way(True, 1600, 6144, BACKWARDS, group=8),  # 24 on 3 and 32 on 4 heads, 4k and 8k, gain 0.3 to 2 %
)


class Share(NamedTuple):
    """Of one warpgroup: its blocks (of which result, number) of 64 rows of dVᵀ and dKᵀ, and its columns of dQ."""

    blocks: tuple[tuple[int, int], ...]
    first: int
    columns: int

    def of(self, result: int) -> list[int]:
        """Its blocks of a result."""
        return [number for which, number in self.blocks if which == result]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperBackwardTiling(BackwardTiling):
    """A warpgroup has 64 keys with their dK and dV in registers, or (`shared_keys`) one has dV and one dK of all keys,
    or (`transposed`) each has rows of dVᵀ and dKᵀ of all keys, see `shares`.

    Q lies in a ring of `q_stages`, dO in one of `do_stages`, dS in `ds_stages` buffers. `dq_split` says how the
    warpgroups share dQ of a tile: by columns, by rows, or transposed (rows of dQᵀ; of 96 `overlapping`, 64 each).
    `p_early`: P is computed while dPᵀ runs, and dS written before the product for dV starts; else P and dS are computed
    together. `bends_early`: so is P, with what dP - D is multiplied by, where the derivative of a score looks at the
    score, and a tanh near 0 is a polynomial. `dq_later`: dQ of a query tile is computed a tile later, so that no
    warpgroup waits for another's dS. `dq_in_bulk`, then: dQ leaves through shared memory, by copies that add, one warp
    starting them for each warpgroup, and where blocks stay dK and dV leave through the same place; else by reductions
    from registers. `dq_pieces` of a warpgroup's part then pass through the same place one after the other. `lse_ahead`:
    rows of LSE that are read under their scores, as many as there are registers for. `dv_later`, of pairs that exchange
    dS: the product for dV of a query tile starts behind that for the next one's scores.
    `passing`, then too: a warpgroup passes by query tiles that see none of its keys. `tries_first`: see
    `Edge`.
    `part_columns`: of dQ, that a warpgroup of its own computes at a time; 0: those with scores share it.
    `distances`: numbers in shared memory of their own through which sums of gradients by distance pass.
    `written`: how products are, see `fused/written.py`.
    """

    q_stages: int
    do_stages: int
    ds_stages: int
    warpgroups: int
    dq_split: Literal["columns", "rows", "transposed", "overlapping"]
    consumer_registers: int
    producer_registers: int
    p_early: bool
    dq_later: bool = False
    dq_in_bulk: bool = False
    passing: bool = False
    tries_first: bool = False
    dq_pieces: int = 1
    lse_ahead: int = 0
    dv_later: bool = False
    bends_early: bool = True
    part_columns: int = 0
    distances: int = 0
    written: Written = "by steps"  # `backward_pair` loses 4 % by whole ones; `_keys_apart` and `_exchanged` choose

    def __post_init__(self) -> None:
        """Raises `AssertionError` for what leaves dQ unwritten, or blocks that wait for each other in a circle."""
        if self.claimed_parts or self.first_writes:
            # reductions from registers add to what nobody cleared
            assert self.dq_in_bulk, "who comes first at dQ writes it, which only copies from shared memory do"
        if self.claimed_parts:
            # who has claimed a part would wait for its second piece, and so for its other warpgroup, which may wait for
            # a part that the second block has claimed, whose first warpgroup waits for the part of the first
            assert self.dq_pieces == 1, "a part of dQ that is claimed leaves in one piece"
            assert self.claimed_parts == self.dq_parts, "each warpgroup claims its part of a tile of dQ"
        if self.rounds:
            assert self.persistent and not self.shared_keys, "warps that idle round dQ, in blocks that stay"

    @property
    def in_stretches(self) -> bool:
        fits = self.kernel == "backward" and self.d == self.dv
        return fits and not (self.ends_backwards or self.last_queries_first or self.claimed_parts)

    @property
    def key_groups(self) -> int:
        return self.warpgroups if self.passing else 1

    @property
    def shared_keys(self) -> bool:
        return self.kernel == "backward_wide" or self.dq_apart

    @property
    def transposed(self) -> bool:
        return self.kernel == "backward_transposed"

    @property
    def has_one_ds(self) -> bool:
        """Whether who writes the next P and dS waits until these have been read."""
        return self.transposed and self.ds_stages == 1

    @property
    def dq_apart(self) -> bool:
        """Whether a warpgroup of its own computes dQ, `part_columns` at a time."""
        return self.part_columns > 0

    @property
    def dq_parts(self) -> int:
        """Of a tile of dQ, each a warpgroup's, of all blocks that share it; or those that one computes in turn."""
        return self.d // self.part_columns if self.dq_apart else self.warpgroups * self.sharing

    @property
    def rounding_warps(self) -> int:
        """Of the copying warpgroup, that round dQ: all but who copies, and who sends or tells."""
        return 3 - self.done_speakers

    @property
    def done_speakers(self) -> int:
        """How many of a block say that a tile of keys has been added to dQ: who sends its parts, or one warp."""
        return self.warpgroups if self.dq_in_bulk else 1

    @property
    def dq_registers(self) -> int:
        """Of a warpgroup that has dQ: what the others leave."""
        return 512 - self.producer_registers - 2 * self.consumer_registers

    @property
    def dq_numbers(self) -> int:
        """Of shared memory through which dQ leaves in bulk; `overlapping`, what nobody sends is behind it."""
        unsent = 2 * ROWS - OVERLAPPING if self.dq_split == "overlapping" else 0
        return self.tile_m * (self.d + unsent) // self.dq_pieces

    @property
    def dk_parts(self) -> int:
        """Blocks that have columns of dK and dV side by side."""
        return 1

    @property
    def shares(self) -> tuple[Share, ...]:
        """What each warpgroup has where dVᵀ and dKᵀ are shared: their blocks of 64 rows in turn, dQ to even it out."""
        of_results = [(result, i) for result, rows in ((DV, self.dv), (DK, self.d)) for i in range(rows // ROWS)]
        ends = [round(len(of_results) * n / self.warpgroups) for n in range(self.warpgroups + 1)]
        shares: list[Share] = []
        first = 0
        for n, (begin, end) in enumerate(itertools.pairwise(ends)):
            even = (2 * self.d + self.dv) // self.warpgroups - ROWS * (end - begin)
            columns = self.d - first if n == self.warpgroups - 1 else even // 32 * 32
            shares.append(Share(tuple(of_results[begin:end]), first, columns))
            first += columns
        return tuple(shares)

    @property
    def statistic_stride(self) -> int:
        """From a query tile's row statistics to the next one's, in fp32: tensor copies take addresses of 128 bytes."""
        return -(-self.tile_m // 32) * 32

    def shared_memory(self, element_bytes: int) -> int:
        stationary = self.tile_n * (self.d + self.dv)
        moving = self.tile_m * (self.q_stages * self.d + self.do_stages * self.dv)
        scores = self.ds_stages * self.tile_m * self.tile_n * (2 if self.transposed else 1)
        # barriers and row statistics, in front of tiles that begin at whole 1024 bytes
        statistics = self.q_stages + (self.q_stages if self.shared_keys else self.do_stages)
        front = -(-(512 + 4 * self.statistic_stride * statistics) // 1024) * 1024
        weights = 4 * self.tile_m * self.tile_n if self.shared_keys else 0
        dq = 4 * self.dq_numbers if self.dq_in_bulk else 0
        if self.persistent and not self.dq_in_bulk:
            stationary *= 2
        return element_bytes * (stationary + moving + scores) + weights + dq + 4 * self.distances + front

    def describe(self) -> dict[str, str]:
        keys = "the same keys" if self.shared_keys else f"{self.tile_n // self.warpgroups} keys each"
        return {
            "stages": f"Q {self.q_stages}, dO {self.do_stages}, dS {self.ds_stages}",
            "roles": f"1 copying warp, {self.warpgroups} warpgroups of {keys}; "
            f"registers {self.consumer_registers}/{self.producer_registers}",
            "dQ": f"summed in fp32 in memory, shared by {self.dq_split}" + ", rounded by warps that idle" * self.rounds,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairBackwardTiling(HopperBackwardTiling):
    """Two blocks have the same keys, each half of the columns of Q, K, V, dO and of what is summed (`of_block`)."""

    kernel: str = "backward_pair"
    sharing: ClassVar[int] = 2

    @property
    def of_block(self) -> HopperBackwardTiling:
        kept = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return HopperBackwardTiling(**kept | {"kernel": "backward_wide", "d": self.d // 2, "dv": self.dv // 2})

    @property
    def dk_parts(self) -> int:
        return self.sharing

    @property
    def exchanged(self) -> int:
        """Numbers in shared memory, through which a block has the other's part of a score product."""
        return self.tile_m * self.tile_n

    def shared_memory(self, element_bytes: int) -> int:
        return self.of_block.shared_memory(element_bytes) + 4 * self.warpgroups * self.exchanged

    def describe(self) -> dict[str, str]:
        d, dv = self.of_block.d, self.of_block.dv
        return {
            **self.of_block.describe(),
            "blocks": f"2 of the same keys, each {d} columns of D and {dv} of Dv; scores are added up between them",
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeBackwardTiling(HopperBackwardTiling):
    """Two blocks have half of a tile's keys each (`of_block`), and half of the columns of dQ, from the keys of both."""

    kernel: str = "backward_exchange"
    sharing: ClassVar[int] = 2

    @property
    def of_block(self) -> HopperBackwardTiling:
        kept = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return HopperBackwardTiling(**kept | {"kernel": "backward_apart", "tile_n": self.block_keys})

    def shared_memory(self, element_bytes: int) -> int:
        across = self.block_keys * (self.d // 2 + self.ds_stages * self.tile_m)
        return self.of_block.shared_memory(element_bytes) + element_bytes * across

    def describe(self) -> dict[str, str]:
        keys, columns = self.block_keys, self.d // 2
        return {
            **self.of_block.describe(),
            "blocks": f"2 of {keys} keys each, which exchange dS; each has {columns} columns of dQ",
        }


def backward_tiling(problem: Problem, program: Program, target: Target, deterministic: bool) -> HopperBackwardTiling:
    """Tiles of the backward kernel, and their order; `deterministic`: dQ is summed in a fixed order."""
    tiling = _tiles(problem, program, target, deterministic)
    return _in_order(tiling, problem, program, target) if deterministic else tiling


def _in_order(tiling: HopperBackwardTiling, problem: Problem, program: Program, target: Target) -> HopperBackwardTiling:
    """With dQ summed in a fixed order.

    Short tiles of keys come first then, and are soon at other heads of their group than long ones: with 13 key/value
    heads a section (32 on 8, 2k) L2 found little and a call took 1.46 times as long as in any order, with one 1.14.
    The last section fills the multiprocessors, or its longest tiles end alone: 1.05. Few tiles are cut in its place.
    """
    first = tiling.dq_in_bulk and all_are_seen(tiling, problem, program)
    tiling = dataclasses.replace(tiling, ends_backwards=differ(problem, program), first_writes=first)
    grouped = problem.group > 1 and problem.layout.is_dense and problem.schedule.heads_together is None
    at_once, tiles = target.sms // tiling.sharing, max(1, -(-problem.kv_len // tiling.tile_n))
    if not (tiling.ends_backwards and grouped and problem.batch * problem.kv_heads * tiles > MANY * at_once):
        return tiling
    # a power of 2, as each is another kernel
    at_last = 1 << max(0, round(math.log2(at_once / tiles)))
    return dataclasses.replace(tiling, heads_together=1, heads_at_last=at_last)


def _way(problem: Problem, program: Program, seen: float) -> dict[str, Any]:
    """What else is done to dQ of plain D 128 in any order."""
    causal = program.mask is not None
    served = (way for way in WAYS if way.causal == causal and problem.group >= way.group)
    changes = next((way.changes for way in served if way.least <= seen < way.below), {})
    return changes if changes and end_together(problem, program) else {}


def _together(problem: Problem, program: Program, seen: float) -> int:
    """Bytes of the heads that run together, of 64 queries a tile in any order."""
    of_documents = max(problem.head_dim, problem.head_dim_v) > 96 and _has_documents(problem, program, seen)
    return TOGETHER_OF_DOCUMENTS if of_documents and program.mask is not None else TOGETHER


def _has_documents(problem: Problem, program: Program, seen: float) -> bool:
    """Whether sequences are short packed ones, or fall apart."""
    return _are_short(problem, seen) or falls_apart(problem, program)


def _are_short(problem: Problem, seen: float) -> bool:
    """Whether sequences are packed ones of 2k and less, on average."""
    return problem.layout.q == problem.layout.kv == "packed" and seen <= SHORT / 2


def _tiles(problem: Problem, program: Program, target: Target, deterministic: bool) -> HopperBackwardTiling:
    """Of each kernel."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    if max(d, dv) > 256:
        return _halves(problem, target)
    if max(d, dv) > 128:
        tiling = _shared_keys(d, dv, problem, target)
        # beside a warp that clears, ptxas moves the sleep of a wait out of the loop; causal ones of D 256 have it there
        clears = problem.layout.is_dense and not deterministic
        if _exchanges(d, dv, problem, program):
            clears = clears and (d == 192 or program.mask is None)
            return dataclasses.replace(_exchanged(tiling, problem, program, target), clears=clears)
        if not _takes_more_keys(d, dv, program):
            return dataclasses.replace(tiling, clears=clears and program.mask is None)
        tiling = dataclasses.replace(tiling, kernel="backward_transposed", tile_n=96, p_early=True, clears=clears)
        halves = deterministic and d == dv and program.score is None and not has_opaque_test(program)
        return _by_halves(tiling) if halves else tiling
    return _keys_apart(d, dv, problem, program, target, deterministic)


def _keys_apart(
    d: int, dv: int, problem: Problem, program: Program, target: Target, deterministic: bool
) -> HopperBackwardTiling:
    """Of 64 keys a warpgroup, whose dK and dV are in its registers, (d + dv) / 2 a thread.

    Sᵀ and dPᵀ take tile_m / 2 each, dQ tile_m * d / 256.
    """
    # taller tiles read K and V less often a score, and leave no registers for addresses of captured tensors or tests
    # that are no bounds (a 2-D neighbourhood: 8 bytes of stack, one product after the other), with D 128 none for a
    # score mod
    reads = reads_pairs(program.score) or reads_pairs(program.mask) or has_opaque_test(program)
    # nor for the words of dropout (98 and 76 spills)
    reads = reads or program.keep is not None
    # nor for whose turn it is beside what a mask reads (documents: 8 spills with D 64, with D 128 one product after the
    # other), unless a table tells
    documents = d == dv and has_documents_apart(problem, program)
    asks = deterministic and reads_any(program.mask) and not documents
    tall = d <= 64 and dv <= 64 and not (reads or asks)
    # with D 128 nor for any test of more than bounds on indices: documents, a dilated window (one product after the
    # other; tiles of 64 queries are 1.27 times as fast)
    plain = not (reads or asks) and program.score is None and not has_costly_test(program.mask)
    # where a mask leaves a key few queries, tiles that end on no multiple of 64 visit more than they save (D 96, causal
    # calls: 3 % gained at 8k, lost at 2k)
    seen = queries_of_a_key(problem, program)
    many = program.mask is None or seen > SHORT
    way = _way(problem, program, seen) if d == dv == 128 and plain and not deterministic else {}
    # full documents by ids whose tiles begin with them gain 7 % by 80 queries; causal ones, more of whose tiles have a
    # test, lose 1 to 4
    whole = documents and not reads and has_whole_documents(problem, program)
    # in a fixed order causal calls of 1k to 4k gain 2 to 4 %, windows lose 2, short packed sequences 2 to 5
    short = _are_short(problem, seen)
    slides = (short and program.mask is not None) or _slides(problem, program)
    wide_in_order = deterministic and not slides
    wide = d == 128 and ((plain and (wide_in_order or many or bool(way))) or whole)
    # in a fixed order full documents gain 26 %
    overlaps = whole or (short and program.mask is None) if deterministic else plain and many
    overlapping = d == OVERLAPPING and dv <= d and overlaps
    listed = reads_any(program.mask) and not bounds_queries(program.mask)
    # in a fixed order each turn comes a tile later, which only senders of dQ wait for: D 64 and 96 gain 3 to 11 %, with
    # score mods up to 18, D 128 8 to 25, documents 19 to 31
    sends = wide or overlapping or deterministic or _tests_pairs(program, d, dv)
    # warpgroups that pass by query tiles need it; D 96 gains nothing else, and what is read of a listed tile takes the
    # registers of 128 queries
    halves = (d == 128 or (d == 96 and documents and not whole)) and not wide and _leaves_halves(program, seen)
    later = sends or (halves if max(d, dv) == 96 else not (tall and listed))
    heads_a_piece, heads_together = _sections(problem, program, seen, target, deterministic) or (
        0, _heads_together(problem, 2 * (d + dv) + 4 * d, 128, target, deterministic),
    )  # fmt: skip
    tiling = HopperBackwardTiling(
        tile_m=128 if tall else 80 if wide else 96 if overlapping else 64,
        tile_n=128,
        d=d,
        dv=dv,
        q_stages=2,
        do_stages=2,
        ds_stages=2,
        warpgroups=2,
        dq_split="rows" if tall else "transposed" if wide else "overlapping" if overlapping else "columns",
        consumer_registers=240,
        producer_registers=24,
        p_early=True,
        bends_early=not tall and _bends_early(program, max(d, dv), deterministic),
        dq_later=later,
        dq_in_bulk=sends,
        # 1 to 3 % at D 128, 2 % at D 64; D 96, which has registers for all of it, loses 1 to 3
        lse_ahead=4 if (tall or wide) and (plain or (whole and wide)) and not deterministic else 0,
        tries_first=program.is_plain and (deterministic or max(d, dv) == 96),
        l2=TOGETHER if wide or deterministic else _together(problem, program, seen),
        section_tiles=_section_tiles(target),
        heads_together=heads_together,
        heads_a_piece=heads_a_piece,
        distances=2 * 4096 if sums_by(program, Pattern.DISTANCE) else 0,
        passing=halves and later,
        # D 96 gains 1 %, others nothing but less to compile; D 128 loses 3 % of soft caps, which spill more, and biases
        written="whole" if max(d, dv) < 128 or is_line(program.score) else "by steps",
    )
    if deterministic:
        stays = _stays_in_order(tiling, problem, program, seen, plain=plain, documents=documents or short)
        return dataclasses.replace(tiling, **STAYING_IN_ORDER) if stays else tiling
    rounds = _rounds(problem, program, target, seen)
    staying = dataclasses.replace(tiling, **{"persistent": True, "clears": True, "rounds": rounds} | way)
    # the loop over tiles of keys takes registers: by lists tests have none left (documents by offsets, which went by
    # lists, spilled 16 and lost 5 %), and score mods lose 2 to 3 % on 128 queries
    gains = (program.score is None or not tall) and not listed
    return staying if gains and staying.shared_memory(2) <= target.shared_memory else tiling


def _tests_pairs(program: Program, d: int, dv: int) -> bool:
    """Whether a test reads a tensor at each pair, or computes as much: who computes adds nothing to memory then.

    Tables of pairs gain 7 % with D 128, 18 with D 96, a 2-D neighbourhood 10; with D 64 they lose 1. Blocks stay, and
    dV leaves where dQ does, so Dv is no larger.
    """
    sums = any(sums_by(program, pattern) for pattern in Pattern) or program.keep is not None
    return d >= max(96, dv) and has_opaque_test(program) and not sums


def _slides(problem: Problem, program: Program) -> bool:
    """Whether tiles of keys end with queries of their own, as a window's do."""
    return program.mask is not None and problem.layout.is_dense and not end_together(problem, program)


def _rounds(problem: Problem, program: Program, target: Target, seen: float) -> bool:
    """Whether warps that idle round dQ: 1 to 4 % where most heads are complete long before the call ends.

    Not where two rounds of blocks are all there is (a call of 128 tiles lost 2 %), nor where tests take registers and
    documents are short (causal ones: 2 to 3). At D 128 not of 1k either, whose heads are complete all at once (2 to 3),
    nor of full calls of 6k and more, where the kernel behind is 1 % of the time (0 to 2). At D 64 and 96 only beside
    slow memory: 1 to 4 % of an H100 (3.35 TB/s), of an H200 (4.8) -1 to 1.
    """
    tiles = problem.batch * problem.kv_heads * -(-problem.kv_len // 128)
    if problem.layout.q == "packed":
        tiles, short = problem.kv_heads * -(-problem.kv_len // 128), program.mask is not None
    else:
        short = problem.kv_len <= COMPLETE_AT_ONCE
    if tiles <= 2 * target.sms or problem.head_dim % 8:
        return False
    if has_costly_test(program.mask) and not has_whole_documents(problem, program):
        return False
    if max(problem.head_dim, problem.head_dim_v) <= 96:
        return target.memory_rate < SLOW_MEMORY
    plain_full = program.mask is None and program.score is None
    return not (short or (plain_full and seen >= 6144))


def _stays_in_order(
    tiling: HopperBackwardTiling, problem: Problem, program: Program, seen: float, *, plain: bool, documents: bool
) -> bool:
    """Whether blocks stay in a fixed order; dK and dV must fit where dQ leaves, and 80 queries spill 278.

    D 96 gains 2 to 9 %, D 64 2 to 5 at 1k and 2k; at 8k it loses 3, with score mods 6. At D 128 causal and full calls
    lose 2 to 4, score mods 1 to 2. Documents by ids gain 4 to 5, full ones of D 64 1, windows 3 (32 on 8 heads lose 2),
    neighbourhoods 7, short packed causal sequences 2 to 5.
    """
    widest = max(tiling.d, tiling.dv)
    if tiling.tile_m * tiling.d < ROWS * widest or tiling.dq_split == "transposed":
        return False
    if documents:
        return tiling.dq_split != "overlapping"
    if widest < 128:
        return plain and (widest == 96 or seen <= SHORT)
    if program.score is not None or program.keep is not None or program.mask is None:
        return False
    return has_opaque_test(program) or (problem.group == 1 and _slides(problem, program))


def _bends_early(program: Program, widest: int, deterministic: bool) -> bool:
    """Whether there are registers for P m'(s) beside P: not with 128 queries (593 spills), nor for what else mods read.

    With D 128 beside no ids of documents either (32 spills in the loop), nor turns.
    """
    if not is_of_score(program.score) or program.keep is not None:
        return False
    return widest < 128 or not (deterministic or has_costly_test(program.mask))


def _leaves_halves(program: Program, seen: float) -> bool:
    """Whether many query tiles see one half of 128 keys alone: documents, windows, short causal calls.

    Of causal calls 1k gains 0.6 %, 4k loses 2 %: the branch costs what is passed by.
    """
    if program.mask is None or program.score is not None or not bounds_queries(program.mask):
        return False
    return reads_any(program.mask) or seen < SHORT / 2


def _section_tiles(target: Target) -> int:
    """Of heads that run together: with 24 query heads on 3, sections of one head left 23 % of multiprocessors idle."""
    return 3 * target.sms // 2


def _sections(
    problem: Problem, program: Program, seen: float, target: Target, deterministic: bool
) -> tuple[int, int | None] | None:
    """Of how many query heads a piece of a tile of keys is, 0: all, and how many key/value heads run together.

    Where tiles of keys differ in length, blocks drift apart, at the end over all heads of their group: more queries
    than L2 holds. Cut in pieces of some heads they stay near each other, and even out where they are few; sections are
    of two rounds of blocks. None where that was not timed, or gains nothing: of fewer heads, and of equal tiles.
    """
    if deterministic:
        documents = _are_short(problem, seen) or has_documents_apart(problem, program)
        return _sections_in_order(problem, program) if documents else None
    group, widest = problem.group, max(problem.head_dim, problem.head_dim_v)
    packed = problem.layout.q == problem.layout.kv == "packed"
    entries = max(1, -(-problem.kv_len // 128))  # tiles of keys of a head, of packed sequences those of all
    if group == 1 or program.mask is None:
        return None
    if _has_documents(problem, program, seen):
        halved = widest <= 96 and not packed
        if has_whole_documents(problem, program) or (halved and not has_documents_apart(problem, program)):
            return None
        # blocks that run together are at a few documents of many heads; by ids at D 64 and 96 four heads gain 2 to 7 %,
        # eight 2 to 6, pieces of some heads 1 more or 3 less
        pieces = max(-(-group // 4) if group >= 8 and not halved else 1, -(-AT_A_DOCUMENT // problem.kv_heads))
        pieces = min(pieces, group // 2)
        together = max(1, AT_A_DOCUMENT // pieces // (2 if halved else 1))
    elif widest <= 64 or group < MANY_HEADS or not (packed or differ(problem, program)):
        return None
    else:
        # 8 heads gain 3 to 14 % by four a piece, by two a little less; 5 lose 2
        pieces = -(-group // next((n for n in (4, 3) if group % n == 0), 2))
        tiles = entries * problem.kv_heads * (1 if packed else problem.batch)
        if tiles * pieces < 1.9 * target.sms:
            pieces = group // 2
        # a power of 2, as each is another kernel; 2 of packed sequences, which have other rows at each call
        rounds = 2 * target.sms / (entries * pieces)
        together = 2 if packed else 1 << max(0, round(math.log2(rounds)))
    return -(-group // pieces) if pieces > 1 else 0, problem.schedule.heads_together or together


def _sections_in_order(problem: Problem, program: Program) -> tuple[int, int | None]:
    """The same of documents by ids in a fixed order: tiles of a head that run together wait for each other.

    With two or three heads at a time, as many as L2 holds, all tiles of a document ran together: full ones took 1.34
    times as long as in any order, with 16 query heads 1.06, causal ones 1.09 and 1.03. Pieces of two heads of 8: 64 on
    8 1.16 to 1.04, 32 on 4 and 16 on 2 1.5 to 1.01.
    """
    group, asked = problem.group, problem.schedule.heads_together
    if program.mask is None or has_whole_documents(problem, program):
        return 0, asked or IN_ORDER_AT_A_DOCUMENT
    pieces = max(-(-group // 2) if group >= 8 else 1, -(-AT_A_DOCUMENT // problem.kv_heads))
    pieces = min(pieces, group // 2)
    return -(-group // pieces) if pieces > 1 else 0, asked or max(1, IN_ORDER_AT_A_DOCUMENT // group)


def _heads_together(problem: Problem, row: int, tile_n: int, target: Target, deterministic: bool) -> int | None:
    """Key/value heads at a time: few where the queries of one, of `row` bytes each, are more than L2 holds; else None.

    Then so many as fill the multiprocessors once. With 32 heads on 4 (8k) two are 2.6 % faster than four, with which a
    call moved 8 times the bytes of DRAM that it has to. In a fixed order one is 24 % faster than four, two 15 %.
    """
    asked = problem.schedule.heads_together
    if asked is not None or problem.group == 1 or not problem.layout.is_dense:
        return asked
    if problem.group * problem.q_len * row <= L2:
        return None
    return 1 if deterministic else max(1, round(target.sms / max(1, -(-problem.kv_len // tile_n))))


def _takes_more_keys(d: int, dv: int, program: Program) -> bool:
    """Whether two warpgroups have registers for transposed sums of 96 keys: of 384 rows, 144 a thread.

    They have none left where tensors are read at pairs (4 spills) or a mask's test costs much (ids of documents: 75),
    and their scores lie so that sums by distance have no lines.
    """
    fits = d == 192 and dv in (128, 192)
    reads = reads_pairs(program.score) or reads_pairs(program.mask) or has_costly_test(program.mask)
    return fits and not reads and not sums_by(program, Pattern.DISTANCE)


def _by_halves(tiling: HopperBackwardTiling) -> HopperBackwardTiling:
    """With dQ in bulk, in the place of a second P and dS: 5 % in a fixed order, where else it loses 2."""
    return dataclasses.replace(tiling, ds_stages=1, dq_in_bulk=True, dq_pieces=2)


def _shared_keys(d: int, dv: int, problem: Problem, target: Target) -> HopperBackwardTiling:
    """dK or dV of 64 keys fill a warpgroup's registers: one has dV, the other one dK."""
    tiling = HopperBackwardTiling(
        kernel="backward_wide",
        tile_m=64, tile_n=64, d=d, dv=dv, q_stages=2, do_stages=2, ds_stages=2, warpgroups=2, dq_split="columns",
        consumer_registers=240, producer_registers=24, p_early=False, l2=TOGETHER, section_tiles=_section_tiles(target),
        heads_together=problem.schedule.heads_together,
    )  # fmt: skip
    fits = tiling.shared_memory(2) <= target.shared_memory
    return tiling if fits else dataclasses.replace(tiling, do_stages=1)


def _exchanges(d: int, dv: int, problem: Problem, program: Program) -> bool:
    """Whether pairs of blocks exchange dS: at D 256 14 % and more faster than `backward_wide`, at 192/128 and 192 6.

    At D 192 causal calls of 1k have one block's tiles of 96 keys, where pairs visit 128. Not where tests cost much:
    documents end at no multiple of 128 keys, and lists would be longer. With captured gradients and dropout it was not
    tried; what a score mod reads beside packed sequences spilled 8.
    """
    fits = (d, dv) in ((192, 128), (256, 256)) or (
        d == dv == 192 and (program.mask is None or queries_of_a_key(problem, program) > SHORT / 4)
    )
    fits = fits and not (problem.layout.q == "packed" and reads_any(program.score))
    sums = any(sums_by(program, pattern) for pattern in Pattern) or program.keep is not None
    return fits and not sums and not has_costly_test(program.mask) and not has_opaque_test(program)


def _exchanged(one: HopperBackwardTiling, problem: Problem, program: Program, target: Target) -> ExchangeBackwardTiling:
    """Of a tile of two blocks. With D 256 the other block's K and dS take the place of a second dO.

    Two parts of dQ of 48 columns each are 7 % faster than one at 192/128, 6 to 8 at D 192: the first is added under the
    other's product.

    Where there are two, dV comes later: 2 to 4 %; with one, dO would stay for too long (D 256 loses 2).
    """
    kept = {f.name: getattr(one, f.name) for f in dataclasses.fields(one)}
    columns = one.d // 4
    own = {
        "kernel": ExchangeBackwardTiling.kernel,
        "tile_n": 2 * one.tile_n,
        "part_columns": columns,
        "consumer_registers": 208 if columns == 64 else 192,
        "section_tiles": one.section_tiles // 2,
        "written": "whole",  # 2 to 4 % of D 256, 0 to 3 of D 192 at 8k
    }
    tilings = (
        ExchangeBackwardTiling(**kept | own | {"do_stages": stages, "dv_later": stages == 2}) for stages in (2, 1)
    )
    return next(t for t in tilings if t.shared_memory(2) <= target.shared_memory)


def _halves(problem: Problem, target: Target) -> PairBackwardTiling:
    """A block has half of all columns: as for a head dimension of half the size, but for scores that are exchanged."""
    d, dv = (-(-n // 64) * 64 for n in (problem.head_dim, problem.head_dim_v))
    one = _shared_keys(d, dv, problem, target)
    kept = {f.name: getattr(one, f.name) for f in dataclasses.fields(one)}
    own = {"kernel": PairBackwardTiling.kernel, "section_tiles": one.section_tiles // 2}
    tilings = (PairBackwardTiling(**{**kept, **own, "do_stages": stages}) for stages in (2, 1))
    return next(t for t in tilings if t.shared_memory(2) <= target.shared_memory)
