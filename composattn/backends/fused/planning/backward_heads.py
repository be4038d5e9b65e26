"""Which heads of a backward run together, and of how many query heads a block sums: what meets in L2.

Where tiles of keys differ in length, blocks drift apart, at the end over all heads of their group: more queries than L2
holds. Cut in pieces of some heads they stay near each other, and even out where they are few. Numbers are those of an
H200, of tiles of 128 keys. Of each table the first row that a call's class matches is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ....call.problem import Problem
from ..tiles.patterns import Pattern, Span, first
from ..tiles.target import Target
from ..tiles.traits import padded
from .call_class import BEYOND, CallClass, MaskKind

L2 = 50 << 20  # bytes
TOGETHER = 16 << 20  # bytes of the heads that run together, if their tiles of keys meet the same queries
# Of documents only some are at work at a time. Eight causal ones (2 sequences of 8k, 17 MB a head) gain 2 % by three
# heads, twelve 0 to 0.6; by five 0.5 and -3, by six -3 and -8, by all 16 -28. D 96 gains 1 % by four
TOGETHER_OF_DOCUMENTS = 56 << 20
AT_A_DOCUMENT = 8  # pieces of its tiles, or heads, that run together, next to those of the tile behind it
IN_ORDER_AT_A_DOCUMENT = 16  # query heads, in a fixed order: fewer tiles of one head wait for each other
TILE = 128  # keys

HeadsOf = tuple[int, int | None]  # query heads of a piece, 0: all; key/value heads together, None: as L2 holds


def _all(problem: Problem, target: Target, deterministic: bool = False) -> HeadsOf:
    """Few key/value heads at a time where the queries of one are more than L2 holds; else as many as it holds.

    Then so many as fill the SMs once. With 32 heads on 4 (8k) two are 2.6 % faster than four, with which a call moved 8
    times the bytes of DRAM that it has to. In a fixed order one is 24 % faster than four, two 15 %.
    """
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    few = problem.group * problem.q_len * (2 * (d + dv) + 4 * d) <= L2
    if few or problem.group == 1 or not problem.layout.is_dense:
        return 0, None
    return 0, 1 if deterministic else max(1, round(target.sms / max(1, -(-problem.kv_len // TILE))))


def _all_in_order(problem: Problem, target: Target) -> HeadsOf:
    return _all(problem, target, deterministic=True)


def _whole_in_order(problem: Problem, target: Target) -> HeadsOf:
    """Eight of 64 on 8 are 2.5 % faster than four."""
    return 0, IN_ORDER_AT_A_DOCUMENT * 128 // max(64, problem.head_dim, problem.head_dim_v)


def _documents_in_order(problem: Problem, target: Target) -> HeadsOf:
    """In a fixed order tiles of a head that run together wait for each other.

    With two or three heads at a time, as many as L2 holds, all tiles of a document ran together: full ones took 1.34
    times as long as in any order, with 16 query heads 1.06 (D 64 with 32 heads 1.07, with 16 1.12), causal ones 1.09
    and 1.03. Pieces of two heads of 8: 64 on 8 1.16 to 1.04, 32 on 4 and 16 on 2 1.5 to 1.01.
    """
    return _in_pieces(problem, _pieces_of_documents(problem, 2)), max(1, IN_ORDER_AT_A_DOCUMENT // problem.group)


def _documents(problem: Problem, target: Target) -> HeadsOf:
    """Blocks that run together are at a few documents of many heads."""
    pieces = _pieces_of_documents(problem, 4)
    return _in_pieces(problem, pieces), max(1, AT_A_DOCUMENT // pieces)


def _narrow_documents(problem: Problem, target: Target) -> HeadsOf:
    """D 64 and 96: four heads gain 2 to 7 %, eight 2 to 6, pieces of some heads 1 more or 3 less."""
    pieces = _pieces_of_documents(problem, problem.group)
    return _in_pieces(problem, pieces), max(1, AT_A_DOCUMENT // pieces // 2)


def _many(problem: Problem, target: Target) -> HeadsOf:
    """8 heads gain 3 to 14 % by four each, a little less by two; 5 lose 2. Sections are of two rounds of blocks."""
    group, packed = problem.group, not problem.layout.is_dense
    entries = max(1, -(-problem.kv_len // TILE))  # tiles of keys of a head, of packed sequences those of all
    pieces = -(-group // next((n for n in (4, 3) if group % n == 0), 2))
    if entries * problem.kv_heads * (1 if packed else problem.batch) * pieces < 1.9 * target.sms:
        pieces = group // 2
    # a power of 2, as each is another kernel; 2 of packed sequences, which have other rows at each call
    rounds = 2 * target.sms / (entries * pieces)
    return _in_pieces(problem, pieces), 2 if packed else 1 << max(0, round(math.log2(rounds)))


def _pieces_of_documents(problem: Problem, heads: int) -> int:
    """Splits of a group's tiles, so many `heads` each where there are 8, fewer where key/value heads are few."""
    pieces = max(-(-problem.group // heads) if problem.group >= 8 else 1, -(-AT_A_DOCUMENT // problem.kv_heads))
    return max(1, min(pieces, problem.group // 2))


def _in_pieces(problem: Problem, pieces: int) -> int:
    return -(-problem.group // pieces) if pieces > 1 else 0


FIXED, NONE, BOUNDED = ("fixed",), (MaskKind.NONE,), (MaskKind.BOUNDS, MaskKind.ENDS)
SHORT: Pattern = {"layout": ("packed",), "seen": Span(0, 1152)}  # packed sequences of 2k and less, if causal
DENSE_96: Pattern = {"widest": Span(0, 96), "layout": ("dense",)}
MANY_HEADS: Pattern = {"widest": Span(64, BEYOND), "group": Span(5, BEYOND)}
# fmt: off
HEADS: tuple[tuple[Callable[[Problem, Target], HeadsOf], Pattern], ...] = (
    (_whole_in_order, {"order": FIXED, "mask": (MaskKind.WHOLE,)}),
    (_whole_in_order, SHORT | {"order": FIXED, "mask": NONE}),
    (_documents_in_order, {"order": FIXED, "mask": (MaskKind.DOCUMENTS,)}),
    (_documents_in_order, SHORT | {"order": FIXED}),
    (_all_in_order, {"order": FIXED}),
    (_all, {"group": (1,)}),
    (_all, {"mask": (MaskKind.NONE, MaskKind.WHOLE)}),  # full documents gain nothing
    (_narrow_documents, DENSE_96 | {"mask": (MaskKind.DOCUMENTS,)}),
    (_documents, {"mask": (MaskKind.DOCUMENTS,)}),
    (_documents, SHORT),
    (_many, MANY_HEADS | {"layout": ("packed",)}),
    (_many, MANY_HEADS | {"layout": ("dense",), "mask": BOUNDED}),
    (_all, {}),
)
BYTES: tuple[tuple[int, Pattern], ...] = (
    (TOGETHER, {"widest": Span(0, 64)}),
    (TOGETHER, {"mask": NONE}),
    (TOGETHER_OF_DOCUMENTS, {"mask": (MaskKind.DOCUMENTS, MaskKind.WHOLE)}),
    (TOGETHER_OF_DOCUMENTS, SHORT),
    (TOGETHER, {}),
)
# fmt: on


def heads_of(call: CallClass, problem: Problem, target: Target) -> HeadsOf:
    """How many query heads a split of a tile of keys has, and how many key/value heads run together."""
    a_piece, together = first(HEADS, call)(problem, target)
    return a_piece, problem.schedule.heads_together or together


def bytes_together(call: CallClass) -> int:
    """Bytes of the heads that run together, of 64 queries a tile in any order."""
    return first(BYTES, call)
