"""What a score mod multiplies the score by before all else, as scales of 8-bit tensors do, by how often it changes.

Scales are not negative, and a softmax takes no others. What a user's own score mod multiplies by may be: operations
"scale" say which factors are scales.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
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


def scales_of(node: Expr | None, values: Expr | None, tile_n: int, rate: Rates) -> tuple[Expr | None, Scales]:
    """(what else the score mod `node` does, None: nothing; its factors and those of `values`, in tiles of such keys).

    `rate`: how often a node has to be computed. Nothing that changes with each pair is a factor here; in tiles of 0
    keys, nothing that changes within a head.
    """
    folds = set(Rate) - {Rate.ELEMENT} if tile_n else {Rate.CONSTANT, Rate.HEAD}
    rest, factors = (None, ()) if node is None else split_factors(node, lambda y: rate(y) in folds)
    found: dict[Rate, list[Expr]] = defaultdict(list)
    for factor in factors:
        found[rate(factor)].append(factor)
    of_values = values if tile_n and values is not None and values.deps & Dep.KV else None
    runs = found[Rate.COLUMN]
    nodes = [*runs, *filter(None, [of_values])]
    constant = (n for n in RUNS if tile_n % n == 0 and all(in_blocks(x, Dep.KV, n, {}) for x in nodes))
    keys = next(constant, 1) if nodes else 0
    heads = (*found[Rate.CONSTANT], *found[Rate.HEAD])
    scales = Scales(heads, tuple(found[Rate.ROW]), tuple(runs), of_values, keys)
    return None if rest is score() else rest, scales


def split_factors(node: Expr, is_known: Callable[[Expr], bool]) -> tuple[Expr, tuple[Expr, ...]]:
    """(`rest`, factors): `node` is `rest` of the score times these, each a scale that `is_known`.

    Nobody sees the score with fewer of them.
    """
    scaled, factors = score(), list[Expr]()
    for product, factor in products(node):
        if factor.op != "scale" or not is_known(factor):
            break
        factors.append(factor)
        scaled = product
    return substitute(node, {scaled: score()}), tuple(factors)


def products(node: Expr) -> Iterator[tuple[Expr, Expr]]:
    """(product, factor) of each "mul" or "div" that the score goes through before all else, where nobody sees it."""
    users: dict[Expr, list[Expr]] = defaultdict(list)
    for user in walk(node):
        for part in user.args:
            users[part].append(user)
    scaled = score()
    while len(users[scaled]) == 1 and users[scaled][0].op in ("mul", "div"):
        (product,) = users[scaled]
        yield product, product.args[1] if product.args[0] is scaled else product.args[0]
        scaled = product


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
        of_blocks = node.op == "floordiv" and node.args[0].op == "index" and node.args[1].is_const
        # `q // n` or `kv // n`, n blocks; by a negative n it changes one position further on
        found = inside or (of_blocks and node.args[1].attr > 0 and node.args[1].attr % block == 0)
        known[node, dep] = found
    return found
