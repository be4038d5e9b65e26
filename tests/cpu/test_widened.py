"""Which integers of a mod are computed in 64 bits: those alone that a call of these sizes could take beyond 32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import composattn as ca
from composattn.analysis.program import Program
from composattn.backends.fused.rewrites.widened import widened
from composattn.call.problem import Problem
from composattn.graph.expr import DType, walk
from composattn.mods import alibi, causal, document, neighborhood, relative_bias, sliding_window
from composattn.mods.mask import Mask
from composattn.mods.score import Score

IDS, LIMIT = torch.arange(4096, dtype=torch.int32) // 100, torch.tensor([2**31 - 1, 5], dtype=torch.int32)
OFFSET = ca.scalar(7)


def problem(length: int, heads: int = 16) -> Problem:
    return Problem(2, heads, heads, length, length, 64, 64, torch.bfloat16, torch.device("cpu"))


def wide(program: Program) -> int:
    return sum(node.dtype is DType.INT64 for node in walk(*(m for m in program.mods if m is not None)))


NARROW: dict[str, Any] = {
    "causal": causal(),
    "window": sliding_window((1024, 0)),
    "documents": document(IDS) & causal(),
    "neighbours": neighborhood((1024, 1024), (7, 7)),
    "an offset": lambda b, h, q, kv: q + OFFSET >= kv,
    "no limit": lambda b, h, q, kv: kv <= LIMIT[b],
    "ids": lambda b, h, q, kv: IDS[q] * 2 - IDS[kv] > 3,
    "bits": lambda b, h, q, kv: ((q ^ kv) & 255) + (q | kv) > 5,
    "quotients": lambda b, h, q, kv: (q // 7 - kv % 5) * 100 > h,
}


@pytest.mark.parametrize("name", NARROW)
def test_positions_are_compared_as_they_are(name: str) -> None:
    mask = NARROW[name] if isinstance(NARROW[name], Mask) else Mask.of(NARROW[name])
    program = Program(None, mask.expr)
    assert widened(program, problem(1 << 20)) is program


def test_so_are_mods_of_distances() -> None:
    for score in (alibi(torch.ones(16)), relative_bias(torch.zeros(16, 8191))):
        program = Program(score.expr, causal().expr)
        assert widened(program, problem(1 << 20)) is program


def test_the_sizes_of_a_call_decide() -> None:
    program = Program(None, Mask.of(lambda b, h, q, kv: q * 5000 + h >= kv).expr)
    assert widened(program, problem(1 << 18)) is program
    assert wide(widened(program, problem(1 << 20)))


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, kv: s + ((q * 73856093) ^ (kv * 19349663)) % 7,
        lambda s, b, h, q, kv: s + (q - kv) ** 4,
        lambda s, b, h, q, kv: s + ((q << 20) % 5),
        lambda s, b, h, q, kv: s + (h * 2_000_000_000) // 3,
    ],
)
def test_what_may_leave_32_bits_is_computed_in_64(mod: Any) -> None:
    program = Program(Score.of(mod).expr)
    found = widened(program, problem(4096))
    assert wide(found) and not wide(program)
    assert wide(widened(found, problem(4096))) == wide(found)
