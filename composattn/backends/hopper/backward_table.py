"""Which form the Hopper backward of a call has: two tables of `backward.json`, with what was measured.

`TILES` says what a tile is, `BLOCKS` whether a block stays for several. Of each the first row that a call's class
matches is taken. To change a row: `python -m benchmarks.sweep`, see docs/design.md. Figures in "why" are of one H200.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from ..fused.planning.tables import Row, Table, file_of, matches, row_of, table
from .backward_class import BackwardClass
from .backward_tiling import FILE


@dataclasses.dataclass(frozen=True)
class Tile:
    """What of a call is one piece of work; `backward_forms` has the tiling of each.

    keys apart: 64 keys a warpgroup, of 128, and so many `queries`. shared keys: two warpgroups have 64 keys, one dV and
    one dK. exchange: two blocks have 64 keys each, and exchange dS. halves: two blocks share the columns of 64 keys.

    `dq`: leaves from registers, through shared memory "in bulk" (as in a fixed order always), or there by a "claim".
    """

    name: str
    kind: Literal["keys apart", "shared keys", "exchange", "halves"]
    queries: int = 64
    dq: Literal["registers", "in bulk", "claim"] = "registers"

    def __str__(self) -> str:
        return self.name


Blocks = Literal["a block a tile", "blocks stay", "a block a tile, clears"]  # dQ, beside its first query tiles
KINDS = {name: Tile(name, **said) for name, said in file_of(FILE)["values"]["tiles"].items()}


class BackwardForm(NamedTuple):
    """How a call is cut."""

    tile: Tile
    blocks: Blocks

    def __str__(self) -> str:
        return f"{self.tile}, {self.blocks}"


TILES: Table[Tile] = table(FILE, "tiles", KINDS.__getitem__)
BLOCKS: Table[Blocks] = table(FILE, "blocks", lambda said: said)
# what a call must be, that a tile can be its: none of the tables' rules that only speed decides
SERVES: Table[Tile] = table(FILE, "serves", KINDS.__getitem__)
STAY: Blocks = "blocks stay"
LEAVE: Blocks = "a block a tile"
CLEAR: Blocks = "a block a tile, clears"
FORMS = tuple(BackwardForm(row.says, blocks) for row in SERVES for blocks in (STAY, LEAVE, CLEAR))


def rows_of(call: BackwardClass) -> tuple[Row[Tile], Row[Blocks]]:
    """The first of each table that a call's class is in."""
    return row_of(TILES, call), row_of(BLOCKS, call)


def form_of(call: BackwardClass) -> BackwardForm:
    """What these rows say."""
    tile, blocks = rows_of(call)
    return BackwardForm(tile.says, blocks.says)


def serves(form: BackwardForm, call: BackwardClass) -> bool:
    """Whether a form can cut calls of a class."""
    return any(row.says == form.tile and matches(call, row.pattern, blocks=form.blocks) for row in SERVES)
