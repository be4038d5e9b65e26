"""What a call is rewritten to before it is planned: one list, for forward and backward, applied in one loop.

A rewrite takes a problem and a program to others that compute the same, and says how the sequences of the one lie in
those of the other: by their `Layout`, which kernels read, or by views of which each is a call of its own. What it can't
serve it leaves as it is, and says why if the mask looks like one of its own; `explain()` prints both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

from ....analysis.program import Program
from ....call.problem import Problem
from ..tiles.target import Target
from ..tiles.traits import has_documents_apart, has_segments_apart
from .apart import CallApart, GeneratedCall, Make
from .dequantised import dequantised
from .invariant import invariant
from .posed import Apart, Found, Nothing, Posed, Rewritten
from .residues import by_residues
from .strips import by_strips
from .widened import in_64_bits


def in_segments(posed: Posed) -> Found:
    """The call with segments, with which tiles may begin; its tiling says whether they do."""
    if posed.direction == "forward":
        in_any_order = not posed.problem.schedule.batch_invariant  # of keys: tiles of these begin where segments do
        apart = in_any_order and has_segments_apart(posed.problem, posed.program)
    else:
        apart = has_documents_apart(posed.problem, posed.program.without_sink)
    if not apart:
        return Nothing()
    return Rewritten(dataclasses.replace(posed, segments=True), "tiles begin with segments, if their kind can")


REWRITES: dict[str, Callable[[Posed], Found]] = {
    "residues": by_residues,
    "dequantised": dequantised,
    "64 bits": in_64_bits,
    "batch-invariant": invariant,
    "strips": by_strips,
    "segments": in_segments,
}
"""In the order in which they are tried, each on what those before have made of the call."""
TAKE_APART = ["residues"]
"""Those that make several calls of one, of which each is rewritten from the beginning."""


class Rewriting(NamedTuple):
    """A call behind all rewrites, or taken apart by one of them; and what each of them said, by its name."""

    found: Posed | Apart
    said: dict[str, str]

    @property
    def posed(self) -> Posed:
        assert isinstance(self.found, Posed), "a call that was taken apart is planned by its parts"
        return self.found


def rewritten(posed: Posed) -> Rewriting:
    """The call behind all rewrites, but for those that would take it apart.

    Raises: `InvalidSchedule`.
    """
    return _applied(posed, list(REWRITES), whole=True)


def _applied(posed: Posed, names: list[str], whole: bool) -> Rewriting:
    said: dict[str, str] = {}
    given = posed
    for name in names:
        found = REWRITES[name](posed)
        if isinstance(found, Rewritten):
            posed, said[name] = found
        elif isinstance(found, Nothing):
            if found.why:
                said[name] = f"nothing, as {found.why}"
        elif not whole:
            return Rewriting(found, {name: found.words})
    if not posed.program.forms:
        posed.program.forms = given.program.forms
    return Rewriting(posed, said)


def prepared(make: Make, problem: Problem, program: Program, scale: float, target: Target) -> GeneratedCall:
    """The call by one of `make`, or by several where a rewrite takes it apart."""
    found, said = _applied(Posed(problem, program, target), TAKE_APART, whole=False)
    if isinstance(found, Posed):
        return make(problem, program, scale, target)
    (name,) = said
    return CallApart(functools.partial(_part, make, target), problem, found, name, scale)


def _part(make: Make, target: Target, problem: Problem, program: Program, scale: float) -> GeneratedCall:
    return prepared(make, problem, program, scale, target)
