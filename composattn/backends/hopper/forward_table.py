"""Which form the Hopper forward of a call has: a table whose rows say of which calls, and what was measured.

The first row that a call's class matches is taken. A row's evidence is the run that timed every form of its shapes, or
`NOT_MEASURED` with the reason for what stands there. To change a row: `python -m benchmarks.sweep`, see docs/design.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from ..fused.planning.call_class import BEYOND, CallClass, LayoutKind, Mask, Mods, Order, Work


@dataclasses.dataclass(frozen=True)
class Form:
    """How a call is cut; `forward_forms` has the tiling of each.

    few: one tile of rows, as many bytes of keys on their way as memory needs. small: one warpgroup a block, two or
    three blocks on a multiprocessor. alone: one warpgroup, alone on it. large: two or three warpgroups that share K and
    V. documents: two, and tiles of keys begin where documents do. wide: D above 256.

    `guesses`: rows take the maximum before a tile for the tile's own. `stays`: blocks draw one tile after the other.
    """

    kind: Literal["few", "small", "alone", "large", "documents", "wide"]
    guesses: bool = False
    stays: bool = False

    def __str__(self) -> str:
        return self.kind + ", guesses" * self.guesses + ", stays" * self.stays


@dataclasses.dataclass(frozen=True)
class Measured:
    """By `results`, a file in benchmarks/results: so many of its `shapes` are the row's.

    `gain`: geometric mean of the time of the best other form over this one's.
    """

    results: str
    shapes: int
    gain: float

    def __str__(self) -> str:
        return f"measured on {self.shapes} shapes: {self.gain - 1:+.1%} over the best other form ({self.results})"


@dataclasses.dataclass(frozen=True)
class NotMeasured:
    """By no run of all forms; what stands there is from single timings, or by likeness, as `why` says."""

    why: str

    def __str__(self) -> str:
        return f"not measured: {self.why}"


def fitted(shapes: int, gain: float) -> Measured:
    """One H200, commit 74da48e, 200 shapes."""
    return Measured("sweeps/h200-forward-fit.json", shapes, gain)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A pattern of classes, each field of which says what is in it; `seen`, `length`: more than, and up to."""

    form: Form
    evidence: Measured | NotMeasured
    widest: tuple[int, int] = (0, 256)
    mods: tuple[Mods, ...] = tuple(Mods)
    mask: tuple[Mask, ...] = tuple(Mask)
    layout: tuple[LayoutKind, ...] = ("dense", "packed", "paged", "mixed")
    order: tuple[Order, ...] = ("any", "fixed", "batch-invariant")
    work: tuple[Work, ...] = tuple(Work)
    seen: tuple[int, int] = (0, BEYOND)
    length: tuple[int, int] = (0, BEYOND)
    sectors: tuple[bool, ...] = (False, True)
    square: tuple[bool, ...] = (False, True)  # D and Dv are one on chip
    packs: tuple[bool, ...] = (False, True)
    fills: tuple[bool, ...] = (False, True)

    def matches(self, call: CallClass) -> bool:
        """Whether a call's class is in the row."""
        (more, most), (seen_more, seen_most), (longer, longest) = self.widest, self.seen, self.length
        return (
            more < call.widest <= most
            and seen_more < call.seen <= seen_most
            and longer < call.length <= longest
            and call.mods in self.mods
            and call.mask in self.mask
            and call.layout in self.layout
            and call.order in self.order
            and call.work in self.work
            and call.sectors in self.sectors
            and (call.d == call.dv) in self.square
            and call.packs in self.packs
            and call.fills in self.fills
        )


FEW, SMALL, ALONE, LARGE, WIDE = Form("few"), Form("small"), Form("alone"), Form("large"), Form("wide")
DOCUMENTS, STAYS = Form("documents"), Form("large", stays=True)
GUESSES, GUESSES_STAYS = Form("large", guesses=True), Form("large", guesses=True, stays=True)

TO_64, TO_96, TO_128, TO_160, TO_224, TO_256 = (0, 64), (64, 96), (96, 128), (128, 160), (192, 224), (224, 256)
MASKS = tuple(m for m in Mask if m is not Mask.NONE)
ONE_RUN = Mask.BOUNDS, Mask.TESTED, Mask.OPAQUE  # masks with which warpgroups pass by tiles of their own, and may guess
YES = (True,)
Pattern = dict[str, Any]
ANY_MODS: Pattern = {"mods": tuple(Mods)}
UNMASKED: Pattern = {"mods": (Mods.PLAIN,), "mask": (Mask.NONE,)}
OF_IDS: Pattern = {"mods": (Mods.PLAIN,), "mask": (Mask.DOCUMENTS,), "packs": (False,)}
BOUNDED: Pattern = {"mods": (Mods.PLAIN,), "mask": ONE_RUN, "packs": (False,)}
LINES: Pattern = {"mods": (Mods.LINE,), "mask": ONE_RUN, "packs": (False,)}
MASKED: Pattern = BOUNDED | {"mods": (Mods.PLAIN, Mods.LINE)}


def dense(form: Form, evidence: Measured | NotMeasured, widest: tuple[int, int], **pattern: Any) -> Row:
    """A row for dense calls in any order, without dropout."""
    mods = pattern.pop("mods", tuple(m for m in Mods if m is not Mods.DROPOUT))
    return Row(form=form, evidence=evidence, widest=widest, layout=("dense",), order=("any",), mods=mods, **pattern)


# single timings of one H200, before all forms were timed: benchmarks/findings.md
OF_DOCUMENTS = NotMeasured("single timings: 8k of D 128 gains 2 to 16 % over small blocks")
OF_ONE_SEQUENCE = NotMeasured("single timings: one sequence of 128 to 1,024 gains 17 to 35 % (D 64 and 96: 3 to 10)")
OF_HALF_FULL = NotMeasured("single timings: behind a mask 15 to 25 %, as the second round's tiles are half full")
OF_FEW_ROUNDS = NotMeasured("as it was: tiles of 64 queries leave less of a last round idle")
OF_32K = NotMeasured("single timings: 32k loses 2 to 3 % by blocks that stay")
OF_LONG_LINES = NotMeasured("single timings: causal 8k of ALiBi loses 7 % by blocks that stay")
OF_LONG_256 = NotMeasured("single timings: 8k gains 0.5 % by blocks that stay, of longer ones there are none")
OF_CURVES = NotMeasured("single timings: 2k gains 4 % by small blocks")
OF_UNDRAWN = NotMeasured("at this D blocks that stay go by a fixed stride, and tiles that a mask cuts differ")
AS_D_64 = NotMeasured("as D 64")
AS_EVER = NotMeasured("as it was")

# fmt: off
TABLE: tuple[Row, ...] = (
    Row(form=WIDE, evidence=NotMeasured("the only one"), widest=(256, BEYOND)),
    Row(form=FEW, evidence=NotMeasured("a model of 205 timed calls chooses, `TimeOfReading`"), work=(Work.FEW_ROWS,)),
    # one short sequence: tiles of 64 queries, each with a multiprocessor of its own
    dense(ALONE, OF_ONE_SEQUENCE, (0, 96), **ANY_MODS, work=(Work.AT_ONCE,), length=(128, 1152)),
    dense(ALONE, OF_ONE_SEQUENCE, (96, 192), **ANY_MODS, work=(Work.AT_ONCE,), length=(0, 1152)),
    dense(ALONE, OF_ONE_SEQUENCE, (192, 256), **ANY_MODS, work=(Work.AT_ONCE,), length=(0, 2304)),
    dense(ALONE, OF_HALF_FULL, (128, 192), **ANY_MODS, mask=MASKS, work=(Work.ROUND_AND_A_HALF,), length=(0, 1152)),
    dense(ALONE, OF_HALF_FULL, (192, 256), **ANY_MODS, mask=MASKS, work=(Work.ROUND_AND_A_HALF,), length=(0, 2304)),
    # documents by ids
    dense(DOCUMENTS, fitted(1, 1.047), TO_128, **OF_IDS, length=(4224, BEYOND)),
    dense(SMALL, fitted(5, 1.078), (0, 128), mask=(Mask.DOCUMENTS,)),
    # D up to 64
    dense(SMALL, OF_FEW_ROUNDS, (0, 96), work=(Work.FEW_ROUNDS,), seen=(0, 1152), sectors=YES),
    dense(GUESSES_STAYS, fitted(4, 1.058), TO_64, **LINES, seen=(256, 4224)),
    dense(GUESSES_STAYS, fitted(5, 1.004), TO_64, **UNMASKED, seen=(0, 512), fills=YES),
    dense(SMALL, fitted(13, 1.057), TO_64, seen=(0, 512), sectors=YES),
    dense(SMALL, fitted(3, 1.038), TO_64, mods=(Mods.PAIRS,), seen=(0, 2304)),
    dense(GUESSES_STAYS, fitted(23, 1.051), TO_64, **UNMASKED, seen=(0, 16384)),
    dense(GUESSES_STAYS, fitted(15, 1.042), TO_64, **MASKED, seen=(0, 4224)),
    dense(GUESSES, OF_32K, TO_64, **UNMASKED),
    dense(GUESSES, AS_EVER, TO_64, **MASKED),
    dense(SMALL, OF_CURVES, TO_64, seen=(0, 2304), sectors=YES),
    dense(LARGE, AS_EVER, TO_64),
    # D up to 96
    dense(GUESSES_STAYS, fitted(6, 1.007), TO_96, **UNMASKED, seen=(1152, BEYOND)),
    dense(GUESSES_STAYS, fitted(6, 1.040), TO_96, **MASKED, length=(512, 1152)),
    dense(GUESSES, fitted(6, 1.032), TO_96, **MASKED, length=(1152, BEYOND)),
    dense(SMALL, AS_D_64, TO_96, mods=(Mods.PAIRS,), seen=(0, 1152), sectors=YES),
    dense(LARGE, OF_UNDRAWN, TO_96, mask=MASKS, length=(1152, BEYOND)),
    dense(STAYS, fitted(14, 1.066), TO_96),
    # D up to 128
    dense(GUESSES_STAYS, fitted(3, 1.054), TO_128, **LINES, square=YES, seen=(512, 2304)),
    dense(GUESSES, OF_LONG_LINES, TO_128, **LINES, square=YES, seen=(2304, BEYOND)),
    dense(GUESSES_STAYS, fitted(5, 0.993), TO_128, **UNMASKED, square=YES, seen=(2304, BEYOND)),
    dense(GUESSES_STAYS, fitted(12, 1.013), TO_128, **BOUNDED, square=YES, seen=(1152, 4224)),
    dense(GUESSES, AS_EVER, TO_128, **BOUNDED, square=YES, seen=(4224, BEYOND)),
    dense(STAYS, fitted(23, 1.070), TO_128, seen=(0, 4224)),
    dense(STAYS, AS_EVER, TO_128, **UNMASKED),
    dense(LARGE, AS_EVER, TO_128),
    # wider
    dense(LARGE, fitted(2, 1.074), TO_160, seen=(1152, BEYOND)),
    dense(LARGE, fitted(2, 1.060), TO_224, seen=(1152, BEYOND)),
    dense(STAYS, fitted(27, 1.184), (128, 224)),
    dense(LARGE, OF_LONG_256, TO_256, **UNMASKED, length=(8448, BEYOND)),
    dense(STAYS, fitted(25, 1.070), TO_256, square=YES),
    dense(LARGE, NotMeasured("Q and O beside each other leave no room for 64 keys"), TO_256),
    # other layouts, a fixed order, dropout: the sweep has no shapes of them
    Row(form=LARGE, evidence=AS_EVER, layout=("paged",)),
    Row(form=SMALL, evidence=AS_EVER, widest=(0, 96), mask=(Mask.DOCUMENTS,)),
    Row(form=SMALL, evidence=AS_EVER, widest=(96, 128), mask=(Mask.DOCUMENTS,), order=("any",)),
    Row(form=SMALL, evidence=AS_EVER, widest=(0, 64), seen=(0, 2304)),
    Row(form=SMALL, evidence=AS_EVER, widest=(64, 96), seen=(0, 1152)),
    Row(form=STAYS, evidence=AS_EVER, widest=(96, 128), layout=("packed",)),
    Row(form=STAYS, evidence=AS_EVER, widest=(96, 128), layout=("dense",), seen=(0, 4224)),
    Row(form=LARGE, evidence=AS_EVER),
)
# fmt: on


FORMS = tuple(dict.fromkeys(row.form for row in TABLE if row.form not in (WIDE, FEW)))  # those that compete


def serves(form: Form, call: CallClass) -> bool:
    """Whether a form can cut calls of a class: none of the table's rules that only speed decides."""
    if call.widest > 256 or call.work is Work.FEW_ROWS:
        return form == (WIDE if call.widest > 256 else FEW)
    one_run = call.mask in ONE_RUN and not call.packs
    if form.guesses:
        dense = call.layout == "dense" and call.order == "any" and call.widest <= 128
        return dense and call.mods is not Mods.DROPOUT and (one_run or call.mask is Mask.NONE)
    if form.kind == "documents":
        by_ids = call.mask is Mask.DOCUMENTS and not call.packs and call.layout == "dense" and call.order == "any"
        return by_ids and call.mods is Mods.PLAIN and call.widest <= 128
    if form.kind == "small":
        return call.widest <= (96 if call.order == "batch-invariant" else 128) and call.layout != "paged"
    return form.kind != "alone" or (call.layout == "dense" and call.order == "any")


def row_of(call: CallClass) -> Row:
    """The first one that a call's class is in."""
    return next(row for row in TABLE if row.matches(call))
