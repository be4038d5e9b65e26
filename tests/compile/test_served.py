"""Calls with no backend named, on GPUs whose kernels have no backward: emulated kernels stand for those."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn import backends, errors
from composattn.backends.fused.running.emulated import EmulatedForward
from composattn.backends.served import where_served
from composattn.mods.masks import causal
from composattn.testing import Case, check, make_case, make_varlen_case

NAME = "warp-emulated"
SLOPES = torch.tensor([0.1, 0.5], requires_grad=True)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the kernels are launched for, one entry a launch; the backend of that name stands for none named."""
    emulated, made = backends.BACKENDS[NAME], []
    launch = EmulatedForward.launch

    def noted(self: EmulatedForward, *arguments: Any) -> None:
        made.append(self.plan.step)
        launch(self, *arguments)

    monkeypatch.setattr(EmulatedForward, "launch", noted)
    monkeypatch.setitem(backends.BACKENDS, NAME, dataclasses.replace(emulated, prepare=where_served(emulated.prepare)))
    return made


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool = False, varlen: Any = None, **mods: Any
) -> Any:
    """`ca.attention` by a plan of its own: kept ones are of the backend as it is."""
    return ca.Attention(backend=NAME, **mods)(q, k, v, return_lse=return_lse, varlen=varlen)


def biased(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score - SLOPES[h] * (q - kv)


CASES = {
    "a learned bias": lambda: make_case(
        0, heads=2, kv_heads=1, q_len=70, kv_len=70, dtype=torch.bfloat16, score_mod=biased, mask_mod=causal()
    ),
    "packed": lambda: make_varlen_case(
        0, [30, 0, 50], [30, 20, 50], heads=2, kv_heads=1, mask_mod=causal(), dtype=torch.bfloat16
    ),
}


@pytest.mark.parametrize("name", [pytest.param("a learned bias"), pytest.param("packed", marks=pytest.mark.slow)])
def test_a_call_that_learns_has_the_forward_of_kernels_and_the_gradients_of_pytorch(
    name: str, launches: list[str]
) -> None:
    case: Case = CASES[name]()
    assert case.dout is not None
    check(attention, case)
    assert launches == ["forward"]


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"sinks": torch.tensor([0.5, -1.0])}, {"dropout_p": 0.3, "dropout_seed": 7}])
def test_sinks_and_dropout_have_gradients(given: dict[str, Any], launches: list[str]) -> None:
    case = make_case(0, heads=2, kv_heads=1, q_len=70, kv_len=70, dtype=torch.bfloat16, mask_mod=causal())
    dropout = given.get("dropout_p", 0.0), given.get("dropout_seed", 0)
    check(attention, dataclasses.replace(case, sinks=given.get("sinks"), dropout=dropout))
    assert launches == ["forward"]


def test_what_kernels_refuse_is_computed_in_pytorch(launches: list[str]) -> None:
    q = torch.randn(1, 1, 20, 264, dtype=torch.bfloat16)
    out = attention(q, q, q)
    assert torch.equal(out, ca.attention(q, q, q, backend="streaming"))
    assert attention(*torch.randn(3, 1, 1, 20, 64)).dtype is torch.float32  # no kernel multiplies fp32
    assert "in PyTorch" in (said := str(ca.Attention(backend=NAME).explain(q, q, q))) and "up to 256, got 264" in said
    assert launches == []


def test_what_kernels_refuse_of_a_batch_invariant_call_stays_refused(launches: list[str]) -> None:
    """PyTorch's sums are in an order of each call's own."""
    schedule = ca.Schedule(batch_invariant=True)
    q = torch.randn(1, 1, 20, 264, dtype=torch.bfloat16)
    with pytest.raises(errors.UnsupportedHeadDim, match="up to 256, got 264"):
        attention(q, q, q, schedule=schedule)
    attention(*q[None, ..., :64].expand(3, 1, 1, 20, 64), schedule=schedule)
    assert launches == ["forward"]


def test_the_same_inputs_take_the_fast_path_while_nothing_learns(launches: list[str]) -> None:
    q, k, v = torch.randn(3, 1, 1, 20, 64, dtype=torch.bfloat16)
    attend = ca.Attention(backend=NAME)
    first, again = attend(q, k, v), attend(q, k, v)
    learned = attend(q.clone().requires_grad_(), k, v)
    assert launches == ["forward"] * 3
    assert torch.equal(first, again) and torch.equal(first, learned) and learned.requires_grad
    assert "in PyTorch" in str(attend.explain(q, k, v))


def test_a_captured_tensor_may_begin_to_learn_between_calls_of_the_same_inputs(launches: list[str]) -> None:
    slopes = torch.tensor([0.1, 0.5])
    attend = ca.Attention(backend=NAME, score_mod=lambda s, b, h, q, kv: s - slopes[h] * (q - kv))
    q, k, v = torch.randn(3, 1, 2, 20, 64, dtype=torch.bfloat16)
    before = [attend(q, k, v), attend(q, k, v)]
    slopes.requires_grad_()
    learned = attend(q, k, v)
    learned.float().pow(2).sum().backward()
    assert launches == ["forward"] * 3
    assert all(torch.equal(out, learned) for out in before)
    assert slopes.grad is not None and (slopes.grad != 0).all()
