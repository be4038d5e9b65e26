"""Which form the Hopper forward of a call has, and its blocks: rows of `forward.json`, with what was measured.

To change a row: `python -m benchmarks.sweep`, see docs/design.md. Figures in "why" are of one H200, in turns.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from ..fused.planning.call_class import CallClass
from ..fused.planning.tables import Table, first, matches, table
from ..fused.tiles.scheduler import Scheduler
from .tiling import FILE, GUESSING, RowSteps


@dataclasses.dataclass(frozen=True)
class ForwardForm:
    """How a call is cut; `forward_forms` has the tiling of each.

    few: one tile of rows, as many bytes of keys on their way as memory needs. small: one warpgroup a block, two or
    three blocks on an SM. alone: one warpgroup, alone on it. large: two or three warpgroups that share K and
    V. wide: D above 256.

    `guesses`: rows take the maximum before a tile for the tile's own. `stays`: blocks draw one tile after the other.
    """

    kind: Literal["few", "small", "alone", "large", "wide"]
    guesses: bool = False
    stays: bool = False

    @property
    def kernel(self) -> str:
        return GUESSING if self.guesses else "forward"

    def __str__(self) -> str:
        return self.kind + ", guesses" * self.guesses + ", stays" * self.stays

    @staticmethod
    def named(words: str) -> ForwardForm:
        kind, *flags = words.split(", ")
        fields: dict[str, Any] = {"kind": kind, **dict.fromkeys(flags, True)}
        return ForwardForm(**fields)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A block of `warpgroups`, of which an SM has `blocks`; a tile has up to so many `keys`.

    `scheduler`: how tiles come to blocks that stay; `stays`: whether they do whatever the form says.
    """

    kind: Literal["three blocks", "two blocks", "alone", "three warpgroups", "two warpgroups"]
    warpgroups: int
    blocks: int = 1
    keys: int = 128
    scheduler: Scheduler = Scheduler.STRIDE
    stays: bool = False

    @staticmethod
    def of(said: dict[str, Any]) -> Shape:
        return Shape(**said | {"scheduler": Scheduler[said.get("scheduler", "STRIDE")]})


TABLE: Table[ForwardForm] = table(FILE, "forms", ForwardForm.named)
SERVES: Table[ForwardForm] = table(FILE, "serves", ForwardForm.named)  # what a form can cut, no matter of speed
BLOCKS: Table[Shape] = table(FILE, "blocks", Shape.of)
PACKS: Table[float] = table(FILE, "packs", float)  # heads share tiles if these are at most so many of those they have
STEPS: Table[RowSteps] = table(FILE, "steps", lambda said: RowSteps(**said))  # what rows do from tile to tile
FORMS = tuple(dict.fromkeys(row.says for row in TABLE if row.says.kind not in ("wide", "few")))  # those that compete
# where a batch-invariant tile's keys find no registers, or a warpgroup more makes 16-bit numbers of bytes
LESS = {"three blocks": Shape("two blocks", 1, blocks=2, keys=64), "three warpgroups": Shape("two warpgroups", 2)}


def serves(form: ForwardForm, call: CallClass) -> bool:
    """Whether a form can cut calls of a class."""
    wanted = dataclasses.replace(form, stays=False)
    return any(row.says == wanted and matches(call, row.pattern) for row in SERVES)


def shape_of(form: ForwardForm, call: CallClass) -> Shape:
    return first(BLOCKS, call, kind=form.kind)


def steps_of(form: ForwardForm, shape: Shape, call: CallClass) -> RowSteps:
    return first(STEPS, call, block="guesses" if form.guesses else shape.kind)
