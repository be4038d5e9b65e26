"""What rows of tables ask of a call: facts by name, each found once, when it is asked for.

Tables of all directions and architectures are written in these names, so that who reads a row knows which calls it is
of, and who has a call knows which row is its. `explain()` prints those that say what kind of call it is.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping
from typing import Any

from ....analysis.bands import exchanged, residual
from ....analysis.captured_gradient import GradientProgram, Pattern, pattern_of
from ....graph.expr import Dep, Expr, Rate
from ....graph.gradient import derivative
from ....graph.multiples import is_of_score
from ..tiles.tiling import key_tiles, query_tiles, slots
from ..tiles.traits import (
    ALONG_KEYS,
    OF_HEADS,
    bounds_queries,
    depends,
    end_together,
    has_costly_test,
    has_documents_apart,
    has_plain_part,
    has_segments_apart,
    keys_of_a_query,
    padded,
    reads,
)
from ..tiles.work import captured_decide

Finders = Mapping[str, Callable[[Any], Any]]
Kinds = Mapping[str, tuple[str, Callable[[Any], bool]]]

# Rows see, and sequences have, up to so many keys; ways to cut calls cross at some of them. A tile of 128 queries of a
# causal call visits 64 keys more than half of them in the mean: one of 1k is in the class up to 576, 2k in that up to
# 1,152, 3k in that up to 1,600
BEYOND = 1 << 31
BANDS = (128, 256, 512, 576, 768, 1152, 1600, 2304, 4224, 8448, 16384, BEYOND)


class Facts:
    """A call by what its `finders` find, else by what its problem, its GPU or its schedule has of such a name.

    `heads`: query heads that share the rows of a tile; `deterministic`: a gradient's sums have a fixed order; `known`:
    what else was found before, as `rows`, of the least tile.
    """

    def __init__(
        self, finders: Finders, problem: Any = None, program: Any = None, target: Any = None,
        *, heads: int = 1, deterministic: bool = False, **known: Any,
    ) -> None:  # fmt: skip
        given = {"problem": problem, "program": program, "target": target, "heads": heads}
        self.given = {**given, "finders": finders, "deterministic": deterministic, **known}
        vars(self).update(self.given)

    def __getattr__(self, name: str) -> Any:
        if name in self.finders:
            found = vars(self)[name] = self.finders[name](self)
            return found
        owner = next((owner for owner in (self.problem, self.target) if hasattr(owner, name)), None)
        return getattr(owner or self.problem.schedule, name)

    def but(self, **known: Any) -> Facts:
        """A call of which other things are known."""
        return Facts(**self.given | known)

    def __str__(self) -> str:
        """What kind of call it is; no two kinds have the same words."""
        wide = f"D {self.d}" if self.square else f"D {self.d}, Dv {self.dv}"
        sectors, heads = " (rows of no whole sectors)" * (not self.sectors), ", heads share tiles" * self.packs
        sight = self.sight.format(_words(self.seen), _words(self.length))
        return (
            f"{self.direction}, {self.order} order, {self.layout}, {wide}{sectors}, {MODS[self.mods][0]}, "
            f"{MASKS[self.mask][0]}{heads}, {WORK[self.work]}, {sight}"
        )


def band(count: float) -> int:
    """The upper end of the band that it is in."""
    return BANDS[bisect.bisect_left(BANDS, count)]


def _words(end: int) -> str:
    return f"more than {BANDS[-2]:,}" if end == BEYOND else f"up to {end:,}"


# What becomes of scores and weights, in words, and when it does: the first that is true of a call is its kind
MODS: Kinds = {
    "weighed": ("weights times numbers of their keys", lambda f: f.weighs_keys),
    "dropout": ("dropout", lambda f: f.program.keep is not None),
    "learned_pairs": (
        "a score mod with gradients of tensors that it reads at (q, kv)", lambda f: f.learns and f.reads_pairs
    ),
    "learned": ("a score mod with gradients of numbers of heads, queries or keys", lambda f: f.learns),
    "plain": ("no score mod", lambda f: not f.scored),
    # times a number of the head, and more that is read nowhere along the keys: ALiBi
    "line": (
        "a line of the score", lambda f: f.derivative.rate in OF_HEADS and not f.reads_along_keys
    ),
    "pairs": ("a score mod that reads at (q, kv)", lambda f: f.reads_pairs),
    "of_score": ("a curve of the score", lambda f: is_of_score(f.program.score)),  # and of nothing else: soft caps
    "other": ("another score mod", lambda f: True),
}  # fmt: skip
# Which keys rows see, in a backward which queries see a key
MASKS: Kinds = {
    "none": ("no mask", lambda f: f.program.mask is None),
    "bounds": ("bounds on positions", lambda f: True),  # windows
    # and begin with the first keys: causal, prefixes
    "ends": ("bounds that end with the last queries", lambda f: end_together(f.problem, f.program)),
    # at a query or a key tensors are read, or a remainder is looked at: dilated windows
    "tested": ("a costly test", lambda f: has_costly_test(f.program.mask)),
    "opaque": ("a test of pairs", lambda f: f.opaque),  # no bound on the keys: tables, neighbourhoods
    "runs": ("several runs of keys", lambda f: len(f.visited) > 1),  # in a backward, of queries
    "read": ("bounds that are read", lambda f: f.bounds_read),  # tensors say where keys begin or end
    "documents": ("documents that tiles begin with", lambda f: f.apart),  # of ids, where there are rows enough
    "listed": ("a test of tensors, listed", lambda f: f.mask_reads),
    "whole": ("documents seen whole", lambda f: f.apart and not has_plain_part(f.program.mask)),
}
OF_QUERIES = ("none", "documents", "read", "runs", "opaque", "tested", "ends", "bounds")
OF_KEYS = ("none", "whole", "documents", "read", "listed", "opaque", "tested", "runs", "ends", "bounds")
# How much there is, in tiles of so many queries (keys, in a backward) as a product has rows, by SM
WORK = {
    "few_rows": "few rows",  # all of a sequence's queries, and heads that share keys, in one tile: decoding
    "at_once": "tiles that run at once",
    "two_rounds": "up to two rounds",
    "few_rounds": "up to four rounds",
    "rounds": "many rounds",
}


def _kind(kinds: Kinds, names: tuple[str, ...], f: Facts) -> str:
    return next(name for name in names if kinds[name][1](f))


def _rounds(f: Facts) -> str:
    return [*WORK][1 + bisect.bisect_left((1, 2, 4), f.tiles / f.target.sms)]


def _layout(f: Facts) -> str:
    lies = f.problem.layout
    return lies.q if lies.q == lies.kv else "paged" if lies.kv == "paged" else "mixed"


def _sectors(f: Facts) -> bool:
    p, types = f.problem, f.problem.types
    return p.head_dim * types.k.itemsize % 32 == p.head_dim_v * types.v.itemsize % 32 == 0


def _pair_bytes(read: Expr) -> float:
    """From where it lies; without end where it is read elsewhere, as at distances."""
    return float(read.attr.tensor.element_size()) if pattern_of(read) is Pattern.PAIR else math.inf


def _patterns(f: Facts) -> set[Pattern]:
    """By which gradients of captured tensors are summed."""
    groups = f.program.reads.values() if isinstance(f.program, GradientProgram) else ()
    return {read.pattern for group in groups for read in group}


OF_ANY: Finders = {
    "order": lambda f: "batch-invariant" if f.problem.schedule.batch_invariant else ("any", "fixed")[f.deterministic],
    "layout": _layout,
    # head dimensions on chip
    "d": lambda f: padded(f.problem.head_dim),
    "dv": lambda f: padded(f.problem.head_dim_v),
    "dims": lambda f: [f.d, f.dv],
    "widest": lambda f: max(f.dims),
    "square": lambda f: f.d == f.dv,
    # rows of k and v in memory are whole sectors of 32 bytes; a tile's copy takes up to twice as long where not
    "sectors": _sectors,
    "packs": lambda f: f.heads > 1,
    "mods": lambda f: _kind(MODS, (*MODS,), f),
    "scored": lambda f: f.program.score is not None,
    "reads_along_keys": lambda f: bool(reads(f.program.score, ALONG_KEYS)),
    "at_pairs": lambda f: reads(f.program.score, {Rate.ELEMENT}),  # at (q, kv), or elsewhere for each
    "reads_pairs": lambda f: bool(f.at_pairs),
    "pairs_of_heads": lambda f: any(read.deps & Dep.H for read in f.at_pairs),
    "pair_bytes": lambda f: sum(map(_pair_bytes, f.at_pairs)),
    "derivative": lambda f: derivative(f.program.score),
    "curved": lambda f: f.scored and bool(f.derivative.deps & Dep.SCORE),  # the score's derivative sees the score
    # values of 8 bits are multiplied by numbers of their keys, which go into weights behind their sum
    "weighs_keys": lambda f: depends(f.program.values, Dep.KV),
    "mask_reads": lambda f: bool(reads(f.program.mask)),
    "opaque": lambda f: residual(f.program.mask).opaque,  # the mask has a condition on (q, kv) that is no bound on kv
    "patterns": _patterns,
    "learns": lambda f: bool(f.patterns),
    **{f"by_{p.name.lower()}": lambda f, p=p: p in f.patterns for p in Pattern},  # type: ignore[misc]
}


def equal_rounds(f: Facts, rows: int, blocks: int = 1) -> int:
    """Tiles of so many rows, with no mask in whole rounds of `blocks` an SM: equal tiles end together."""
    a_round = max(1, f.target.sms * blocks * (f.program.mask is None))
    return -(-query_tiles(f.problem, f.heads, rows) // a_round)


def _pairs(f: Facts, rows: int, columns: int) -> int:
    """Pairs of a head of a sequence, in whole tiles."""
    return -(-f.queries // rows) * rows * key_tiles(f.problem, columns) * columns


# `seen`: keys that a row sees in the mean, `length`: those of a sequence, both as upper ends of `BANDS`. `fills`: tiles
# of 192 rows and 128 keys have an eighth more pairs than those of 64, or less. `thirds`: rows of tiles of 192 over
# those of tiles of 128; `fifths`: keys of tiles of 80 over those of tiles of 96
FORWARD: Finders = {
    **OF_ANY,
    "direction": lambda f: "forward",
    "sight": lambda f: "a row sees {} of {} keys",
    "visited": lambda f: f.program.intervals,
    "apart": lambda f: has_segments_apart(f.problem, f.program),
    "bounds_read": lambda f: captured_decide(f.visited),
    "mask": lambda f: _kind(MASKS, OF_QUERIES, f),
    "few": lambda f: f.queries * slots(f.heads) <= f.rows,
    "tiles": lambda f: query_tiles(f.problem, f.heads, f.rows),
    "work": lambda f: "few_rows" if f.few else _rounds(f),
    "seen": lambda f: band(f.keys if f.few else keys_of_a_query(f.problem, f.visited)),
    "length": lambda f: band(f.keys),
    "fills": lambda f: _pairs(f, 192, 128) * 8 <= _pairs(f, 64, 64) * 9,
    "fifths": lambda f: 5 * key_tiles(f.problem, 80) / max(1, 6 * key_tiles(f.problem, 96)),
    "thirds": lambda f: 1.5 * equal_rounds(f, 192) / max(1, equal_rounds(f, 128)),
}


def _filled(f: Facts, queries: int) -> int:
    return -(-f.problem.q_len // queries) * queries


# `seen`: queries that see a key; `fills`: tiles of 128 queries have a tenth more of them than those of 64, or less;
# `thirds`: queries of tiles of 80 over those of 64
BACKWARD: Finders = {
    **OF_ANY,
    "direction": lambda f: "backward",
    "sight": lambda f: "a key is seen by {} of {} queries",
    "visited": lambda f: f.program.of_keys[0],
    "apart": lambda f: has_documents_apart(f.problem, f.program),
    "bounds_read": lambda f: f.mask_reads and bounds_queries(f.program.mask),
    "mask": lambda f: _kind(MASKS, OF_KEYS, f),
    "tiles": lambda f: key_tiles(f.problem, f.rows) * f.problem.kv_heads * f.problem.batch,
    "work": _rounds,
    "seen": lambda f: band(keys_of_a_query(f.problem.mirrored, exchanged(f.visited))),
    "length": lambda f: band(f.queries),
    "fills": lambda f: not f.problem.layout.is_dense or _filled(f, 128) * 10 <= 11 * _filled(f, 64),
    "thirds": lambda f: _filled(f, 80) / max(1, _filled(f, 64)),
}
