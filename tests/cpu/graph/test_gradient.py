"""Derivatives of score mods against torch autograd in fp64."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from composattn.graph.evaluate import Env, _value, evaluate
from composattn.graph.expr import const, read, score, walk
from composattn.graph.gradient import derivative, differentiable_leaves, is_zero, partials
from composattn.graph.ops import OPS
from composattn.graph.scalar import Scalar
from composattn.graph.trace import trace_score
from tests.cpu.graph.programs import SIZE, ScoreProgram


def points(score_values: torch.Tensor) -> Env:
    """One random point a score: b, h, q, kv inside the captured tensors."""
    n = score_values.numel()
    generator = torch.Generator().manual_seed(n)
    index = {name: torch.randint(0, SIZE, (n,), generator=generator) for name in ("b", "h", "q", "kv")}
    index |= {"q_len": torch.tensor(SIZE), "kv_len": torch.tensor(SIZE)}
    return Env(index=index, score=score_values)


# as torch's before 2.14, which gives their ends no gradient; NaN on either side gives NaN
CLAMPS = {
    "clamp_min": lambda x, least: torch.where((x >= least) | x.isnan(), x, least),
    "clamp_max": lambda x, most: torch.where((x <= most) | x.isnan(), x, most),
}


def autograd(expr, env: Env) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Value, d/d score and, a read at a time, d/d read by torch."""
    env.score.requires_grad_()
    leaves = [n for n in differentiable_leaves(expr) if n.op == "read"]
    # every read becomes a leaf of its own, which torch differentiates by each element
    values = {id(n): evaluate(n, env).detach().expand(env.score.shape).clone().requires_grad_() for n in leaves}
    memo: dict = {}
    for node in walk(expr):
        args = [memo[id(a)] for a in node.args]
        clamp = CLAMPS.get(node.op)
        made = _value(node, args, env) if clamp is None else clamp(*args)
        memo[id(node)] = values.get(id(node), made)
    value = memo[id(expr)].expand(env.score.shape)
    if not value.requires_grad:
        return value, torch.zeros_like(env.score), {n: torch.zeros_like(env.score) for n in leaves}
    inputs = [env.score, *(values[id(n)] for n in leaves)]
    found = torch.autograd.grad(value.sum(), inputs, allow_unused=True)
    grads = [torch.zeros_like(env.score) if g is None else g for g in found]
    return value, grads[0], dict(zip(leaves, grads[1:], strict=True))


def agree(ours: torch.Tensor, theirs: torch.Tensor, value: torch.Tensor, what: str) -> None:
    """Equal wherever torch's backward is finite and so is the value; elsewhere ours may only be better."""
    ours = ours.expand(theirs.shape)
    compared = torch.isfinite(theirs) & torch.isfinite(value) & (theirs.abs() < 1e12)
    torch.testing.assert_close(ours[compared], theirs[compared], rtol=1e-7, atol=1e-7, msg=lambda m: f"{what}: {m}")


@hypothesis.settings(max_examples=1200)
@hypothesis.given(code=st.lists(st.integers(0, 255), max_size=14), seed=st.integers(0, 99))
def test_random_score_mods_differentiate_as_torch(code: list[int], seed: int) -> None:
    program = ScoreProgram(code, seed)
    scores = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2
    scores[:4] = torch.tensor([0.0, 1.0, -1.0, 0.5])  # where the kinks are
    env = points(scores)
    value, by_score, by_read = autograd(program.expr, env)
    with torch.no_grad():
        agree(evaluate(derivative(program.expr), env), by_score, value, f"d/d score of {program.expr}")
        ours = partials(program.expr)
        for leaf, theirs in by_read.items():
            mine = evaluate(ours[leaf], env) if leaf in ours else torch.zeros_like(scores)
            agree(mine, theirs, value, f"d/d {leaf} of {program.expr}")


KINKS = {
    "abs": lambda s: torch.abs(s), "sign": lambda s: torch.sign(s) + s, "relu": lambda s: torch.relu(s),
    "max_tie": lambda s: torch.maximum(s, s * 2), "min_tie": lambda s: torch.minimum(s, -s),
    "floor": lambda s: torch.floor(s) * s,
    "remainder": lambda s: s % 0.5, "fmod": lambda s: torch.fmod(s, 0.5), "power": lambda s: s**3,
    "power_of_zero": lambda s: s**0, "sqrt": lambda s: torch.sqrt(s), "where": lambda s: torch.where(s >= 0, s, 2 * s),
}  # fmt: skip


@pytest.mark.parametrize("name", KINKS)
def test_piecewise_points_are_those_of_torch(name: str) -> None:
    fn = KINKS[name]
    expr = trace_score(lambda s, b, h, q, kv: fn(s))
    x = torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    theirs = torch.autograd.grad(fn(x).sum(), x)[0]
    ours = evaluate(derivative(expr), points(x.detach())).expand(x.shape)
    torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-12, atol=0)


def test_a_branch_not_taken_contributes_nothing_where_torch_gives_nan() -> None:
    fn = lambda s: torch.where(s > 0, torch.log(s) * torch.sqrt(s), torch.where(s < 0, 1 / s, 3 * s))  # noqa: E731
    x = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64, requires_grad=True)
    theirs = torch.autograd.grad(fn(x).sum(), x)[0]
    assert theirs.isnan().any(), "torch got better: the module's page says otherwise"
    ours = evaluate(derivative(trace_score(lambda s, b, h, q, kv: fn(s))), points(x.detach()))
    torch.testing.assert_close(ours, torch.tensor([-1.0, 3.0, 1.0], dtype=torch.float64))


def test_a_hidden_score_has_no_gradient_even_behind_infinity() -> None:
    expr = trace_score(lambda s, b, h, q, kv: 30 * torch.tanh(torch.where(q >= kv, s, float("-inf")) / 30))
    x = torch.full((3,), 2.0, dtype=torch.float64)
    env = Env(index={"q": torch.tensor([0, 1, 2]), "kv": torch.tensor(1)}, score=x)
    ours = evaluate(derivative(expr), env)
    slope = (1 - torch.tanh(x / 30) ** 2) * torch.tensor([0, 1, 1])
    torch.testing.assert_close(ours, slope, rtol=1e-14, atol=0)


def test_reads_of_one_tensor_are_kept_apart_and_carry_their_positions() -> None:
    table = torch.randn(8)
    expr = trace_score(lambda s, b, h, q, kv: s * table[h] + table[q - kv] ** 2)
    by_leaf = partials(expr)
    assert [leaf.attr.tensor is table for leaf in by_leaf] == [True, True]
    by_head, by_distance = by_leaf
    assert repr(by_head.args) == "(h,)" and repr(by_distance.args) == "(sub(q, kv),)"
    assert by_leaf[by_head] is score()
    assert repr(by_leaf[by_distance]).startswith("mul(2.0")


def test_run_time_scalars_have_a_derivative() -> None:
    slope = Scalar(0.5)
    expr = trace_score(lambda s, b, h, q, kv: s + slope * (kv - q))
    ((leaf, d),) = partials(expr).items()
    assert leaf is slope.expr and repr(d) == "cast_float(sub(kv, q))"


def test_integers_and_positions_have_none() -> None:
    table = torch.arange(8)
    expr = trace_score(lambda s, b, h, q, kv: torch.where(table[h] > q, s, 0.0) + torch.round(s))
    assert partials(expr) == {}
    assert repr(derivative(expr)).count("where") == 1


def test_additive_bias_leaves_the_slope_one() -> None:
    bias = torch.randn(4, 4)
    assert derivative(trace_score(lambda s, b, h, q, kv: s + bias[q, kv])) is const(1.0)
    assert is_zero(derivative(trace_score(lambda s, b, h, q, kv: bias[q, kv])))


def test_soft_cap_folds_its_constants() -> None:
    expr = trace_score(lambda s, b, h, q, kv: 30.0 * torch.tanh(s / 30.0))
    assert repr(derivative(expr)) == "sub(1.0, mul(tanh(div(score, 30.0)), tanh(div(score, 30.0))))"


def test_every_row_states_its_derivative() -> None:
    assert [name for name, row in OPS.items() if row.partials is None] == []


def test_a_leaf_that_is_the_expression() -> None:
    table = torch.randn(4)
    expr = trace_score(lambda s, b, h, q, kv: table[h])
    (leaf,) = partials(expr)
    assert leaf is read(leaf.attr, leaf.args) and partials(expr)[leaf] is const(1.0)
