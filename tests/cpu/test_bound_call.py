"""Calls of a form that is known take the fast path, and what they must not take it for does not."""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import composattn as ca
from benchmarks.host_work import copied, without_kernels
from composattn.backends.fused.planning.arguments import ForwardArguments, MainArguments
from composattn.backends.fused.running import call as fused_call
from composattn.backends.fused.running import kernels as fused_kernels
from composattn.errors import GradientUnsupported
from composattn.mods import alibi, causal, document, neighborhood

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
    for kind, name in ((fused_call.FusedCall, "__call__"), (fused_kernels.FusedAttend, "backward")):
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
    slopes, sinks, learning = torch.rand(4), torch.rand(4).requires_grad_(), torch.rand(4).requires_grad_()
    cases: list[tuple[dict[str, Any], list[torch.Tensor]]] = [
        ({}, []),
        ({"mask_mod": causal()}, []),
        ({"score_mod": alibi(slopes)}, []),
        ({"sinks": sinks}, [sinks]),
        ({"score_mod": alibi(learning)}, [learning]),
    ]
    for mods, learned in cases:
        for step in range(3):
            long_ways.clear()
            out: Any = ca.attention(q, k, v, **mods)
            torch.autograd.grad(out, (q, k, v, *learned), torch.randn_like(q))
            assert bool(long_ways) == (step == 0)


LEARNED: dict[str, Callable[[torch.Tensor, torch.Tensor], dict[str, Any]]] = {
    "score mod": lambda slopes, sinks: {"score_mod": alibi(slopes)},
    "sinks": lambda slopes, sinks: {"sinks": sinks},
    "both": lambda slopes, sinks: {"score_mod": alibi(slopes), "sinks": sinks},
    "both, by one tensor": lambda slopes, sinks: {"score_mod": alibi(sinks), "sinks": sinks},
}


@pytest.mark.parametrize("alone", [False, True], ids=["with q, k and v", "alone"])
@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.usefixtures("given")
def test_what_is_learned_has_its_gradient_in_every_step(name: str, alone: bool) -> None:
    q, k, v = rows(4), rows(2), rows(2)
    slopes, sinks = torch.rand(4).requires_grad_(), torch.rand(4).requires_grad_()
    mods = LEARNED[name](slopes, sinks)
    if alone:
        q, k, v = q.detach(), k.detach(), v.detach()
    for _ in range(4):
        slopes.grad = sinks.grad = None
        out = ca.attention(q, k, v, mask_mod=causal(), **mods)
        out.backward(torch.randn_like(out))  # type: ignore[union-attr]
        assert (slopes.grad is not None) == (name in ("score mod", "both"))
        assert (sinks.grad is not None) == (name != "score mod")


def test_a_backward_whose_lists_and_tables_hang_on_no_tensor_reads_them_again_on_the_fast_path(
    given: Given, long_ways: list[int]
) -> None:
    q, k, v = rows(4, length=4096), rows(2, length=4096), rows(2, length=4096)
    read = []
    for step in range(3):
        long_ways.clear()
        given.clear()
        out: Any = ca.attention(q, k, v, mask_mod=neighborhood((64, 64), 7))
        torch.autograd.grad(out, (q, k, v), torch.randn_like(q))
        assert bool(long_ways) == (step == 0)
        main = MainArguments(*given[2])
        read.append((main.key_tiles, main.captured))
    assert read[0][0] is not None and read[0][1]
    for tables, lists in read[1:]:
        assert tables is read[0][0] and all(map(operator.is_, lists, read[0][1]))


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


def test_forms_of_different_lengths_in_turns_have_memory_of_their_own(given: Given, long_ways: list[int]) -> None:
    of_lengths = {
        length: (rows(4, length=length), rows(2, length=length), rows(2, length=length)) for length in (96, 128)
    }
    for step in range(3):
        for qkv in of_lengths.values():
            given.clear()
            long_ways.clear()
            torch.autograd.grad(ca.attention(*qkv, mask_mod=causal()), qkv, torch.randn_like(qkv[0]))  # type: ignore[arg-type]
            (main,) = (MainArguments(*x) for x in given if len(x) == len(MainArguments._fields))
            assert bool(long_ways) == (step == 0)
            assert main.dk.shape == qkv[1].shape and main.workspace.numel() >= 2 * qkv[0][..., 0].numel()


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


@pytest.mark.usefixtures("given")
def test_a_lent_tensor_that_learns_nothing_is_no_input_of_autograd_and_its_writes_are_refused() -> None:
    qkv = rows(4), rows(2), rows(2)
    ids, slopes = torch.arange(qkv[0].shape[2]) // 5, torch.rand(4)

    def call(of: torch.Tensor) -> torch.Tensor:
        return ca.attention(*qkv, score_mod=alibi(slopes), mask_mod=lambda b, h, q, kv: of[q] == of[kv])

    for _ in range(3):
        torch.autograd.grad(call(ids), qkv, torch.randn_like(qkv[0]))
    out: Any = call(ids)
    assert len(out.grad_fn.next_functions) == 3
    assert len(out.grad_fn.saved_tensors) == 5
    other = ids.clone()
    other.add_(1)
    torch.autograd.grad(call(other), qkv, torch.randn_like(qkv[0]))
    torch.autograd.grad(out, qkv, torch.randn_like(qkv[0]), retain_graph=True)
    ids.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, qkv, torch.randn_like(qkv[0]))
    torch.autograd.grad(call(ids), qkv, torch.randn_like(qkv[0]))


@pytest.mark.parametrize("is_kept", [True, False], ids=["the other stays", "the other is freed"])
@pytest.mark.usefixtures("given")
def test_a_lent_tensor_that_was_swapped_for_another_is_refused_in_the_backward(is_kept: bool) -> None:
    qkv, slopes = (rows(4), rows(2), rows(2)), torch.rand(4)
    for _ in range(3):
        out: Any = ca.attention(*qkv, score_mod=alibi(slopes))
        torch.autograd.grad(out, qkv, torch.randn_like(qkv[0]))
    out, other = ca.attention(*qkv, score_mod=alibi(slopes)), torch.rand(4)
    torch.utils.swap_tensors(slopes, other)
    if is_kept:
        other.mul_(2)
        ca.attention(*qkv, score_mod=alibi(other))
    else:
        del other
        gc.collect()
    with pytest.raises(RuntimeError, match="swapped"):
        torch.autograd.grad(out, qkv, torch.randn_like(qkv[0]))
    torch.autograd.grad(ca.attention(*qkv, score_mod=alibi(slopes)), qkv, torch.randn_like(qkv[0]))


@pytest.mark.usefixtures("given")
def test_a_lent_tensor_that_learns_is_an_input_of_autograd() -> None:
    qkv = rows(4), rows(2), rows(2)
    slopes, ids = torch.rand(4, requires_grad=True), torch.arange(qkv[0].shape[2]) // 5
    for _ in range(3):
        out: Any = ca.attention(*qkv, score_mod=alibi(slopes), mask_mod=document(ids))
    assert len(out.grad_fn.next_functions) > 3
    slopes.requires_grad_(False)
    for _ in range(3):
        out = ca.attention(*qkv, score_mod=alibi(slopes), mask_mod=document(ids))
    assert len(out.grad_fn.next_functions) == 3


def drawn(seed: int) -> torch.Tensor:
    """Documents that descend."""
    cuts = torch.rand(128, generator=torch.Generator().manual_seed(seed)) < 0.05
    return -cuts.cumsum(0)


def read_by(given: Given) -> list[torch.Tensor]:
    """What a backward's main kernel read of masks, as it was then."""
    (main,) = (MainArguments(*arguments) for arguments in given if len(arguments) == len(MainArguments._fields))
    return [main.key_tiles, *main.captured]


BETWEEN: dict[str, Callable[[Callable[[torch.Tensor], Any], torch.Tensor], Any]] = {
    "nothing": lambda call, ids: None,
    "another tensor": lambda call, ids: [call(drawn(seed)) for seed in (7, 8)],
    "a view of the same memory": lambda call, ids: call(ids.view(-1)),
    "the same without a gradient": lambda call, ids: call(ids.detach()),
}


@pytest.mark.parametrize("is_freed", [False, True], ids=["kept", "freed by the caller"])
@pytest.mark.parametrize("name", BETWEEN)
def test_a_later_backward_reads_what_its_call_read(name: str, is_freed: bool) -> None:
    given: Given = []
    qkv, dout = (rows(4), rows(2), rows(2)), torch.randn(2, 4, 128, 64, dtype=torch.bfloat16)

    def call(ids: torch.Tensor) -> torch.Tensor:
        return ca.attention(*qkv, mask_mod=causal() & document(ids))

    def backward(out: torch.Tensor) -> list[torch.Tensor]:
        given.clear()
        torch.autograd.grad(out, qkv, dout)
        return read_by(given)

    with without_kernels(lambda plan: lambda *arguments: given.append(copied(arguments))):
        ids = drawn(1)
        for seed in (2, 3, 1):
            wanted = backward(call(drawn(seed)))
        out = call(ids)
        out = call(ids)
        BETWEEN[name](call, ids)
        if is_freed:
            del ids
            gc.collect()
            call(drawn(9))  # which may take over its memory, were it free
        found = backward(out)
    assert len(found) == len(wanted) > 1
    assert all(map(torch.equal, found, wanted))
