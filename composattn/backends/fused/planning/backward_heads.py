"""Which heads of a backward run together, and of how many query heads a block sums: what meets in L2.

Where tiles of keys differ in length, blocks drift apart, at the end over all heads of their group: more queries than L2
holds. Cut in pieces of some heads they stay near each other, and even out where they are few. Numbers are those of an
H200, of tiles of 128 keys.
"""

from __future__ import annotations

import math

from ....analysis.program import Program
from ....call.problem import Problem
from ..tiles.coverage import differ, has_documents_apart, has_whole_documents
from ..tiles.segments import falls_apart
from ..tiles.target import Target
from ..tiles.traits import padded

L2 = 50 << 20  # bytes
TOGETHER = 16 << 20  # bytes of the heads that run together, if their tiles of keys meet the same queries
# Of documents only some are at work at a time. Eight causal ones (2 sequences of 8k, 17 MB a head) gain 2 % by three
# heads, twelve 0 to 0.6; by five 0.5 and -3, by six -3 and -8, by all 16 -28. D 96 gains 1 % by four
TOGETHER_OF_DOCUMENTS = 56 << 20
SHORT = 2304  # queries that see a tile of keys, on average: of causal masks 4k tokens; half of it 2k
AT_A_DOCUMENT = 8  # pieces of its tiles, or heads, that run together, next to those of the tile behind it
IN_ORDER_AT_A_DOCUMENT = 16  # query heads, in a fixed order: fewer tiles of one head wait for each other
MANY_HEADS = 6  # of a group, whose tiles of keys are cut in pieces of some of them
TILE = 128  # keys

HeadsOf = tuple[int, int | None]  # query heads of a piece, 0: all; key/value heads together, None: as L2 holds


def heads_of(problem: Problem, program: Program, seen: float, target: Target, deterministic: bool) -> HeadsOf:
    """How many query heads a split of a tile of keys has, and how many key/value heads run together.

    `seen`: queries that see a tile of keys, on average.
    """
    if deterministic:
        documents = are_short(problem, seen) or has_documents_apart(problem, program)
        found = _documents_in_order(problem, program) if documents else None
    elif problem.group == 1 or program.mask is None:
        found = None
    elif _has_documents(problem, program, seen):
        found = _documents(problem, program)
    else:
        found = _many_heads(problem, program, target)
    return (0, _heads_together(problem, target, deterministic)) if found is None else found


def bytes_together(problem: Problem, program: Program, seen: float) -> int:
    """Bytes of the heads that run together, of 64 queries a tile in any order."""
    of_documents = _widest(problem) > 64 and _has_documents(problem, program, seen)
    return TOGETHER_OF_DOCUMENTS if of_documents and program.mask is not None else TOGETHER


def are_short(problem: Problem, seen: float) -> bool:
    """Whether sequences are packed ones of 2k and less, on average."""
    return _are_packed(problem) and seen <= SHORT / 2


def _documents(problem: Problem, program: Program) -> HeadsOf | None:
    """Blocks that run together are at a few documents of many heads. Full ones gain nothing.

    By ids at D 64 and 96 four heads gain 2 to 7 %, eight 2 to 6, pieces of some heads 1 more or 3 less.
    """
    narrow = _widest(problem) <= 96 and not _are_packed(problem)
    if has_whole_documents(problem, program) or (narrow and not has_documents_apart(problem, program)):
        return None
    pieces = _pieces_of_documents(problem, problem.group if narrow else 4)
    return _in_pieces(problem, pieces, AT_A_DOCUMENT // pieces // (2 if narrow else 1))


def _documents_in_order(problem: Problem, program: Program) -> HeadsOf:
    """In a fixed order tiles of a head that run together wait for each other.

    With two or three heads at a time, as many as L2 holds, all tiles of a document ran together: full ones took 1.34
    times as long as in any order, with 16 query heads 1.06 (D 64 with 32 heads 1.07, with 16 1.12), causal ones 1.09
    and 1.03. Pieces of two heads of 8: 64 on 8 1.16 to 1.04, 32 on 4 and 16 on 2 1.5 to 1.01. Of full ones that are as
    many key/value heads: eight of 64 on 8 are 2.5 % faster than four.
    """
    if program.mask is None or has_whole_documents(problem, program):
        together = IN_ORDER_AT_A_DOCUMENT * 128 // max(64, _widest(problem))
        return 0, problem.schedule.heads_together or together
    return _in_pieces(problem, _pieces_of_documents(problem, 2), IN_ORDER_AT_A_DOCUMENT // problem.group)


def _many_heads(problem: Problem, program: Program, target: Target) -> HeadsOf | None:
    """Heads of a split where tiles of keys differ: 8 heads gain 3 to 14 % by four each, a little less by two; 5 lose 2.

    Sections are of two rounds of blocks. None where that was not timed, or gains nothing: of fewer heads, and of equal
    tiles.
    """
    group, packed = problem.group, _are_packed(problem)
    if _widest(problem) <= 64 or group < MANY_HEADS or not (packed or differ(problem, program)):
        return None
    entries = max(1, -(-problem.kv_len // TILE))  # tiles of keys of a head, of packed sequences those of all
    pieces = -(-group // next((n for n in (4, 3) if group % n == 0), 2))
    tiles = entries * problem.kv_heads * (1 if packed else problem.batch)
    if tiles * pieces < 1.9 * target.sms:
        pieces = group // 2
    # a power of 2, as each is another kernel; 2 of packed sequences, which have other rows at each call
    rounds = 2 * target.sms / (entries * pieces)
    return _in_pieces(problem, pieces, 2 if packed else 1 << max(0, round(math.log2(rounds))))


def _heads_together(problem: Problem, target: Target, deterministic: bool) -> int | None:
    """Key/value heads at a time: few where the queries of one are more than L2 holds; else None.

    Then so many as fill the SMs once. With 32 heads on 4 (8k) two are 2.6 % faster than four, with which a
    call moved 8 times the bytes of DRAM that it has to. In a fixed order one is 24 % faster than four, two 15 %.
    """
    asked = problem.schedule.heads_together
    if asked is not None or problem.group == 1 or not problem.layout.is_dense:
        return asked
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    if problem.group * problem.q_len * (2 * (d + dv) + 4 * d) <= L2:
        return None
    return 1 if deterministic else max(1, round(target.sms / max(1, -(-problem.kv_len // TILE))))


def _pieces_of_documents(problem: Problem, heads: int) -> int:
    """Splits of a group's tiles, so many `heads` each where there are 8, fewer where key/value heads are few."""
    pieces = max(-(-problem.group // heads) if problem.group >= 8 else 1, -(-AT_A_DOCUMENT // problem.kv_heads))
    return max(1, min(pieces, problem.group // 2))


def _in_pieces(problem: Problem, pieces: int, together: int) -> HeadsOf:
    a_piece = -(-problem.group // pieces) if pieces > 1 else 0
    return a_piece, problem.schedule.heads_together or max(1, together)


def _has_documents(problem: Problem, program: Program, seen: float) -> bool:
    """Whether sequences are short packed ones, or fall apart."""
    return are_short(problem, seen) or falls_apart(problem, program)


def _are_packed(problem: Problem) -> bool:
    return problem.layout.q == problem.layout.kv == "packed"


def _widest(problem: Problem) -> int:
    return max(problem.head_dim, problem.head_dim_v)
