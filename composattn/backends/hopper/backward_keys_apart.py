"""The tiling of a Hopper backward whose warpgroups have 64 keys each, up to D 128: what a call is, what it gains by."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from ...analysis.captured_gradient import Pattern
from ...analysis.program import Program
from ...call.problem import Problem
from ...graph.multiples import is_of_score
from ..fused.planning.backward_heads import (
    MANY_HEADS,
    SHORT,
    TOGETHER,
    are_short,
    bytes_together,
    heads_of,
)
from ..fused.planning.coverage import differ, end_together, has_documents_apart, has_whole_documents
from ..fused.tiles.order import queries_of_a_key
from ..fused.tiles.target import Target
from ..fused.tiles.traits import (
    bounds_queries,
    has_costly_test,
    has_opaque_test,
    is_line,
    padded,
    reads_any,
    reads_by,
    reads_pairs,
    sums_by,
)
from .backward_tiling import ROWS, HopperBackwardTiling

FEW = 1600  # queries that see a tile of keys, on average: of causal masks 3k tokens
FEWER = 1000  # 2k tokens
MORE_ROWS = 1.1
HALF = 48  # rows, of tiles of 80
HELD_A_REGISTER = 4  # columns of 64 keys, that a register of 128 threads has


# What else is done to dQ of causal D 128 in any order where so many queries see a tile of keys, on average: 2k gains 4
# to 6 %, full calls lose 3 to 8
CLAIMED: dict[str, Any] = {"dq_begins": "claim", "tries_first": True}
CLAIMED_FROM, CLAIMED_BELOW = 768, 1600
# those who send and wait for turns want more than 24 registers (18 spills with 32), and who computes spares 8; waits of
# these kernels sleep in the loop, so they look first
STAYING_IN_ORDER: dict[str, Any] = {"persistent": True, "tries_first": True}


@dataclasses.dataclass(frozen=True)
class KeysApart:
    """A call, and the facts that its `tiling` depends on.

    dK and dV of 64 keys are in a warpgroup's registers, (d + dv) / 2 a thread; Sᵀ and dPᵀ take tile_m / 2 each, dQ
    tile_m * d / 256. Taller tiles read K and V less often a score, and leave no registers for what is read beside it.
    """

    problem: Problem
    program: Program
    target: Target
    deterministic: bool

    @functools.cached_property
    def tiling(self) -> HopperBackwardTiling:
        """What the kernel is cut into."""
        tiling = self._without_held
        # K too only where a tile has 64 queries: some columns of it lose 1 % of D 64
        most = tiling.dv + tiling.d * self.is_low
        columns = min(max(0, self.spare(tiling)) * HELD_A_REGISTER // 16 * 16, most)
        return dataclasses.replace(tiling, held=columns)

    @functools.cached_property
    def _without_held(self) -> HopperBackwardTiling:
        """With K and V in shared memory alone."""
        if self.deterministic:
            stays: dict[str, Any] = STAYING_IN_ORDER if self.stays_in_order else {}
            return dataclasses.replace(self._each_block, **stays)
        also: dict[str, Any] = {"persistent": not self.leaves, "dq_begins": "beside"}
        staying = dataclasses.replace(self._each_block, **also | self.way)
        # the loop over tiles of keys takes registers: by lists tests have none left (documents by offsets, which went
        # by lists, spilled 16 and lost 5 %), and score mods lose 2 to 3 % on 128 queries
        gains = (self.program.score is None or not self.tall) and not (self.listed or self.few_keys)
        return staying if gains and staying.shared_memory(2) <= self.target.shared_memory else self._each_block

    @functools.cached_property
    def _each_block(self) -> HopperBackwardTiling:
        """With a block for each tile of keys."""
        a_piece, together = heads_of(self.problem, self.program, self.seen, self.target, self.deterministic)
        wide, narrow = self.wide, self.widest < 128
        any_order = not self.deterministic
        return HopperBackwardTiling(
            tile_m=self.tile_m,
            tile_n=128,
            d=self.d,
            dv=self.dv,
            dq_leaves="in bulk" if self.sends else "later" if self.later else "at once",
            # 1 to 3 % at D 128, 2 % at D 64, 1 % at D 96, which has registers for all of it, but loses 1 to 3
            early="LSE"
            if any_order and ((self.plain and not self.is_low) or (wide and self.whole))
            else "P"
            if self.bends_early
            else "nothing",
            tries_first=self.program.is_plain and (self.deterministic or self.widest == 96),
            l2=bytes_together(self.problem, self.program, self.seen) if any_order and not wide else TOGETHER,
            heads_together=together,
            heads_a_piece=a_piece,
            distances=2 * 4096 if sums_by(self.program, Pattern.DISTANCE) else 0,
            passing=self.halves and self.later,
            short_rows=self.short_rows,
            # D 96 gains 1 %, others nothing but less to compile; D 128 loses 3 % of soft caps, which spill more, and
            # biases
            written="whole" if narrow or is_line(self.program.score) else "by steps",
        )

    # --- what the call is ----------------------------------------------------------------------------------------

    @functools.cached_property
    def d(self) -> int:
        return padded(self.problem.head_dim)

    @functools.cached_property
    def dv(self) -> int:
        return padded(self.problem.head_dim_v)

    @property
    def widest(self) -> int:
        return max(self.d, self.dv)

    @functools.cached_property
    def seen(self) -> float:
        """Queries that see a tile of keys, on average."""
        return queries_of_a_key(self.problem, self.program)

    @functools.cached_property
    def documents(self) -> bool:
        """Whether tiles of keys begin with documents by ids, of which a table tells what they visit."""
        return has_documents_apart(self.problem, self.program)

    @functools.cached_property
    def whole(self) -> bool:
        """Whether these are seen whole."""
        return self.documents and not self.reads and has_whole_documents(self.problem, self.program)

    @functools.cached_property
    def short(self) -> bool:
        """Whether sequences are short packed ones."""
        return are_short(self.problem, self.seen)

    @functools.cached_property
    def many(self) -> bool:
        """Whether many queries see a key: else tiles that end on no multiple of 64 visit more than they save.

        D 96, causal calls: 3 % gained at 8k, lost at 2k.
        """
        return self.program.mask is None or self.seen > SHORT

    @functools.cached_property
    def slides(self) -> bool:
        """Whether tiles of keys end with queries of their own, as a window's do."""
        if self.program.mask is None or not self.problem.layout.is_dense:
            return False
        return not end_together(self.problem, self.program)

    @functools.cached_property
    def few_keys(self) -> bool:
        """Whether there are eight times as many queries, 2k and more: a block has its tile for so long that nothing is
        gained by one that stays. 7,800 on 512 keys take 0.84 of the time, 4,096 on 77 of D 64 0.90; 1k lose 3 %.
        """
        q_len, kv_len = self.problem.q_len, self.problem.kv_len
        return self.problem.layout.is_dense and q_len >= 2048 and q_len >= 8 * kv_len

    # --- what takes registers --------------------------------------------------------------------------------------

    @functools.cached_property
    def reads(self) -> bool:
        """Whether addresses of captured tensors, or tests that are no bounds, or the words of dropout take registers.

        A 2-D neighbourhood: 8 bytes of stack, one product after the other; dropout 98 and 76 spills.
        """
        score, mask = self.program.score, self.program.mask
        return reads_pairs(score) or reads_pairs(mask) or has_opaque_test(self.program) or self.program.keep is not None

    @functools.cached_property
    def asks(self) -> bool:
        """Whether whose turn it is does so beside what a mask reads, and no table tells.

        Documents: 8 spills with D 64, with D 128 one product after the other.
        """
        return self.deterministic and reads_any(self.program.mask) and not self.documents

    @functools.cached_property
    def plain(self) -> bool:
        """Whether nothing does: with D 128 no score mod, nor any test of more than bounds on indices.

        Documents, a dilated window: one product after the other; tiles of 64 queries are 1.27 times as fast.
        """
        return self.light and self.program.score is None

    @functools.cached_property
    def light(self) -> bool:
        """The same, or scores are lines (`is_line`) without a gradient of what they are made of."""
        program = self.program
        lines = is_line(program.score) and not any(sums_by(program, pattern) for pattern in Pattern)
        return lines and not (self.reads or self.asks) and not has_costly_test(program.mask)

    @functools.cached_property
    def listed(self) -> bool:
        """Whether lists say what a tile of keys visits."""
        return reads_any(self.program.mask) and not bounds_queries(self.program.mask)

    @functools.cached_property
    def reads_at_pairs(self) -> bool:
        """Whether a tensor is read at each pair, or a test computes as much: who computes adds nothing to memory then.

        Masks that are tables gain 7 % with D 128, 18 with D 96, a 2-D neighbourhood 10, biases 12 and 2; with D 64 both
        lose 1 to 2. Blocks stay, and dV leaves where dQ does, so Dv is no larger.
        """
        program = self.program
        sums = any(sums_by(program, pattern) for pattern in Pattern) or program.keep is not None
        at_pairs = has_opaque_test(program) or reads_by(program.score, Pattern.PAIR)
        return self.d >= max(96, self.dv) and at_pairs and not sums

    def spare(self, tiling: HopperBackwardTiling) -> int:
        """Registers of a thread that are left for K and V: found by compiling, so that no more spill.

        With too few ptxas has one product wait for the other, which takes 1.3 times as long.
        K and V that wait there are read once a tile of keys, not once a query tile, of which they are 1 to 22 % of what
        passes shared memory's port: D 64 gains 0 to 4 %, D 96 2 to 4, D 128 0 to 2, 32k 3 to 4.
        """
        score, mask = self.program.score, self.program.mask
        # addresses, indices, what a step begins with
        others = 28 if tiling.dq_in_bulk else 36 if self.is_low else 32
        others += 16 * has_costly_test(mask)
        others += 4 * (self.deterministic and (tiling.passing or not self.problem.layout.is_dense))
        if score is not None or self.reads or self.asks:
            others += 8 if is_line(score) and not self.reads else 28
        return tiling.consumer_registers - (tiling.d + tiling.dv) // 2 - tiling.tile_m - others

    # --- how many queries a tile has -------------------------------------------------------------------------------

    @property
    def is_low(self) -> bool:
        """64, where nothing else is served."""
        return self.tile_m == ROWS

    @property
    def tile_m(self) -> int:
        return 128 if self.tall else 80 if self.wide else 64

    @functools.cached_property
    def tall(self) -> bool:
        """128, up to D 64, but where they are over a tenth more rows than in tiles of 64, or scores lines.

        Of 137 to 178 queries 64 take 0.77 to 0.81 of the time, of 448 and 553 0.94; of ALiBi 0.94 to 0.97.
        """
        lines = self.program.score is not None and is_line(self.program.score)
        if self.widest > 64 or self.reads or self.asks or lines:
            return False
        rows = self.problem.q_len
        return not self.problem.layout.is_dense or -(-rows // 128) * 128 <= MORE_ROWS * -(-rows // ROWS) * ROWS

    @functools.cached_property
    def wide(self) -> bool:
        """80, at D 128.

        Causal calls of 4k gain 3 %, and 2 more by `short_rows`.
        Full documents by ids gain 7 %; causal ones, more of whose tiles have a test, lose 1 to 4. In a fixed order
        causal calls of 1k to 4k gain 2 to 4 %, windows lose 2, short packed sequences 2 to 5.
        """
        if self.d < 128 or not self.plain:
            return self.d == 128 and self.whole
        if self.many or self.way or (self.seen >= FEW and end_together(self.problem, self.program)):
            return True
        return self.deterministic and not ((self.short and self.program.mask is not None) or self.slides)

    @functools.cached_property
    def short_rows(self) -> int:
        """Rows of a sequence's last query tile, where it is computed as one of fewer.

        Documents end anywhere: half a tile. Else so many as there are, where that saves 1 % of what is visited: D 128
        full 2k and 4k gain 1 and 3 %, causal 2 and 2, 8k nothing; documents 1 to 2.
        """
        backwards = self.deterministic and differ(self.problem, self.program)
        if backwards or not self.wide:
            return 0
        if self.documents or self.short:
            return HALF
        if self.program.mask is not None and not end_together(self.problem, self.program):
            return 0  # few tiles of keys see the last queries
        short = -(-(self.problem.q_len % self.tile_m) // 16) * 16
        saves = self.problem.layout.is_dense and short and self.tile_m - short >= self.seen / 100
        return short if saves else 0

    # --- how dQ leaves ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def way(self) -> dict[str, Any]:
        """What else is done to dQ of plain causal D 128 in any order."""
        plain = self.d == self.dv == 128 and self.plain and not self.deterministic
        few = CLAIMED_FROM <= self.seen < CLAIMED_BELOW
        causal = self.program.mask is not None and end_together(self.problem, self.program)
        return CLAIMED if plain and few and causal else {}

    @functools.cached_property
    def sends(self) -> bool:
        """Whether it leaves in bulk.

        In a fixed order each turn comes a tile later, which only senders of dQ wait for: D 64 and 96 gain 3 to 11 %,
        with score mods up to 18, D 128 8 to 25, documents 19 to 31.
        """
        return self.wide or self.deterministic or self.reads_at_pairs

    @functools.cached_property
    def later(self) -> bool:
        """Whether it is computed a tile later, as for who sends it or passes by query tiles.

        D 96 gains nothing else, and what is read of a listed tile takes the registers of 128 queries.
        """
        return self.sends or (self.halves if self.widest == 96 else not (self.tall and self.listed))

    @functools.cached_property
    def halves(self) -> bool:
        """Whether many query tiles see one half of 128 keys alone: documents, windows, short causal calls.

        Of causal calls 1k gains 0.6 %, 4k loses 2 %: the branch costs what is passed by. D 96 gains 3 % of causal
        documents, by ids or packed, of full ones nothing.
        """
        mask = self.program.mask
        at_96 = self.d == 96 and ((self.documents and not self.whole) or (self.short and not self.deterministic))
        if self.wide or not (self.d == 128 or at_96):
            return False
        if mask is None or self.program.score is not None or not bounds_queries(mask):
            return False
        return reads_any(mask) or self.seen < SHORT / 2

    @functools.cached_property
    def bends_early(self) -> bool:
        """Whether there are registers for P m'(s) beside P: not with 128 queries (593 spills), nor for what mods read.

        With D 128 beside no ids of documents either (32 spills in the loop), nor turns.
        """
        if self.tall or not is_of_score(self.program.score) or self.program.keep is not None:
            return False
        return self.widest < 128 or not (self.deterministic or has_costly_test(self.program.mask))

    # --- blocks that stay ------------------------------------------------------------------------------------------

    @functools.cached_property
    def leaves(self) -> bool:
        """Whether a block ends with its tile, in any order: where a head has more tiles than run at once.

        Those that stay take their next tile before they end one: 32k moves 2.15 GB of memory for 1.51. Causal calls of
        24k and 32k gain 1 to 3 %, full ones of 20k to 32k 1.5 to 3, of D 64 1 to 2. Up to 16k they lose 0 to 3, causal
        ones of D 64 2, 8 heads of a group 1, windows 5; score mods -1 to 0.
        """
        whole = self.program.mask is None or (self.widest == 128 and end_together(self.problem, self.program))
        gains = self.plain and whole and self.widest in (64, 128) and self.problem.group < MANY_HEADS
        return gains and self.problem.layout.is_dense and self.problem.kv_len > 128 * self.target.sms

    @functools.cached_property
    def stays_in_order(self) -> bool:
        """Whether blocks stay in a fixed order; dK and dV must fit where dQ leaves, and 80 queries spill 278.

        D 96 gains 2 to 9 %, D 64 2 to 5 at 1k and 2k; at
        8k it loses 3, with score mods 6. At D 128 causal and full calls lose 2 to 4, ALiBi 2, relative biases 1, biases
        at pairs 16. Causal soft caps gain 3 to 4, documents by ids 4 to 5, full ones of D 64 1, windows 3 (32 on 8
        heads lose 2), neighbourhoods 7, short packed causal sequences 2 to 5.
        """
        tiling, program = self._each_block, self.program
        if tiling.tile_m * tiling.d < ROWS * self.widest or self.wide:
            return False
        if self.documents or (self.short and self.plain):
            return True
        if self.widest < 128:
            return self.plain and (self.widest == 96 or self.seen <= SHORT)
        if program.keep is not None or program.mask is None:
            return False
        alone = self.problem.group == 1 and not reads_any(program.mask)
        if program.score is not None:
            return alone and is_of_score(program.score) and differ(self.problem, program) and not self.slides
        return has_opaque_test(program) or (alone and self.slides)
