"""Documents by ids whose tiles begin with them, run by the emulator against fp64."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.backends.fused import stretches
from composattn.backends.fused.plan import plan_forward
from composattn.backends.fused.target import HOPPER
from composattn.backends.hopper import tiling
from composattn.call.problem import Problem
from composattn.mods.mask import Mask
from composattn.mods.masks import causal, document
from composattn.testing.tolerance import Case, check
from tests.support import on_few_multiprocessors, outlier_normal

BACKEND = "hopper-emulated"
ATTENTION = partial(ca.attention, backend=BACKEND)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of some hundred rows are cut as long ones."""
    monkeypatch.setattr(stretches, "LONG", 100)
    monkeypatch.setattr(tiling, "LONG_DOCUMENTS", 100)


def documents(*lengths: int) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def drawn(
    generator: torch.Generator, mask: Mask, batch: int, heads: tuple[int, int], length: int, order: str = "bhsd"
) -> Case:
    """`order`: of the dimensions in memory."""

    def rows(count: int) -> torch.Tensor:
        sizes = {"b": batch, "h": count, "s": length, "d": 128}
        shape = [sizes[name] for name in order]
        made = outlier_normal(*shape, generator=generator, dtype=torch.bfloat16)
        return made.permute(*(order.index(name) for name in "bhsd"))

    q, k, v = (rows(count) for count in (heads[0], heads[1], heads[1]))
    return Case(q, k, v, mask_mod=mask, name=str(mask))


def in_stretches(case: Case) -> bool:
    """Whether tiles begin with stretches."""
    return plan_forward(Problem.of(case.q, case.k, case.v), case.program, HOPPER).has_stretches


def test_causal_documents_of_each_sequence_in_groups_of_heads(generator: torch.Generator) -> None:
    """Lengths that are no multiples of tiles, documents of one token, blocks that stay for several tiles."""
    ids = torch.stack([documents(150, 1, 1, 99, 146), documents(300, 97)])
    case = drawn(generator, causal() & document(ids), 2, (2, 1), 397)
    assert in_stretches(case)
    with on_few_multiprocessors(BACKEND):
        check(ATTENTION, case)


@pytest.mark.parametrize("order", ["bshd", "sbhd"])
def test_whole_documents_and_padding_that_sees_nothing(order: str, generator: torch.Generator) -> None:
    ids = torch.cat([documents(130, 201), torch.full((40,), -1)])
    seen = Mask.of(lambda b, h, q, kv: (ids[q] == ids[kv]) & (ids[q] >= 0))
    case = drawn(generator, seen, 1, (1, 1), 371, order)
    assert in_stretches(case)
    check(ATTENTION, case)


def test_a_short_document_behind_as_many_stretches_as_there_may_be(generator: torch.Generator) -> None:
    """Its rows lay in no tile, and their output was what memory had held before."""
    ids = documents(*[128] * 8, 9)
    case = drawn(generator, causal() & document(ids), 1, (1, 1), len(ids))
    assert in_stretches(case)
    check(ATTENTION, case)


def test_ids_may_be_written_to_and_lie_anyhow(generator: torch.Generator) -> None:
    ids = documents(140, 130, 60)
    case = drawn(generator, causal() & document(ids), 1, (1, 1), 330)
    attention = ca.Attention(mask_mod=case.mask_mod, backend=BACKEND)

    def planned_once(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return attention(q, k, v, **{name: value for name, value in options.items() if name == "return_lse"})

    for now in (ids.clone(), documents(140, 130, 60).roll(50), torch.arange(330), documents(200, 130)):
        ids.copy_(now)
        check(planned_once, case)
        check(ATTENTION, dataclasses.replace(case, mask_mod=causal() & document(ids)))


def test_sinks_and_dropout(generator: torch.Generator) -> None:
    case = drawn(generator, document(documents(140, 130)), 1, (2, 1), 270)
    check(ATTENTION, dataclasses.replace(case, sinks=torch.randn(2, generator=generator).requires_grad_()))
    check(ATTENTION, dataclasses.replace(case, dropout=(0.2, 5)))


def test_the_same_bits_in_any_schedule(generator: torch.Generator) -> None:
    case = drawn(generator, causal() & document(documents(140, 201)), 1, (1, 1), 341)
    wanted = ca.attention(case.q, case.k, case.v, mask_mod=case.mask_mod, backend=BACKEND)
    for schedule in (ca.Schedule(order="shortest_first"), ca.Schedule(order="in_order", persistent=False)):
        found = ca.attention(case.q, case.k, case.v, mask_mod=case.mask_mod, backend=BACKEND, schedule=schedule)
        assert torch.equal(found, wanted)
