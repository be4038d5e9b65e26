"""What a call on an image takes, whole and in strips: a model fitted to timed calls, which decides between them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from .posed import Direction, Posed

Test = Literal["pairs", "words"]
SCORES = 128 * 128


class Tile(NamedTuple):
    """Queries and keys of a call's tiles; how many blocks of them run on an SM."""

    queries: int
    keys: int
    blocks: int = 1


class Cost(NamedTuple):
    """Microseconds of a block for a work tile: at its ends, and for each `SCORES` of visited tiles, hidden ones too.

    Those that are tested by `pairs`, and by `words`, as strips are. `evidence`: on one H200, microseconds of kernels.
    """

    ends: float
    pairs: float
    words: float
    evidence: str


# by direction, D and Dv at most
COSTS: dict[tuple[Direction, int], Cost] = {
    ("forward", 64): Cost(1.5, 7.5, 5.2, "7x7 of 64x64: strips of 8 36.7, whole 86; three blocks on an SM"),
    ("forward", 256): Cost(
        1.5, 3.3, 1.84, "13x13: 96 wide 83.7, whole 264; video of 32 wide 179.6, whole 373, 96 wide 303"
    ),
    ("backward", 64): Cost(3.5, 4.0, 4.0, "7x7 of 64x64: strips of 8 114.8, whole 157; of 16, by pairs, 141"),
    ("backward", 256): Cost(
        4.0, 5.5, 5.5, "13x13: 96 wide 239.6, by pairs of five steps 292, whole 486; video whole 513"
    ),
}


def microseconds(posed: Posed, visits: float, tile: Tile) -> float:
    """The time of a call, whole or in strips, of whose queries each computes scores with `visits` times 128 keys."""
    problem, strips = posed.problem, posed.problem.layout.strips
    widest = max(problem.head_dim, problem.head_dim_v)
    cost = next(cost for (direction, d), cost in COSTS.items() if direction == posed.direction and widest <= d)
    if posed.direction == "forward":
        tiles = problem.batch * problem.q_heads * -(-problem.q_len // tile.queries)
    else:
        tiles = problem.batch * problem.kv_heads * -(-problem.kv_len // tile.keys)
    scores = problem.batch * problem.q_heads * problem.q_len * visits * 128
    test = cost.pairs if strips is None else cost.words
    of_tile = cost.ends + test * scores / tiles / SCORES
    return max(1.0, tiles / (posed.target.sms * tile.blocks)) * of_tile
