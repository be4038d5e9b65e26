"""Reads outside of captured tensors: named on every backend where checks are on, at visible pairs and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import composattn as ca
from composattn import errors
from composattn.analysis.outside_reads import refuse_outside_reads
from composattn.analysis.program import Program
from composattn.mods import causal
from composattn.mods.mask import Mask
from composattn.mods.score import Score

LENGTH = 200
TABLE = torch.randn(LENGTH)
SHORT = torch.randn(2, LENGTH // 2)
IDS = torch.arange(LENGTH) // 10
RANGES = ((-2, 3), (-2, 3), (-30, 30), (60, 200), (55, 130))  # of coefficients, the modulus and the table's size
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def checks_are_on() -> Iterator[None]:
    with ca.debug_checks():
        yield


OUTSIDE: dict[str, dict[str, Callable[..., Any]]] = {
    "one further": {"score_mod": lambda s, b, h, q, kv: s + TABLE[q + 1]},
    "one before the first": {"score_mod": lambda s, b, h, q, kv: s + TABLE[-q - 2]},
    "by distance": {"score_mod": lambda s, b, h, q, kv: s + SHORT[h, (q - kv).abs()]},
    "by distance below the diagonal": {
        "score_mod": lambda s, b, h, q, kv: s + SHORT[h, q - kv],
        "mask_mod": causal(),
    },
    "by what another says": {"score_mod": lambda s, b, h, q, kv: s + SHORT[h, IDS[kv] * 6]},
    "in a mask": {"mask_mod": lambda b, h, q, kv: (TABLE[kv + 1] > -9) & (q >= kv)},
    "in a branch that is taken": {"score_mod": lambda s, b, h, q, kv: torch.where(q > 3, TABLE[q + 1], s)},
}
INSIDE: dict[str, dict[str, Callable[..., Any]]] = {
    "from the end": {"score_mod": lambda s, b, h, q, kv: s + TABLE[-q - 1] + TABLE[q - kv]},
    "hidden by the mask": {
        "score_mod": lambda s, b, h, q, kv: s + SHORT[h, q - kv],
        "mask_mod": lambda b, h, q, kv: (q >= kv) & (q - kv < LENGTH // 2),
    },
    "hidden by the mask that reads": {"mask_mod": lambda b, h, q, kv: (kv + 1 < LENGTH) & (TABLE[kv + 1] > 0)},
    "in a branch that is not taken": {
        "score_mod": lambda s, b, h, q, kv: torch.where(q + 1 < LENGTH, TABLE[q + 1], s) + TABLE[(q + 1).clamp(max=9)],
    },
    "blocks": {"mask_mod": ca.BlockSparse(torch.ones(1, 1, 13, 13, dtype=torch.bool), 16)},
}


def call(backend: str, **options: Any) -> Any:
    q = torch.randn(1, 2, LENGTH, 64, dtype=torch.float16 if "hopper" in backend else torch.float32)
    return ca.attention(q, q, q, backend=backend, **options)


@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "streaming") for name in OUTSIDE), ("one further", "hopper-emulated")]
)
def test_reads_outside_are_named_with_the_pair(name: str, backend: str) -> None:
    with pytest.raises(errors.CapturedIndexOutOfRange, match="b 0, h 0, q "):
        call(backend, **OUTSIDE[name])


@pytest.mark.parametrize("name", OUTSIDE)
def test_without_checks_they_are_clamped(name: str) -> None:
    with ca.debug_checks(False):
        assert bool(call("streaming", **OUTSIDE[name]).isfinite().all())


@pytest.mark.parametrize("name", INSIDE)
def test_reads_inside_pass(name: str) -> None:
    call("streaming", **INSIDE[name])


MASKS: list[Callable[..., Any] | None] = [
    None, causal(), lambda b, h, q, kv: (q - kv).abs() < 40, lambda b, h, q, kv: (IDS[q] == IDS[kv]) & (h == 1)
]  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_what_is_named_is_what_a_look_at_every_pair_finds(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x, y, z, modulus, size = (int(torch.randint(low, high, (), generator=draw)) for low, high in RANGES)
    mask, table = MASKS[seed % len(MASKS)], torch.randn(size)

    def at(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (x * q + y * kv + z) % modulus - h * 7

    b, h, q, kv = torch.meshgrid(*map(torch.arange, (2, 2, LENGTH, LENGTH - 3)), indexing="ij")
    wrong = (at(b, h, q, kv) < -size) | (at(b, h, q, kv) >= size)
    wrong &= torch.ones(()).bool() if mask is None else mask(b, h, q, kv)
    score = Score.of(lambda s, b, h, q, kv: s + table[at(b, h, q, kv)])
    program = Program(score.expr, None if mask is None else Mask.of(mask).expr)
    if not wrong.any():
        refuse_outside_reads(program, range(2), 2, LENGTH, LENGTH - 3, CPU)
        return
    with pytest.raises(errors.CapturedIndexOutOfRange) as refusal:
        refuse_outside_reads(program, range(2), 2, LENGTH, LENGTH - 3, CPU)
    named = re.search(r"b (\d+), h (\d+), q (\d+), kv (\d+)", str(refusal.value))
    assert named is not None and bool(wrong[tuple(map(int, named.groups()))])


def test_packed_sequences_are_looked_at_one_by_one() -> None:
    rows = torch.randn(12, 2, 8)
    limits = torch.randn(2, 7)
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    attend = ca.Attention(score_mod=lambda s, b, h, q, kv: s + limits[b, kv])
    attend(rows, rows, rows, varlen=ca.Varlen(offsets))
    with pytest.raises(errors.CapturedIndexOutOfRange, match="b 1, h 0, q 0, kv 7"):
        attend(rows, rows, rows, varlen=ca.Varlen(torch.tensor([0, 4, 12], dtype=torch.int32)))


def test_pages_are_looked_at_as_far_as_they_are_used() -> None:
    q, pages = torch.randn(1, 1, 1, 8), torch.randn(2, 1, 16, 8)
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    bias = torch.randn(20)
    attend = ca.Attention(score_mod=lambda s, b, h, q, kv: s + bias[kv])
    attend(q, pages, pages, paged=ca.Paged(table, 16, torch.tensor([20], dtype=torch.int32)))
    with pytest.raises(errors.CapturedIndexOutOfRange, match="kv 20"):
        attend(q, pages, pages, paged=ca.Paged(table, 16, torch.tensor([21], dtype=torch.int32)))


def test_compiled_code_looks_when_it_runs() -> None:
    made = ca.Attention(score_mod=lambda s, b, h, q, kv: s + TABLE[q + 1])
    attend = torch.compile(lambda q: made(q, q, q), fullgraph=True, backend="eager")
    q = torch.randn(1, 1, LENGTH, 8)
    with pytest.raises(errors.CapturedIndexOutOfRange):
        attend(q)
