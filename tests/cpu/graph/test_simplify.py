"""Rewrites of score mods: exact ones to the last bit, the others within the rounding that they state."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import sympy
import torch

from composattn.analysis.symbolic import Names, formula, latex, to_sympy
from composattn.graph.evaluate import Env, evaluate
from composattn.graph.expr import Dep, Expr, const, score
from composattn.graph.gradient import derivative
from composattn.graph.ops import ARITY, OPS, apply
from composattn.graph.simplify import affine_in_score, is_finite, simplify, split_row_constant
from composattn.graph.trace import Scalar, trace_mask, trace_score
from composattn.mods import masks, scores
from tests.cpu.graph.programs import SIZE, ScoreProgram

CODE = st.lists(st.integers(0, 255), max_size=14)


def env_at(seed: int) -> Env:
    generator = torch.Generator().manual_seed(seed)
    index = {name: torch.randint(0, SIZE, (12,), generator=generator) for name in ("b", "h", "q", "kv")}
    values = torch.randn(12, dtype=torch.float64, generator=generator) * 3
    values[:5] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")])
    return Env(index=index, score=values)


def value(expr: Expr, env: Env) -> torch.Tensor:
    with torch.no_grad():
        return evaluate(expr, env).expand(12)


@hypothesis.settings(max_examples=500)
@hypothesis.given(code=CODE, seed=st.integers(0, 99))
def test_simplify_keeps_every_bit(code: list[int], seed: int) -> None:
    expr, env = ScoreProgram(code, seed).expr, env_at(seed)
    before, after = value(expr, env), value(simplify(expr), env)
    same = (before == after) & (torch.signbit(before) == torch.signbit(after)) | (before.isnan() & after.isnan())
    assert same.all(), f"{expr} became {simplify(expr)}"


@hypothesis.settings(max_examples=500)
@hypothesis.given(code=CODE, seed=st.integers(0, 99))
def test_what_is_split_off_is_finite_and_constant_along_a_row(code: list[int], seed: int) -> None:
    expr, env = ScoreProgram(code, seed).expr, env_at(seed)
    rest, row = split_row_constant(expr)
    assert not row.deps & (Dep.KV | Dep.SCORE)
    assert value(row, env).isfinite().all()
    close(value(apply("add", rest, row), env), value(expr, env))


@hypothesis.settings(max_examples=500)
@hypothesis.given(code=CODE, seed=st.integers(0, 99))
def test_an_affine_form_gives_the_same_scores(code: list[int], seed: int) -> None:
    expr, env = ScoreProgram(code, seed).expr, env_at(seed)
    found = affine_in_score(expr)
    if found is not None:
        scale, offset = found
        assert not (scale.deps | offset.deps) & Dep.SCORE
        close(value(apply("add", apply("mul", score(), scale), offset), env), value(expr, env))


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_affine_forms_of_the_ready_mods() -> None:
    slopes, bias = torch.rand(4), torch.randn(4, 8)
    scale, offset = affine_in_score(scores.alibi(slopes).expr) or pytest.fail("alibi is affine")
    assert scale is const(1.0) and formula(offset) == "t0[h]·(kv - q)"
    mod = lambda s, b, h, q, kv: (s + bias[h, kv]) * 2 / 4 - q  # noqa: E731
    scale, offset = affine_in_score(trace_score(mod)) or pytest.fail("it is affine")
    assert scale is const(0.5) and formula(offset) == "t0[h, kv]·2·0.25 - q"
    assert affine_in_score(scores.softcap(30.0).expr) is None
    hidden = trace_score(lambda s, b, h, q, kv: torch.where(q >= kv, s, float("-inf")))
    assert affine_in_score(hidden) is None, "an infinite score times 0 would be NaN"
    assert affine_in_score(trace_score(lambda s, b, h, q, kv: s * s)) is None


def test_a_row_constant_is_split_off_where_it_is_finite() -> None:
    table, position = torch.randn(8), torch.arange(8)
    mod = lambda s, b, h, q, kv: s + table[q] + position[q] - torch.tanh(q * 0.5) + kv  # noqa: E731
    rest, row = split_row_constant(trace_score(mod))
    assert formula(rest) == "s + t0[q] + kv", "a captured float may be -inf, which hides the row"
    assert formula(row) == "t0[q] - tanh(q·0.5)"
    assert not is_finite(trace_score(lambda s, b, h, q, kv: s)) and not is_finite(const(float("nan")))


@pytest.mark.parametrize(
    ("mod", "expected"),
    [
        (lambda s, b, h, q, kv: s**2, "s·s"),
        (lambda s, b, h, q, kv: s / 8, "s·0.125"),
        (lambda s, b, h, q, kv: s / 10, "s / 10"),
        (lambda s, b, h, q, kv: s * -1, "-s"),
        (lambda s, b, h, q, kv: s + (q + 1 + 2), "s + q + 3"),
        (lambda s, b, h, q, kv: s + q // 4 // 2, "s + q // 8"),
        (lambda s, b, h, q, kv: torch.where(q > 1, torch.where(q > 1, s, 1.0), 2.0), "where(q > 1, s, 2)"),
        (lambda s, b, h, q, kv: s * 0, "s·0"),
        (lambda s, b, h, q, kv: s - s, "s - s"),
    ],
)
def test_simplified_forms(mod: object, expected: str) -> None:
    assert formula(simplify(trace_score(mod))) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (lambda b, h, q, kv: (q - kv) * 2 - (q - (kv - 1)) > -3, "(q - kv)·2 - (q - (kv - 1)) > -3"),
        (lambda b, h, q, kv: ~((q >= kv) & (kv < 3)) | (abs(q - kv) <= 2), "~(q >= kv & kv < 3) | |q - kv| <= 2"),
        (lambda b, h, q, kv: (q // (kv + 1) == 2) == (q > kv), "(q // (kv + 1) == 2) == (q > kv)"),
        (lambda b, h, q, kv: -(q + kv) < 2**q, "-(q + kv) < 2**q"),
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


@hypothesis.settings(max_examples=60)
@hypothesis.given(code=CODE, seed=st.integers(0, 20))
def test_sympy_agrees_where_it_has_a_value(code: list[int], seed: int) -> None:
    program = ScoreProgram(code, seed)
    found = to_sympy(program.expr)
    if found is None or len(str(found)) > 2000:
        return
    at = {"b": 1, "h": 2, "q": 3, "kv": 4}
    env = Env(index={k: torch.tensor(v) for k, v in at.items()}, score=torch.tensor(0.7, dtype=torch.float64))
    with torch.no_grad():
        ours = float(evaluate(program.expr, env))
    import sympy

    numbers = {"s": 0.7, "c0": program.scalar.value, **at}
    names = Names(program.expr)
    tensors = {names.tensor(c): c.tensor for c in names._tensors}
    values = {symbol: numbers[symbol.name] for symbol in found.free_symbols if getattr(symbol, "name", None) in numbers}
    values |= {
        s: float(tensors[s.name].detach())
        for s in found.free_symbols
        if getattr(s, "name", None) in tensors and not tensors[s.name].ndim
    }
    try:
        theirs = found.subs(values)
        theirs = theirs.replace(
            lambda e: isinstance(e, sympy.Indexed),
            lambda e: sympy.Float(float(tensors[e.base.name].detach()[tuple(int(i) for i in e.indices)]), 30),
        ).evalf()
    except ZeroDivisionError:  # x % 0, which is NaN in torch
        return
    except (TypeError, ValueError) as refusal:  # the logarithm of a negative number is complex there: no < and no Max
        assert "compar" in str(refusal), refusal
        return
    if theirs.is_real and theirs.is_finite and abs(ours) < 1e12 and ours == ours:
        assert abs(float(theirs) - ours) <= 1e-6 * (1 + abs(ours)), f"{program.expr} is {ours}, {found} is {theirs}"


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
