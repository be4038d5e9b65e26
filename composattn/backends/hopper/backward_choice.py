"""Which tiling the Hopper backward of a call has: by its class two rows, by these a form, by both its fields.

Tables are those of `backward.json`, with what was measured. `TILES` says what a tile is, `BLOCKS` whether a block stays
for several; other tables say the fields of a tiling, by name. To change a row: `python -m benchmarks.sweep`, see
docs/design.md. Figures in "why" are of one H200.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.compiling import tuned
from ..fused.planning.call_class import CallClass, Facts, Finders, class_of
from ..fused.planning.tables import Table, all_of, file_of, first, row_of, table
from ..fused.tiles.coverage import all_are_seen
from ..fused.tiles.target import Target
from ..fused.tiles.tiling import Chosen, fitting
from .backward_tiling import FILE, ExchangeBackwardTiling, HopperBackwardTiling, HopperPairBackwardTiling
from .tiling import ROWS

KEYS = 128  # of a tile
AT_A_DOCUMENT = 8  # pieces of its tiles, or heads, that run together, next to those of the tile behind it
Blocks = Literal["a block a tile", "blocks stay", "a block a tile, clears"]  # dQ, beside its first query tiles
HeadsOf = tuple[int, int | None]  # query heads of a piece, 0: all; key/value heads together, None: as L2 holds


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardClass(CallClass):
    """Backward calls that are cut alike.

    `group`: query heads of a key/value head. `ratio`: so many times as many queries as keys, of dense calls.
    `key_tiles`: of a sequence, which may all add to a part of dQ. `pairs`: a tensor is read at each pair, or a test
    computes as much, of no wider V than K. `largest`: queries of the largest tile for which registers are left, found
    by compiling; above D 128, where tiles have 64, keys. `seen_by_all`: some tile of keys visits each query tile.
    """

    group: int
    ratio: int
    key_tiles: int
    pairs: bool
    largest: int
    seen_by_all: bool


@dataclasses.dataclass(frozen=True)
class Tile:
    """What of a call is one piece of work, see `KINDS`.

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


class BackwardForm(NamedTuple):
    """How a call is cut."""

    tile: Tile
    blocks: Blocks

    def __str__(self) -> str:
        return f"{self.tile}, {self.blocks}"


# by kind: the tiling, fields of it, and of what columns are whole multiples
KINDS: dict[str, tuple[type[HopperBackwardTiling], dict[str, Any], int]] = {
    "keys apart": (HopperBackwardTiling, {"tile_n": KEYS}, 32),
    "shared keys": (HopperBackwardTiling, {"tile_n": ROWS, "kernel": "backward_wide"}, 32),
    "exchange": (ExchangeBackwardTiling, {"tile_n": 2 * ROWS}, 32),
    "halves": (HopperPairBackwardTiling, {"tile_n": ROWS}, 64),
}
NAMED = {name: Tile(name, **said) for name, said in file_of(FILE)["values"]["tiles"].items()}
TILES: Table[Tile] = table(FILE, "tiles", NAMED.__getitem__)
BLOCKS: Table[Blocks] = table(FILE, "blocks")
# what a call must be, that a tile can be its: none of the tables' rules that only speed decides
SERVES: Table[Tile] = table(FILE, "serves", NAMED.__getitem__)
FORMS = tuple(itertools.starmap(BackwardForm, itertools.product((row.says for row in SERVES), get_args(Blocks))))
OF_CLASS: dict[str, Table[Any]] = {name: table(FILE, name) for name in ("pairs", "largest")}
# fields by call and form; and of fields that take room those to try, of which the first is taken that fits
FIELDS: dict[str, Table[Any]] = {
    name: table(FILE, name) for name in ("dq_leaves", "bends_early", "tries_first", "distances", "written", "dq_begins")
}
STAYS: Table[list[dict[str, Any]]] = table(FILE, "stays")
# columns of V and K that may wait in registers, none of which spills (`benchmarks.fit`): they are read once a tile of
# keys, not once a query tile, 1 to 22 % of what passes shared memory's port
RESIDENT: Table[int] = table(FILE, "resident")
HEADS: Table[list[Any]] = table(FILE, "heads")  # a rule, and its numbers
AT_LAST: Table[Any] = table(FILE, "at_last")  # heads of a fixed order's last section, see `BackwardTiling`


class BackwardFacts(Facts):
    """Facts of a backward; `group_bytes`: what the queries of a key/value head read and add to."""

    more: ClassVar[Finders] = {
        **Facts.more,
        "group_bytes": lambda f: f.problem.group * f.problem.q_len * (2 * (f.d + f.dv) + 4 * f.d),
    }


def backward_class(problem: Problem, program: Program, target: Target, deterministic: bool) -> BackwardClass:
    """The class of a backward whose dQ is summed in any order, or in a fixed one."""
    call = class_of(problem, program, target, "backward", rows=KEYS, deterministic=deterministic)
    return BackwardClass(
        **vars(call),
        group=problem.group,
        ratio=problem.q_len // max(1, problem.kv_len) if problem.layout.is_dense else 1,
        key_tiles=_tiles(problem),
        pairs=call.d >= call.dv and first(OF_CLASS["pairs"], call),
        largest=first(OF_CLASS["largest"], call),
        seen_by_all=all_are_seen(problem, program),
    )


def serves(form: BackwardForm, call: BackwardClass) -> bool:
    """Whether a form can cut calls of a class."""
    return form.tile in set(all_of(SERVES, call, blocks=form.blocks))


def choose_backward(problem: Problem, program: Program, target: Target, deterministic: bool) -> Chosen:
    """Tiles of the backward kernel, and their order; `deterministic`: dQ is summed in a fixed order."""
    call = backward_class(problem, program, target, deterministic)
    tile, blocks = row_of(TILES, call), row_of(BLOCKS, call)
    facts, others = BackwardFacts(problem, program, target, call), (form for form in FORMS if serves(form, call))
    said = f"tiles: {tile.says}; {tile.evidence}\n    blocks: {blocks.says}; {blocks.evidence}"
    own = BackwardForm(tile.says, blocks.says)
    return tuned.chosen(facts, own, others, said, lambda form: tiling_of_form(form, facts))


def tiling_of_form(form: BackwardForm, facts: Facts) -> HopperBackwardTiling:
    """A call's tiling by one of the forms."""
    tile, target = form.tile, facts.target
    kind, fixed, step = KINDS[tile.kind]
    cut = {"kind": tile.kind, "queries": tile.queries, "dq": tile.dq, "blocks": form.blocks}
    fields: dict[str, Any] = {
        **{name: first(rows, facts, **cut) for name, rows in FIELDS.items()},
        **heads_of(facts, fixed["tile_n"], max(1, target.sms // kind.sharing)),
        **fixed,
        "tile_m": tile.queries,
        "d": -(-facts.d // step) * step,
        "dv": -(-facts.dv // step) * step,
    }
    # K too only where a tile has 64 queries
    fields["resident"] = min(first(RESIDENT, facts, **cut), fields["dv"] + fields["d"] * (tile.queries == ROWS))
    return fitting((kind(**fields | more) for more in first(STAYS, facts, **cut)), target)


# Which heads run together, and of how many query heads a block sums: what meets in L2. Where tiles of keys differ in
# length, blocks drift apart, at the end over all heads of their group: more queries than L2 holds. Cut in pieces of
# some heads they stay near each other, and even out where they are few


def _documents(facts: Facts, heads: int, at_once: int, by: str = "pieces") -> HeadsOf:
    """Splits of a group's tiles, so many `heads` each, fewer where key/value heads are few; 0: all heads.

    So many pieces, or heads of a group, run `at_once`.
    """
    group = facts.problem.group
    pieces = max(-(-group // (heads or group)), -(-AT_A_DOCUMENT // facts.problem.kv_heads))
    pieces = max(1, min(pieces, group // 2))
    return -(-group // pieces), max(1, at_once // {"pieces": pieces, "group": group}[by])


def _many(facts: Facts, together: int | None = None) -> HeadsOf:
    """Pieces of four heads, three or half of them; of one where these make less than 1.2 rounds: 0.7 of the time.

    A section has two rounds of blocks, of a power of two of heads; packed sequences, cut anew at each call, `together`.
    """
    group, sms, tiles = facts.problem.group, facts.target.sms, _tiles(facts.problem)
    several = -(-group // next((n for n in (4, 3) if group % n == 0), 2))
    blocks = tiles * facts.problem.kv_heads * (1 if together else facts.problem.batch)
    pieces = next((n for n, rounds in ((several, 1.9), (group // 2, 1.2)) if blocks * n >= rounds * sms), group)
    return -(-group // pieces), together or _power_of_two(2 * sms / (tiles * pieces))


def _tiles(problem: Problem, keys: int = KEYS) -> int:
    """Tiles of keys of a head; of packed sequences those of all."""
    return max(1, -(-problem.kv_len // keys))


def _power_of_two(number: float) -> int:
    """The next one: each number of heads is another kernel."""
    return 1 << max(0, round(math.log2(number)))


# "one round": key/value heads that fill the SMs once
RULES: dict[str, Callable[..., HeadsOf]] = {
    "so many": lambda facts, together: (0, together),
    "one round": lambda facts: (0, max(1, round(facts.target.sms / _tiles(facts.problem)))),
    "documents": _documents,
    "many": _many,
}


def heads_of(facts: Facts, keys: int, at_once: int) -> dict[str, int | None]:
    """How many query heads a split of a tile of keys has, how many key/value heads run together, and at last.

    `at_once`: tiles of so many `keys` that run at once.
    """
    problem, tiles = facts.problem, _tiles(facts.problem, keys)
    rule, *numbers = first(HEADS, facts)
    a_piece, together = RULES[rule](facts, *numbers)
    fields = {"heads_a_piece": a_piece, "heads_together": problem.schedule.heads_together or together}
    at_last = first(AT_LAST, facts, rounds=problem.batch * problem.kv_heads * tiles / at_once)
    if at_last == "a round":  # it fills the SMs, or its longest tiles end alone: 1.05
        fields["heads_together"], at_last = 1, _power_of_two(at_once / tiles)
    return {**fields, "heads_at_last": at_last}
