"""Gradients of what multiplies the score, in the emulator against fp64: from dQ, with no pass in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.backends.fused.running.gradient import FusedGradient
from composattn.mods import causal, softcap
from composattn.mods.score import Score
from composattn.testing.tolerance import Case, assert_attention_close, check, run
from tests.support import outlier_normal

LENGTH, HEADS = 150, 4
GATES = torch.tensor([0.0, 0.7, -1.3, 2.0])
OF_ROWS = 0.1 + torch.linspace(-1.5, 1.5, HEADS * LENGTH).view(HEADS, LENGTH)
CASES: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], Any], dict[str, Any]]] = {
    "a gate that is 0 for a head": (GATES, lambda t: lambda s, b, h, q, kv: s * t[h], {"mask_mod": causal()}),
    "all gates 0, a cap behind": (
        0 * GATES,
        lambda t: Score.of(lambda s, b, h, q, kv: s * t[h]) >> softcap(9.0),
        {"dropout": (0.2, 7)},
    ),
    "a temperature by row, a sink": (
        OF_ROWS.abs() + 0.3,
        lambda t: lambda s, b, h, q, kv: s / t[h, q] - (q - kv).abs() / 64,
        {"sinks": torch.linspace(-1.0, 1.0, HEADS)},
    ),
    "a logarithm, packed": (
        GATES,
        lambda t: lambda s, b, h, q, kv: s * t[h].exp(),
        {"varlen": ca.Varlen(torch.tensor([0, 100, 150], dtype=torch.int32), seqused_q=torch.tensor([77, 50]).int())},
    ),
}


@pytest.fixture
def in_pytorch(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was computed tile by tile in PyTorch."""
    asked: list[Any] = []
    tile_by_tile = FusedGradient._streamed

    def streamed(self: FusedGradient, *given: Any) -> Any:
        asked.append(given[1])
        return tile_by_tile(self, *given)

    monkeypatch.setattr(FusedGradient, "_streamed", streamed)
    return asked


def case(name: str, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16) -> Case:
    start, make, how = CASES[name]
    packed = "varlen" in how
    shapes = [(LENGTH, n, 64) if packed else (2, n, LENGTH, 64) for n in (HEADS, 2, 2, HEADS)]
    q, k, v, dout = (outlier_normal(*s, generator=generator, dtype=dtype, device="cpu") for s in shapes)
    dlse = torch.randn(*((HEADS, LENGTH) if packed else (2, HEADS, LENGTH)), generator=generator)
    return Case(q, k, v, score_mod=make(start.clone().requires_grad_()), dout=dout, dlse=dlse, name=name, **how)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("all")])
def test_rows_of_dq_say_it_within_the_tolerance(name: str, in_pytorch: list[Any], generator: torch.Generator) -> None:
    check(partial(ca.attention, backend="hopper-emulated"), case(name, generator))
    assert not in_pytorch


def test_of_gates_that_are_all_0_only_what_should_be_0_is_a_little_off(
    in_pytorch: list[Any], generator: torch.Generator
) -> None:
    asked = case("all gates 0, a cap behind", generator)
    found = run(partial(ca.attention, backend="hopper-emulated"), asked)
    nothing = [found.pop(name) for name in ("dq", "dk")]
    assert_attention_close(found, asked)
    assert all(float(t.abs().max()) < 1e-20 for t in nothing) and not in_pytorch


def test_of_fp16_it_is_computed_in_pytorch(in_pytorch: list[Any], generator: torch.Generator) -> None:
    """Which has no numbers so small that a gate of 0 changes nothing by them."""
    check(
        partial(ca.attention, backend="hopper-emulated"), case("a gate that is 0 for a head", generator, torch.float16)
    )
    assert len(in_pytorch) == 1


def test_explain_says_where_it_comes_from() -> None:
    gate = GATES.clone().requires_grad_()
    attn = ca.Attention(score_mod=lambda s, b, h, q, kv: s * gate[h], backend="hopper-emulated")
    q = torch.zeros(1, HEADS, LENGTH, 64, dtype=torch.bfloat16)
    assert "[4]: from dQ of each row" in str(attn.explain(q, q, q))
