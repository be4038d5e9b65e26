"""A call on an image whose last row is not whole, as two: strips of whole rows, and the queries that see the last one.

Copies of boxes see a tensor as whole rows. Queries that see nothing of the last row, all but a few rows of a
neighbourhood, are a call on whole rows, which can be of strips (`rewrites.strips`); those behind them are a second one,
with the keys that they see. Nothing but results is copied.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from ....analysis.program import Program
from ....analysis.strips import Strips, from_rows, reads_image, rows_seen, strips_of
from ....call.problem import Problem
from ....graph.expr import Expr
from .image_costs import ANOTHER
from .posed import Apart, Found, Nothing, Part, Posed, Rewritten, Rows
from .strips import LEAST, Counted, by_strips
from .whole import reads_more_than_positions

# Microseconds of the whole by the model, below which a GPU would wait for the host, as of residues
LONG = 70.0
Call = tuple[Problem, Program]


class Tail(NamedTuple):
    """From which rows on queries may see the last row of keys, and from which on keys are seen by these queries."""

    queries: int
    keys: int


def without_last_row(posed: Posed) -> Found:
    """The call as two, where the first of them then goes by strips, and both visit fewer tiles than the whole."""
    problem, program = posed.problem, posed.program
    if program.mask is None or not problem.layout.is_dense or problem.layout.strips is not None:
        return Nothing()
    if problem.q_len != problem.kv_len or problem.schedule.batch_invariant or reads_more_than_positions(program):
        return Nothing()
    strips = strips_of(program.mask)
    if strips is None or not problem.q_len % strips.columns:
        return Nothing()
    if not all(reads_image(graph, strips.columns) for graph in (program.mask, program.score) if graph is not None):
        return Nothing()
    tail = _tail(program.mask, problem, strips)
    if tail.queries * strips.apart < LEAST:
        return Nothing(f"all but {tail.queries} rows of the image may see its last row, which is not whole")
    calls = _whole_rows(problem, program, strips, tail), _behind(problem, program, strips, tail)
    why = _no_gain(posed, calls, strips)
    return Nothing(why) if why else _apart(problem, calls, strips, tail)


def _tail(mask: Expr, problem: Problem, strips: Strips) -> Tail:
    rows = -(-problem.q_len // strips.columns)
    seen = rows_seen(mask, strips.columns, (rows, rows), problem.q_heads)
    queries = min([*seen[:, -1].nonzero().flatten().tolist(), rows - 1])  # those of the last row are none of whole rows
    keys = min([*seen[queries:].any(0).nonzero().flatten().tolist(), rows - 1])
    return Tail(queries, keys)


def _whole_rows(problem: Problem, program: Program, strips: Strips, tail: Tail) -> Call:
    """Queries before the tail, keys before the last row."""
    kv_len = problem.kv_len // strips.columns * strips.columns
    return dataclasses.replace(problem, q_len=tail.queries * strips.columns, kv_len=kv_len), program


def _behind(problem: Problem, program: Program, strips: Strips, tail: Tail) -> Call:
    """Queries of the tail, and the keys that they see."""
    q_len, kv_len = [problem.q_len - first * strips.columns for first in tail]
    mods = [None if mod is None else from_rows(mod, strips.columns, *tail) for mod in (program.score, program.mask)]
    return dataclasses.replace(problem, q_len=q_len, kv_len=kv_len), Program(*mods)


def _no_gain(posed: Posed, calls: tuple[Call, Call], strips: Strips) -> str:
    """Why two calls would not pay; empty where they do."""
    first, behind = [dataclasses.replace(posed, problem=p, program=g) for p, g in calls]
    found = by_strips(first)
    if not isinstance(found, Rewritten):
        return found.why if isinstance(found, Nothing) else "whole rows are no call of their own"
    chosen = found.posed.problem.layout.strips
    assert chosen is not None
    whole, rest = [Counted.whole(each, strips.several_axes).microseconds for each in (posed, behind)]
    both = Counted.in_strips(first, chosen).microseconds + rest + ANOTHER[posed.direction]
    if whole < LONG:
        return f"{whole:.0f} us by the model are over before the host has launched two calls"
    if both <= whole:
        return ""
    return f"strips and a call behind them would take {both:.0f} us by the model in place of {whole:.0f}"


def _apart(problem: Problem, calls: tuple[Call, Call], strips: Strips, tail: Tail) -> Apart:
    (first, _), (behind, _) = calls
    q_start, kv_start = tail.queries * strips.columns, tail.keys * strips.columns
    parts = (
        Part(0, Rows(None, 0, problem.batch, first.q_len), Rows(None, 0, problem.batch, first.kv_len)),
        Part(
            1,
            Rows(None, q_start, problem.batch, behind.q_len),
            Rows(None, kv_start, problem.batch, behind.kv_len),
            shared=max(0, first.kv_len - kv_start),
        ),
    )
    words = (
        f"{first.q_len} queries and {first.kv_len} keys, whole rows of {strips.columns} columns, and a call of the "
        f"{behind.q_len} queries behind them, that see the last row or are in it, and {behind.kv_len} keys"
    )
    return Apart(calls, parts, words)
