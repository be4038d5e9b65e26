"""What rows of a Hopper forward do from tile to tile of keys: a table by form, Dv and what its mods are."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Literal, NamedTuple

from ...analysis.program import Program
from ..fused.tiles.patterns import Pattern, Span, matches
from ..fused.tiles.traits import reads_pairs
from .tiling import RowSteps

# blocks of one warpgroup, three or two on an SM; and warpgroups of a block that is alone there
Kind = Literal["three blocks", "two blocks", "alone", "three warpgroups", "two warpgroups", "guesses", "documents"]
Scores = Literal["plain", "pairs", "other", "dropout"]  # a mod that reads at (q, kv), or none; "dropout" with any
EVERY, WIDE = Span(0, 256), Span(128, 256)


class Facts(NamedTuple):
    """Facts of a call that its steps depend on."""

    kind: Kind
    dv: int
    scores: Scores
    masked: bool


def of(kind: Kind, steps: RowSteps, dv: Container[Any] = EVERY, **pattern: Container[Any]) -> tuple[Pattern, RowSteps]:
    """A row: of which calls, and what they do."""
    return {"kind": (kind,), "dv": dv, **pattern}, steps


PLAIN: Pattern = {"scores": ("plain",)}
PAIRS: Pattern = {"scores": ("pairs",)}
DROPOUT: Pattern = {"scores": ("dropout",)}
# fmt: off
TABLE = (  # figures: one H200, in turns
    of("three blocks", RowSteps(True, "first")),  # no other softmax is under its products (D 64: 1 to 3 %)
    of("two blocks", RowSteps()),
    of("documents", RowSteps(False, "first")),
    # three warpgroups fill each other's gaps; two gain from a shorter turn
    of("three warpgroups", RowSteps(True)),
    of("guesses", RowSteps(), Span(0, 64), masked=(False,), **PLAIN),  # anew loses 2 %
    # anew D 96 gains 1 %, D 64 1 to 2 of causal 4k and more
    of("guesses", RowSteps(written="anew"), Span(0, 96), **PLAIN),
    # anew 8k gains 3 %; behind half of the exponentials 0 to 5 from 4k on; early, scores that deviate by 3 and 6 1 to 3
    of("guesses", RowSteps(True, "half", "anew"), Span(96, 128), **PLAIN),
    of("guesses", RowSteps()),  # ALiBi loses 2 % anew, soft caps 3
    # D 128 gains 3 to 5 % up to 4k by the first exponential, a window of 1,024 7, D 192 and 256 0 to 2
    of("two warpgroups", RowSteps(True, "first"), WIDE, **PLAIN),
    of("two warpgroups", RowSteps(False, "first"), **PLAIN),
    # what is read at (q, kv) gains 3 % by the first exponential, 1 to 3 anew
    of("two warpgroups", RowSteps(True, "first", "anew"), WIDE, **PAIRS),
    of("two warpgroups", RowSteps(False, "first", "anew"), **PAIRS),
    of("two warpgroups", RowSteps(True), WIDE),  # by the first exponential a soft cap loses 2 %, ALiBi 1
    of("two warpgroups", RowSteps()),
    of("alone", RowSteps(True), WIDE, **DROPOUT),
    of("alone", RowSteps(), **DROPOUT),
    of("alone", RowSteps(True, "first", "anew"), WIDE, **PAIRS),
    of("alone", RowSteps(False, "first", "anew"), **PAIRS),
    of("alone", RowSteps(True, "first"), WIDE),
    of("alone", RowSteps(False, "first")),
)
# fmt: on


def row_steps(kind: Kind, dv: int, program: Program) -> RowSteps:
    """By the first row that a call is in."""
    facts = Facts(kind, dv, _scores(program), program.mask is not None)
    return next(steps for pattern, steps in TABLE if matches(facts, pattern))


def _scores(program: Program) -> Scores:
    if program.keep is not None:
        return "dropout"
    if program.score is None:
        return "plain"
    return "pairs" if reads_pairs(program.score) else "other"
