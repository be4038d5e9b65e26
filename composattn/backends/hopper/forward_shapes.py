"""What a block of a Hopper forward is, and what its rows do from tile to tile: two tables, by form and class of a call.

Of each the first row that a call's class matches is taken. Figures: one H200, in turns.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from ..fused.planning.call_class import BEYOND, CallClass, MaskKind, ModsKind
from ..fused.tiles.patterns import Pattern, Span, first
from ..fused.tiles.scheduler import Scheduler
from .forward_table import ForwardForm
from .tiling import FROM_FIRST, GUESSING, RowSteps

Kind = Literal["three blocks", "two blocks", "alone", "three warpgroups", "two warpgroups", "documents"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A block of `warpgroups`, of which an SM has `blocks`; a tile has up to so many `keys`.

    `scheduler`: how tiles come to blocks that stay; `stays`: whether they do whatever the form says.
    """

    kind: Kind
    warpgroups: int
    blocks: int = 1
    keys: int = 128
    scheduler: Scheduler = Scheduler.STRIDE
    stays: bool = False

    def kernel(self, form: ForwardForm) -> str:
        return GUESSING if form.guesses else FROM_FIRST if self.kind == "documents" else "forward"


TO_64, TO_96, WIDE, ABOVE_192 = Span(0, 64), Span(0, 96), Span(128, 256), Span(192, 256)
PLAIN, PAIRS, DROPOUT = (ModsKind.PLAIN,), (ModsKind.PAIRS,), (ModsKind.DROPOUT,)
# not what a score mod reads at (q, kv), which waits in registers, as numbers of keys and the words of dropout do (63
# spilled with D 64)
LIGHT = tuple(m for m in ModsKind if m not in (ModsKind.PAIRS, ModsKind.DROPOUT, ModsKind.WEIGHED))
MASKED: Pattern = {"mask": tuple(m for m in MaskKind if m is not MaskKind.NONE)}
DRAWN = (64, 128, 192, 256)  # D whose blocks that stay draw their tiles; others were not timed so
SHORT: Pattern = {
    "mods": PLAIN, "mask": (MaskKind.NONE, MaskKind.BOUNDS), "layout": ("dense",), "order": ("any",),
    "length": Span(0, 512),
}  # fmt: skip
FEW: Pattern = {"length": Span(0, 128)}  # two tiles of 64 keys
WINDOW: Pattern = {
    "mods": (ModsKind.PLAIN, ModsKind.DROPOUT), "mask": (MaskKind.BOUNDS, MaskKind.TESTED), "seen": Span(0, 512),
    "length": Span(1152, BEYOND),
}  # fmt: skip

THREE_BLOCKS, TWO_BLOCKS = Shape("three blocks", 1, blocks=3, keys=64), Shape("two blocks", 1, blocks=2, keys=64)
THREE, TWO, ALONE = Shape("three warpgroups", 3), Shape("two warpgroups", 2), Shape("alone", 1)
# where a batch-invariant tile's keys find no registers, or a warpgroup more makes 16-bit numbers of bytes
LESS = {"three blocks": TWO_BLOCKS, "three warpgroups": TWO}


# fmt: off
SHAPES: dict[str, tuple[tuple[Shape, Pattern], ...]] = {
    "small": (
        (dataclasses.replace(THREE_BLOCKS, stays=True), SHORT | {"widest": (64,)}),  # causal 128 to 512: 9 to 15 %
        (THREE_BLOCKS, SHORT | {"widest": TO_96}),
        (THREE_BLOCKS, WINDOW | {"widest": TO_96}),
        (THREE_BLOCKS, FEW | {"widest": TO_96}),
        (THREE_BLOCKS, {"mods": PAIRS, "widest": TO_96}),  # 37 spills with 96 columns of a table
        (dataclasses.replace(THREE_BLOCKS, keys=96), {"widest": TO_64}),
        (THREE_BLOCKS, {"widest": TO_96}),
        (TWO_BLOCKS, {}),
    ),
    "alone": (
        (dataclasses.replace(ALONE, keys=64), {"widest": ABOVE_192}),
        (dataclasses.replace(ALONE, keys=64), FEW),
        (ALONE, {}),
    ),
    "documents": (
        # 128 keys gain 2 to 16 % of 8k; drawn late, twelve documents lose 3 %, eight causal ones 4
        (Shape("documents", 2, scheduler=Scheduler.EARLY, stays=True), {}),
    ),
    "large": (
        (dataclasses.replace(THREE, scheduler=Scheduler.LATE), {"widest": (64,), "mods": LIGHT}),
        (THREE, {"widest": TO_96, "mods": LIGHT}),
        # D 256 has room for 80 keys; 64 cost less at a mask's edges (1 to 2.5 % of 8k)
        (dataclasses.replace(TWO, keys=64, scheduler=Scheduler.LATE), MASKED | {"widest": (256,)}),
        (dataclasses.replace(TWO, keys=64), MASKED | {"widest": ABOVE_192}),
        (dataclasses.replace(TWO, scheduler=Scheduler.LATE), {"widest": DRAWN}),
        (TWO, {}),
    ),
}

STEPS: dict[str, tuple[tuple[RowSteps, Pattern], ...]] = {
    "three blocks": ((RowSteps(True, "first"), {}),),  # no other softmax is under its products (D 64: 1 to 3 %)
    "two blocks": ((RowSteps(), {}),),
    "documents": ((RowSteps(False, "first"), {}),),
    "guesses": (
        # anew D 96 gains 1 %, D 64 1 to 2 of causal 4k and more; with no mask D 64 loses 2
        (RowSteps(), {"dv": TO_64, "mods": PLAIN, "mask": (MaskKind.NONE,)}),
        (RowSteps(written="anew"), {"dv": TO_96, "mods": PLAIN}),
        # anew 8k gains 3 %; behind half of the exponentials 0 to 5 from 4k on; early, by 3 and 6 deviating ones 1 to 3
        (RowSteps(True, "half", "anew"), {"dv": Span(96, 128), "mods": PLAIN}),
        (RowSteps(), {}),  # ALiBi loses 2 % anew, soft caps 3
    ),
    "three warpgroups": (
        # three warpgroups fill each other's gaps; two gain from a shorter turn
        (RowSteps(True), {}),
    ),
    "two warpgroups": (
        # D 128 gains 3 to 5 % up to 4k by the first exponential, a window of 1,024 7, D 192 and 256 0 to 2
        (RowSteps(True, "first"), {"dv": WIDE, "mods": PLAIN}),
        (RowSteps(False, "first"), {"mods": PLAIN}),
        # what is read at (q, kv) gains 3 % by the first exponential, 1 to 3 anew
        (RowSteps(True, "first", "anew"), {"dv": WIDE, "mods": PAIRS}),
        (RowSteps(False, "first", "anew"), {"mods": PAIRS}),
        (RowSteps(True), {"dv": WIDE}),  # by the first exponential a soft cap loses 2 %, ALiBi 1
        (RowSteps(), {}),
    ),
    "alone": (
        (RowSteps(True), {"dv": WIDE, "mods": DROPOUT}),
        (RowSteps(), {"mods": DROPOUT}),
        (RowSteps(True, "first", "anew"), {"dv": WIDE, "mods": PAIRS}),
        (RowSteps(False, "first", "anew"), {"mods": PAIRS}),
        (RowSteps(True, "first"), {"dv": WIDE}),
        (RowSteps(False, "first"), {}),
    ),
}
# fmt: on


def shape_of(form: ForwardForm, call: CallClass) -> Shape:
    return first(SHAPES[form.kind], call)


def steps_of(form: ForwardForm, shape: Shape, call: CallClass) -> RowSteps:
    return first(STEPS["guesses" if form.guesses else shape.kind], call)
