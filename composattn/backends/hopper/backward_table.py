"""Which form the Hopper backward of a call has: two tables, whose rows say of which calls, and what was measured.

`TILES` says what a tile is, `BLOCKS` whether a block stays for several. Of each the first row that a call's class
matches is taken. A row's evidence is the run that timed every form of its shapes, or why it stands there with none.
To change a row: `python -m benchmarks.sweep`, see docs/design.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from ..fused.planning.call_class import BEYOND, MaskKind, ModsKind, Rounds
from ..fused.tiles.patterns import Pattern, Span, matches
from .backward_class import BackwardClass
from .evidence import Evidence, Measured, NotMeasured

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Tile:
    """What of a call is one piece of work; `backward_forms` has the tiling of each.

    keys apart: 64 keys a warpgroup, of 128, and so many `queries`. shared keys: two warpgroups have 64 keys, one dV and
    one dK. exchange: two blocks have 64 keys each, and exchange dS. halves: two blocks share the columns of 64 keys.

    `dq`: leaves from registers, through shared memory "in bulk" (as in a fixed order always), or there by a "claim".
    `passes`: a warpgroup passes by query tiles that see none of its keys.
    """

    kind: Literal["keys apart", "shared keys", "exchange", "halves"]
    queries: int = 64
    dq: Literal["registers", "in bulk", "claim"] = "registers"
    passes: bool = False

    def __str__(self) -> str:
        if self.kind != "keys apart":
            return self.kind
        dq = "" if self.dq == "registers" else f", dQ {self.dq}"
        return f"{self.queries} queries{dq}{', passes' * self.passes}"


Blocks = Literal["a block a tile", "blocks stay", "a block a tile, clears"]  # dQ, beside its first query tiles


class BackwardForm(NamedTuple):
    """How a call is cut."""

    tile: Tile
    blocks: Blocks

    def __str__(self) -> str:
        return f"{self.tile}, {self.blocks}"


@dataclasses.dataclass(frozen=True)
class BackwardRule(Generic[T]):
    """Calls of all classes that are in the pattern, and in no row before."""

    says: T
    evidence: Evidence
    pattern: Pattern


def fitted(shapes: int, gain: float) -> Measured:
    """One H200, commit 74da48e, 120 shapes."""
    return Measured("sweeps/h200-backward-fit.json", shapes, gain)


QUERIES_64, QUERIES_80, QUERIES_128 = (Tile("keys apart", queries) for queries in (64, 80, 128))
PASSES, IN_BULK = Tile("keys apart", passes=True), Tile("keys apart", dq="in bulk")
CLAIMS, SENDS_80 = Tile("keys apart", 80, "claim"), Tile("keys apart", 80, "in bulk")
SHARED, EXCHANGE, HALVES = Tile("shared keys"), Tile("exchange"), Tile("halves")
LEAVE: Blocks = "a block a tile"
CLEAR: Blocks = "a block a tile, clears"
STAY: Blocks = "blocks stay"

TO_64, TO_96, TO_128, TO_256 = Span(0, 64), Span(64, 96), Span(96, 128), Span(224, 256)
NARROW, WIDE, WIDEST = Span(0, 128), Span(128, 256), Span(256, BEYOND)
TO_1K, TO_2K, TO_4K = Span(0, 576), Span(0, 1152), Span(0, 2304)
FROM_3K, FROM_4K = Span(1600, BEYOND), Span(2304, BEYOND)
ANY, FIXED, DENSE, PACKED = ("any",), ("fixed",), ("dense",), ("packed",)
YES, NO = (True,), (False,)
PLAIN: Container[Any] = (ModsKind.PLAIN,)
CLAIMED: Pattern = {"largest": (80,), "square": YES, "mask": (MaskKind.ENDS,), "order": ANY, "seen": Span(768, 1600)}
FEW_TILES: Pattern = {"order": ANY, "work": (Rounds.AT_ONCE,)}
NARROW_WINDOW: Pattern = {"order": ANY, "mask": (MaskKind.BOUNDS,), "seen": Span(0, 256)}
TORN: Pattern = {"mods": PLAIN, "mask": (MaskKind.READ, MaskKind.DOCUMENTS), "largest": (64,)}
LONG: Pattern = {"mods": PLAIN, "order": ANY, "layout": DENSE, "group": Span(0, 5), "length": Span(16384, BEYOND)}
BOUNDED = MaskKind.NONE, MaskKind.ENDS, MaskKind.BOUNDS, MaskKind.RUNS
RUN = MaskKind.BOUNDS, MaskKind.RUNS
UNREAD = MaskKind.ENDS, MaskKind.BOUNDS, MaskKind.RUNS, MaskKind.TESTED
DOCUMENTS = MaskKind.DOCUMENTS, MaskKind.WHOLE
LINES = ModsKind.LINE, ModsKind.LEARNED
UNSCORED: Pattern = {"mods": (ModsKind.PLAIN, ModsKind.DROPOUT)}
CURVES: Container[Any] = (ModsKind.OF_SCORE, ModsKind.OTHER, ModsKind.LEARNED_PAIRS)


def tile(says: Tile, evidence: Evidence, widest: Span, **pattern: Container[Any]) -> BackwardRule[Tile]:
    return BackwardRule(says, evidence, {"widest": widest, **pattern})


def blocks(says: Blocks, evidence: Evidence, widest: Span, **pattern: Container[Any]) -> BackwardRule[Blocks]:
    return BackwardRule(says, evidence, {"widest": widest, **pattern})


# single timings of one H200: benchmarks/findings.md
THE_ONLY_ONE = NotMeasured("the only one")
NO_REGISTERS = NotMeasured("the only one for which registers are left")
OF_128_KEYS = NotMeasured("single timings: up to 406 tokens lose 11 to 21 % by pairs, which visit 128 keys")
OF_CLAIMS = NotMeasured("single timings: 2k gains 4 to 6 %, 1k and 8k lose")
OF_80 = NotMeasured("single timings: in a fixed order 1k to 4k gain 2 to 4 %, windows lose 2, short packed ones 2 to 5")
OF_WHOLE = NotMeasured("single timings: full documents by ids gain 7 % by 80 queries; causal ones lose 1 to 4")
OF_HALVES = NotMeasured("single timings: many query tiles see one half of 128 keys; causal 1k gains 0.6 %, 4k loses 2")
OF_LISTS = NotMeasured("16 registers spilled in blocks that stay, documents by offsets lost 5 %")
OF_LONG = NotMeasured("single timings: 24k and 32k gain 1 to 3 % by blocks that leave, up to 16k loses 0 to 3")
OF_CURVES = NotMeasured("single timings: score mods of 128 queries lose 2 to 3 % by blocks that stay")
STAYS_FIXED = NotMeasured("single timings: documents by ids gain 4 to 5 %, short packed ones 2 to 5, D 96 2 to 9")
AT_64_FIXED = NotMeasured("single timings: D 64 of 1k and 2k gains 2 to 5 % by blocks that stay, 8k loses 3")
AT_128_FIXED = NotMeasured("single timings: soft caps gain 3 to 4 % by blocks that stay, windows 3, neighbourhoods 7")
LEAVES_FIXED = NotMeasured("single timings: blocks that stay lose 1 to 16 %")
AS_EVER = NotMeasured("as it was")

# fmt: off
TILES: tuple[BackwardRule[Tile], ...] = (
    tile(HALVES, THE_ONLY_ONE, WIDEST),
    # D above 128
    tile(SHARED, NO_REGISTERS, WIDE, largest=(64,)),
    tile(EXCHANGE, fitted(2, 1.273), WIDE, square=NO),
    tile(EXCHANGE, fitted(8, 1.218), TO_256),
    tile(EXCHANGE, fitted(1, 1.232), WIDE, mask=(MaskKind.NONE,)),
    tile(EXCHANGE, fitted(5, 1.084), WIDE, group=Span(1, BEYOND)),
    tile(SHARED, fitted(2, 1.121), WIDE, seen=TO_1K),
    tile(EXCHANGE, AS_EVER, WIDE),
    # D up to 64
    tile(QUERIES_64, fitted(1, 1.033), TO_64, mods=LINES),
    tile(QUERIES_64, fitted(5, 1.185), TO_64, fills=NO),
    tile(QUERIES_128, fitted(30, 1.093), TO_64, largest=(128,)),
    # D 128
    tile(SENDS_80, OF_WHOLE, NARROW, largest=(80,), mask=(MaskKind.WHOLE,)),
    tile(SENDS_80, fitted(8, 1.066), NARROW, largest=(80,), mask=(MaskKind.NONE,)),
    tile(CLAIMS, fitted(4, 1.035), NARROW, **CLAIMED),
    tile(SENDS_80, fitted(1, 1.036), NARROW, largest=(80,), mask=(MaskKind.ENDS,), seen=FROM_3K),
    tile(SENDS_80, OF_80, NARROW, largest=(80,), mask=(MaskKind.ENDS,), order=FIXED),
    tile(SENDS_80, AS_EVER, NARROW, largest=(80,), seen=FROM_4K),
    tile(SENDS_80, OF_80, NARROW, largest=(80,), order=FIXED, layout=PACKED, seen=Span(1152, BEYOND)),
    # single timings: tables gain 7 % (D 96: 18), neighbourhoods 10, biases 12 and 2; D 64 loses 1 to 2
    tile(IN_BULK, fitted(1, 1.000), Span(64, 128), pairs=YES),
    tile(PASSES, fitted(2, 1.019), TO_128, **UNSCORED, d=(128,), mask=(MaskKind.READ, *DOCUMENTS)),
    tile(PASSES, fitted(5, 1.013), TO_128, **UNSCORED, d=(128,), seen=TO_2K, mask=UNREAD),
    # D 96
    tile(PASSES, OF_HALVES, TO_96, **UNSCORED, d=(96,), mask=(MaskKind.DOCUMENTS,)),
    tile(PASSES, OF_HALVES, Span(64, 128), **UNSCORED, d=(96,), layout=PACKED, order=ANY, seen=TO_2K,
         mask=(MaskKind.BOUNDS, MaskKind.RUNS, MaskKind.READ, MaskKind.TESTED)),
    tile(QUERIES_64, AS_EVER, NARROW),
)

BLOCKS: tuple[BackwardRule[Blocks], ...] = (
    blocks(LEAVE, THE_ONLY_ONE, Span(128, BEYOND)),
    # dQ in any order
    blocks(LEAVE, OF_LISTS, NARROW, order=ANY, mask=(MaskKind.LISTED,)),
    blocks(STAY, OF_CLAIMS, NARROW, **CLAIMED),
    blocks(LEAVE, fitted(4, 1.045), Span(64, 128), **FEW_TILES, group=Span(5, BEYOND), length=Span(0, 1600)),
    blocks(LEAVE, fitted(2, 1.014), TO_128, **TORN, order=ANY, d=(128,), group=(4, 5)),
    blocks(LEAVE, fitted(2, 1.016), TO_64, **NARROW_WINDOW, length=Span(1152, BEYOND)),
    blocks(LEAVE, fitted(2, 1.146), NARROW, order=ANY, ratio=Span(7, BEYOND), length=Span(1600, BEYOND)),
    blocks(LEAVE, OF_CURVES, TO_64, order=ANY, largest=(128,), fills=YES, mods=CURVES),
    blocks(CLEAR, OF_LONG, Span(32, 64), **LONG, mask=(MaskKind.NONE,)),
    blocks(CLEAR, OF_LONG, TO_128, **LONG, mask=(MaskKind.NONE, MaskKind.ENDS)),
    blocks(STAY, fitted(51, 1.032), NARROW, order=ANY),
    # in a fixed order
    blocks(LEAVE, LEAVES_FIXED, TO_128, mask=(MaskKind.NONE, MaskKind.WHOLE)),
    blocks(STAY, STAYS_FIXED, NARROW, mask=DOCUMENTS),
    blocks(STAY, STAYS_FIXED, NARROW, mods=PLAIN, mask=BOUNDED, layout=PACKED, seen=TO_2K),
    blocks(STAY, AT_64_FIXED, TO_64, mods=PLAIN, mask=BOUNDED, seen=TO_4K),
    blocks(STAY, STAYS_FIXED, TO_96, mods=PLAIN, mask=BOUNDED),
    blocks(STAY, AT_128_FIXED, TO_128, mods=(ModsKind.OF_SCORE,), mask=(MaskKind.ENDS,), group=(1,)),
    blocks(STAY, AT_128_FIXED, TO_128, mods=PLAIN, pairs=YES),
    blocks(STAY, AT_128_FIXED, TO_128, mods=PLAIN, mask=(MaskKind.TESTED, MaskKind.OPAQUE), layout=DENSE, group=(1,)),
    blocks(STAY, AT_128_FIXED, TO_128, mods=PLAIN, mask=RUN, layout=DENSE, group=(1,), seen=TO_4K),
    blocks(LEAVE, LEAVES_FIXED, NARROW),
)
# fmt: on


def rows_of(call: BackwardClass) -> tuple[BackwardRule[Tile], BackwardRule[Blocks]]:
    """The first of each table that a call's class is in."""
    return _first(TILES, call), _first(BLOCKS, call)


def form_of(call: BackwardClass) -> BackwardForm:
    """What these rows say."""
    tile_row, blocks_row = rows_of(call)
    return BackwardForm(tile_row.says, blocks_row.says)


PASSED = tuple(m for m in MaskKind if m not in (MaskKind.NONE, MaskKind.OPAQUE, MaskKind.LISTED))
# what a call must be, that a tile can be its: none of the table's rules that only speed decides
_ANY_DQ: Pattern = {"widest": NARROW, "order": ANY}
SERVED: dict[Tile, Pattern] = {
    HALVES: {"widest": WIDEST},
    SHARED: {"widest": WIDE},
    EXCHANGE: {"widest": WIDE, "largest": (128,)},
    QUERIES_64: {"widest": NARROW},
    QUERIES_128: {"widest": TO_64, "largest": (128,)},
    SENDS_80: {"widest": NARROW, "largest": (80,)},
    CLAIMS: {**_ANY_DQ, "largest": (80,), "square": YES},
    IN_BULK: {**_ANY_DQ, "widest": Span(64, 128), "pairs": YES},
    PASSES: {**UNSCORED, "widest": Span(64, 128), "d": (96, 128), "mask": PASSED},
}
FORMS = tuple(BackwardForm(tile, blocks) for tile in SERVED for blocks in (STAY, LEAVE, CLEAR))


def serves(form: BackwardForm, call: BackwardClass) -> bool:
    """Whether a form can cut calls of a class."""
    wide = form.tile in (HALVES, SHARED, EXCHANGE)
    return matches(call, SERVED[form.tile]) and (not wide or form.blocks == LEAVE)


def _first(table: tuple[BackwardRule[T], ...], call: BackwardClass) -> BackwardRule[T]:
    return next(row for row in table if matches(call, row.pattern))
