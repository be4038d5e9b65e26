"""From graph to CuTe: score mods and masks on a score tile, each part computed as rarely as it can be.

The only place where the graph and the DSL meet. A value that depends on the head alone is computed once per work
tile, one that depends on the row once per row, on the column once per column of a tile, the rest once per element.

Two more things make mods cheap. Positions are `tile start + constant`, so an integer expression linear in q and kv
is one register and an immediate, in comparisons too. And in an additive score mod a term `head value * (a kv + b q)`
(ALiBi) splits into a part per column and a part per row; softmax does not see the latter, which returns in LSE.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute import math as cm

from ..analysis.program import Program
from ..analysis.row_limits import RowLimits
from ..graph.expr import DEEP, Dep, DType, Expr, Rate, promote, score, walk
from ..graph.factors import Scales, in_blocks, scales_of
from ..graph.least_score import LEAST_SCORE
from ..graph.linear import Affine, affine
from ..graph.multiples import steepest_tanh
from ..graph.ops import MIRRORED
from ..graph.philox import factor_of
from .arithmetic import ONE_BY_ONE, Arithmetic, chains, tree
from .emit_dropout import copied, drop
from .emit_ops import CUTE, convert
from .emit_reads import Neighbours, Pairs, TileReads, read_element
from .emit_row import NEAR, TOGETHER, RowValues
from .emit_scales import BoundScales, ReadScales
from .exponential import LOG2_E
from .quotients import quotient
from .score_tile import LIFTED, Runs, ScoreTile
from .values import Fixed, bits_before, choose, larger, smaller, total

LEAVES = frozenset(("index", "score", "scalar", "size", "read"))  # what is given; all else is computed of them
WORD = 24  # positions that a word of `run_of` speaks of

_AT_A_TIME = 25  # operations of a deep graph that lie in each other while it is computed
_LIMIT = 1 << 24  # integers below it are exact in fp32
VALUES, SCALES = "values", "scales"  # the names of what is folded among what was read ahead
MOST_AHEAD = 48  # registers in which numbers at pairs wait for scores


def small_affine(node: Expr) -> Affine | None:
    """`node` as an affine form whose numbers are immediates, exact in fp32; None where it is none."""
    form = affine(node) if node.dtype is DType.INT32 else None
    small = form is not None and max(abs(form.q), abs(form.kv)) <= 64 and abs(form.constant) < _LIMIT
    return form if small else None


def _may_wrap(x: Affine, y: Affine, difference: Affine) -> bool:
    """Whether x - y may leave 32 bits where neither does: positions are below 2^29, rising forms differ by less."""
    return abs(difference.q) + abs(difference.kv) > 3 and min(x.q, x.kv, y.q, y.kv) < 0


def rate(node: Expr, of_one_head: bool) -> Rate:
    """The rate of `node` where a thread's rows are of one head, or of several."""
    several = not of_one_head and node.deps & Dep.H
    return Rate.of(node.deps | Dep.Q) if several else node.rate


# --- evaluation ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Leaves:
    """Run-time values of a work tile: head, lengths, the user's scale, what the mods captured."""

    b: Int32
    h: Int32
    q_len: Int32
    kv_len: Int32
    scale: Float32
    captured: Any
    scalars: Any
    _: dataclasses.KW_ONLY  # by position, a new field once took the place of `metadata`, and gradients were wrong
    first: Any = None  # first and last query row of the tile, for loop bounds
    last: Any = None
    d: Any = None  # the channel of V, for what values are multiplied by
    metadata: Any = None  # of a tile of keys, `KeyTileMetadata`


class Evaluator:
    """Values of nodes on one score tile; `head` and `row` values live as long as the work tile.

    `tile` may be None where only head-rate values are asked (loop bounds).
    """

    def __init__(self, mods: Mods, leaves: Leaves, tile: ScoreTile | None, parent: Evaluator | None = None) -> None:
        self.mods, self.leaves, self._tile = mods, leaves, tile
        # copies: what is computed inside a loop must not be seen outside of it
        self.head: dict[Expr, Any] = {} if parent is None else dict(parent.head)
        self.row: dict[tuple[Expr, int], Any] = {} if parent is None else dict(parent.row)
        self.column: dict[tuple[Expr, int], Any] = {}
        self.element: dict[tuple[Expr, int, int], Any] = {}
        self.block: dict[tuple[Expr, int, int], Any] = {}
        self.ahead: dict[Expr, tuple[list[Affine], TileReads]] = {}
        self.ahead_in_registers = 0  # of `Pairs`
        self.start: dict[Affine, Any] = {}
        self.start_float: dict[Affine, Any] = {}

    @property
    def tile(self) -> ScoreTile:
        assert self._tile is not None, "without a score tile only values of a head are known"
        return self._tile

    def rate(self, node: Expr) -> Rate:
        """How often `node` has to be computed here: where rows are of several heads, these change as rows do."""
        return node.rate if self._tile is None else rate(node, self._tile.shape.of_one_head)

    def value(self, node: Expr, r: int = 0, c: int = 0) -> Any:
        """The value of `node` at row `r` and column `c` of the thread's fragment."""
        if node.depth > DEEP:
            for part in walk(node):  # from below, so that few calls lie in each other
                if part.depth % _AT_A_TIME == 0 and part.args:
                    self._value(part, r, c)
        return self._value(node, r, c)

    def _value(self, node: Expr, r: int, c: int) -> Any:
        if node.is_const:
            return node.attr
        often = self.rate(node)
        shared = False
        if often in (Rate.ELEMENT, Rate.ROW, Rate.COLUMN):
            first = self.first_of_block(node, r, c)
            shared, (r, c) = first is not None, first or (r, c)
        store: dict[Any, Any]
        key: Any
        if often is Rate.ELEMENT:
            store, key = self.block if shared else self.element, (node, r, c)
        elif often is Rate.COLUMN:
            store, key = self.column, (node, c)
        elif often is Rate.ROW:
            store, key = self.row, (node, r)
        else:
            store, key = self.head, node
        if key not in store:
            store[key] = self._compute(node, r, c)
        return store[key]

    def first_of_block(self, node: Expr, r: int, c: int) -> tuple[int, int] | None:
        """The first element where `node` is the same for certain, as q // n and kv // n are; None: only this one."""
        shape, known = self.tile.shape, self.mods.in_blocks
        if shape.block == 1:
            return None
        rows = in_blocks(node, Dep.Q, shape.block, known) and (shape.of_one_head or not node.deps & Dep.H)
        columns = in_blocks(node, Dep.KV, shape.block, known)
        if not rows and not columns:
            return None
        return shape.first_row(r) if rows else r, shape.first_column(c) if columns else c

    def forget_element(self) -> None:
        """Drops what was computed for the current element, so that registers are not kept alive by mistake."""
        self.element.clear()

    def prepare(self, *roots: Expr | None, along: Literal[Rate.ROW, Rate.COLUMN] = Rate.ROW) -> None:
        """Computes, now, everything under `roots` that rows alone decide, or (`along`) columns alone."""
        places = (
            [(r, 0) for r in range(self.tile.rows)] if along is Rate.ROW else [(0, c) for c in range(self.tile.columns)]
        )
        seen: set[Expr] = set()
        waiting = [root for root in roots[::-1] if root is not None]
        while waiting:
            node = waiting.pop()
            if node in seen or node.is_const:
                continue
            seen.add(node)
            often = self.rate(node)
            if often in (Rate.CONSTANT, Rate.HEAD):
                self.value(node)
            elif often is along and small_affine(node) is None:
                for r, c in places:
                    self.value(node, r, c)
            else:
                waiting += node.args[::-1]

    def position(self, form: Affine, r: int, c: int) -> Any:
        """The integer value of a linear form: one register for the tile, an immediate for the element."""
        if form not in self.start:
            tile = self.tile
            base: Any = 0
            for coefficient, first in ((form.q, tile.first_q), (form.kv, tile.first_kv)):
                if coefficient:
                    base = base + (first if coefficient == 1 else first * coefficient)
            # a constant is a value of the kernel too: a Python number has other operators (~True is -2)
            moves = form.q or form.kv
            self.start[form] = Int32(form.constant) if not moves else base + form.constant if form.constant else base
        return self.start[form] + self.offset(form, r, c)

    def offset(self, form: Affine, r: int, c: int) -> int:
        shape = self.tile.shape
        return form.q * shape.row_offsets[r] + form.kv * shape.column_offsets[c]

    def float_start(self, form: Affine) -> Any:
        """The form at the thread's first element of the tile, as fp32 (exact below 2^24)."""
        if form not in self.start_float:
            self.start_float[form] = self.position(form, 0, 0).to(Float32)
        return self.start_float[form]

    def as_float(self, node: Expr, r: int, c: int) -> Any:
        """`node` as fp32; positions convert once per tile, not once per element (conversions are quarter rate)."""
        form = small_affine(node) if node.rate in (Rate.ROW, Rate.COLUMN, Rate.ELEMENT) else None
        if form is not None:
            offset = self.offset(form, r, c)
            start = self.float_start(form)
            return start + float(offset) if offset else start
        return convert(self.value(node, r, c), DType.FLOAT)

    def read_ahead(self, root: Expr | None, often: tuple[Rate, ...] = ()) -> None:
        """Starts what `root` reads at positions linear in q and kv together, or in each; before anything is waited for.

        On a diagonal of `q - kv` these are the same number: a tile has few of them. A thread with one row shares no
        column's read with another, so that a number a column is as many as it has either way. `often`: if said, what
        is read so, and nothing else.
        """
        often = often or ((Rate.ELEMENT, Rate.COLUMN) if self.tile.rows == 1 else (Rate.ELEMENT,))
        for node in walk(root) if root is not None else ():
            if node.op == "read" and self.rate(node) in often:
                self._read_ahead(node)

    def _has_room(self, node: Expr, tensor: Any, modes: int, count: int, elements: int) -> bool:
        """Whether so many numbers, read at positions of `modes`, wait in registers for all elements; then they do."""
        rows = self.tile.shape.rows
        if modes == 1:
            # of 2 q + kv a tile has as many as elements, and registers for none of them to wait in
            return node.dtype is not DType.BOOL and (rows == 1 or 3 * count <= 2 * elements)
        registers = self.ahead_in_registers + Pairs.registers(tensor, count)
        waits = modes == 2 and rows > 1 and count == elements and registers <= MOST_AHEAD
        self.ahead_in_registers = registers if waits else self.ahead_in_registers
        return waits

    def _read_ahead(self, node: Expr) -> None:
        shape = self.tile.shape
        modes = [mode for mode, a in enumerate(node.args) if not _is_fixed(a, shape.of_one_head)]
        forms = [form for mode in modes if (form := small_affine(node.args[mode])) is not None]
        if len(forms) < len(modes):
            return
        each = list(itertools.product(range(shape.rows), range(shape.columns)))
        offsets = {m: sorted({self.offset(form, *rc) for rc in each}) for m, form in zip(modes, forms, strict=True)}
        count = math.prod(map(len, offsets.values()))
        tensor = self.leaves.captured[self.mods.capture_slot[node.attr]]
        if not self._has_room(node, tensor, len(modes), count, len(each)):
            return
        indices = [None if mode in modes else self.value(a) for mode, a in enumerate(node.args)]
        for mode, form in zip(modes, forms, strict=True):
            indices[mode] = self.position(form, 0, 0) - self.offset(form, 0, 0)
        kind = Neighbours if len(modes) == 1 else Pairs
        self.ahead[node] = forms, kind(tensor, indices, offsets, node.dtype)

    def _leaf(self, node: Expr, r: int, c: int) -> Any:
        """What is given: the score, a position, a number, a tensor's element or size."""
        if node.op == "index":
            return self._index(node.attr, r, c)
        if node.op == "score":
            return self.tile.values[r, c] * self.leaves.scale
        if node.op == "scalar":
            return self.leaves.scalars[self.mods.scalar_slot[node.attr]]
        if node in self.ahead:
            forms, numbers = self.ahead[node]
            return numbers[tuple([self.offset(form, r, c) for form in forms])]
        tensor = self.leaves.captured[self.mods.capture_slot[node.attr]]
        if node.op == "size":
            return Int32(tensor.shape[node.args[0].attr])
        return read_element(tensor, [self._value(a, r, c) for a in node.args], node.dtype)

    def _compute(self, node: Expr, r: int, c: int) -> Any:
        if node.op in LEAVES:
            return self._leaf(node, r, c)
        form = small_affine(node)
        if form is not None:
            return self.position(form, r, c)
        if node.op in MIRRORED:
            return self._comparison(node, r, c)
        if node.op.startswith("cast_"):
            if node.op == "cast_float":
                return self.as_float(node.args[0], r, c)
            return CUTE[node.op](self._value(node.args[0], r, c))
        wanted = node.dtype
        if node.op == "where":
            condition, *branches = node.args
            return CUTE["where"](self._value(condition, r, c), *(self._as(a, wanted, r, c) for a in branches))
        if node.op == "div" and node in self.mods.deciding:
            return quotient(*(self._as(a, wanted, r, c) for a in node.args))
        if node.op in ("isnan", "isinf"):
            return CUTE[node.op](self._value(node.args[0], r, c))
        return CUTE[node.op](*(self._as(a, wanted, r, c) for a in node.args))

    def _as(self, node: Expr, wanted: DType, r: int, c: int) -> Any:
        if wanted is DType.FLOAT and node.dtype.is_integer and not node.is_const:
            return self.as_float(node, r, c)
        return convert(self._value(node, r, c), wanted)

    def _comparison(self, node: Expr, r: int, c: int) -> Any:
        x, y = node.args
        fx, fy = small_affine(x), small_affine(y)
        if fx is not None and fy is not None:
            difference = fx.minus(fy)
            small = max(abs(difference.q), abs(difference.kv)) <= 64 and abs(difference.constant) < _LIMIT
            if small and not _may_wrap(fx, fy, difference):
                # start + offset ? 0 as start ? -offset: the element's part is an immediate
                self.position(difference, 0, 0)
                return CUTE[node.op](self.start[difference], -self.offset(difference, r, c))
        common = promote(x.dtype, y.dtype)
        return CUTE[node.op](self._as(x, common, r, c), self._as(y, common, r, c))

    def _index(self, name: str, r: int, c: int) -> Any:
        if name in ("q", "kv"):
            return self.position(Affine(int(name == "q"), int(name == "kv"), 0), r, c)
        if name == "h" and self._tile is not None:
            return self.tile.head_index(r)
        return getattr(self.leaves, name)


# --- the score mod, cut into what a kernel needs --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LinearTerm:
    """`head` * (q * form.q + kv * form.kv + constant), added to the score: one FMA per column, nothing per row."""

    head: Expr | None  # None is 1
    form: Affine
    sign: float

    def column(self, at: Evaluator, c: int) -> Any:
        """The term at column `c` and the thread's first row."""
        factor = self._factor(at)
        offset = float(self.form.kv * at.tile.shape.column_offsets[c])
        return (at.float_start(self.form) + offset) * factor  # the sum first: it is exact

    def line(self, at: Evaluator) -> tuple[Any, Any]:
        """(the term at the thread's first row and column, what it rises by from column to column)."""
        factor = self._factor(at)
        return at.float_start(self.form) * factor, float(self.form.kv) * factor

    def row(self, at: Evaluator, r: int) -> Any:
        """What row `r` has more than the first row: not seen by softmax, added to LSE."""
        return float(self.form.q * at.tile.shape.row_offsets[r]) * self._factor(at)

    def _factor(self, at: Evaluator) -> Any:
        value = self.sign if self.head is None else convert(at.value(self.head), DType.FLOAT)
        return value if self.head is None or self.sign == 1.0 else value * self.sign


@dataclasses.dataclass(frozen=True)
class AdditiveScore:
    """score * factor + linear terms + other terms."""

    factor: Expr | None
    linear_terms: tuple[LinearTerm, ...]
    others: tuple[tuple[float, Expr], ...]


def additive(expr: Expr, of_one_head: bool = True) -> AdditiveScore | None:
    """`expr` as an additive score mod, or None when the score occurs in any other way.

    `of_one_head`: whether a thread's rows are, so that what depends on the head alone is one value.
    """
    if expr.depth > DEEP:
        return None
    terms = list(_terms(expr, 1.0))
    scored = [(sign, t) for sign, t in terms if _depends_on_score(t)]
    if len(scored) != 1 or scored[0][0] != 1.0:
        return None
    factor = _score_factor(scored[0][1], of_one_head)
    if factor is _NOT_A_FACTOR:
        return None
    lines, others = [], []
    for sign, term in terms:
        if _depends_on_score(term):
            continue
        line = _linear_term(sign, term, of_one_head)
        if line is None:
            others.append((sign, term))
        else:
            lines.append(line)
    return AdditiveScore(factor, tuple(lines), tuple(others))


_NOT_A_FACTOR: Any = object()


def _depends_on_score(node: Expr) -> bool:
    return bool(node.deps & score().deps)


def _terms(node: Expr, sign: float) -> Any:
    if node.dtype is DType.FLOAT and node.op in ("add", "sub") and _depends_on_score(node):
        yield from _terms(node.args[0], sign)
        yield from _terms(node.args[1], sign if node.op == "add" else -sign)
    else:
        yield sign, node


def _is_fixed(node: Expr, of_one_head: bool) -> bool:
    """Whether `node` is one value for all of a thread's rows and columns."""
    return rate(node, of_one_head) in (Rate.CONSTANT, Rate.HEAD)


def _score_factor(term: Expr, of_one_head: bool) -> Any:
    if term is score():
        return None
    if term.op == "mul":
        for x, y in (term.args, term.args[::-1]):
            if x is score() and _is_fixed(y, of_one_head):
                return y
    return _NOT_A_FACTOR


def _linear_term(sign: float, term: Expr, of_one_head: bool) -> LinearTerm | None:
    """Only with a head-only factor: a row-dependent value could be infinite, and must not be lost to softmax."""
    if term.op == "mul":
        for x, y in (term.args, term.args[::-1]):
            form = small_affine(y.args[0] if y.op == "cast_float" else y)
            if form is not None and form.kv and _is_fixed(x, of_one_head):
                return LinearTerm(x, form, sign)
        return None
    form = small_affine(term.args[0] if term.op == "cast_float" else term)
    return LinearTerm(None, form, sign) if form is not None and form.kv else None


def run_of(count: int, start: Any, stop: Any) -> Iterator[tuple[int, Any]]:
    """(i, whether start <= i < stop) for `i` below `count`; `start` None: 0, `stop` None: no end.

    A word says it of 24, and a bit of it costs less than a comparison: predicates are set by seven from a register.
    """
    for word, inside in words_of_run(count, start, stop):
        for i in range(word, min(word + WORD, count)):
            yield i, inside & (1 << (i - word)) != 0


def words_of_run(count: int, start: Any, stop: Any) -> Iterator[tuple[int, Any]]:
    """Each word of `run_of`, and the first position that it speaks of."""
    for word in range(0, count, WORD):
        inside: Any = -1
        if stop is not None:
            inside = bits_before(stop if word == 0 else larger(stop - word, 0))
        if start is not None:
            inside = inside & ~bits_before(start if word == 0 else larger(start - word, 0))
        yield word, inside


def run_ends(at: Evaluator, limits: RowLimits, r: int, c: int) -> tuple[Any, Any]:
    """(begin, end) of the run that row `r`, or column `c`, has; begin None: no position lies before it."""
    begin = None if limits.begin.is_const and limits.begin.attr <= 0 else Int32(at.value(limits.begin, r, c))
    return begin, Int32(at.value(limits.end, r, c))


# --- what kernels use -----------------------------------------------------------------------------------------


class Mods:
    """The score mod, the mask and the loop bounds of a plan; holds graphs, no run-time values.

    The kernel receives tensors in the order of `captured`, by default the program's, run-time numbers in the program's.
    `positive_scale`: whether the user's softmax scale is above 0, so that it can stay folded into the exponent.
    `of_one_head`: whether a thread's rows are. `arithmetic`: how a thread that has one row computes it. `steepest`: see
    `steepest_tanh`. `folds`: keys of a tile whose scales, of scores and of V, are the softmax's; 0: of heads alone.
    """

    def __init__(
        self,
        program: Program,
        positive_scale: bool = True,
        of_one_head: bool = True,
        captured: tuple[Any, ...] | None = None,
        arithmetic: Arithmetic = ONE_BY_ONE,
        folds: int | None = None,
    ) -> None:
        self.score, self.mask, self.sink, self.keep, self.values = program.mods
        self.scales: Scales | None = None
        if folds is not None:
            rest, scales = scales_of(self.score, self.values, folds, lambda node: rate(node, of_one_head))
            if folds or scales.heads:
                self.score, self.scales = rest, scales
        self.arithmetic = arithmetic
        self.bounds, self.limits = program.intervals, program.limits
        self.positive_scale = positive_scale
        read = program.captures if captured is None else captured
        self.capture_slot = {capture: slot for slot, capture in enumerate(read)}
        self.scalar_slot = {scalar: slot for slot, scalar in enumerate(program.scalars)}
        self.in_blocks: dict[tuple[Expr, Dep], bool] = {}
        self.deciding = deciding(self.score, self.mask)
        self.additive = None if self.score is None else additive(self.score, of_one_head)
        self.steepest = steepest_tanh(self.score)

    @property
    def changes_scores(self) -> bool:
        return self.score is not None or not self.positive_scale

    @property
    def least_score(self) -> float:
        """A row with no score of this size has nothing to attend."""
        return -math.inf if self.score is None else LEAST_SCORE

    def softmax_scale_log2(self, scale: Float32) -> Float32:
        """What makes log2 units of the scores that `apply_score` leaves; always positive."""
        return Float32(LOG2_E) if self.changes_scores else scale * LOG2_E

    def is_near(self, scale: Any, scores: Sequence[Any]) -> Any:
        """Whether no tanh of a score mod whose `steepest` is known is of a number beyond `NEAR`, at raw scores."""
        largest = tree(cute.arch.fmax, chains(cute.arch.fmax, [cm.abs(score) for score in scores]))
        return largest * cm.abs(scale * self.steepest) <= NEAR

    def intervals(self, leaves: Leaves) -> list[tuple[Any, Any, Any, Any]]:
        """(begin, end, full_begin, full_end) of each run of kv positions that the query tile visits, int32."""
        at = Evaluator(self, leaves, None)
        return [tuple(Int32(at.value(e)) for e in (i.begin, i.end, i.full_begin, i.full_end)) for i in self.bounds]

    def at(self, tile: ScoreTile, leaves: Leaves) -> BoundMods:
        """The mods at a work tile, with all that does not change along kv computed."""
        return BoundMods(self, tile, leaves)


class BoundMods(Fixed):
    """Mods at one work tile; applied to the score tiles along kv."""

    def __init__(self, mods: Mods, tile: ScoreTile, leaves: Leaves) -> None:
        self.mods, self.leaves = mods, leaves
        self.work = Evaluator(mods, leaves, tile)
        self.scales = None if mods.scales is None else BoundScales(mods.scales, self.work, mods.score is not None)
        if self.scales is not None:
            self.leaves = self.work.leaves = dataclasses.replace(leaves, scale=self.scales.of_leaves(leaves.scale))
        self.work.prepare(mods.mask, None if mods.additive else mods.score)
        if mods.additive is not None:
            parts = [mods.additive.factor, *(t.head for t in mods.additive.linear_terms)]
            self.work.prepare(*parts, *(term for _, term in mods.additive.others))
        self.row_shift = [self._row_shift(r) for r in range(tile.rows)]
        self.limits_hold: Any = False  # a number known when compiling, or a kernel value
        if mods.limits is not None and _is_fixed(mods.limits.holds, tile.shape.of_one_head):
            self.limits_hold = self.work.value(mods.limits.holds)
            self.row_limits = [self._row_limits(mods.limits, r) for r in range(tile.rows)]

    def _row_limits(self, limits: RowLimits, r: int) -> tuple[Any, Any]:
        """The keys that row `r` sees, inside of the sequence."""
        begin, end = run_ends(self.work, limits, r, 0)
        return begin, smaller(end, self.leaves.kv_len)

    def _row_shift(self, r: int) -> Any:
        """Part of the scores of row `r` that `apply_score` leaves out, in natural units; belongs into LSE."""
        terms = () if self.mods.additive is None else self.mods.additive.linear_terms
        return total(term.row(self.work, r) for term in terms if term.form.q)

    def row_sink(self, r: int) -> Any:
        """The sink of row `r` in the unit of `row_shift`, less that; None where there is none."""
        if self.mods.sink is None:
            return None
        value, shift = Float32(convert(self.work.value(self.mods.sink, r), DType.FLOAT)), self.row_shift[r]
        return value if shift is None else value - shift

    def scaled(self, scale: Any) -> Any:
        """`scale` times what is folded into it: NaN, for all to see, where that is negative, which no softmax takes."""
        return scale if self.scales is None else self.scales.of_softmax(scale)

    @property
    def kept_factor(self) -> float:
        """What an output is multiplied by at last, for weights that `drop` left out."""
        return 1.0 if self.mods.keep is None else factor_of(self.mods.keep)

    def drop(self, tile: ScoreTile) -> None:
        """Weights that dropout does not keep to 0, in place."""
        if self.mods.keep is not None:
            drop(Evaluator(self.mods, self.leaves, tile, self.work), self.mods.keep, tile.values)

    def weigh(self, tile: ScoreTile, ahead: dict[Any, Any], hides: bool) -> None:
        """Weights times what the values of their keys are multiplied by, in place; `ahead` has it, if it is not 1.

        `hides`: some weights are 0 as nobody sees their keys; behind the last one memory may hold a scale that is NaN.
        """
        for (r, c), factor in ahead.get(VALUES, {}).items():
            weight = tile.values[r, c]
            tile.values[r, c] = choose(weight == 0.0, weight, weight * factor) if hides else weight * factor

    @property
    def scales_channels(self) -> bool:
        """Whether there is a `value_factor` for a channel."""
        values = self.mods.values
        return values is not None and values.deps & (Dep.KV | Dep.D) == Dep.D

    def value_factor(self, tile: ScoreTile, r: int, channel: Any = None) -> Any:
        """What values of all keys, those of a `channel` or of all of them, are multiplied by in row `r`; None: 1."""
        values = self.mods.values
        if values is None or values.deps & Dep.KV or (channel is None) == bool(values.deps & Dep.D):
            return None
        at = Evaluator(self.mods, dataclasses.replace(self.leaves, d=channel), tile)
        return Float32(convert(at.value(values, r), DType.FLOAT))

    def weights(self, tile: ScoreTile, start: int, count: int) -> cute.Tensor:
        """`count` weights of a tile of one row, from column `start` on, after dropout; the tile itself is unchanged."""
        part = cute.make_tensor(tile.values.iterator + start, cute.make_layout(count))
        if self.mods.keep is None:
            return part
        columns = tile.shape.column_offsets[start : start + count]
        values = cute.make_tensor(copied(part).iterator, cute.make_layout((1, count)))
        shape = dataclasses.replace(tile.shape, column_offsets=columns)
        self.drop(ScoreTile(shape, values, tile.b, tile.h, tile.first_q, tile.first_kv))
        return cute.make_tensor(values.iterator, cute.make_layout(count))

    def read_ahead(self, tile: ScoreTile) -> dict[Expr, Any]:
        """Reads that need not wait for the scores: of the score mod, for `apply_score`, and of values, for `weigh`."""
        at = Evaluator(self.mods, self.leaves, tile, self.work)
        at.read_ahead(self.mods.score)
        ahead: dict[Any, Any] = at.ahead
        values = self.mods.values
        if self.scales is not None:
            ahead[SCALES] = ReadScales()  # what there is of tiles lies in shared memory
        if values is not None and values.deps & Dep.KV and (self.scales is None or self.scales.scales.values is None):
            places = itertools.product(range(tile.rows), range(tile.columns))
            ahead[VALUES] = {rc: Float32(convert(at.value(values, *rc), DType.FLOAT)) for rc in places}
        return ahead

    def is_near(self, scores: Sequence[Any]) -> Any:
        """See `Mods.is_near`."""
        return self.mods.is_near(self.leaves.scale, scores)

    def apply_score(
        self, tile: ScoreTile, ahead: dict[Any, Any], all_visible: bool = False, near: bool = False
    ) -> None:
        """Raw q·k to scores in natural units, in place (left raw when there is no score mod).

        `all_visible`: the mask, which comes next, hides nothing of this tile. `near`: see `is_near`.
        """
        if self.scales is None:
            self._apply_score(tile, ahead, all_visible, near)
            return
        self.scales.apply(tile, ahead[SCALES])
        self._apply_score(tile, ahead, all_visible, near)
        self.scales.lift(tile)

    def _apply_score(self, tile: ScoreTile, ahead: dict[Any, Any], all_visible: bool, near: bool) -> None:
        """`apply_score` of scores whose factors were applied before."""
        mods = self.mods
        if not mods.changes_scores:
            return
        at = Evaluator(mods, self.leaves, tile, self.work)
        at.ahead = ahead
        if mods.additive is not None:
            self._apply_additive(at, mods.additive)
            return
        if tile.rows == 1 and mods.score is not None and mods.score.depth <= DEEP:
            for first in range(0, tile.columns, TOGETHER):
                values = RowValues(at, mods.arithmetic, range(first, first + TOGETHER), all_visible, near).of(
                    mods.score
                )
                for c, value in enumerate(values, first):
                    tile.values[0, c] = value
                at.forget_element()
            return
        for r in range(tile.rows):
            for c in range(tile.columns):
                tile.values[r, c] = Float32(at.value(mods.score or score(), r, c))
                at.forget_element()

    def _apply_additive(self, at: Evaluator, shape: AdditiveScore) -> None:
        tile = at.tile
        scale = self.leaves.scale
        factor = scale if shape.factor is None else convert(at.value(shape.factor), DType.FLOAT) * scale
        if tile.rows == 1 and tile.shape.has_neighbours:
            self._apply_to_row(at, shape, factor)
            return
        for c in range(tile.columns):
            along = total(term.column(at, c) for term in shape.linear_terms)
            for r in range(tile.rows):
                added = along
                for sign, other in shape.others:
                    value = convert(at.value(other, r, c), DType.FLOAT)
                    if sign < 0:
                        added = -value if added is None else added - value
                    else:
                        added = value if added is None else added + value
                raw = tile.values[r, c]
                tile.values[r, c] = raw * factor if added is None else cm.fma(raw, factor, Float32(added))
                at.forget_element()

    def _apply_to_row(self, at: Evaluator, shape: AdditiveScore, factor: Any) -> None:
        """The additive score mod where a thread has one row of neighbours: no other row shares what a column has."""
        tile, arithmetic = at.tile, self.mods.arithmetic
        columns = range(tile.columns)
        scores = [tile.values[0, c] for c in columns]
        added: list[Any] = [None] * tile.columns
        lines = [term.line(at) for term in shape.linear_terms]
        if lines:
            # the same few numbers for all columns, and one number more for each `LIFTED` of them
            start, slope = (functools.reduce(operator.add, parts) for parts in zip(*lines, strict=True))
            offsets = tile.shape.column_offsets
            tile.runs = Runs(LIFTED, (), [cm.fma(slope, Float32(first), start) for first in offsets[::LIFTED]])
            multiples = arithmetic.multiples(slope, LIFTED)
            added = [multiples[offset % LIFTED] for offset in offsets]
        for c in columns:
            for sign, other in shape.others:
                value = convert(at.value(other, 0, c), DType.FLOAT)
                signed = value if sign > 0 else -value
                added[c] = signed if added[c] is None else added[c] + signed
            at.forget_element()
        if lines or shape.others:
            changed = arithmetic.times_plus(scores, factor, list(map(Float32, added)))
        else:
            changed = arithmetic.times(scores, factor)
        for c, value in zip(columns, changed, strict=True):
            tile.values[0, c] = value

    def apply_mask(self, tile: ScoreTile) -> None:
        """-inf where the mask is false or kv lies beyond the sequence, in place."""
        at = Evaluator(self.mods, self.leaves, tile, self.work)
        limit = self.leaves.kv_len - tile.first_kv
        for c in range(tile.columns):
            inside = tile.shape.column_offsets[c] < limit
            for r in range(tile.rows):
                visible = inside if self.mods.mask is None else self._and(inside, at.value(self.mods.mask, r, c))
                tile.values[r, c] = choose(visible, tile.values[r, c], -Float32.inf)
                at.forget_element()

    def apply_limits(self, tile: ScoreTile) -> None:
        """What `apply_mask` does, by each row's first and last visible key alone; where the mask's limits hold."""
        for r in range(tile.rows):
            for c, visible in run_of(tile.columns, *self.run(tile, r)):
                tile.values[r, c] = choose(visible, tile.values[r, c], -Float32.inf)

    def run(self, tile: ScoreTile, r: int) -> tuple[Any, Any]:
        """The thread's columns that row `r` sees by its limits: the first, None where it is 0, and the one behind."""
        before, (begin, end) = tile.shape.columns_before, self.row_limits[r]
        stop = before(larger(end - tile.first_kv, 0))
        return None if begin is None else before(larger(begin - tile.first_kv, 0)), stop

    @staticmethod
    def _and(inside: Any, visible: Any) -> Any:
        if isinstance(visible, bool):
            return inside if visible else inside & False
        return inside & visible


_STEPS = {"floor", "ceil", "round", "trunc", "floordiv", "truncdiv", "mod", "fmod", "sign"}
_STEPS |= {"cast_bool", "cast_int32", "cast_int64", *MIRRORED}


def deciding(*roots: Expr | None) -> set[Expr]:
    """All that a comparison, a rounding or a cast to an integer below `roots` is computed from.

    Without what changes with the score, which has errors of its own.
    """
    found: set[Expr] = set()
    for node in reversed(list(walk(*(r for r in roots if r is not None)))):
        if node in found or node.op in _STEPS:
            found.update(a for a in node.args if not a.deps & Dep.SCORE)
    return found
