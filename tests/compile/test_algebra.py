"""What a kernel makes of a score mod's algebra: terms that cost nothing per element, and products for quotients."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from composattn.graph.trace import trace_score
from composattn.mods import scores

pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

from composattn.analysis.program import Program
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.running.emulated import text_of
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Problem
from composattn.primitives.emit import additive

SLOPES, ROWS = torch.linspace(0.1, 1.0, 8), torch.zeros(8, 512)


@pytest.mark.parametrize(
    ("mod", "lines", "others"),
    [
        (scores.alibi(SLOPES), 1, 0),
        (lambda s, b, h, q, kv: s * 2 - SLOPES[h] * (2 * q - kv + 3), 1, 0),
        (lambda s, b, h, q, kv: s + ROWS[h, q], 0, 1),  # a row constant that may be -inf: it hides the row
        (lambda s, b, h, q, kv: s + ROWS[h, kv] + kv, 1, 1),
    ],
)
def test_linear_terms_by_head_leave_the_inner_loop_but_for_one_multiply_add(
    mod: Callable[..., Any], lines: int, others: int
) -> None:
    found = additive(trace_score(mod))
    assert found is not None
    assert (len(found.linear_terms), len(found.others)) == (lines, others)


def test_a_square_and_a_quotient_by_a_constant_are_products(folder: Path) -> None:
    q = torch.zeros(1, 8, 512, 64, dtype=torch.bfloat16)
    program = Program(trace_score(lambda s, b, h, q, kv: s + s**2 / 3))
    plan = plan_forward(Problem.of(q, q, q), program, HOPPER, return_lse=False, positive_scale=True)
    ptx = text_of(plan, folder)
    assert "ex2.approx" in ptx, "the exponential of softmax"
    assert not re.search(r"\b(lg2|div)\.\w*\.?f32", ptx)
