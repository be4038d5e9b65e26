"""What a score mod multiplies the score by before all else, as scales of 8-bit tensors do, by how often it changes.

Scales are not negative, and a softmax takes no others. What a user's own score mod multiplies by may be: it comes
behind the scales of k and of q, and is none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from .expr import DEEP, Dep, Expr, Rate, score, walk
from .rebuilt import substitute

Rates = Callable[[Expr], Rate]


class Scales(NamedTuple):
    """Factors of the score by how often they change: with the head, with the row, or with a run of keys.

    `keys`: of a run, 1 where something changes with each key; 0 where nothing changes along keys. `values`: the factor
    of V, where that does.
    """

    heads: tuple[Expr, ...] = ()
    rows: tuple[Expr, ...] = ()
    runs: tuple[Expr, ...] = ()
    values: Expr | None = None
    keys: int = 0

    @property
    def by_key(self) -> bool:
        return self.keys == 1

    @property
    def of_score(self) -> tuple[Expr, ...]:
        return (*self.heads, *self.rows, *self.runs)


RUNS = (128, 64, 32)  # keys: of fewer, each key has numbers of its own
MOST = 2  # factors of a score: the scales of k and of q, both of which a call with a score mod has


def scales_of(node: Expr | None, values: Expr | None, tile_n: int, rate: Rates) -> tuple[Expr | None, Scales]:
    """(what else the score mod `node` does, None: nothing; its factors and those of `values`, in tiles of such keys).

    `rate`: how often a node has to be computed. Nothing that changes with each pair is a factor here, nor is anything
    behind the first two.
    """
    rest, factors = (None, ()) if node is None else split_factors(node, lambda y: rate(y) is not Rate.ELEMENT)
    found: dict[Rate, list[Expr]] = defaultdict(list)
    for factor in factors:
        found[rate(factor)].append(factor)
    of_values = values if values is not None and values.deps & Dep.KV else None
    runs = found[Rate.COLUMN]
    keys = _longest_runs([*runs, *filter(None, [of_values])], tile_n)
    heads = (*found[Rate.CONSTANT], *found[Rate.HEAD])
    scales = Scales(heads, tuple(found[Rate.ROW]), tuple(runs), of_values, keys)
    return None if rest is score() else rest, scales


def _longest_runs(nodes: list[Expr], tile_n: int) -> int:
    """The most keys of runs within which none of `nodes` changes; 1: some change from key to key, 0: there are none."""
    if not nodes:
        return 0
    return next((n for n in RUNS if tile_n % n == 0 and all(in_blocks(x, Dep.KV, n, {}) for x in nodes)), 1)


def split_factors(node: Expr, is_known: Callable[[Expr], bool]) -> tuple[Expr, tuple[Expr, ...]]:
    """(`rest`, up to `MOST` factors): `node` is `rest` of the score times these, each of which `is_known`.

    Nobody sees the score with fewer of them.
    """
    users: dict[Expr, list[Expr]] = defaultdict(list)
    for user in walk(node):
        for part in user.args:
            users[part].append(user)
    scaled, factors = score(), list[Expr]()
    while scaled is not node and len(factors) < MOST and len(users[scaled]) == 1 and users[scaled][0].op == "mul":
        (product,) = users[scaled]
        (factor,) = (x for x in product.args if x is not scaled)
        if factor.deps & score().deps or not is_known(factor):
            break
        factors.append(factor)
        scaled = product
    return substitute(node, {scaled: score()}), tuple(factors)


def in_blocks(node: Expr, dep: Dep, block: int, known: dict[tuple[Expr, Dep], bool]) -> bool:
    """Whether `node` changes with a position only from one block of positions to the next; `known` keeps answers.

    Nothing that reads the score does, which is another one at each pair.
    """
    return bool(node.deps & dep) and not node.deps & Dep.SCORE and _constant_in_blocks(node, dep, block, known)


def _constant_in_blocks(node: Expr, dep: Dep, block: int, known: dict[tuple[Expr, Dep], bool]) -> bool:
    if not node.deps & dep:
        return True
    found = known.get((node, dep))
    if found is None and node.depth > DEEP:
        return False
    if found is None:
        inside = bool(node.args) and all(_constant_in_blocks(a, dep, block, known) for a in node.args)
        found = known[node, dep] = _is_of_blocks(node, block) or inside
    return found


def _is_of_blocks(node: Expr, block: int) -> bool:
    """Whether it is `q // n` or `kv // n`, n blocks; by a negative n it changes one position further on."""
    if node.op != "floordiv" or node.args[0].op != "index" or not node.args[1].is_const:
        return False
    return node.args[1].attr > 0 and node.args[1].attr % block == 0
