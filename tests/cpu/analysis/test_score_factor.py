"""What multiplies the score before all else: which score mods have it, and that q·dQ says its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.analysis.program import Program
from composattn.analysis.score_factor import ScoreFactor, score_factor
from composattn.backends.fused.running.gradient import gradients_of_factor
from composattn.mods import softcap
from composattn.mods.score import Score
from composattn.mods.sink import Sink

HEADS, LENGTH = 3, 7
OF_HEAD = torch.tensor([0.5, -1.5, 0.0])
OF_ROW = torch.linspace(-1.0, 2.0, HEADS * LENGTH).view(HEADS, LENGTH)
OF_PAIR = torch.linspace(-1.0, 1.0, LENGTH * LENGTH).view(LENGTH, LENGTH)
GROUPS = torch.arange(LENGTH) // 3
CAP = softcap(2.0)
Mod = Callable[..., Any]
SERVED: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], Any]]] = {
    "a temperature": (OF_HEAD + 2, lambda t: lambda s, b, h, q, kv: s / t[h]),
    "a gate that is 0 for a head": (OF_HEAD, lambda t: lambda s, b, h, q, kv: t[h] * s),
    "its logarithm": (OF_HEAD, lambda t: lambda s, b, h, q, kv: s * t[h].clamp(max=1.0).exp()),
    "two reads of one tensor": (OF_HEAD, lambda t: lambda s, b, h, q, kv: s * (1 + t[h]) / (2 + t[0])),
    "by row": (OF_ROW, lambda t: lambda s, b, h, q, kv: s * t[h, q]),
    "by row, of groups, a bias behind": (OF_ROW, lambda t: lambda s, b, h, q, kv: s * t[h, GROUPS[q]] + OF_PAIR[q, kv]),
    "a cap behind": (OF_HEAD, lambda t: Score.of(lambda s, b, h, q, kv: s * t[h]) >> CAP),
    "among sequences": (OF_ROW[:2], lambda t: lambda s, b, h, q, kv: s * t[b, q] * 0.5),
}
LEFT: dict[str, Mod] = {
    "a cap before": lambda s, b, h, q, kv: 2.0 * torch.tanh(s / 2.0) * OF_HEAD[h],
    "a bias before": lambda s, b, h, q, kv: (s + OF_PAIR[q, kv]) * OF_HEAD[h],
    "by key": lambda s, b, h, q, kv: s * OF_ROW[h, kv],
    "the score elsewhere": lambda s, b, h, q, kv: s * OF_HEAD[h] + s.abs(),
    "the tensor elsewhere": lambda s, b, h, q, kv: s * OF_HEAD[h] + OF_HEAD[h] * kv,
    "the score twice": lambda s, b, h, q, kv: s * s * OF_HEAD[h],
    "what the score divides": lambda s, b, h, q, kv: OF_HEAD[h] / (s + 9.0),
    "a number that is known at the call": lambda s, b, h, q, kv: s * (ca.scalar(2.0) + OF_HEAD[h]),
    "numbers alone": lambda s, b, h, q, kv: s * 2.0,
}


def program(mod: Any, **more: Any) -> Program:
    return Program(Score.of(mod).expr, **more)


@pytest.mark.parametrize("name", SERVED)
def test_rows_of_q_and_dq_say_the_gradient(name: str, generator: torch.Generator) -> None:
    start, make = SERVED[name]
    learned = start.double().requires_grad_()
    of = program(make(learned))
    factor = score_factor(of)
    assert factor is not None and [c.tensor is learned for c in factor.learned] == [True]
    q, k, v, dout = (torch.randn(2, HEADS, LENGTH, 4, generator=generator, dtype=torch.float64) for _ in range(4))
    exact = ca.Attention(score_mod=make(learned), backend="reference")
    (wanted,) = torch.autograd.grad(exact(q, k, v), learned, dout)
    q.requires_grad_()
    (dq,) = torch.autograd.grad(_of_program(factor.away_from_zero(of), q, k, v), q, dout)
    (capture,) = factor.learned
    found = gradients_of_factor(factor, [capture], {capture: learned.detach()}, q.detach(), dq)[capture]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)  # rows are multiplied in fp32


def _of_program(of: Program, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """By the definition, in fp64."""
    from composattn.graph.evaluate import Env, evaluate

    b, h, row, kv = (torch.arange(n) for n in (*q.shape[:3], k.shape[2]))
    index = {"b": b.view(-1, 1, 1, 1), "h": h.view(-1, 1, 1), "q": row.view(-1, 1), "kv": kv}
    assert of.score is not None
    score = evaluate(of.score, Env(index, score=q @ k.mT * q.shape[-1] ** -0.5))
    return score.softmax(-1) @ v


@pytest.mark.parametrize("name", LEFT)
def test_score_mods_of_other_forms_have_none(name: str) -> None:
    assert score_factor(program(LEFT[name])) is None


def test_what_a_sink_reads_too_is_not_learned_by_dq_alone() -> None:
    def scaled(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * OF_HEAD[h]

    assert isinstance(score_factor(program(scaled)), ScoreFactor)
    assert score_factor(program(scaled, sink=Sink.of(OF_HEAD).expr)) is None
