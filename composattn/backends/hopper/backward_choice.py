"""Which tiling the Hopper backward of a call has: by its facts two rows, by these a form, by both its fields.

Tables are those of `backward.json`, with what was measured. "tiles" says what a tile is, "blocks" whether a block stays
for several; other tables say the fields of a tiling, by name. To change a row: `python -m benchmarks.sweep`, see
docs/design.md. Figures in "why" are of one H200.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.compiling import tuned
from ..fused.planning.facts import BACKWARD, Facts, Finders
from ..fused.planning.tables import first, row_of, rows_of
from ..fused.tiles.target import Target
from ..fused.tiles.tiling import Chosen, fitting
from ..fused.tiles.traits import all_are_seen
from .backward_tiling import TABLES, ExchangeBackwardTiling, HopperBackwardTiling, HopperPairBackwardTiling
from .tiling import ROWS

KEYS = 128  # of a tile
AT_A_DOCUMENT = 8  # pieces of its tiles, or heads, that run together, next to those of the tile behind it
HeadsOf = tuple[int, int | None]  # query heads of a piece, 0: all; key/value heads together, None: as L2 holds


# by kind: the tiling, fields of it, and of what columns are whole multiples
KINDS: dict[str, tuple[type[HopperBackwardTiling], dict[str, Any], int]] = {
    "keys apart": (HopperBackwardTiling, {"tile_n": KEYS}, 32),
    "shared keys": (HopperBackwardTiling, {"tile_n": ROWS, "kernel": "backward_wide"}, 32),
    "exchange": (ExchangeBackwardTiling, {"tile_n": 2 * ROWS}, 32),
    "halves": (HopperPairBackwardTiling, {"tile_n": ROWS}, 64),
}
# What forms mean, by their words: of tiles and `blocks`, whether one stays, or clears dQ beside its first query tiles.
# What of a call is one piece of work is a `kind`: keys apart: 64 keys a warpgroup, of 128. shared keys: two warpgroups
# have 64 keys, one dV and one dK. exchange: two blocks have 64 keys each, and exchange dS. halves: two blocks share the
# columns of 64 keys. `dq` leaves from registers, through shared memory "in bulk" (as in a fixed order always), or there
# by a "claim". What a call must be, that a tile can be its, is in "serves": none of the tables' rules that only speed
# decides
FORMS: dict[str, dict[str, Any]] = {
    f"{tile.says['tile']}, {blocks.says}": {**tile.says, "blocks": blocks.says}
    for tile in TABLES["named"]
    for blocks in TABLES["blocks"]
}
# fields by call and form; those of "stays" take room: of several the first is taken that fits. Columns of V and K that
# wait in registers, "resident", are read once a tile of keys, not once a query tile: 1 to 22 % of what passes shared
# memory's port; none spills (`benchmarks.fit`)
FIELDS = "dq_leaves", "bends_early", "tries_first", "distances", "written", "dq_begins"
FINDERS: Finders = {
    **BACKWARD,
    # so many times as many queries as keys, of dense calls
    "ratio": lambda f: f.q_len // max(1, f.kv_len) if f.layout == "dense" else 1,
    # of a head, which may all add to a part of dQ; of packed sequences those of all
    "key_tiles": lambda f: max(1, -(-f.kv_len // KEYS)),
    # a tensor is read at each pair, or a test computes as much, of no wider V than K
    "pairs": lambda f: f.d >= f.dv and first(TABLES["pairs"], f),
    # queries of the largest tile for which registers are left, by compiling; above D 128, where tiles have 64, keys
    "largest": lambda f: first(TABLES["largest"], f),
    "seen_by_all": lambda f: all_are_seen(f.problem, f.program),  # some tile of keys visits each query tile
    # what the queries of a key/value head read and add to
    "group_bytes": lambda f: f.group * f.q_len * (2 * (f.d + f.dv) + 4 * f.d),
}


def backward_facts(problem: Problem, program: Program, target: Target, deterministic: bool) -> Facts:
    """A backward whose dQ is summed in any order, or in a fixed one."""
    return Facts(FINDERS, problem, program, target, rows=KEYS, deterministic=deterministic)


def serves(form: str, call: Facts) -> bool:
    """Whether a form can cut calls of a class."""
    return any(FORMS[form]["tile"] == row.says for row in rows_of(TABLES["serves"], call, blocks=FORMS[form]["blocks"]))


def choose_backward(problem: Problem, program: Program, target: Target, deterministic: bool) -> Chosen:
    """Tiles of the backward kernel, and their order; `deterministic`: dQ is summed in a fixed order."""
    call = backward_facts(problem, program, target, deterministic)
    tile, blocks = row_of(TABLES["tiles"], call), row_of(TABLES["blocks"], call)
    said = f"tiles: {tile.says}; {tile.evidence}\n    blocks: {blocks.says}; {blocks.evidence}"
    others = (form for form in FORMS if serves(form, call))
    return tuned.chosen(call, f"{tile.says}, {blocks.says}", others, said, tiling_of_form)


def tiling_of_form(form: str, call: Facts) -> HopperBackwardTiling:
    """A call's tiling by one of the forms."""
    cut = FORMS[form]
    kind, fixed, step = KINDS[cut["kind"]]
    fields: dict[str, Any] = {
        **{name: first(TABLES[name], call, **cut) for name in FIELDS},
        **heads_of(call, fixed["tile_n"], max(1, call.target.sms // kind.sharing)),
        **fixed,
        "tile_m": cut["queries"],
        "d": -(-call.d // step) * step,
        "dv": -(-call.dv // step) * step,
    }
    # K too only where a tile has 64 queries
    most = fields["dv"] + fields["d"] * (cut["queries"] == ROWS)
    fields["resident"] = min(first(TABLES["resident"], call, **cut), most)
    return fitting((kind(**fields | more) for more in first(TABLES["stays"], call, **cut)), call.target)


# Which heads run together, and of how many query heads a block sums: what meets in L2. Where tiles of keys differ in
# length, blocks drift apart, at the end over all heads of their group: more queries than L2 holds. Cut in pieces of
# some heads they stay near each other, and even out where they are few


def _documents(call: Facts, heads: int, at_once: int, by: str = "pieces") -> HeadsOf:
    """Splits of a group's tiles, so many `heads` each, fewer where key/value heads are few; 0: all heads.

    So many pieces, or heads of a group, run `at_once`.
    """
    pieces = max(-(-call.group // (heads or call.group)), -(-AT_A_DOCUMENT // call.kv_heads))
    pieces = max(1, min(pieces, call.group // 2))
    return -(-call.group // pieces), max(1, at_once // {"pieces": pieces, "group": call.group}[by])


def _many(call: Facts, together: int | None = None) -> HeadsOf:
    """Pieces of four heads, three or half of them; of one where these make less than 1.2 rounds: 0.7 of the time.

    A section has two rounds of blocks, of a power of two of heads; packed sequences, cut anew at each call, `together`.
    """
    group, sms, tiles = call.group, call.sms, call.key_tiles
    several = -(-group // next((n for n in (4, 3) if group % n == 0), 2))
    blocks = tiles * call.kv_heads * (1 if together else call.batch)
    pieces = next((n for n, rounds in ((several, 1.9), (group // 2, 1.2)) if blocks * n >= rounds * sms), group)
    return -(-group // pieces), together or _power_of_two(2 * sms / (tiles * pieces))


def _power_of_two(number: float) -> int:
    """The next one: each number of heads is another kernel."""
    return 1 << max(0, round(math.log2(number)))


# "one round": key/value heads that fill the SMs once
RULES: dict[str, Callable[..., HeadsOf]] = {
    "so many": lambda call, together: (0, together),
    "one round": lambda call: (0, max(1, round(call.sms / call.key_tiles))),
    "documents": _documents,
    "many": _many,
}


def heads_of(call: Facts, keys: int, at_once: int) -> dict[str, int | None]:
    """How many query heads a split of a tile of keys has, how many key/value heads run together, and at last.

    `at_once`: tiles of so many `keys` that run at once.
    """
    tiles, (rule, *numbers) = max(1, -(-call.kv_len // keys)), first(TABLES["heads"], call)
    a_piece, together = RULES[rule](call, *numbers)
    fields = {"heads_a_piece": a_piece, "heads_together": call.heads_together or together}
    at_last = first(TABLES["at_last"], call, rounds=call.batch * call.kv_heads * tiles / at_once)
    if at_last == "a round":  # it fills the SMs, or its longest tiles end alone: 1.05
        fields["heads_together"], at_last = 1, _power_of_two(at_once / tiles)
    return {**fields, "heads_at_last": at_last}
