"""The tilings of the forms that the Hopper backward's table names: what follows from a call once its form is known."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from ...analysis.captured_gradient import Pattern as Sums
from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.planning.backward_heads import TOGETHER, bytes_together, heads_of
from ..fused.planning.call_class import MaskKind, ModsKind
from ..fused.tiles.patterns import Pattern, Span, first, matches
from ..fused.tiles.target import Target
from ..fused.tiles.traits import bounds_queries, sums_by
from .backward_class import FREE, KEYS, TESTED, BackwardClass
from .backward_table import BackwardForm, Tile
from .backward_tiling import ROWS, ExchangeBackwardTiling, HopperBackwardTiling, HopperPairBackwardTiling

HELD_A_REGISTER = 4  # columns of 64 keys, that a register of 128 threads has
Leaves = Literal["at once", "later", "in bulk"]
Early = Literal["nothing", "LSE", "P"]


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts of a call and of its class, from which tilings follow."""

    problem: Problem
    program: Program
    target: Target
    call: BackwardClass

    @property
    def in_order(self) -> bool:
        """Whether dQ is summed in a fixed order."""
        return self.call.order == "fixed"


# --- 64 keys a warpgroup ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Step:
    """A call and its tile: what rows of the next tables are of."""

    call: BackwardClass
    tile: Tile

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tile if name in ("queries", "dq", "passes") else self.call, name)


ANY, FIXED, D_96, D_128 = ("any", "batch-invariant"), ("fixed",), Span(64, 96), Span(96, 128)
IN_BULK: Pattern = {"dq": ("in bulk", "claim")}
COSTLY = MaskKind.TESTED, MaskKind.READ, MaskKind.DOCUMENTS, MaskKind.WHOLE
WEIGHED = ModsKind.PLAIN, ModsKind.LINE, ModsKind.LEARNED
# fmt: off
# In a fixed order each turn comes a tile later, which only senders of dQ wait for: D 64 and 96 gain 3 to 11 %, with
# score mods up to 18, D 128 8 to 25, documents 19 to 31. In any order D 96 gains by nothing but passing, and what is
# read of a listed tile takes the registers of 128 queries
LEAVES: tuple[tuple[Leaves, Pattern], ...] = (
    ("in bulk", {"order": FIXED}),
    ("in bulk", IN_BULK),
    ("later", {"passes": (True,)}),
    ("at once", {"widest": D_96}),
    ("at once", {"mask": (MaskKind.LISTED,), "queries": (128,)}),
    ("later", {}),
)
# LSE: 1 to 3 % at D 128, 2 % at D 64, 1 % at D 96, which has registers for all of it, but loses 1 to 3. P m'(s) beside
# P: not with 128 queries (593 spills); with D 128 beside no ids of documents either (32 in the loop), nor turns
EARLY: tuple[tuple[Early, Pattern], ...] = (
    ("LSE", {"order": ANY, "queries": (80,)}),
    ("LSE", FREE | {"order": ANY, "queries": (128,)}),
    ("nothing", {"queries": (128,)}),
    ("nothing", {"widest": D_128, "mask": COSTLY}),
    ("nothing", {"widest": D_128, "order": FIXED}),
    ("P", {"mods": (ModsKind.OF_SCORE,)}),
    ("nothing", {}),
)
# registers that are taken beside the products: of all rows that match; and by mods, of the first one
TAKEN: tuple[tuple[int, Pattern], ...] = (
    (28, {}),  # addresses, indices, what a step begins with
    (4, {"order": ANY, "dq": ("registers",)}),
    (4, {"order": ANY, "dq": ("registers",), "queries": (64,)}),
    (16, {"mask": COSTLY}),
    (4, {"order": FIXED, "passes": (True,)}),
    (4, {"order": FIXED, "layout": ("packed", "mixed"), "passes": (False,)}),
)
BY_MODS: tuple[tuple[int, Pattern], ...] = (
    (28, {"mods": tuple(m for m in ModsKind if m not in WEIGHED)}),
    (28, {"mask": TESTED}),
    (8, {"mods": WEIGHED[1:]}),
    (8, {"order": FIXED, "mask": (MaskKind.READ,)}),
    (0, {}),
)
# fmt: on


def keys_apart(facts: Facts, form: BackwardForm) -> HopperBackwardTiling:
    """dK and dV of 64 keys are in a warpgroup's registers, (d + dv) / 2 a thread; Sᵀ and dPᵀ take tile_m / 2 each, dQ
    tile_m * d / 256. Taller tiles read K and V less often a score, and leave no registers for what is read beside it.
    """
    program, call, tile = facts.program, facts.call, form.tile
    a_piece, together = heads_of(call, facts.problem, facts.target)
    step = Step(call, tile)
    tiling = HopperBackwardTiling(
        tile_m=tile.queries,
        tile_n=KEYS,
        d=call.d,
        dv=call.dv,
        dq_leaves=first(LEAVES, step),
        early=first(EARLY, step),
        tries_first=program.is_plain and (facts.in_order or call.widest == 96),
        l2=TOGETHER if facts.in_order or tile.queries == 80 else bytes_together(call),
        heads_together=together,
        heads_a_piece=a_piece,
        distances=2 * 4096 if sums_by(program, Sums.DISTANCE) else 0,
        passing=tile.passes and bounds_queries(program.mask),
        # D 96 gains 1 %, others nothing but less to compile; D 128 loses 3 % of soft caps, which spill more, and biases
        written="whole" if call.widest < 128 or call.mods in WEIGHED else "by steps",
    )
    return _holding(step, _staying(facts, form, tiling))


def _staying(facts: Facts, form: BackwardForm, tiling: HopperBackwardTiling) -> HopperBackwardTiling:
    """With blocks that stay, where there is room for it; dK and dV must fit where dQ leaves in bulk.

    In a fixed order waits of these kernels sleep in the loop, so they look first. The loop over tiles of keys takes
    registers: by lists tests have none left.
    """
    if form.blocks == "a block a tile":
        return tiling
    changes: dict[str, Any] = {"persistent": form.blocks == "blocks stay"}
    if facts.in_order:
        fits = tiling.tile_m * tiling.d >= ROWS * facts.call.widest
        return dataclasses.replace(tiling, **changes, tries_first=True) if fits else tiling
    claims = form.tile.dq == "claim"
    changes |= {"dq_begins": "claim", "tries_first": True} if claims else {"dq_begins": "beside"}
    staying = dataclasses.replace(tiling, **changes)
    return staying if staying.shared_memory(2) <= facts.target.shared_memory else tiling


def _holding(step: Step, tiling: HopperBackwardTiling) -> HopperBackwardTiling:
    """With as many columns of K and V in registers as there are any left: found by compiling, so that no more spill.

    With too few ptxas has one product wait for the other, which takes 1.3 times as long. K and V that wait there are
    read once a tile of keys, not once a query tile, of which they are 1 to 22 % of what passes shared memory's port:
    D 64 gains 0 to 4 %, D 96 2 to 4, D 128 0 to 2, 32k 3 to 4.
    """
    taken = first(BY_MODS, step) + sum(registers for registers, pattern in TAKEN if matches(step, pattern))
    spare = tiling.consumer_registers - (tiling.d + tiling.dv) // 2 - tiling.tile_m - taken
    # K too only where a tile has 64 queries: some columns of it lose 1 % of D 64
    most = tiling.dv + tiling.d * (tiling.tile_m == ROWS)
    return dataclasses.replace(tiling, resident=min(max(0, spare) * HELD_A_REGISTER // 16 * 16, most))


# --- two warpgroups with the same keys ------------------------------------------------------------------------------


def shared_keys(facts: Facts) -> HopperBackwardTiling:
    """dK or dV of 64 keys fill a warpgroup's registers: one has dV, the other one dK."""
    tiling = _of_shared_keys(facts, facts.call.d, facts.call.dv)
    # beside a warp that clears, ptxas moves the sleep of a wait out of the loop; causal ones of D 256 have it there
    return _cleared(facts, tiling, facts.program.mask is None)


def exchange(facts: Facts) -> ExchangeBackwardTiling:
    """The tiling of a tile of two blocks. With D 256 the other block's K and dS take the place of a second dO."""
    one = _of_shared_keys(facts, facts.call.d, facts.call.dv)
    # 2 to 4 % of D 256, 0 to 3 of D 192 at 8k
    own = {"kernel": ExchangeBackwardTiling.kernel, "tile_n": 2 * one.tile_n, "written": "whole"}
    tiling = _with_room(facts, ExchangeBackwardTiling, one, own)
    return _cleared(facts, tiling, facts.call.d == 192 or facts.program.mask is None)


def halves(facts: Facts) -> HopperPairBackwardTiling:
    """A block has half of all columns: as for a head dimension of half the size, but for scores that are exchanged."""
    d, dv = (-(-n // 64) * 64 for n in (facts.problem.head_dim, facts.problem.head_dim_v))
    one = _of_shared_keys(facts, d, dv)
    return _with_room(facts, HopperPairBackwardTiling, one, {"kernel": HopperPairBackwardTiling.kernel})


def _of_shared_keys(facts: Facts, d: int, dv: int) -> HopperBackwardTiling:
    tiling = HopperBackwardTiling(
        kernel="backward_wide", tile_m=ROWS, tile_n=ROWS, d=d, dv=dv, l2=TOGETHER,
        heads_together=facts.problem.schedule.heads_together,
    )  # fmt: skip
    fits = tiling.shared_memory(2) <= facts.target.shared_memory
    return tiling if fits else dataclasses.replace(tiling, do_stages=1)


def _with_room(facts: Facts, kind: type[Any], one: HopperBackwardTiling, own: dict[str, Any]) -> Any:
    """A tiling of two blocks, with a second dO where it fits."""
    kept = {f.name: getattr(one, f.name) for f in dataclasses.fields(one)}
    tilings = (kind(**kept | own | {"do_stages": stages}) for stages in (2, 1))
    return next(t for t in tilings if t.shared_memory(2) <= facts.target.shared_memory)


def _cleared(facts: Facts, tiling: Any, gains: bool) -> Any:
    """With a warp that clears dQ beside the first tiles: 3 to 5 % of D 192 and 256."""
    clears = gains and facts.problem.layout.is_dense and not facts.in_order
    return dataclasses.replace(tiling, dq_begins="beside") if clears else tiling
