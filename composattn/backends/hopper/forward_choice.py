"""Which tiling the Hopper forward of a call has: by its class a row of the table, by the row a form."""

from __future__ import annotations

import dataclasses
import functools

from ...analysis.program import Program
from ...call.eight_bits import EIGHT_BITS
from ...call.problem import Problem
from ..fused.compiling import tuned
from ..fused.planning.call_class import CallClass, Rounds, class_of
from ..fused.planning.tables import first, row_of
from ..fused.tiles.few_queries import packed_heads, sharing_heads
from ..fused.tiles.target import Target
from ..fused.tiles.tiling import query_tiles
from .few_rows import few_rows
from .forward_forms import Facts, tiling_of
from .forward_table import FORMS, PACKS, TABLE, ForwardForm, serves, shape_of
from .fp8_choice import fp8_tiling, fp8_words
from .tiling import ROWS, HopperTiling
from .wide_tiling import WideTiling, wide_tiling


def forward_tiling(problem: Problem, program: Program, target: Target) -> HopperTiling | WideTiling:
    """Tiles of the forward kernel."""
    if problem.types.q in EIGHT_BITS:
        return fp8_tiling(problem, program, target)
    call = forward_class(problem, program, target)
    own, others = first(TABLE, call), (form for form in FORMS if serves(form, call))
    return tuned.tiling(call, problem, target, own, others, lambda f: tiling_of_form(f, call, problem, program, target))


def forward_class(problem: Problem, program: Program, target: Target) -> CallClass:
    """What kind of call it is, in tiles of 64 rows, the least that a warpgroup's product has."""
    of = functools.partial(class_of, problem, program, target, "forward", rows=ROWS)
    call = of(heads=packed_heads(problem, program, ROWS))
    heads = sharing_heads(problem, program, ROWS)
    if not call.packs and heads > 1 and _fewer_tiles(problem, heads, call):
        call = of(heads=heads)
    # who asks blocks to stay has work for several rounds
    stays = problem.schedule.persistent and call.work is not Rounds.FEW_ROWS
    return dataclasses.replace(call, work=Rounds.ROUNDS) if stays else call


def _fewer_tiles(problem: Problem, heads: int, call: CallClass) -> bool:
    """Whether heads that share tiles have so few of them that it pays. `call`: where each has its own."""
    form = first(TABLE, call)
    most = first(PACKS, call, kind=form.kind, guesses=form.guesses)
    rows = ROWS * shape_of(form, call).warpgroups if most else ROWS
    return query_tiles(problem, heads, rows) <= most * query_tiles(problem, 1, rows)


def forward_words(problem: Problem, program: Program, target: Target) -> str:
    """The class of a call, the form it gets, and what says so, for people to read."""
    if problem.types.q in EIGHT_BITS:
        return fp8_words(problem, program)
    call = forward_class(problem, program, target)
    row, known = row_of(TABLE, call), tuned.of_call(call, problem, target)
    chosen = f"{known.form}; {known}; the table says {row.says}" if known else f"{row.says}; {row.evidence}"
    return f"{call}\n    form: {chosen}"


def tiling_of_form(
    form: ForwardForm, call: CallClass, problem: Problem, program: Program, target: Target
) -> HopperTiling | WideTiling:
    """A call's tiling by one of the forms."""
    if form.kind == "wide":
        return wide_tiling(problem, program, target)
    facts = Facts(problem, program, target, call)
    return few_rows(facts) if form.kind == "few" else tiling_of(facts, form)
