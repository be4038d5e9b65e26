"""What kind of call a Hopper backward is, and which form it has: tables of `backward.json`, with what was measured.

`TILES` says what a tile is, `BLOCKS` whether a block stays for several. Of each the first row that a call's class
matches is taken. To change a row: `python -m benchmarks.sweep`, see docs/design.md. Figures in "why" are of one H200.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal, NamedTuple, get_args

from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.planning.call_class import CallClass, class_of
from ..fused.planning.tables import Row, Table, all_of, file_of, first, row_of, table
from ..fused.tiles.target import Target
from .backward_tiling import FILE

KEYS = 128  # of a tile
PAIRS: Table[bool] = table(FILE, "pairs")
LARGEST: Table[int] = table(FILE, "largest")  # found by compiling


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardClass(CallClass):
    """Backward calls that are cut alike.

    `group`: query heads of a key/value head. `ratio`: so many times as many queries as keys, of dense calls.
    `pairs`: a tensor is read at each pair, or a test computes as much, of no wider V than K. `largest`: queries of the
    largest tile for which registers are left; above D 128, where tiles have 64, keys.
    """

    group: int
    ratio: int
    pairs: bool
    largest: int


def backward_class(problem: Problem, program: Program, target: Target, deterministic: bool) -> BackwardClass:
    """The class of a backward whose dQ is summed in any order, or in a fixed one."""
    call = class_of(problem, program, target, "backward", rows=KEYS, deterministic=deterministic)
    return BackwardClass(
        **vars(call),
        group=problem.group,
        ratio=problem.q_len // max(1, problem.kv_len) if problem.layout.is_dense else 1,
        pairs=call.d >= call.dv and first(PAIRS, call),
        largest=first(LARGEST, call),
    )


@dataclasses.dataclass(frozen=True)
class Tile:
    """What of a call is one piece of work; `backward_choice` has the tiling of each.

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
NAMED = {name: Tile(name, **said) for name, said in file_of(FILE)["values"]["tiles"].items()}


class BackwardForm(NamedTuple):
    """How a call is cut."""

    tile: Tile
    blocks: Blocks

    def __str__(self) -> str:
        return f"{self.tile}, {self.blocks}"


TILES: Table[Tile] = table(FILE, "tiles", NAMED.__getitem__)
BLOCKS: Table[Blocks] = table(FILE, "blocks")
# what a call must be, that a tile can be its: none of the tables' rules that only speed decides
SERVES: Table[Tile] = table(FILE, "serves", NAMED.__getitem__)
FORMS = tuple(itertools.starmap(BackwardForm, itertools.product((row.says for row in SERVES), get_args(Blocks))))


def rows_of(call: BackwardClass) -> tuple[Row[Tile], Row[Blocks]]:
    """The first of each table that a call's class is in."""
    return row_of(TILES, call), row_of(BLOCKS, call)


def form_of(call: BackwardClass) -> BackwardForm:
    """What these rows say."""
    tile, blocks = rows_of(call)
    return BackwardForm(tile.says, blocks.says)


def serves(form: BackwardForm, call: BackwardClass) -> bool:
    """Whether a form can cut calls of a class."""
    return form.tile in set(all_of(SERVES, call, blocks=form.blocks))
