"""A mask as a union of conjunctions: bounds on kv, conditions on the row, what is left to test.

The mask is brought to negation normal form. Every integer comparison is solved for kv (sums, products with constants,
`//` and `%` by constants, abs, min, max, clamp, where), and comparisons of captured ids become runs. The result is
brought to disjunctive normal form. Nothing is approximated silently: a conjunction whose bounds say less than the mask
is `exact=False`: all that it sees lies inside its bounds, and not all inside is seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import torch

from ..graph.balanced import balanced
from ..graph.expr import DEEP, Capture, Dep, DType, Expr, const, index, read
from ..graph.linear import Linear, bounds, build, difference, linear
from ..graph.ops import MIRRORED, NEGATED, apply
from .derived import Derived, derive
from .matches import END, FIRST, FULL_END, FULL_START, START, STOP, matches, reached

MOST_CONJUNCTIONS = 8  # a mask that needs more is analysed by intervals over tiles instead
MOST_CHOICES = 64  # of one comparison that are followed: each has two sides, and a value may pass many of them twice


@dataclass(frozen=True)
class Low:
    """kv >= outer; every kv >= inner is seen (as far as this bound goes)."""

    outer: Expr
    inner: Expr


@dataclass(frozen=True)
class High:
    """kv < outer; every kv < inner is seen (as far as this bound goes)."""

    outer: Expr
    inner: Expr


@dataclass(frozen=True)
class RowCondition:
    """A condition on the row alone: `kind` is ge (value >= 0), eq (value == 0) or ne."""

    kind: str
    value: Expr


@dataclass(frozen=True)
class Residue:
    """kv is `of` modulo `step`; settles no bound, but moves the bounds to the nearest such kv."""

    of: Expr
    step: int


@dataclass(frozen=True)
class Opaque:
    """A condition that nothing is known of."""

    condition: Expr
    holds: bool


Constraint = Low | High | RowCondition | Residue | Opaque


@dataclass
class Conjunction:
    """The intersection of its constraints."""

    constraints: tuple[Constraint, ...] = ()

    @property
    def exact(self) -> bool:
        return not any(isinstance(c, (Opaque, Residue)) for c in self.constraints)

    def bounds(self) -> tuple[list[Low], list[High]]:
        return (
            [c for c in self.constraints if isinstance(c, Low)],
            [c for c in self.constraints if isinstance(c, High)],
        )


# A formula over constraints: lists of conjunctions (their union). ALL is one without constraints, NONE has none.
Conjunctions = list[Conjunction]


@dataclass
class _Solver:
    """Solves for the leaf `name` ("kv"; "q" for conditions on rows)."""

    name: str
    leaf: Expr
    dep: Dep
    seen: dict[tuple[Expr, bool], Conjunctions] = field(default_factory=dict)
    choices: int = 0  # followed so far, of the comparison at hand

    # --- logic ---

    def formula(self, e: Expr, holds: bool) -> Conjunctions:
        """Pieces of `e` (of its negation, where not `holds`)."""
        key = (e, holds)
        if key not in self.seen:
            self.seen[key] = self._formula(e, holds)
        return self.seen[key]

    def _formula(self, e: Expr, holds: bool) -> Conjunctions:
        op, args = e.op, e.args
        if op == "const":
            return _ALL() if bool(e.attr) is holds else []
        if op == "not":
            return self.formula(args[0], not holds)
        if op in ("and", "or"):
            join = self.both if (op == "and") is holds else self.either
            return join(self.formula(args[0], holds), self.formula(args[1], holds))
        if op == "where":
            return self.choice(args[0], self.formula(args[1], holds), self.formula(args[2], holds))
        if _compares_bools(e):
            differ = (op == "eq") is not holds
            return self.choice(args[0], self.formula(args[1], not differ), self.formula(args[1], differ))
        if op == "cast_bool" and args[0].dtype.is_integer:
            return self.ne(linear(args[0])) if holds else self.eq(linear(args[0]))
        if op in NEGATED:
            outside, self.choices = self.choices, 0
            found, self.choices = self.comparison(e, holds), outside
            return found
        if op != "read":
            return [Conjunction((Opaque(e, holds),))]
        if e.deps & self.dep:
            return self.compared_reads("eq", e, const(holds), e, holds)
        return self.condition("eq", Linear(-int(holds), {e: 1}))

    def choice(self, condition: Expr, yes: Conjunctions, no: Conjunctions) -> Conjunctions:
        """`yes` where the condition holds, `no` elsewhere."""
        return self.either(self.both(self.formula(condition, True), yes), self.both(self.formula(condition, False), no))

    def comparison(self, e: Expr, holds: bool) -> Conjunctions:
        x, y = e.args
        if not all(a.dtype.is_integer for a in e.args):
            exact = _as_integers(e)
            return [Conjunction((Opaque(e, holds),))] if exact is None else self.formula(exact, holds)
        op = e.op if holds else NEGATED[e.op]
        if any(_is_table(a) and a.deps & self.dep for a in (x, y)):
            return self.compared_reads(op, x, y, e, holds)
        a, b = linear(x), linear(y)
        if op in ("eq", "ne"):
            return (self.eq if op == "eq" else self.ne)(a.plus(b, -1))
        if op in ("gt", "lt"):
            a, b = (a.shifted(-1), b) if op == "gt" else (a, b.shifted(-1))
        return self.ge(a.plus(b, -1) if op in ("ge", "gt") else b.plus(a, -1))

    def both(self, x: Conjunctions, y: Conjunctions) -> Conjunctions:
        if len(x) * len(y) > MOST_CONJUNCTIONS:  # keep the simpler side and leave the other to the test
            kept = x if len(x) <= len(y) else y
            left = Opaque(const(True), True)
            return [Conjunction((*p.constraints, left)) for p in kept]
        return _unique([Conjunction(tuple(dict.fromkeys(p.constraints + r.constraints))) for p, r in product(x, y)])

    def either(self, x: Conjunctions, y: Conjunctions) -> Conjunctions:
        conjunctions = _unique(x + y)
        return conjunctions if len(conjunctions) <= MOST_CONJUNCTIONS else [Conjunction((Opaque(const(True), True),))]

    # --- one comparison ---

    def ge(self, lin: Linear) -> Conjunctions:
        """lin >= 0"""
        here = [(t, c) for t, c in lin.terms.items() if t.deps & self.dep]
        if not here:
            return self.condition("ge", lin)
        if len(here) > 1:
            return self.unsolved("ge", lin)
        (t, c), rest = here[0], lin.without(here[0][0])
        if c > 0:  # t >= -rest / c, rounded up
            return self.bound(t, "ge", rest.times(-1) if c == 1 else _floordiv(rest, c).times(-1))
        return self.bound(t, "le", rest if c == -1 else _floordiv(rest, -c))

    def eq(self, lin: Linear) -> Conjunctions:
        """lin == 0"""
        here = [(t, c) for t, c in lin.terms.items() if t.deps & self.dep]
        if not here:
            return self.condition("eq", lin)
        if len(here) == 1 and abs(here[0][1]) == 1:
            (t, c), rest = here[0], lin.without(here[0][0])
            value = rest.times(-c)
            if t.op == "mod":
                return self.residue(t, value)
            if t.op == "abs":
                either = self.either(self.eq(linear(t.args[0]).plus(value, -1)), self.eq(linear(t.args[0]).plus(value)))
                return self.both(either, self.ge(value))
        return self.both(self.ge(lin), self.ge(lin.times(-1)))

    def ne(self, lin: Linear) -> Conjunctions:
        """lin != 0"""
        here = [t for t in lin.terms if t.deps & self.dep]
        if not here:
            return self.condition("ne", lin)
        if len(here) == 1 and here[0].op in ("mod", "read"):
            return self.unsolved("ne", lin)
        return self.either(self.ge(lin.shifted(-1)), self.ge(lin.times(-1).shifted(-1)))

    def condition(self, kind: str, lin: Linear) -> Conjunctions:
        if lin.is_const:
            v = lin.constant
            return _ALL() if {"ge": v >= 0, "eq": v == 0, "ne": v != 0}[kind] else []
        return [Conjunction((RowCondition(kind, build(lin)),))]

    def unsolved(self, kind: str, lin: Linear) -> Conjunctions:
        return [Conjunction((Opaque(apply(kind, build(lin), const(0)), True),))]

    def bound(self, t: Expr, side: str, value: Linear) -> Conjunctions:
        """t >= value (side "ge") or t <= value (side "le"), for a term `t` that depends on the leaf."""
        ge = side == "ge"
        if t is self.leaf:
            end = build(value if ge else value.shifted(1))
            return [Conjunction((Low(end, end) if ge else High(end, end),))]
        found = self.inner_bound(t, side, value)
        if found is not None:
            return found
        low, high = bounds(t)
        if value.is_const:
            less, more = (low, high) if ge else (-high, -low)
            limit = value.constant if ge else -value.constant
            if limit <= less or limit > more:
                return _ALL() if limit <= less else []
        return self.unsolved("ge", Linear(0, {t: 1}).plus(value, -1) if ge else value.plus(Linear(0, {t: 1}), -1))

    def inner_bound(self, t: Expr, side: str, value: Linear) -> Conjunctions | None:
        """`bound` as bounds on what `t` is made of; None where its operation has no such rule."""
        ge, op, args = side == "ge", t.op, t.args

        def again(u: Expr, v: Linear, side: str = side) -> Conjunctions:
            return self.ge(linear(u).plus(v, -1) if side == "ge" else v.plus(linear(u), -1))

        if op == "floordiv" and args[1].is_const and args[1].attr > 0:
            n = int(args[1].attr)
            return again(args[0], value.times(n) if ge else value.times(n).shifted(n - 1))
        self.choices += 1
        if self.choices > MOST_CHOICES:
            return None
        if op == "abs":
            u = args[0]
            if ge:
                return self.either(again(u, value), again(u, value.times(-1), "le"))
            return self.both(again(u, value), again(u, value.times(-1), "ge"))
        if op in ("maximum", "clamp_min", "minimum", "clamp_max"):
            join = self.either if (op in ("maximum", "clamp_min")) is ge else self.both
            return join(again(args[0], value), again(args[1], value))
        if op == "where":
            condition, yes, no = args
            return self.choice(condition, again(yes, value), again(no, value))
        return None

    def residue(self, t: Expr, value: Linear) -> Conjunctions:
        """u % n == value"""
        u, n = t.args
        inside = linear(u)
        here = [(x, c) for x, c in inside.terms.items() if x.deps & self.dep]
        if n.is_const and n.attr > 0 and len(here) == 1 and here[0][0] is self.leaf and abs(here[0][1]) == 1:
            # c·leaf + rest ≡ value  ⇔  leaf ≡ c·(value - rest)
            c, rest = here[0][1], inside.without(self.leaf)
            of = build(value.plus(rest, -1).times(c))
            in_range = self.both(self.ge(value), self.ge(value.times(-1).shifted(int(n.attr) - 1)))
            return self.both(in_range, [Conjunction((Residue(of, int(n.attr)),))])
        return self.unsolved("eq", Linear(0, {t: 1}).plus(value, -1))

    def compared_reads(self, op: str, x: Expr, y: Expr, e: Expr, holds: bool) -> Conjunctions:
        """A captured value of the column compared with one of the row, with its position, or a constant: x op y."""
        column, row = (x, y) if x.deps & self.dep else (y, x)
        op = op if column is x else MIRRORED[op]
        bound = _reached(op, column) if self.name == "kv" and row is index("q") else None
        if bound is not None:
            return [Conjunction((bound,))]
        ends = None if self.name != "kv" else _matches("eq" if op == "ne" else op, row, column)
        if ends is None:
            return [Conjunction((Opaque(e, holds),))]
        start, end, full_start, full_end = ends
        if op == "ne":  # before a run and after it; a run with gaps hides no range that is known
            return self.either([Conjunction((High(full_start, start),))], [Conjunction((Low(full_end, end),))])
        return [Conjunction((Low(start, full_start), High(end, full_end)))]


def _compares_bools(e: Expr) -> bool:
    return e.op == "xor" or (e.op in ("eq", "ne") and all(a.dtype is DType.BOOL for a in e.args))


def _ALL() -> Conjunctions:
    return [Conjunction()]


def _unique(conjunctions: Conjunctions) -> Conjunctions:
    """The conjunctions that lie inside no other one."""
    sets = [frozenset(p.constraints) for p in conjunctions]
    kept = []
    for i, s in enumerate(sets):
        if not any(other < s or (other == s and j < i) for j, other in enumerate(sets) if j != i):
            kept.append(conjunctions[i])
    return kept


def _floordiv(lin: Linear, n: int) -> Linear:
    if lin.is_const:
        return Linear(lin.constant // n, {})
    return linear(apply("floordiv", build(lin), const(n)))


_EXACT_FLOATS = 2**22  # halves and whole numbers up to here are exact in fp32


def _as_integers(e: Expr) -> Expr | None:
    """A comparison of an integer with a float constant as one of integers, where fp32 can't tell them apart."""
    x, y = e.args
    if x.is_const and not y.is_const:
        return _as_integers(apply(MIRRORED[e.op], y, x))
    if x.op == "cast_float":
        x = x.args[0]
    if not (x.dtype.is_integer and y.is_const and abs(y.attr) < _EXACT_FLOATS):
        return None
    value = y.attr
    if value * 2 != int(value * 2):
        return None
    floor = int(value // 1)
    if value == floor:
        return apply(e.op, x, const(floor))
    if e.op in ("eq", "ne"):
        return const(e.op == "ne")
    return apply("le" if e.op in ("lt", "le") else "gt", x, const(floor))


def _is_table(e: Expr) -> bool:
    return e.op == "read" and e.dtype is not DType.FLOAT and e.attr.tensor.ndim > 0


def _order(node: Expr, position: str) -> tuple[int, int, int] | None:
    """Which dimension of a read stands for b, h and the position; None where an index is anything else."""
    names = [i.attr if i.op == "index" else None for i in node.args]
    if any(n not in ("b", "h", position) for n in names) or len(set(names)) != len(names):
        return None
    b, h, p = (names.index(n) if n in names else -1 for n in ("b", "h", position))
    return b, h, p


def _columns_order(column: Expr) -> tuple[int, int, int] | None:
    """`_order` of a table that is read at kv; None for anything else."""
    found = _order(column, "kv") if _is_table(column) and column.attr.tensor.numel() else None
    return found if found is not None and found[2] >= 0 else None


def _reached(op: str, column: Expr) -> Low | High | None:
    """Where the columns with `column op q` end, exact where values ascend, as those of documents by offsets do."""
    columns_order = _columns_order(column)
    if columns_order is None or op not in ("lt", "le", "gt", "ge"):
        return None
    table = reached(column.attr, columns_order, strictly=op in ("lt", "ge"))
    at = (*(const(0) if d < 0 else index(name) for name, d in zip("bh", columns_order, strict=False)), index("q"))
    first, stop = (read(table, (const(i), *at)) for i in (FIRST, STOP))
    return High(stop, first) if op in ("lt", "le") else Low(first, stop)


def _matches(op: str, row: Expr, column: Expr) -> tuple[Expr, Expr, Expr, Expr] | None:
    """Where the columns with `column op row` begin and end: outer and inner."""
    columns_order = _columns_order(column)
    if columns_order is None:
        return None
    if row.is_const:
        rows, rows_order = _constant(column.attr, int(row.attr)), (-1, -1, -1)
    elif _is_table(row) and row.attr.tensor.numel():
        found = _order(row, "q")
        if found is None:
            return None
        rows, rows_order = row.attr, found
    else:
        return None
    table = matches(op, rows, column.attr, rows_order, columns_order)
    leaves = (index("b"), index("h"), index("q"))
    at = tuple(
        const(0) if row_d < 0 and column_d < 0 else leaf
        for leaf, row_d, column_d in zip(leaves, rows_order, (*columns_order[:2], -1), strict=True)
    )
    start, end, full_start, full_end = (read(table, (const(i), *at)) for i in (START, END, FULL_START, FULL_END))
    return start, end, full_start, full_end


def _constant(like: Capture, value: int) -> Derived:
    """A one-element tensor on the device of `like`."""
    return derive(("constant", value), lambda x: x.new_full((), value, dtype=torch.int64), like)


def conjunctions(mask: Expr) -> Conjunctions:
    """The mask as a union of conjunctions, bounds on kv; of a mask too deep to be followed nothing is known."""
    mask = balanced(mask)
    if mask.depth > DEEP:
        return [Conjunction((Opaque(mask, True),))]
    return _Solver("kv", index("kv"), Dep.KV).formula(mask, True)


def rows_where(row: RowCondition) -> tuple[Expr | None, Expr | None] | None:
    """[low, high) of the rows where a condition holds, None for no end; None where it is no such range."""
    solver = _Solver("q", index("q"), Dep.Q)
    lin = linear(row.value)
    solved = solver.ge(lin) if row.kind == "ge" else solver.eq(lin) if row.kind == "eq" else []
    if len(solved) != 1 or not all(isinstance(c, (Low, High)) for c in solved[0].constraints):
        return None
    lows, highs = solved[0].bounds()
    low, high = [c.outer for c in lows], [c.outer for c in highs]
    if len(low) > 1 or len(high) > 1 or any(e.deps & Dep.Q for e in (*low, *high)):
        return None
    return (low[0] if low else None), (high[0] if high else None)


def tightened(conjunction: Conjunction) -> tuple[list[Low], list[High]]:
    """Bounds on kv, outer ends moved to the nearest kv of its residues where the distance is a constant."""
    lows, highs = conjunction.bounds()
    for residue in (c for c in conjunction.constraints if isinstance(c, Residue)):
        for i, low in enumerate(lows):
            ahead = difference(residue.of, low.outer)
            if ahead is not None and ahead % residue.step:
                lows[i] = Low(build(linear(low.outer).shifted(ahead % residue.step)), low.inner)
        for i, high in enumerate(highs):
            back = difference(build(linear(high.outer).shifted(-1)), residue.of)
            if back is not None and back % residue.step:
                highs[i] = High(build(linear(high.outer).shifted(-(back % residue.step))), high.inner)
    return lows, highs
