"""Sinks in the generated kernels, emulated with no GPU: dense, packed, paged and split calls, and their gradients."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.analysis.program import Program
from composattn.backends.fused.planning.plan_backward import SinkForm, plan_backward
from composattn.backends.fused.running.emulated import emulating
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Problem
from composattn.call.schedule import Schedule
from composattn.emulator.mode import EAGER, LATE, random_mode
from composattn.mods import alibi, causal
from composattn.mods.sink import Sink
from composattn.testing import Case, check, make_case, make_paged_case, make_varlen_case

BACKENDS = ["hopper-emulated", "blackwell-emulated"]
SINKS = torch.tensor([3.0, -1.0, 0.5, -torch.inf])
HEADS: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dim": 64, "dtype": torch.bfloat16}


def seen(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q != 5)


def early_rows(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """The first row sees one of three parts of the keys, and the second row none."""
    return torch.where(q == 0, kv > 450, q != 1)


def dense(**options: Any) -> Case:
    return make_case(3, batch=1, **HEADS, **options)


FORWARD: dict[str, tuple[Case, dict[str, Any]]] = {
    "rows that see nothing": (dense(q_len=70, kv_len=150, mask_mod=seen), {}),
    "alibi, of which a part is left to LSE": (dense(q_len=90, mask_mod=causal(), score_mod=alibi(4)), {}),
    "kv in parts": (dense(q_len=3, kv_len=600, mask_mod=early_rows), {"schedule": Schedule(split_kv=3)}),
    "heads that share a tile": (dense(q_len=3, kv_len=200, mask_mod=causal("bottom_right")), {}),
    "packed": (make_varlen_case(1, (90, 0, 33), (80, 9, 33), used_q=(80, 0, 33), mask_mod=causal(), **HEADS), {}),
    "paged": (make_paged_case(2, [300, 17, 0], page_size=16, **HEADS), {}),
    "packed queries, paged keys": (make_paged_case(2, [100, 17, 0], page_size=16, q_lens=(9, 0, 2), **HEADS), {}),
}


BACKWARD: dict[str, Case] = {
    "dense": make_case(3, batch=2, q_len=150, mask_mod=seen, **HEADS),  # several blocks have rows of a head
    "packed": make_varlen_case(1, (90, 0, 33), (80, 9, 33), used_q=(80, 0, 33), mask_mod=causal(), **HEADS),
}


def with_sinks(case: Case, sinks: torch.Tensor = SINKS) -> Case:
    return dataclasses.replace(case, sinks=sinks)


# pages with packed queries, Blackwell's whole keys with the gradients below
QUICK = {*((name, "hopper-emulated") for name in FORWARD if name != "paged"), ("kv in parts", "blackwell-emulated")}
CALLS = [(name, backend) for name in FORWARD for backend in BACKENDS]


@pytest.mark.parametrize(
    "name, backend", [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.slow) for c in CALLS]
)
def test_forward_is_as_close_as_plain_pytorch(name: str, backend: str) -> None:
    case, options = FORWARD[name]
    attend = functools.partial(ca.attention, backend=backend, **options)
    for mode in (EAGER, LATE, random_mode(7)):
        with emulating(mode):
            check(attend, with_sinks(case).without_gradients())


QUICK_GRADIENTS = {("dense", "hopper-emulated"), ("packed", "blackwell-emulated")}
GRADIENTS = [(name, backend) for name in BACKWARD for backend in BACKENDS]


@pytest.mark.parametrize(
    "name, backend", [pytest.param(*c, marks=[] if c in QUICK_GRADIENTS else pytest.mark.slow) for c in GRADIENTS]
)
def test_gradients_are_as_close_as_plain_pytorchs(name: str, backend: str) -> None:
    case = with_sinks(BACKWARD[name], SINKS.nan_to_num(neginf=-1.0).requires_grad_())
    check(functools.partial(ca.attention, backend=backend), case)


SMALL = make_case(4, batch=2, heads=2, kv_heads=1, q_len=70, dim=64, dtype=torch.bfloat16, mask_mod=seen)


@pytest.mark.parametrize("backend", ["hopper-emulated", pytest.param("blackwell-emulated", marks=pytest.mark.slow)])
def test_their_gradient_has_the_same_bits_whatever_comes_first(backend: str) -> None:
    case, sinks, found = SMALL, torch.tensor([0.5, -1.0], dtype=torch.bfloat16, requires_grad=True), []
    for mode in (EAGER, LATE, random_mode(5)):
        with emulating(mode):
            out = ca.attention(case.q, case.k, case.v, mask_mod=seen, sinks=sinks, backend=backend)
            found.append(torch.autograd.grad(out, sinks, case.dout)[0])
    assert found[0].dtype == torch.bfloat16 and bool(found[0].all())
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_sinks_that_lie_apart_get_theirs() -> None:
    case, many, found = SMALL, torch.randn(2, 3).requires_grad_(), {}
    for sinks in (many[:, 1], many[:, 1].contiguous()):
        out = ca.attention(case.q, case.k, case.v, mask_mod=seen, sinks=sinks, backend="hopper-emulated")
        found[sinks.stride()] = torch.autograd.grad(out, many, case.dout)[0]
    assert len(found) == 2 and torch.equal(*found.values())


def test_each_call_of_a_vmap_has_its_own() -> None:
    case, sinks = SMALL, torch.randn(2, 2)

    def loss(sinks: torch.Tensor, backend: str) -> torch.Tensor:
        out = ca.attention(case.q, case.k, case.v, mask_mod=seen, sinks=sinks, backend=backend)
        return (out * case.dout).float().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None))(sinks, "hopper-emulated")
    wanted = torch.stack([torch.func.grad(loss)(x, "reference") for x in sinks])
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


def test_a_tensor_that_is_sink_and_bias_gets_both_gradients() -> None:
    both = torch.tensor([0.5, -1.0]).requires_grad_()

    def slope(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + both[h] * kv / 70

    case = make_case(4, batch=1, heads=2, q_len=70, dim=64, dtype=torch.bfloat16, score_mod=slope, mask_mod=causal())
    check(functools.partial(ca.attention, backend="hopper-emulated"), with_sinks(case, both))


def test_sinks_alone_may_want_a_gradient() -> None:
    case, found = with_sinks(BACKWARD["dense"], torch.ones(4).requires_grad_()), {}
    for backend in ("hopper-emulated", "reference"):
        out = ca.attention(case.q, case.k, case.v, mask_mod=seen, sinks=case.sinks, backend=backend)
        found[backend] = torch.autograd.grad(out, case.sinks, case.dout)[0]
    torch.testing.assert_close(*found.values(), rtol=1e-2, atol=1e-2)


def test_where_there_are_no_keys_lse_is_the_sink() -> None:
    q, sinks = torch.ones(1, 4, 7, 64, dtype=torch.bfloat16), SINKS.nan_to_num(neginf=-1.0).requires_grad_()
    nothing = q[:, :2, :0]
    out, lse = ca.attention(q, nothing, nothing, sinks=sinks, backend="hopper-emulated", return_lse=True)
    assert not bool(out.any()) and torch.equal(lse, sinks[:, None].expand(1, 4, 7))
    assert torch.equal(torch.autograd.grad(lse.sum(), sinks)[0], torch.full((4,), 7.0))


def test_a_backward_is_that_of_a_call_without_them_but_where_they_get_a_gradient() -> None:
    problem, form = (
        Problem(1, 4, 4, 256, 256, 64, 64, torch.bfloat16, torch.device("cpu")),
        SinkForm(SINKS.dtype, False),
    )
    given: list[Any] = [(None, None), (Sink.of(SINKS).expr, None), (Sink.of(SINKS).expr, form)]
    plain, sinking, learning = (plan_backward(problem, Program(None, None, x), HOPPER, sinks=y) for x, y in given)
    assert learning.main.key == sinking.main.key == plain.main.key
    for before, after in zip(
        (plain.preprocess, plain.postprocess), (sinking.preprocess, sinking.postprocess), strict=True
    ):
        assert before.key == after.key
    assert learning.preprocess.key != plain.preprocess.key and learning.postprocess.key != plain.postprocess.key
