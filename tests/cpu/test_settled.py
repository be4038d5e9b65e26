"""Calls of a form that is known take the short way, and what they must not take it for does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import composattn as ca
from benchmarks.host_work import without_kernels
from composattn.backends.fused import call as fused_call
from composattn.backends.fused.arguments import ForwardArguments, MainArguments
from composattn.errors import GradientUnsupported
from composattn.mods import alibi, causal

Given = list[tuple[Any, ...]]


@pytest.fixture
def given() -> Iterator[Given]:
    """What kernels were launched with; they compute nothing."""
    launched: Given = []
    with without_kernels(lambda plan: lambda *arguments: launched.append(arguments)):
        yield launched


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many calls and gradients took the long way."""
    taken: list[int] = []
    for kind, name in ((fused_call.FusedCall, "__call__"), (fused_call.FusedAttend, "backward")):
        before: Any = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *x, before=before: (taken.append(1), before(*x))[1])
    return taken


def rows(heads: int, width: int = 64, length: int = 128, as_view: bool = False) -> torch.Tensor:
    made = torch.randn(2, length, heads, width, dtype=torch.bfloat16).transpose(1, 2)
    return (made if as_view else made.contiguous()).requires_grad_()


LIE = pytest.mark.parametrize("as_view", [False, True], ids=["contiguous", "views"])


@LIE
@pytest.mark.usefixtures("given")
def test_from_the_second_step_on_nothing_takes_the_long_way(as_view: bool, long_ways: list[int]) -> None:
    q, k, v = rows(4, as_view=as_view), rows(2, as_view=as_view), rows(2, as_view=as_view)
    slopes = torch.rand(4)
    for mods in ({}, {"mask_mod": causal()}, {"score_mod": alibi(slopes)}, {"sinks": torch.rand(4).requires_grad_()}):
        learned = (q, k, v, *([mods["sinks"]] if "sinks" in mods else []))
        for step in range(3):
            long_ways.clear()
            torch.autograd.grad(ca.attention(q, k, v, **mods), learned, torch.randn_like(q))  # type: ignore[arg-type]
            assert bool(long_ways) == (step == 0)


@LIE
@pytest.mark.parametrize("width", [64, 128])
def test_memory_lies_as_on_the_long_way(as_view: bool, width: int, given: Given) -> None:
    q, k, v = rows(4, as_view=as_view), rows(2, as_view=as_view), rows(2, width, as_view=as_view)
    found = []
    for return_lse in (False, False, True):
        given.clear()
        out = ca.attention(q, k, v, return_lse=return_lse)
        dout = torch.randn_like(out[0] if return_lse else out)
        grads = torch.autograd.grad(out[0] if return_lse else out, (q, k, v), dout)
        made = [ForwardArguments(*given[0]).out, ForwardArguments(*given[0]).lse, *grads]
        found.append([(t.shape, t.stride(), t.dtype) for t in made])
    assert found[0] == found[1] == found[2]


WAYS: dict[str, Callable[..., Any]] = {
    "lse is asked for": lambda q, k, v: ca.attention(q, k, v, return_lse=True)[0],
    "tensors are saved by a hook": lambda q, k, v: _saved_elsewhere(q, k, v),
    "computed again": lambda q, k, v: checkpoint(lambda: ca.attention(q, k, v), use_reentrant=False),
}


def _saved_elsewhere(*qkv: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.expand(t.shape)):
        return ca.attention(*qkv)  # type: ignore[return-value]


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.usefixtures("given")
def test_what_is_no_plain_call_takes_the_long_way(name: str, long_ways: list[int]) -> None:
    qkv = rows(4), rows(2), rows(2)
    for _ in range(3):
        torch.autograd.grad(ca.attention(*qkv), qkv, torch.randn_like(qkv[0]))  # type: ignore[arg-type]
    long_ways.clear()
    torch.autograd.grad(WAYS[name](*qkv), qkv, torch.randn_like(qkv[0]))
    assert long_ways


@pytest.mark.usefixtures("given")
def test_a_gradient_of_another_dtype_or_form_takes_the_long_way_once_the_form_is_read_as_it_comes(
    long_ways: list[int],
) -> None:
    qkv = rows(4), rows(2), rows(2)

    def taken(dout: torch.Tensor) -> bool:
        long_ways.clear()
        torch.autograd.grad(ca.attention(*qkv), qkv, dout)  # type: ignore[arg-type]
        return bool(long_ways)

    plain = torch.randn_like(qkv[0])
    assert [taken(plain) for _ in range(3)] == [True, False, False]
    expanded = plain[:, :, :1, :1].expand(plain.shape)
    assert [taken(expanded) for _ in range(2)] == [True, True], "a copy is made of it each time"
    assert not taken(plain), "one that was not read as it came changes nothing"
    askew = torch.cat([plain.flatten(), plain.flatten()])[3 : 3 + plain.numel()].view(plain.shape)
    assert taken(askew) and not taken(plain)
    view = plain.transpose(1, 2).contiguous().transpose(1, 2)
    assert [taken(view) for _ in range(2)] == [True, False]


@pytest.mark.usefixtures("given")
def test_a_gradient_is_refused_a_second_time_and_given_many_at_once() -> None:
    qkv = rows(4), rows(2), rows(2)
    dout = torch.randn_like(qkv[0])
    for _ in range(3):
        torch.autograd.grad(ca.attention(*qkv), qkv, dout)  # type: ignore[arg-type]
    grads = torch.autograd.grad(ca.attention(*qkv), qkv, dout, create_graph=True)  # type: ignore[arg-type]
    with pytest.raises(GradientUnsupported, match="not differentiable itself"):
        grads[0].sum().backward()
    many = torch.stack([dout, dout, dout])
    grads = torch.autograd.grad(ca.attention(*qkv), qkv, many, is_grads_batched=True)  # type: ignore[arg-type]
    assert [g.shape[0] for g in grads] == [3, 3, 3]


@pytest.mark.usefixtures("given")
def test_an_input_that_was_written_to_is_refused_in_the_backward() -> None:
    qkv = rows(4), rows(2), rows(2)
    for _ in range(3):
        out = ca.attention(*qkv)
        torch.autograd.grad(out, qkv, torch.randn_like(qkv[0]))  # type: ignore[arg-type]
    inner = [t * 1 for t in qkv]
    out = ca.attention(*inner)
    inner[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, qkv, torch.randn_like(qkv[0]))  # type: ignore[arg-type]


def test_sums_in_a_fixed_order_follow_torchs_setting_at_the_time(given: Given) -> None:
    qkv = rows(4), rows(2), rows(2)

    def turns() -> Any:
        given.clear()
        torch.autograd.grad(ca.attention(*qkv), qkv, torch.randn_like(qkv[0]))  # type: ignore[arg-type]
        (main,) = (MainArguments(*x) for x in given if len(x) == len(MainArguments._fields))
        return main.turns

    assert [turns() is None for _ in range(3)] == [True] * 3
    torch.use_deterministic_algorithms(True)
    try:
        assert [turns() is None for _ in range(3)] == [False] * 3
    finally:
        torch.use_deterministic_algorithms(False)
    assert turns() is None
