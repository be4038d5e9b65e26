"""Which tiling the Hopper backward of a call has: by its class two rows, by these a form, by both its fields."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...analysis.captured_gradient import Pattern as Sums
from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.compiling import tuned
from ..fused.planning.call_class import Facts
from ..fused.planning.tables import Table, all_of, first, table
from ..fused.tiles.coverage import all_are_seen
from ..fused.tiles.target import Target
from ..fused.tiles.tiling import fitting
from ..fused.tiles.traits import sums_by
from .backward_heads import heads_of
from .backward_table import FORMS, KEYS, BackwardForm, backward_class, form_of, rows_of, serves
from .backward_tiling import FILE, ROWS, ExchangeBackwardTiling, HopperBackwardTiling, HopperPairBackwardTiling

HELD_A_REGISTER = 4  # columns of 64 keys, that a register of 128 threads has
# by kind: the tiling, fields of it, and of what columns are whole multiples
KINDS: dict[str, tuple[type[HopperBackwardTiling], dict[str, Any], int]] = {
    "keys apart": (HopperBackwardTiling, {"tile_n": KEYS}, 32),
    "shared keys": (HopperBackwardTiling, {"tile_n": ROWS, "kernel": "backward_wide"}, 32),
    "exchange": (ExchangeBackwardTiling, {"tile_n": 2 * ROWS}, 32),
    "halves": (HopperPairBackwardTiling, {"tile_n": ROWS}, 64),
}
# fields by call and form; and of fields that take room those to try, of which the first is taken that fits
FIELDS: dict[str, Table[Any]] = {
    name: table(FILE, name) for name in ("dq_leaves", "early", "tries_first", "l2", "distances", "written", "dq_begins")
}
STAYS: Table[list[dict[str, Any]]] = table(FILE, "stays")
# registers that are taken beside the products: of all rows that match; and by mods, of the first one
TAKEN: Table[int] = table(FILE, "taken")
BY_MODS: Table[int] = table(FILE, "by_mods")


class BackwardFacts(Facts):
    """Facts of a backward, from which tilings follow."""

    @property
    def by_distance(self) -> bool:
        return sums_by(self.program, Sums.DISTANCE)

    @property
    def seen_by_all(self) -> bool:
        """Whether some tile of keys visits each query tile."""
        return all_are_seen(self.problem, self.program)

    @property
    def group_bytes(self) -> int:
        """Bytes that the queries of a key/value head read and add to."""
        return self.problem.group * self.problem.q_len * (2 * (self.d + self.dv) + 4 * self.d)


def backward_tiling(problem: Problem, program: Program, target: Target, deterministic: bool) -> HopperBackwardTiling:
    """Tiles of the backward kernel, and their order; `deterministic`: dQ is summed in a fixed order."""
    call = backward_class(problem, program, target, deterministic)
    facts, others = BackwardFacts(problem, program, target, call), (form for form in FORMS if serves(form, call))
    return tuned.tiling(call, problem, target, form_of(call), others, lambda form: tiling_of_form(form, facts))


def backward_words(problem: Problem, program: Program, target: Target, deterministic: bool) -> str:
    """The class of a call, the form it gets, and what says so, for people to read."""
    call = backward_class(problem, program, target, deterministic)
    (tile, blocks), known = rows_of(call), tuned.of_call(call, problem, target)
    if known:
        return f"{call}\n    form: {known.form}; {known}; the tables say {form_of(call)}"
    return f"{call}\n    tiles: {tile.says}; {tile.evidence}\n    blocks: {blocks.says}; {blocks.evidence}"


def tiling_of_form(form: BackwardForm, facts: BackwardFacts) -> HopperBackwardTiling:
    """A call's tiling by one of the forms."""
    tile, target = form.tile, facts.target
    kind, fixed, step = KINDS[tile.kind]
    cut = {"kind": tile.kind, "queries": tile.queries, "dq": tile.dq, "blocks": form.blocks}
    fields: dict[str, Any] = {
        **{name: first(rows, facts, **cut) for name, rows in FIELDS.items()},
        **heads_of(facts, fixed["tile_n"], target.sms // kind.sharing),
        **fixed,
        "tile_m": tile.queries,
        "d": -(-facts.d // step) * step,
        "dv": -(-facts.dv // step) * step,
    }
    tilings = (kind(**fields | more) for more in first(STAYS, facts, **cut))
    tiling = fitting(tilings, target)
    return _holding(facts, cut, tiling) if tile.kind == "keys apart" else tiling


def _holding(facts: BackwardFacts, cut: dict[str, Any], tiling: HopperBackwardTiling) -> HopperBackwardTiling:
    """With as many columns of K and V in registers as there are any left: found by compiling, so that no more spill.

    dK and dV of 64 keys take (d + dv) / 2 a thread, Sᵀ and dPᵀ tile_m / 2 each. With too few ptxas has one product wait
    for the other, which takes 1.3 times as long. K and V that wait there are read once a tile of keys, not once a query
    tile: 1 to 22 % of what passes shared memory's port, 0 to 4 % of the time.
    """
    taken = first(BY_MODS, facts) + sum(all_of(TAKEN, facts, **cut))
    spare = tiling.consumer_registers - (tiling.d + tiling.dv) // 2 - tiling.tile_m - taken
    # K too only where a tile has 64 queries: some columns of it lose 1 % of D 64
    most = tiling.dv + tiling.d * (tiling.tile_m == ROWS)
    return dataclasses.replace(tiling, resident=min(max(0, spare) * HELD_A_REGISTER // 16 * 16, most))
