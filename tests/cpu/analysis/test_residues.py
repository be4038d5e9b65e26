"""Masks by which a query sees only keys of its own residue: the step that is found, and what is left to ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.analysis.residues import of_residue, residues
from composattn.graph.expr import Expr
from composattn.mods import causal, dilated_window, neighborhood, sliding_window
from composattn.mods.mask import Mask

LENGTH = 50
STEPS: dict[str, tuple[int, Callable[..., Any]]] = {
    "a dilated window": (3, dilated_window((12, 12), 3)),
    "the same, causal": (4, dilated_window((20, 0), 4) & causal()),
    "a neighbourhood with gaps": (5, neighborhood((50,), 3, 5)),
    "remainders of each": (4, lambda b, h, q, kv: (q >= kv) & (q % 4 == kv % 4) & (q - kv < 30)),
    "keys less queries": (7, lambda b, h, q, kv: (kv - q) % 7 == 0),
    "moved by whole steps": (3, lambda b, h, q, kv: ((q - kv + 6) % 3 == 0) & (q >= kv)),
    "the other way round": (6, lambda b, h, q, kv: 0 == (q - kv) % 6),  # noqa: SIM300
    "two steps": (12, lambda b, h, q, kv: ((q - kv) % 4 == 0) & ((q - kv) % 6 == 0) & (q >= kv)),
    "by head": (2, lambda b, h, q, kv: ((q - kv) % 2 == 0) & (q - kv < 5 + h)),
}
WHOLE: dict[str, Callable[..., Any]] = {
    "no remainder": causal() & sliding_window(9),
    "another residue": lambda b, h, q, kv: (q - kv) % 3 == 1,
    "moved": lambda b, h, q, kv: (q - kv + 1) % 3 == 0,
    "all others": lambda b, h, q, kv: (q - kv) % 3 != 0,
    "one of two": lambda b, h, q, kv: ((q - kv) % 3 == 0) | (q == kv + 1),
    "sums": lambda b, h, q, kv: (q + kv) % 3 == 0,
    "twice as far": lambda b, h, q, kv: (2 * (q - kv)) % 4 == 0,
    "steps that differ": lambda b, h, q, kv: q % 3 == kv % 4,
    "by head": lambda b, h, q, kv: (q - kv) % (h + 2) == 0,
    "C's remainder": lambda b, h, q, kv: torch.fmod(q, 3) == 0,
}


def visible(mask: Expr, batch: int, heads: int, q_len: int, kv_len: int) -> torch.Tensor:
    return Mask(mask).dense(q_len, kv_len, batch, heads).expand(batch, heads, q_len, kv_len)


def graph(mask: Callable[..., Any]) -> Expr:
    found = ca.Attention(mask_mod=mask).program.mask
    assert found is not None
    return found


@pytest.mark.parametrize("name", STEPS)
def test_a_mask_is_its_rest_among_positions_of_one_residue(name: str) -> None:
    step, mask = STEPS[name]
    whole = graph(mask)
    found, rest = residues(whole)
    assert found == step
    wanted = visible(whole, 1, 3, LENGTH, LENGTH + 1)
    same = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH + 1)) % step == 0
    assert torch.equal(wanted, visible(rest, 1, 3, LENGTH, LENGTH + 1) & same)
    first = 1
    of_each = visible(of_residue(rest, step, first), step - first, 3, LENGTH // step, LENGTH // step)
    for b in range(step - first):
        places = torch.arange(LENGTH // step) * step + first + b
        assert torch.equal(of_each[b], wanted[0][:, places[:, None], places])


@pytest.mark.parametrize("name", WHOLE)
def test_no_step_is_found_where_other_residues_are_seen(name: str) -> None:
    mask = graph(WHOLE[name])
    assert residues(mask) == (1, mask)
