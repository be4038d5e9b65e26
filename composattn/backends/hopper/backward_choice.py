"""Which tiling the Hopper backward of a call has: by its class two rows, by these a form; then what its order wants."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.compiling import tuned
from ..fused.planning.tables import Table, first, table
from ..fused.tiles.coverage import all_are_seen
from ..fused.tiles.target import Target
from .backward_forms import Facts, exchange, halves, keys_apart, shared_keys
from .backward_table import FORMS, BackwardForm, backward_class, form_of, rows_of, serves
from .backward_tiling import FILE, HopperBackwardTiling

BACKWARDS: Table[bool] = table(FILE, "backwards", bool)  # whether the last section goes the other way
ONE_HEAD: Table[bool] = table(FILE, "one_head", bool)  # whether a section has one key/value head
MADE: dict[str, Callable[[Facts, BackwardForm], HopperBackwardTiling]] = {
    "keys apart": keys_apart, "shared keys": shared_keys, "exchange": exchange, "halves": halves,
}  # fmt: skip


def backward_tiling(problem: Problem, program: Program, target: Target, deterministic: bool) -> HopperBackwardTiling:
    """Tiles of the backward kernel, and their order; `deterministic`: dQ is summed in a fixed order."""
    call = backward_class(problem, program, target, deterministic)
    facts, others = Facts(problem, program, target, call), (form for form in FORMS if serves(form, call))
    return tuned.tiling(call, problem, target, form_of(call), others, lambda form: tiling_of_form(form, facts))


def backward_words(problem: Problem, program: Program, target: Target, deterministic: bool) -> str:
    """The class of a call, the form it gets, and what says so, for people to read."""
    call = backward_class(problem, program, target, deterministic)
    (tile, blocks), known = rows_of(call), tuned.of_call(call, problem, target)
    if known:
        return f"{call}\n    form: {known.form}; {known}; the tables say {form_of(call)}"
    return f"{call}\n    tiles: {tile.says}; {tile.evidence}\n    blocks: {blocks.says}; {blocks.evidence}"


def tiling_of_form(form: BackwardForm, facts: Facts) -> HopperBackwardTiling:
    """A call's tiling by one of the forms."""
    tiling = MADE[form.tile.kind](facts, form)
    return _in_order(tiling, facts) if facts.in_order else tiling


def _in_order(tiling: HopperBackwardTiling, facts: Facts) -> HopperBackwardTiling:
    """With dQ summed in a fixed order. The last section fills the SMs, or its longest tiles end alone: 1.05."""
    problem, call = facts.problem, facts.call
    seen, backwards = tiling.dq_in_bulk and all_are_seen(problem, facts.program), first(BACKWARDS, call)
    tiling = dataclasses.replace(tiling, heads_at_last=0 if backwards else None, dq_begins="turn" if seen else "before")
    at_once, tiles = facts.target.sms // tiling.sharing, max(1, -(-problem.kv_len // tiling.tile_n))
    rounds, asked = problem.batch * problem.kv_heads * tiles / at_once, problem.schedule.heads_together
    if not first(ONE_HEAD, call, asked=asked, rounds=rounds):
        return tiling
    # a power of 2, as each is another kernel
    return dataclasses.replace(tiling, heads_together=1, heads_at_last=1 << max(0, round(math.log2(at_once / tiles))))
