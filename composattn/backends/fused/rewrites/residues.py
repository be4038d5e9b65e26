"""A call of which queries see only keys of their own residue (`analysis.residues`), as one call for each residue.

Positions of one residue lie `step` rows apart in memory, which copies read as they are: nothing is permuted. Residues
of one length are sequences of one call, as a batch; so a sequence whose length is a multiple of the step is one call,
and its results, in memory ordered as q is, are those of the sequence.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

from ....analysis.program import Program
from ....analysis.residues import of_residue, residues
from ....call.problem import Problem
from ..tiles.traits import keys_of_a_query
from .posed import Apart, Found, Nothing, Part, Posed, Rows
from .whole import reads_more_than_positions

LEAST = 128  # queries and keys of a residue: fewer fill no tile
MOST = 4  # calls in place of one: each costs the host as much as a call does
# FLOPs of the forward in visited tiles, of the whole: below it a GPU would wait for the host, which has 15 µs more to
# do forward and 75 with a backward (kernels that do nothing, on a CPU; a whole call takes 3 and 29)
LONG = 2e10


class ResidueGroup(NamedTuple):
    """Some residues from `first` on, with equally many queries and keys each."""

    first: int
    residues: int
    q_len: int
    kv_len: int


def by_residues(posed: Posed) -> Found:
    """The call as one for each residue; it stays whole where a mod reads what is of the whole sequence."""
    problem, program = posed.problem, posed.program
    if program.mask is None or not problem.layout.is_dense or problem.schedule.batch_invariant:
        return Nothing()
    step, rest = residues(program.mask)
    if step == 1:
        return Nothing()
    why = reads_more_than_positions(program) or _too_short(problem, program, step)
    return Nothing(why) if why else _apart(problem, Program(program.score, rest), step)


def _too_short(problem: Problem, program: Program, step: int) -> str:
    """Why the calls would not pay; empty where they do."""
    calls = problem.batch * len(groups(problem, step))
    if calls > MOST:
        return f"residues modulo {step} would be {calls} calls, of more than {MOST} the host takes too long"
    shortest = min(problem.q_len, problem.kv_len) // step
    if shortest < LEAST:
        return f"a residue modulo {step} has {shortest} positions, of fewer than {LEAST} no tile is full"
    visited = problem.batch * problem.q_heads * problem.q_len * keys_of_a_query(problem, program.intervals)
    flops = problem.flops(int(visited))
    return "" if flops >= LONG else f"{flops:.1e} FLOPs are over before the host has launched {calls} calls"


def _apart(problem: Problem, program: Program, step: int) -> Apart:
    """`program` is that of the whole sequence without the term that asks for one residue."""
    found = groups(problem, step)
    parts = tuple(
        Part(n, Rows(b, g.first, g.residues, g.q_len, step), Rows(b, g.first, g.residues, g.kv_len, step))
        for b in range(problem.batch)
        for n, g in enumerate(found)
    )
    each = "\n".join(f"{g.residues} of {g.q_len} queries and {g.kv_len} keys" for g in found)
    return Apart(
        tuple((_of(g, problem), _program_of(g, program, step)) for g in found),
        parts,
        f"by residues modulo {step}, which are sequences of their own: {each}",
    )


def groups(problem: Problem, step: int) -> list[ResidueGroup]:
    """Residues of equal lengths: three groups at most, as queries and keys each end somewhere in a round."""
    ends = sorted({0, problem.q_len % step, problem.kv_len % step, step})
    return [
        ResidueGroup(first, stop - first, _length(problem.q_len, step, first), _length(problem.kv_len, step, first))
        for first, stop in itertools.pairwise(ends)
    ]


def _length(length: int, step: int, residue: int) -> int:
    """Positions below `length` with this residue."""
    return (length - residue + step - 1) // step


def _of(group: ResidueGroup, problem: Problem) -> Problem:
    return dataclasses.replace(problem, batch=group.residues, q_len=group.q_len, kv_len=group.kv_len)


def _program_of(group: ResidueGroup, program: Program, step: int) -> Program:
    mods = program.score, program.mask
    return Program(*(None if graph is None else of_residue(graph, step, group.first) for graph in mods))
