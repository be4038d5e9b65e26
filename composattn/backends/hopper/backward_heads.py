"""Which heads of a backward run together, and of how many query heads a block sums: what meets in L2.

Where tiles of keys differ in length, blocks drift apart, at the end over all heads of their group: more queries than L2
holds. Cut in pieces of some heads they stay near each other, and even out where they are few. Rules' numbers, and which
calls they are of, are in `backward.json`, of an H200 and tiles of 128 keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from ...call.problem import Problem
from ..fused.planning.tables import Table, first, table
from ..fused.tiles.target import Target
from ..fused.tiles.traits import padded
from .backward_table import KEYS, BackwardClass
from .backward_tiling import FILE

L2 = 50 << 20  # bytes
AT_A_DOCUMENT = 8  # pieces of its tiles, or heads, that run together, next to those of the tile behind it
IN_ORDER_AT_A_DOCUMENT = 16  # query heads, in a fixed order: fewer tiles of one head wait for each other

HeadsOf = tuple[int, int | None]  # query heads of a piece, 0: all; key/value heads together, None: as L2 holds


def _all(problem: Problem, target: Target, few: int = 0) -> HeadsOf:
    """Few key/value heads at a time where the queries of one are more than L2 holds; else as many as it holds.

    So many as fill the SMs once, if none are said. With 32 heads on 4 (8k) two are 2.6 % faster than four, with which a
    call moved 8 times the bytes of DRAM that it has to.
    """
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    held = problem.group * problem.q_len * (2 * (d + dv) + 4 * d) <= L2
    if held or problem.group == 1 or not problem.layout.is_dense:
        return 0, None
    return 0, few or max(1, round(target.sms / max(1, -(-problem.kv_len // KEYS))))


def _whole(problem: Problem, target: Target) -> HeadsOf:
    return 0, IN_ORDER_AT_A_DOCUMENT * 128 // max(64, problem.head_dim, problem.head_dim_v)


def _documents(problem: Problem, target: Target, heads: int, at_once: int, by: str = "pieces") -> HeadsOf:
    """Splits of a group's tiles, so many `heads` each where there are 8, fewer where key/value heads are few.

    0: all heads. So many pieces, or heads of a group, run `at_once`.
    """
    group = problem.group
    pieces = max(-(-group // (heads or group)) if group >= 8 else 1, -(-AT_A_DOCUMENT // problem.kv_heads))
    pieces = max(1, min(pieces, group // 2))
    return _in_pieces(group, pieces), max(1, at_once // {"pieces": pieces, "group": group}[by])


def _many(problem: Problem, target: Target) -> HeadsOf:
    """Pieces of four heads, three, or half of them. Sections are of two rounds of blocks."""
    group, packed = problem.group, not problem.layout.is_dense
    entries = max(1, -(-problem.kv_len // KEYS))  # tiles of keys of a head, of packed sequences those of all
    pieces = -(-group // next((n for n in (4, 3) if group % n == 0), 2))
    if entries * problem.kv_heads * (1 if packed else problem.batch) * pieces < 1.9 * target.sms:
        pieces = group // 2
    # a power of 2, as each is another kernel; 2 of packed sequences, which have other rows at each call
    rounds = 2 * target.sms / (entries * pieces)
    return _in_pieces(group, pieces), 2 if packed else 1 << max(0, round(math.log2(rounds)))


def _in_pieces(group: int, pieces: int) -> int:
    return -(-group // pieces) if pieces > 1 else 0


RULES: dict[str, Callable[..., HeadsOf]] = {"all": _all, "whole": _whole, "documents": _documents, "many": _many}


def _rule(said: dict[str, Any]) -> Callable[[Problem, Target], HeadsOf]:
    return functools.partial(RULES[said["rule"]], **{name: value for name, value in said.items() if name != "rule"})


HEADS: Table[Callable[[Problem, Target], HeadsOf]] = table(FILE, "heads", _rule)
BYTES: Table[int] = table(FILE, "bytes", int)  # of the heads that run together


def heads_of(call: BackwardClass, problem: Problem, target: Target) -> HeadsOf:
    """How many query heads a split of a tile of keys has, and how many key/value heads run together."""
    a_piece, together = first(HEADS, call)(problem, target)
    return a_piece, problem.schedule.heads_together or together
