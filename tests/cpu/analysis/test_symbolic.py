"""Mods as mathematics: their formulas, and sympy as the oracle of their derivatives and of a mask's inequalities."""

from __future__ import annotations

import math
import random
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import sympy
import torch

import composattn as ca
from composattn.analysis.bands import row_limits, tile_intervals
from composattn.analysis.symbolic import Names, formula, latex, read_in_words, to_sympy
from composattn.graph.evaluate import Env, evaluate, evaluate_all
from composattn.graph.expr import DType, Expr, const, index, score, walk
from composattn.graph.gradient import derivative
from composattn.graph.ops import ARITY, OPS, apply
from composattn.graph.scalar import Scalar
from composattn.graph.trace import trace_mask, trace_score
from composattn.mods import masks, scores
from tests.cpu.graph.programs import ScoreProgram

CODE = st.lists(st.integers(0, 255), max_size=14)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (lambda b, h, q, kv: (q - kv) * 2 - (q - (kv - 1)) > -3, "(q - kv)·2 - (q - (kv - 1)) > -3"),
        (lambda b, h, q, kv: ~((q >= kv) & (kv < 3)) | (abs(q - kv) <= 2), "~(q >= kv & kv < 3) | |q - kv| <= 2"),
        (lambda b, h, q, kv: (q // (kv + 1) == 2) == (q > kv), "(q // (kv + 1) == 2) == (q > kv)"),
        (lambda b, h, q, kv: -(q + kv) < 2**q, "-(q + kv) < 2**q"),
        (lambda b, h, q, kv: q + -80 < kv + (-q + 3), "q - 80 < kv - q + 3"),
    ],
)
def test_formulas_have_the_brackets_they_need(mask: object, expected: str) -> None:
    assert formula(trace_mask(mask)) == expected  # type: ignore[arg-type]


def test_names_follow_first_appearance_and_tell_what_they_are() -> None:
    table, slope = torch.randn(8, 3), Scalar(0.5)
    expr = trace_score(lambda s, b, h, q, kv: s * slope + table[q, h] + table[kv, h])
    names = Names(expr)
    assert formula(expr, names) == "s·c0 + t0[q, h] + t0[kv, h]"
    assert names.legend() == {"t0": "float32[8, 3]"}


def test_a_read_is_said_as_a_formula_and_not_as_a_graph() -> None:
    table, picked = torch.randn(4, 257), torch.zeros(9, dtype=torch.int32)
    expr = trace_score(lambda s, b, h, q, kv: s + table[h, (q - kv).clamp(-128, 128) + 128 + picked[q]])
    said = [read_in_words(node) for node in walk(expr) if node.op == "read"]
    assert "a captured tensor of shape (9,) is read at [q]" in said
    assert "a captured tensor of shape (4, 257) is read at [h, min(max(q - kv, -128), 128) + 128 + t0[q]]" in said


def point(program: ScoreProgram) -> tuple[Env, dict[str, float]]:
    """One place and score, and the numbers that stand for the symbols there."""
    at = {"b": 1, "h": 2, "q": 3, "kv": 4}
    env = Env(index={k: torch.tensor(v) for k, v in at.items()}, score=torch.tensor(0.7, dtype=torch.float64))
    return env, {"s": 0.7, "c0": program.scalar.value, **at}


def number(found: Any, program: ScoreProgram, numbers: dict[str, float]) -> float | None:
    """What sympy makes of it; None where that is no finite real number."""
    names = Names(program.expr)
    tensors = {names.tensor(c): c.tensor.detach() for c in names._tensors}
    known = {**numbers, **{name: float(t) for name, t in tensors.items() if not t.ndim}}
    try:
        value = found.subs({s: known[s.name] for s in found.free_symbols if getattr(s, "name", None) in known})
        value = value.replace(
            lambda e: isinstance(e, sympy.Indexed),
            lambda e: sympy.Float(float(tensors[e.base.name][tuple(int(i) for i in e.indices)]), 30),
        ).evalf()
    except ZeroDivisionError:  # x % 0, which is NaN in torch
        return None
    except (TypeError, ValueError) as refusal:  # the logarithm of a negative number is complex there: no < and no Max
        assert "compar" in str(refusal), refusal
        return None
    return float(value) if value.is_real and value.is_finite else None


def finite_value(expr: Expr, at: Env) -> float | None:
    """Its value; None where a step on the way is no finite number: sign(NaN) is 0 again, and sympy's is complex."""
    with torch.no_grad():
        steps = [float(step) for step in evaluate_all(list(walk(expr)), at)]
    return steps[-1] if all(map(math.isfinite, steps)) else None


@hypothesis.settings(max_examples=60)
@hypothesis.given(code=CODE, seed=st.integers(0, 20))
def test_sympy_agrees_where_it_has_a_value(code: list[int], seed: int) -> None:
    program = ScoreProgram(code, seed)
    found = to_sympy(program.expr)
    if found is None or len(str(found)) > 2000:
        return
    at, numbers = point(program)
    ours, theirs = finite_value(program.expr, at), number(found, program, numbers)
    if theirs is not None and ours is not None and abs(ours) < 1e12:
        assert abs(theirs - ours) <= 1e-6 * (1 + abs(ours)), f"{program.expr} is {ours}, {found} is {theirs}"


def test_latex_of_ready_mods() -> None:
    assert latex(scores.softcap(30.0).expr) == r"30 \tanh{\left(\frac{s}{30} \right)}"
    assert latex(derivative(scores.softcap(30.0).expr)) == r"1 - \tanh^{2}{\left(\frac{s}{30} \right)}"
    assert r"\wedge" in latex((masks.causal() & masks.sliding_window(4)).expr)
    shifted = trace_mask(lambda b, h, q, kv: (q << 2) > kv)
    assert latex(shifted) == r"\texttt{q << 2 > kv}"


def test_text_of_shared_parts_does_not_explode() -> None:
    x = score()
    for _ in range(200):
        x = apply("add", apply("mul", x, x), x)
    assert len(formula(x)) <= 2000 and "…" in formula(x)
    assert len(latex(x)) < 3000
    assert len(formula(derivative(x))) <= 2000


def test_every_operation_with_an_algebra_finds_it_in_sympy() -> None:
    # the rows of the table name sympy's functions, which are looked up when first used
    x, y = sympy.symbols("x y", real=True)
    logic = (x > 0, y > 0)
    for row in OPS.values():
        if row.sympy is not None:
            arguments = logic if row.name in ("and", "or", "xor", "not") else (x, y)
            given = (x > 0, x, y) if row.name == "where" else arguments[: ARITY[row.name]]
            assert row.sympy(*given).free_symbols, row.name


# --- the derivative, against sympy's --------------------------------------------------------------------------------


def _is_float(name: str) -> bool:
    types = (DType.BOOL, DType.FLOAT, DType.FLOAT) if name == "where" else (DType.FLOAT,) * ARITY[name]
    try:
        return OPS[name].result(*types) is DType.FLOAT
    except ca.errors.TypeMismatch:
        return False


AT = [0.3, 0.7, 1.6, 2.5]  # inside of every function's domain, and at no kink
DIFFERENTIABLE = [
    name
    for name, row in OPS.items()
    # floor, sign and comparisons have none; of a remainder sympy does not know it
    if row.sympy is not None
    and row.partials is not None
    and name not in ("mod", "floordiv", "sign", "floor", "ceil")
    and name != "among"  # which is its argument
    and not name.startswith("cast_")
    and _is_float(name)
]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_the_derivative_of_every_operation_is_sympys(name: str) -> None:
    s, other = score(), const(1.25)
    given = {1: (s,), 2: (s, other), 3: (apply("gt", s, other), apply("mul", s, s), s)}[ARITY[name]]
    for arguments in dict.fromkeys((given, given[::-1] if ARITY[name] == 2 else given)):
        expr = apply(name, *arguments)
        wanted = sympy.lambdify(_S, sympy.diff(to_sympy(expr), _S), "mpmath")
        ours = evaluate(derivative(expr), Env({}, score=torch.tensor(AT, dtype=torch.float64)))
        for value, found in zip(AT, ours.expand(len(AT)).tolist(), strict=True):
            assert found == pytest.approx(float(wanted(value)), rel=1e-9), f"{expr} at {value}"


_S = sympy.Symbol("s", real=True)


@hypothesis.settings(max_examples=60)
@hypothesis.given(code=CODE, seed=st.integers(0, 20))
def test_derivatives_of_random_mods_are_sympys(code: list[int], seed: int) -> None:
    program = ScoreProgram(code, seed)
    whole = to_sympy(program.expr)
    at, values = point(program)
    if whole is None or len(str(whole)) > 600 or finite_value(program.expr, at) is None:
        return  # where there is no real number there is no derivative: sympy's is one of complex numbers, or 0
    slope = sympy.diff(whole, _S)
    if slope.has(sympy.Derivative, sympy.Subs, sympy.DiracDelta, sympy.Heaviside, sympy.Mod, sympy.floor):
        return  # a step, of which sympy's derivative is no number
    theirs = number(slope, program, values)
    ours = finite_value(derivative(program.expr), at)
    if theirs is not None and ours is not None and abs(ours) < 1e9:
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6), f"{program.expr}: d/ds is {slope}"


# --- bounds on kv, against sympy's solutions ------------------------------------------------------------------------


def affine_mask(draw: random.Random) -> Expr:
    """Two or three inequalities in q and kv, all of which hold."""
    q, kv = index("q"), index("kv")
    mask = const(True)
    for _ in range(draw.randint(2, 3)):
        a, b, c = draw.choice([-3, -2, -1, 1, 2, 3]), draw.randint(-3, 3), draw.randint(-20, 20)
        left = apply("add", apply("mul", const(a), kv), apply("mul", const(b), q))
        mask = apply("and", mask, apply(draw.choice(["lt", "le", "gt", "ge"]), left, const(c)))
    return mask


@pytest.mark.parametrize("seed", range(25))
def test_solved_bounds_are_sympys(seed: int) -> None:
    rows, length = range(4, 8), 24
    mask = affine_mask(random.Random(seed))
    condition, kv = to_sympy(mask), sympy.Symbol("kv", integer=True, nonnegative=True)
    q, free = sympy.Symbol("q", integer=True, nonnegative=True), sympy.Symbol("x", real=True)
    seen = []
    for row in rows:
        parts = sympy.And.make_args(condition.subs({q: row, kv: free}))
        solved = sympy.reduce_inequalities(list(parts), free).as_set()
        seen.append({n for n in range(length) if solved.contains(n) == True})  # noqa: E712  (sympy's truth)
    limits = row_limits(mask)
    assert limits is not None
    for row, wanted in zip(rows, seen, strict=True):
        env = Env({"q": torch.tensor(row), "q_len": length, "kv_len": length})
        begin, end = (int(v) for v in evaluate_all([limits.begin, limits.end], env))
        assert set(range(begin, end)) == wanted
    env = Env({"first": rows[0], "last": rows[-1], "q_len": length, "kv_len": length})
    (interval,) = tile_intervals(mask)
    begin, end, full_begin, full_end = (int(v) for v in evaluate_all(list(interval.ends), env))
    assert set.union(*seen) <= set(range(begin, end))
    assert set(range(max(full_begin, 0), min(full_end, length))) <= set.intersection(*seen)


# --- in notebooks ---------------------------------------------------------------------------------------------------


def test_notebooks_show_a_mask_and_a_score_mod_with_its_derivative() -> None:
    assert masks.causal()._repr_latex_() == r"$\displaystyle q \geq kv$"
    shown = scores.softcap(30.0)._repr_latex_()
    assert r"\frac{\partial \mathrm{score\_mod}}{\partial s} &= 1 - \tanh^{2}" in shown
    table = torch.randn(4)
    assert r"\partial {t_{0}}_{h}} &= s" in ca.score(lambda s, b, h, q, kv: s * table[h])._repr_latex_()


def test_what_is_no_formula_is_shown_as_text_that_latex_reads() -> None:
    bits = ca.mask(lambda b, h, q, kv: (q & 3) == (kv % 4))
    assert bits._repr_latex_() == r"$\displaystyle \texttt{(q \& 3) == kv \% 4}$"
