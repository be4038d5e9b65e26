"""Which heads of a backward run together, and of how many query heads a block sums: what meets in L2.

Where tiles of keys differ in length, blocks drift apart, at the end over all heads of their group: more queries than L2
holds. Cut in pieces of some heads they stay near each other, and even out where they are few. Rules' numbers, and which
calls they are of, are in `backward.json`, of an H200 and tiles of 128 keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..fused.planning.call_class import Facts
from ..fused.planning.tables import Table, first, table
from .backward_table import KEYS
from .backward_tiling import FILE

AT_A_DOCUMENT = 8  # pieces of its tiles, or heads, that run together, next to those of the tile behind it
IN_ORDER_AT_A_DOCUMENT = 16  # query heads, in a fixed order: fewer tiles of one head wait for each other

HeadsOf = tuple[int, int | None]  # query heads of a piece, 0: all; key/value heads together, None: as L2 holds


def _so_many(facts: Facts, together: int | None) -> HeadsOf:
    return 0, together


def _one_round(facts: Facts) -> HeadsOf:
    """Key/value heads that fill the SMs once."""
    return 0, max(1, round(facts.target.sms / _tiles(facts, KEYS)))


def _whole(facts: Facts) -> HeadsOf:
    return 0, IN_ORDER_AT_A_DOCUMENT * 128 // max(64, facts.problem.head_dim, facts.problem.head_dim_v)


def _documents(facts: Facts, heads: int, at_once: int, by: str = "pieces") -> HeadsOf:
    """Splits of a group's tiles, so many `heads` each, fewer where key/value heads are few; 0: all heads.

    So many pieces, or heads of a group, run `at_once`.
    """
    group = facts.problem.group
    pieces = max(-(-group // (heads or group)), -(-AT_A_DOCUMENT // facts.problem.kv_heads))
    pieces = max(1, min(pieces, group // 2))
    return -(-group // pieces), max(1, at_once // {"pieces": pieces, "group": group}[by])


def _many(facts: Facts, together: int | None = None) -> HeadsOf:
    """Pieces of four heads, three, or half of them. Sections are of two rounds of blocks, of a power of two of heads.

    `together`: so many instead, of packed sequences, which have other rows at each call; their tiles lie together.
    """
    group, sms, tiles = facts.problem.group, facts.target.sms, _tiles(facts, KEYS)
    pieces = -(-group // next((n for n in (4, 3) if group % n == 0), 2))
    if tiles * facts.problem.kv_heads * (1 if together else facts.problem.batch) * pieces < 1.9 * sms:
        pieces = group // 2
    return -(-group // pieces), together or _power_of_two(2 * sms / (tiles * pieces))


def _tiles(facts: Facts, keys: int) -> int:
    """Tiles of keys of a head; of packed sequences those of all."""
    return max(1, -(-facts.problem.kv_len // keys))


def _power_of_two(number: float) -> int:
    """The next one: each number of heads is another kernel."""
    return 1 << max(0, round(math.log2(number)))


RULES: dict[str, Callable[..., HeadsOf]] = {
    "so many": _so_many, "one round": _one_round, "whole": _whole, "documents": _documents, "many": _many,
}  # fmt: skip
HEADS: Table[list[Any]] = table(FILE, "heads")  # a rule, and its numbers
AT_LAST: Table[Any] = table(FILE, "at_last")  # heads of a fixed order's last section, see `BackwardTiling`
A_ROUND = "a round"


def heads_of(facts: Facts, keys: int, at_once: int) -> dict[str, int | None]:
    """How many query heads a split of a tile of keys has, how many key/value heads run together, and at last.

    `at_once`: tiles of so many `keys` that run at once.
    """
    problem, tiles = facts.problem, _tiles(facts, keys)
    rule, *numbers = first(HEADS, facts)
    a_piece, together = RULES[rule](facts, *numbers)
    fields = {"heads_a_piece": a_piece, "heads_together": problem.schedule.heads_together or together}
    rounds = problem.batch * problem.kv_heads * tiles / at_once
    at_last = first(AT_LAST, facts, rounds=rounds)
    if at_last == A_ROUND:  # it fills the SMs, or its longest tiles end alone: 1.05
        fields["heads_together"], at_last = 1, _power_of_two(at_once / tiles)
    return {**fields, "heads_at_last": at_last}
