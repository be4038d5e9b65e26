"""Each mod and layout of the table of combinations with keys and values of 8 bits, and with queries too, emulated."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.backends.fused.running.emulated import EmulatedForward
from composattn.backends.hopper.fp8_tiling import FP8
from composattn.backends.hopper.tiling import OF_BYTES
from composattn.testing import Case, check
from tests.byte_keys import E4M3, of_bytes, power_of_two
from tests.combinations import EIGHT_BITS, LARGEST, LAYOUTS, MODS, Cell

HEADS, KV_HEADS = 4, 2
AT_DAY = {("own function", "paged"), ("offsets", "varlen"), ("largest scores", "dense")}
hopper = partial(ca.attention, backend="hopper-emulated")


def in_eight_bits(case: Case, of_queries: bool) -> Case:
    """The case with k and v of 8 bits, and q too, each with a scale of its own for each head."""
    found = of_bytes(case, E4M3, power_of_two(KV_HEADS), power_of_two(KV_HEADS).flip(0))
    if not of_queries:
        return found
    of_q = power_of_two(HEADS) / 2
    return dataclasses.replace(
        found, q=case.q.float().to(E4M3), scales=(of_q, *found.scales[1:]), out_dtype=torch.bfloat16
    )


def with_largest(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`hopper`, whose largest scores are held to the reference's; products of 8 bits are summed in 14."""
    out, lse, found = hopper(*tensors, **options, return_max_scores=True)
    *_, wanted = ca.attention(*tensors, backend="reference", **options, return_max_scores=True)
    torch.testing.assert_close(found.double(), wanted.double(), rtol=2e-3, atol=2e-3)
    return out, lse


def cells() -> list[object]:
    """Keys of 8 bits in each layout, queries too where products of 8 bits are served."""
    return [
        pytest.param(
            mod, layout, of_queries, id=f"{mod}, {layout}, {'q, k and v' if of_queries else 'k and v'}",
            marks=[] if (mod, layout) in AT_DAY else pytest.mark.slow,
        )
        for mod in MODS
        if mod not in (EIGHT_BITS, "wide heads")
        for layout in LAYOUTS
        for of_queries in (False, True)
        if not (of_queries and layout == "paged")
    ]  # fmt: skip


@pytest.mark.parametrize(("mod", "layout", "of_queries"), cells())
def test_each_mod_and_layout_is_right(mod: str, layout: str, of_queries: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    made = EmulatedForward.__init__

    def noted(self: EmulatedForward, plan: object, *more: object) -> None:
        steps.append(plan.step)  # type: ignore[attr-defined]
        made(self, plan, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(EmulatedForward, "__init__", noted)
    case = Cell(mod, layout, "band", "GQA", "forward").case()  # type: ignore[arg-type]
    check(with_largest if mod == LARGEST else hopper, in_eight_bits(case, of_queries))
    assert steps == [FP8] if of_queries else steps and all(step.endswith(OF_BYTES) for step in steps)
