"""Which form the Hopper forward of a call has: a table whose rows say of which calls, and what was measured.

The first row that a call's class matches is taken. A row's evidence is the run that timed every form of its shapes, or
`NOT_MEASURED` with the reason for what stands there. To change a row: `python -m benchmarks.sweep`, see docs/design.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import Any, Literal

from ..fused.planning.call_class import BEYOND, CallClass, MaskKind, ModsKind, Rounds
from ..fused.tiles.patterns import Pattern, Span, matches
from .evidence import Evidence, Measured, NotMeasured


@dataclasses.dataclass(frozen=True)
class ForwardForm:
    """How a call is cut; `forward_forms` has the tiling of each.

    few: one tile of rows, as many bytes of keys on their way as memory needs. small: one warpgroup a block, two or
    three blocks on an SM. alone: one warpgroup, alone on it. large: two or three warpgroups that share K and
    V. documents: two, and tiles of keys begin where documents do. wide: D above 256.

    `guesses`: rows take the maximum before a tile for the tile's own. `stays`: blocks draw one tile after the other.
    """

    kind: Literal["few", "small", "alone", "large", "documents", "wide"]
    guesses: bool = False
    stays: bool = False

    def __str__(self) -> str:
        return self.kind + ", guesses" * self.guesses + ", stays" * self.stays


def fitted(shapes: int, gain: float) -> Measured:
    """One H200, commit 74da48e, 200 shapes."""
    return Measured("sweeps/h200-forward-fit.json", shapes, gain)


@dataclasses.dataclass(frozen=True)
class ForwardRule:
    """Calls of all classes that are in the pattern, and in no row before."""

    form: ForwardForm
    evidence: Evidence
    pattern: Pattern


FEW, SMALL, ALONE = ForwardForm("few"), ForwardForm("small"), ForwardForm("alone")
LARGE, WIDE = ForwardForm("large"), ForwardForm("wide")
DOCUMENTS, STAYS = ForwardForm("documents"), ForwardForm("large", stays=True)
GUESSES, GUESSES_STAYS = ForwardForm("large", guesses=True), ForwardForm("large", guesses=True, stays=True)

TO_BEYOND = Span(0, BEYOND)
TO_64, TO_96, TO_128, TO_192, TO_256 = Span(0, 64), Span(64, 96), Span(96, 128), Span(160, 192), Span(224, 256)
MASKS = tuple(m for m in MaskKind if m is not MaskKind.NONE)
# masks with which warpgroups pass by tiles of their own, and may guess
ONE_RUN = MaskKind.BOUNDS, MaskKind.TESTED, MaskKind.OPAQUE
UNMASKED: Pattern = {"mods": (ModsKind.PLAIN,), "mask": (MaskKind.NONE,)}
OF_IDS: Pattern = {"mods": (ModsKind.PLAIN,), "mask": (MaskKind.DOCUMENTS,), "packs": (False,)}
BOUNDED: Pattern = {"mods": (ModsKind.PLAIN,), "mask": ONE_RUN, "packs": (False,)}
DILATED: Pattern = {"mods": (ModsKind.PLAIN,), "mask": (MaskKind.TESTED,), "packs": (False,)}
LINES: Pattern = {"mods": (ModsKind.LINE,), "mask": ONE_RUN, "packs": (False,)}
MASKED: Pattern = {"mods": (ModsKind.PLAIN, ModsKind.LINE), "mask": ONE_RUN, "packs": (False,)}
DENSE: Pattern = {"layout": ("dense",), "order": ("any",)}
ONE: Pattern = DENSE | {"work": (Rounds.AT_ONCE,)}
HALF_FULL: Pattern = DENSE | {"mask": MASKS, "work": (Rounds.ROUND_AND_A_HALF,)}
KEEPS: Pattern = DENSE | {"mods": tuple(m for m in ModsKind if m is not ModsKind.DROPOUT)}


def every(form: ForwardForm, evidence: Evidence, widest: Span = TO_BEYOND, **pattern: Container[Any]) -> ForwardRule:
    """Calls of all layouts and orders."""
    return ForwardRule(form, evidence, {"widest": widest, **pattern})


def dense(form: ForwardForm, evidence: Evidence, widest: Span, **pattern: Container[Any]) -> ForwardRule:
    """Calls of no other layout or order, and of no dropout."""
    return ForwardRule(form, evidence, {**KEEPS, "widest": widest, **pattern})


# single timings of one H200, before all forms were timed: benchmarks/findings.md
OF_DOCUMENTS = NotMeasured("single timings: 8k of D 128 gains 2 to 16 % over small blocks")
OF_ONE_SEQUENCE = NotMeasured("single timings: one sequence of 128 to 1,024 gains 17 to 35 % (D 64 and 96: 3 to 10)")
OF_HALF_FULL = NotMeasured("single timings: behind a mask 15 to 25 %, as the second round's tiles are half full")
OF_32K = NotMeasured("single timings: 32k loses 2 to 3 % by blocks that stay")
OF_LONG_LINES = NotMeasured("single timings: causal 8k of ALiBi loses 7 % by blocks that stay")
OF_UNDRAWN = NotMeasured("at this D blocks that stay go by a fixed stride, and tiles that a mask cuts differ")
AS_DILATED_88 = NotMeasured("as a dilated window of D 88, which loses 11 % by blocks that stay")
AS_EVER = NotMeasured("as it was")

# fmt: off
TABLE: tuple[ForwardRule, ...] = (
    every(WIDE, NotMeasured("the only one"), Span(256, BEYOND)),
    every(FEW, NotMeasured("a model of 205 timed calls: `TimeOfReading`"), work=(Rounds.FEW_ROWS,)),
    # one short sequence: tiles of 64 queries, each with an SM of its own
    every(ALONE, OF_ONE_SEQUENCE, Span(0, 96), **ONE, length=Span(128, 1152)),
    every(ALONE, OF_ONE_SEQUENCE, Span(96, 192), **ONE, length=Span(0, 1152)),
    every(ALONE, OF_ONE_SEQUENCE, Span(192, 256), **ONE, length=Span(0, 2304)),
    every(ALONE, OF_HALF_FULL, Span(128, 192), **HALF_FULL, length=Span(0, 1152)),
    every(ALONE, OF_HALF_FULL, Span(192, 256), **HALF_FULL, length=Span(0, 2304)),
    # documents by ids
    dense(DOCUMENTS, fitted(1, 1.047), TO_128, **OF_IDS, length=Span(4224, BEYOND)),
    dense(SMALL, fitted(5, 1.078), Span(0, 128), mask=(MaskKind.DOCUMENTS,)),
    # D up to 64
    dense(SMALL, AS_EVER, Span(0, 96), work=(Rounds.FEW_ROUNDS,), seen=Span(0, 1152), sectors=(True,)),
    dense(GUESSES_STAYS, fitted(5, 1.004), TO_64, **UNMASKED, seen=Span(0, 512), fills=(True,)),
    dense(SMALL, fitted(14, 1.049), TO_64, seen=Span(0, 512), sectors=(True,)),
    dense(SMALL, fitted(3, 1.038), TO_64, mods=(ModsKind.PAIRS,), seen=Span(0, 2304)),
    dense(GUESSES_STAYS, fitted(23, 1.051), TO_64, **UNMASKED, seen=Span(0, 16384)),
    dense(GUESSES, AS_DILATED_88, TO_64, **DILATED, seen=Span(512, 4224)),
    dense(GUESSES_STAYS, fitted(18, 1.045), TO_64, **MASKED, seen=Span(0, 4224)),
    dense(GUESSES, OF_32K, TO_64, **UNMASKED),
    dense(GUESSES, AS_EVER, TO_64, **MASKED),
    # D up to 96
    dense(GUESSES_STAYS, fitted(6, 1.007), TO_96, **UNMASKED, seen=Span(1152, BEYOND)),
    dense(GUESSES_STAYS, fitted(6, 1.040), TO_96, **MASKED, length=Span(512, 1152)),
    dense(GUESSES, fitted(6, 1.032), TO_96, **MASKED, length=Span(1152, BEYOND)),
    dense(SMALL, AS_EVER, TO_96, mods=(ModsKind.PAIRS,), seen=Span(0, 1152), sectors=(True,)),
    dense(LARGE, OF_UNDRAWN, TO_96, mask=MASKS, length=Span(1152, BEYOND)),
    dense(STAYS, fitted(14, 1.066), TO_96),
    # D up to 128
    dense(GUESSES_STAYS, fitted(3, 1.054), TO_128, **LINES, square=(True,), seen=Span(512, 2304)),
    dense(GUESSES, OF_LONG_LINES, TO_128, **LINES, square=(True,), seen=Span(2304, BEYOND)),
    dense(GUESSES_STAYS, fitted(5, 0.993), TO_128, **UNMASKED, square=(True,), seen=Span(2304, BEYOND)),
    dense(GUESSES_STAYS, fitted(12, 1.013), TO_128, **BOUNDED, square=(True,), seen=Span(1152, 4224)),
    dense(GUESSES, AS_EVER, TO_128, **BOUNDED, square=(True,), seen=Span(4224, BEYOND)),
    dense(STAYS, fitted(23, 1.070), TO_128, seen=Span(0, 4224)),
    # wider
    dense(STAYS, fitted(12, 1.200), TO_192),
    dense(LARGE, fitted(2, 1.127), Span(128, 224), mask=MASKS, length=Span(1152, BEYOND)),
    dense(STAYS, fitted(17, 1.148), Span(128, 224)),
    dense(STAYS, fitted(25, 1.070), TO_256, square=(True,)),
    # other layouts, a fixed order, dropout: the sweep has no shapes of them
    every(LARGE, AS_EVER, layout=("paged",)),
    every(SMALL, AS_EVER, Span(0, 96), mask=(MaskKind.DOCUMENTS,)),
    every(SMALL, AS_EVER, Span(96, 128), mask=(MaskKind.DOCUMENTS,), order=("any",)),
    every(SMALL, AS_EVER, Span(0, 64), seen=Span(0, 2304)),
    every(SMALL, AS_EVER, Span(64, 96), seen=Span(0, 1152)),
    every(STAYS, AS_EVER, Span(96, 128), layout=("packed",)),
    every(STAYS, AS_EVER, Span(96, 128), layout=("dense",), seen=Span(0, 4224)),
    every(LARGE, AS_EVER),
)
# fmt: on


FORMS = tuple(dict.fromkeys(row.form for row in TABLE if row.form not in (WIDE, FEW)))  # those that compete


# what each form can cut, none of it a matter of speed
CAN: dict[str, tuple[Pattern, ...]] = {
    "wide": ({"widest": Span(256, BEYOND)},),
    "few": ({"widest": Span(0, 256), "work": (Rounds.FEW_ROWS,)},),
    "documents": (DENSE | OF_IDS | {"widest": Span(0, 128)},),
    "small": (
        {"widest": Span(0, 96), "layout": ("dense", "packed", "mixed")},
        {"widest": Span(0, 128), "layout": ("dense", "packed", "mixed"), "order": ("any", "fixed")},
    ),
    "alone": (DENSE,),
    "large": ({},),
    "guesses": (
        KEEPS | {"widest": Span(0, 128), "mask": (MaskKind.NONE,)},
        KEEPS | {"widest": Span(0, 128), "mask": ONE_RUN, "packs": (False,)},
    ),
}
COMPETE: Pattern = {"widest": Span(0, 256), "work": tuple(w for w in Rounds if w is not Rounds.FEW_ROWS)}


def serves(form: ForwardForm, call: CallClass) -> bool:
    """Whether a form can cut calls of a class."""
    competes = form in (WIDE, FEW) or matches(call, COMPETE)
    return competes and any(matches(call, can) for can in CAN["guesses" if form.guesses else form.kind])


def row_of(call: CallClass) -> ForwardRule:
    """The first one that a call's class is in."""
    return next(row for row in TABLE if matches(call, row.pattern))
