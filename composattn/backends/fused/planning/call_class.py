"""What kind of call it is: one value, made in one place, that says which row of a table of tilings serves it.

Tables of all directions and architectures are written in its words, so that who reads a row knows which calls it is of,
and who has a call knows which row is its. `explain()` prints it.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeVar

from ....analysis.captured_gradient import Pattern
from ....analysis.program import Program
from ....call.problem import Problem
from ....graph.expr import Dep
from ....graph.gradient import derivative
from ....graph.multiples import is_of_score
from ..tiles.coverage import (
    end_together,
    has_documents_apart,
    has_segments_apart,
    keys_of_a_query,
    queries_of_a_key,
)
from ..tiles.target import Target
from ..tiles.tiling import key_tiles, query_tiles, slots
from ..tiles.traits import (
    OF_HEADS,
    bounds_queries,
    has_costly_test,
    has_opaque_test,
    has_plain_part,
    keys,
    padded,
    queries,
    reads_along_keys,
    reads_any,
    reads_pairs,
    sums_by,
    weighs_keys,
)
from ..tiles.work import captured_decide

Direction = Literal["forward", "backward"]
Order = Literal["any", "fixed", "batch-invariant"]  # of sums: "fixed" is a deterministic gradient's
Kind = TypeVar("Kind")
LayoutKind = Literal["dense", "packed", "paged", "mixed"]
Finders = Mapping[str, Callable[[Any], Any]]  # how each fact of a call is found

# Rows see, and sequences have, up to so many keys; ways to cut calls cross at some of them. A tile of 128 queries of a
# causal call visits 64 keys more than half of them in the mean: one of 1k is in the class up to 576, 2k in that up to
# 1,152, 3k in that up to 1,600
BEYOND = 1 << 31
BANDS = (128, 256, 512, 576, 768, 1152, 1600, 2304, 4224, 8448, 16384, BEYOND)


class ModsKind(enum.Enum):
    """What becomes of scores and weights: `MODS` says which of these a call is of."""

    PLAIN = "no score mod"
    LINE = "a line of the score"  # times a number of the head, and more that is read nowhere along the keys: ALiBi
    OF_SCORE = "a curve of the score"  # and of nothing else: soft caps
    OTHER = "another score mod"
    PAIRS = "a score mod that reads at (q, kv)"
    LEARNED = "a score mod with gradients of numbers of heads, queries or keys"
    LEARNED_PAIRS = "a score mod with gradients of tensors that it reads at (q, kv)"
    DROPOUT = "dropout"
    WEIGHED = "weights times numbers of their keys"  # of values of 8 bits


class MaskKind(enum.Enum):
    """Which keys rows see: `MASKS` says which of these a forward is of, `MASKS_OF_KEYS` a backward."""

    NONE = "no mask"
    BOUNDS = "bounds on positions"  # windows
    ENDS = "bounds that end with the last queries"  # and begin with the first keys: causal, prefixes
    TESTED = "a costly test"  # at a query or a key tensors are read, or a remainder is looked at: dilated windows
    OPAQUE = "a test of pairs"  # no bound on the keys: tables, neighbourhoods
    RUNS = "several runs of keys"  # in a backward, of queries
    READ = "bounds that are read"  # tensors say where keys begin or end
    DOCUMENTS = "documents that tiles begin with"  # of ids, where there are rows enough
    # which queries see a key, in a backward alone
    LISTED = "a test of tensors, listed"
    WHOLE = "documents seen whole"


class Rounds(enum.Enum):
    """How much there is, in tiles of so many queries (keys, in a backward) as a product has rows, by SM."""

    FEW_ROWS = "few rows"  # all of a sequence's queries, and heads that share keys, in one tile: decoding
    AT_ONCE = "tiles that run at once"
    TWO_ROUNDS = "up to two rounds"
    FEW_ROUNDS = "up to four rounds"
    ROUNDS = "many rounds"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallClass:
    """Calls that are cut alike.

    `d`, `dv`: head dimensions on chip. `sectors`: rows of q, k and v in memory are whole sectors of 32 bytes; a tile's
    copy takes up to twice as long where they are not. `packs`: query heads share the rows of a tile. `seen`: keys that
    a row sees (in a backward: queries that see a key) in the mean; `length`: how many there are in a sequence; both are
    the upper ends of `BANDS`. `fills`: tiles of 192 rows and 128 keys have an eighth more pairs than those of 64,
    or less; in a backward tiles of 128 queries have a tenth more of them. `thirds`: rows of tiles of 192 over those of
    tiles of 128, with no mask in whole rounds of tiles; in a backward those of 80 over those of 64.
    """

    direction: Direction
    order: Order
    layout: LayoutKind
    d: int
    dv: int
    sectors: bool
    mods: ModsKind
    mask: MaskKind
    packs: bool
    work: Rounds
    seen: int
    length: int
    fills: bool
    thirds: float

    @property
    def widest(self) -> int:
        return max(self.d, self.dv)

    @property
    def dims(self) -> tuple[int, int]:
        return self.d, self.dv

    @property
    def square(self) -> bool:
        return self.d == self.dv

    def __str__(self) -> str:
        wide = f"D {self.d}" if self.d == self.dv else f"D {self.d}, Dv {self.dv}"
        sectors, heads = " (rows of no whole sectors)" * (not self.sectors), ", heads share tiles" * self.packs
        what = "a row sees {} of {} keys" if self.direction == "forward" else "a key is seen by {} of {} queries"
        return (
            f"{self.direction}, {self.order} order, {self.layout}, {wide}{sectors}, {self.mods.value}, "
            f"{self.mask.value}{heads}, {self.work.value}, {what.format(_words(self.seen), _words(self.length))}"
        )


def class_of(
    problem: Problem,
    program: Program,
    target: Target,
    direction: Direction,
    *,
    rows: int,
    heads: int = 1,
    deterministic: bool = False,
) -> CallClass:
    """`rows`: of the least tile; `heads`: query heads that share them; `deterministic`: a gradient's sums are."""
    types, lies = problem.types, problem.layout
    return CallClass(
        direction=direction,
        order="batch-invariant" if problem.schedule.batch_invariant else "fixed" if deterministic else "any",
        layout=lies.q if lies.q == lies.kv else "paged" if lies.kv == "paged" else "mixed",
        d=padded(problem.head_dim),
        dv=padded(problem.head_dim_v),
        sectors=problem.head_dim * types.k.itemsize % 32 == problem.head_dim_v * types.v.itemsize % 32 == 0,
        mods=_first(MODS, program),
        packs=heads > 1,
        **{"forward": _of_forward, "backward": _of_backward}[direction](problem, program, target, rows, heads),
    )


def _of_forward(problem: Problem, program: Program, target: Target, rows: int, heads: int) -> dict[str, Any]:
    few, tiles = queries(problem) * slots(heads) <= rows, query_tiles(problem, heads, rows) * problem.batch
    a_round = max(1, target.sms * (program.mask is None))  # equal tiles end together
    thirds, halves = (-(-query_tiles(problem, heads, n) * problem.batch // a_round) for n in (192, 128))
    return {
        "mask": _first(MASKS, problem, program),
        "work": Rounds.FEW_ROWS if few else _rounds(tiles, target),
        "seen": band(keys(problem) if few else keys_of_a_query(problem, program.intervals)),
        "length": band(keys(problem)),
        "fills": _pairs(problem, 192, 128) * 8 <= _pairs(problem, 64, 64) * 9,
        "thirds": 1.5 * thirds / max(1, halves),
    }


def _of_backward(problem: Problem, program: Program, target: Target, rows: int, heads: int) -> dict[str, Any]:
    q_len = problem.q_len
    return {
        "mask": _first(MASKS_OF_KEYS, problem, program),
        "work": _rounds(key_tiles(problem, rows) * problem.kv_heads * problem.batch, target),
        "seen": band(queries_of_a_key(problem, program)),
        "length": band(queries(problem)),
        "fills": not problem.layout.is_dense or -(-q_len // 128) * 128 * 10 <= 11 * (-(-q_len // 64) * 64),
        "thirds": -(-q_len // 80) * 80 / max(1, -(-q_len // 64) * 64),
    }


def band(count: float) -> int:
    """The upper end of the band that it is in."""
    return BANDS[bisect.bisect_left(BANDS, count)]


def _first(kinds: Mapping[Kind, Callable[..., bool]], *call: Any) -> Kind:
    return next(kind for kind, is_so in kinds.items() if is_so(*call))


# the first that is true of a call
MODS: Mapping[ModsKind, Callable[[Program], bool]] = {
    ModsKind.WEIGHED: weighs_keys,
    ModsKind.DROPOUT: lambda program: program.keep is not None,
    ModsKind.LEARNED_PAIRS: lambda program: sums_by(program, *Pattern) and reads_pairs(program.score),
    ModsKind.LEARNED: lambda program: sums_by(program, *Pattern),
    ModsKind.PLAIN: lambda program: program.score is None,
    ModsKind.LINE: lambda program: (
        program.score is not None and derivative(program.score).rate in OF_HEADS and not reads_along_keys(program.score)
    ),
    ModsKind.PAIRS: lambda program: reads_pairs(program.score),
    ModsKind.OF_SCORE: lambda program: is_of_score(program.score),
    ModsKind.OTHER: lambda program: True,
}
MASKS: Mapping[MaskKind, Callable[[Problem, Program], bool]] = {
    MaskKind.NONE: lambda problem, program: program.mask is None,
    MaskKind.DOCUMENTS: has_segments_apart,
    MaskKind.READ: lambda problem, program: captured_decide(program.intervals),
    MaskKind.RUNS: lambda problem, program: len(program.intervals) > 1,
    MaskKind.OPAQUE: lambda problem, program: has_opaque_test(program),
    MaskKind.TESTED: lambda problem, program: has_costly_test(program.mask),
    MaskKind.ENDS: end_together,
    MaskKind.BOUNDS: lambda problem, program: True,
}
MASKS_OF_KEYS: Mapping[MaskKind, Callable[[Problem, Program], bool]] = {
    MaskKind.NONE: lambda problem, program: program.mask is None,
    MaskKind.WHOLE: lambda problem, program: (
        program.mask is not None and not has_plain_part(program.mask) and has_documents_apart(problem, program)
    ),
    MaskKind.DOCUMENTS: has_documents_apart,
    MaskKind.READ: lambda problem, program: reads_any(program.mask) and bounds_queries(program.mask),
    MaskKind.LISTED: lambda problem, program: reads_any(program.mask),
    MaskKind.OPAQUE: lambda problem, program: has_opaque_test(program),
    MaskKind.TESTED: lambda problem, program: has_costly_test(program.mask),
    MaskKind.RUNS: lambda problem, program: len(program.of_keys[0]) > 1,
    MaskKind.ENDS: end_together,
    MaskKind.BOUNDS: lambda problem, program: True,
}
UP_TO, ROUNDS = (1, 2, 4), (Rounds.AT_ONCE, Rounds.TWO_ROUNDS, Rounds.FEW_ROUNDS, Rounds.ROUNDS)


def _rounds(tiles: int, target: Target) -> Rounds:
    return ROUNDS[bisect.bisect_left(UP_TO, tiles / target.sms)]


def _pairs(problem: Problem, rows: int, columns: int) -> int:
    """Pairs of a head of a sequence, in whole tiles."""
    return -(-queries(problem) // rows) * rows * key_tiles(problem, columns) * columns


def _words(end: int) -> str:
    return f"more than {BANDS[-2]:,}" if end == BEYOND else f"up to {end:,}"


@dataclasses.dataclass(frozen=True)
class Facts:
    """A call and its class, and what rows of tables may ask: what is in `more`, found once, its class and schedule.

    by_...: gradients of captured tensors are summed by such a pattern. `curved`: the score's derivative sees the score.
    """

    more: ClassVar[Finders] = {
        **{f"by_{pattern.name.lower()}": lambda f, pattern=pattern: sums_by(f.program, pattern) for pattern in Pattern},  # type: ignore[misc]
        "scored": lambda f: f.program.score is not None,
        "reads_pairs": lambda f: reads_pairs(f.program.score),
        "curved": lambda f: f.scored and bool(derivative(f.program.score).deps & Dep.SCORE),
    }

    problem: Problem
    program: Program
    target: Target
    call: Any

    def __getattr__(self, name: str) -> Any:
        if name in self.more:
            found = vars(self)[name] = self.more[name](self)
            return found
        return getattr(self.call if hasattr(self.call, name) else self.problem.schedule, name)
