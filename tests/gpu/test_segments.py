"""Documents by ids of several sequences, with which tiles begin, on a GPU: all sizes of tiles, forward and backward."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import composattn as ca
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Problem
from composattn.call.schedule import Schedule
from composattn.mods import causal, document
from composattn.testing import Case, check
from tests.support import gpu_backend, outlier_normal, poison_cuda_memory

pytestmark = pytest.mark.gpu

ROWS = 2085
# a first one that is too short for copies of its last rows, ends at no tile's, more than there are segments
LENGTHS = ((100, 64, 700, 1, 62, 333, 825), (2085,), (130,) * 16 + (5,))


def ids() -> torch.Tensor:
    """Which document each row of three sequences is in."""
    of = [torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) for lengths in LENGTHS]
    return torch.stack(of).to("cuda")


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_documents_of_each_sequence(dim: int, is_causal: bool, generator: torch.Generator) -> None:
    draw = functools.partial(outlier_normal, generator=generator, device="cuda", dtype=torch.bfloat16)
    q, k, v = (draw(3, heads, ROWS, dim) for heads in (4, 2, 2))
    same = document(ids())
    case = Case(q, k, v, mask_mod=causal() & same if is_causal else same, dout=draw(3, 4, ROWS, dim))
    apart = Schedule(pack_gqa=False)  # grouped heads of more than 128 columns share tiles of documents else
    problem = dataclasses.replace(Problem.of(q, k, v), schedule=apart)
    assert plan_forward(problem, case.program, HOPPER).has_segments
    attention = functools.partial(ca.attention, backend=gpu_backend(), schedule=apart)
    for deterministic in (False, True):
        poison_cuda_memory()
        check(functools.partial(attention, deterministic=deterministic), case)


def test_ids_that_are_written_to_between_steps(generator: torch.Generator) -> None:
    draw = functools.partial(outlier_normal, generator=generator, device="cuda", dtype=torch.bfloat16)
    q, k, v, dout = (draw(3, 2, ROWS, 128) for _ in range(4))
    now = ids()
    case = Case(q, k, v, mask_mod=causal() & document(now), dout=dout)
    for _ in range(4):
        now.copy_(now.roll(1, 0))
        check(functools.partial(ca.attention, backend=gpu_backend()), case)
