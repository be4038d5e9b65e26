"""The tilings of the forms that the Hopper backward's table names: what follows from a call once its form is known."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from ...analysis.captured_gradient import Pattern as Sums
from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.planning.tables import Table, all_of, first, table
from ..fused.tiles.target import Target
from ..fused.tiles.traits import sums_by
from ..fused.tiles.written import Written
from .backward_heads import BYTES, heads_of
from .backward_table import KEYS, LEAVE, STAY, BackwardClass, BackwardForm, Tile
from .backward_tiling import FILE, ROWS, ExchangeBackwardTiling, HopperBackwardTiling, HopperPairBackwardTiling

L2 = 16 << 20  # bytes of what the heads read and add to that run together
HELD_A_REGISTER = 4  # columns of 64 keys, that a register of 128 threads has
LEAVES: Table[Literal["at once", "later", "in bulk"]] = table(FILE, "leaves", lambda said: said)
EARLY: Table[Literal["nothing", "LSE", "P"]] = table(FILE, "early", lambda said: said)
TRIES_FIRST: Table[bool] = table(FILE, "tries_first", bool)
WRITTEN: Table[Written] = table(FILE, "written", lambda said: said)
CLEARS: Table[Literal["before", "beside"]] = table(FILE, "clears", lambda said: said)  # when dQ is cleared
# registers that are taken beside the products: of all rows that match; and by mods, of the first one
TAKEN: Table[int] = table(FILE, "taken", int)
BY_MODS: Table[int] = table(FILE, "by_mods", int)


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

    def of_tile(self, tile: Tile) -> dict[str, Any]:
        """What rows may say of a tile beside the call."""
        return {"queries": tile.queries, "dq": tile.dq}


# --- 64 keys a warpgroup ------------------------------------------------------------------------------------------


def keys_apart(facts: Facts, form: BackwardForm) -> HopperBackwardTiling:
    """dK and dV of 64 keys are in a warpgroup's registers, (d + dv) / 2 a thread; Sᵀ and dPᵀ take tile_m / 2 each, dQ
    tile_m * d / 256. Taller tiles read K and V less often a score, and leave no registers for what is read beside it.
    """
    program, call, tile = facts.program, facts.call, form.tile
    a_piece, together = heads_of(call, facts.problem, facts.target)
    step = facts.of_tile(tile)
    tiling = HopperBackwardTiling(
        tile_m=tile.queries,
        tile_n=KEYS,
        d=call.d,
        dv=call.dv,
        dq_leaves=first(LEAVES, call, **step),
        early=first(EARLY, call, **step),
        tries_first=first(TRIES_FIRST, call),
        l2=first(BYTES, call, **step),
        heads_together=together,
        heads_a_piece=a_piece,
        distances=2 * 4096 if sums_by(program, Sums.DISTANCE) else 0,
        written=first(WRITTEN, call),
    )
    return _holding(facts, tile, _staying(facts, form, tiling))


def _staying(facts: Facts, form: BackwardForm, tiling: HopperBackwardTiling) -> HopperBackwardTiling:
    """With blocks that stay, where there is room for it; dK and dV must fit where dQ leaves in bulk.

    In a fixed order waits of these kernels sleep in the loop, so they look first. The loop over tiles of keys takes
    registers: by lists tests have none left.
    """
    if form.blocks == LEAVE:
        return tiling
    changes: dict[str, Any] = {"persistent": form.blocks == STAY}
    if facts.in_order:
        fits = tiling.tile_m * tiling.d >= ROWS * facts.call.widest
        return dataclasses.replace(tiling, **changes, tries_first=True) if fits else tiling
    claims = form.tile.dq == "claim"
    changes |= {"dq_begins": "claim", "tries_first": True} if claims else {"dq_begins": "beside"}
    staying = dataclasses.replace(tiling, **changes)
    return staying if staying.shared_memory(2) <= facts.target.shared_memory else tiling


def _holding(facts: Facts, tile: Tile, tiling: HopperBackwardTiling) -> HopperBackwardTiling:
    """With as many columns of K and V in registers as there are any left: found by compiling, so that no more spill.

    With too few ptxas has one product wait for the other, which takes 1.3 times as long. K and V that wait there are
    read once a tile of keys, not once a query tile, of which they are 1 to 22 % of what passes shared memory's port:
    D 64 gains 0 to 4 %, D 96 2 to 4, D 128 0 to 2, 32k 3 to 4.
    """
    taken = first(BY_MODS, facts.call) + sum(all_of(TAKEN, facts.call, **facts.of_tile(tile)))
    spare = tiling.consumer_registers - (tiling.d + tiling.dv) // 2 - tiling.tile_m - taken
    # K too only where a tile has 64 queries: some columns of it lose 1 % of D 64
    most = tiling.dv + tiling.d * (tiling.tile_m == ROWS)
    return dataclasses.replace(tiling, resident=min(max(0, spare) * HELD_A_REGISTER // 16 * 16, most))


# --- two warpgroups with the same keys ------------------------------------------------------------------------------


def shared_keys(facts: Facts, form: BackwardForm) -> HopperBackwardTiling:
    """dK or dV of 64 keys fill a warpgroup's registers: one has dV, the other one dK."""
    return _with_room(facts, form, HopperBackwardTiling, *facts.call.dims, kernel="backward_wide")


def exchange(facts: Facts, form: BackwardForm) -> HopperBackwardTiling:
    """The tiling of a tile of two blocks. With D 256 the other block's K and dS take the place of a second dO.

    Whole products gain 2 to 4 % of D 256, 0 to 3 of D 192 at 8k.
    """
    return _with_room(facts, form, ExchangeBackwardTiling, *facts.call.dims, tile_n=2 * ROWS, written="whole")


def halves(facts: Facts, form: BackwardForm) -> HopperBackwardTiling:
    """A block has half of all columns: as for a head dimension of half the size, but for scores that are exchanged."""
    d, dv = (-(-n // 64) * 64 for n in (facts.problem.head_dim, facts.problem.head_dim_v))
    return _with_room(facts, form, HopperPairBackwardTiling, d, dv)


def _with_room(
    facts: Facts, form: BackwardForm, kind: type[HopperBackwardTiling], d: int, dv: int, **own: Any
) -> HopperBackwardTiling:
    """Two warpgroups with the same keys, with a second dO where it fits."""
    fields: dict[str, Any] = {
        "tile_m": ROWS, "tile_n": ROWS, "d": d, "dv": dv, "l2": L2,
        "heads_together": facts.problem.schedule.heads_together,
        "dq_begins": first(CLEARS, facts.call, kind=form.tile.kind),
    }  # fmt: skip
    tilings = (kind(**fields | own | {"do_stages": stages}) for stages in (2, 1))
    return next(tiling for tiling in tilings if tiling.shared_memory(2) <= facts.target.shared_memory)
