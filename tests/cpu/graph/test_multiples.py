"""What score mods take the tanh of: a number times the score, or anything else."""

from __future__ import annotations

import pytest
import torch

import composattn as ca
from composattn.graph.multiples import steepest_tanh
from composattn.graph.ops import apply
from composattn.mods import softcap

BIAS = torch.zeros(8)
MODS = {
    "soft cap": (softcap(20.0), 1 / 20),
    "of the score itself": (lambda s, b, h, q, kv: torch.tanh(s), 1.0),
    "less, times and over": (lambda s, b, h, q, kv: torch.tanh(3.0 * -(s / 6.0)) + q, 0.5),
    "the larger of two": (lambda s, b, h, q, kv: torch.tanh(s / 8.0) + torch.tanh(s * 4.0), 4.0),
    "of a sum": (lambda s, b, h, q, kv: torch.tanh(s + kv), None),
    "of what is read": (lambda s, b, h, q, kv: torch.tanh(s * BIAS[h]), None),
    "of another one": (lambda s, b, h, q, kv: torch.tanh(torch.tanh(s)), None),
    "no tanh": (lambda s, b, h, q, kv: s * 2.0, None),
}


@pytest.mark.parametrize("name", MODS)
def test_the_number_is_known_where_all_are_of_the_score_alone(name: str) -> None:
    mod, wanted = MODS[name]
    found = steepest_tanh(ca.Attention(score_mod=mod).program.score)
    assert found == (None if wanted is None else pytest.approx(wanted))


def test_a_call_with_no_score_mod_has_none() -> None:
    assert steepest_tanh(None) is None


def test_a_score_mod_that_is_taken_whole_has_none() -> None:
    # which tanh a tile takes depends on all of its scores: no bits of a row may (batch_invariant)
    assert steepest_tanh(apply("whole", softcap(20.0).expr)) is None
