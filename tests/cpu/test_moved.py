"""What a gradient needs and was given other memory, or was written to, since its call is refused, whatever the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from benchmarks.host_work import without_kernels
from composattn.graph.borrowed import borrow
from composattn.mods import document

LENGTH = 12
Mods = dict[str, Any]

READ: dict[str, tuple[Callable[[], torch.Tensor], Callable[[Any], Mods]]] = {
    "ids": (lambda: torch.arange(LENGTH) // 5, lambda t: {"mask_mod": lambda b, h, i, j: t[i] == t[j]}),
    "ids of a ready mask": (lambda: torch.arange(LENGTH) // 5, lambda t: {"mask_mod": document(t)}),
    "a table": (lambda: torch.randn(LENGTH, LENGTH), lambda t: {"score_mod": lambda s, b, h, i, j: s + t[i, j]}),
    "a learned table": (
        lambda: torch.randn(LENGTH, LENGTH).requires_grad_(),
        lambda t: {"score_mod": lambda s, b, h, i, j: s + t[i, j]},
    ),
    "a number": (lambda: torch.tensor(1.5), lambda t: {"score_mod": lambda s, b, h, i, j: s * t}),
    "sinks": (lambda: torch.randn(2), lambda t: {"sinks": t}),
    "a seed": (lambda: torch.tensor(7), lambda t: {"dropout_p": 0.5, "dropout_seed": t}),
    "blocks": (lambda: torch.ones(1, 1, 1, 1).to(torch.int8), lambda t: {"mask_mod": ca.BlockSparse(t, 16)}),
    "lengths": (lambda: torch.tensor([0, 5, LENGTH], dtype=torch.int32), lambda t: {"varlen": ca.Varlen(t)}),
}


def other(t: torch.Tensor) -> torch.Tensor:
    return t.detach().clone() + 1


def twice(t: torch.Tensor) -> None:
    """The third memory may lie where the first one did."""
    t.data = other(t)
    t.data = other(t)


def turned(t: torch.Tensor) -> None:
    """In the same memory, in another order."""
    t.data = t.data.mT if t.ndim == 2 else other(t)


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "data": lambda t: setattr(t, "data", other(t)),
    "data, twice": twice,
    "strides": turned,
    "set_": torch.no_grad()(lambda t: t.set_(other(t))),
    "a write": lambda t: t.detach().copy_(other(t)),
}
Call = Callable[..., Any]
ENTRIES: dict[str, Callable[[Mods], Call]] = {
    "attention": lambda mods: lambda q, k, v: ca.attention(q, k, v, **mods),
    "Attention": lambda mods: planned(**mods),
    "nn.Attention": lambda mods: planned(kind=ca.nn.Attention, **mods),
    "torch.func": lambda mods: lambda q, k, v: ca.attention(q, k, v, **mods),
    "an operator": lambda mods: lambda q, k, v: torch.compile(backend="eager")(ca.attention)(q, k, v, **mods),
}
NO_MODULES = ("a seed",)  # a module takes none that is a tensor


def planned(kind: Any = ca.Attention, varlen: Any = None, **mods: Any) -> Call:
    made = kind(**mods)
    return lambda q, k, v: made(q, k, v, varlen=varlen)


@pytest.mark.parametrize("name", [name for name in READ if name != "blocks"])  # a CPU keeps what it made of them
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_gradient_is_refused_where_what_it_needs_has_changed(entry: str, name: str) -> None:
    if entry == "nn.Attention" and name in NO_MODULES:
        return
    shape = (LENGTH, 2, 4) if name == "lengths" else (1, 2, LENGTH, 4)
    q, k, v = (torch.randn(*shape).requires_grad_() for _ in range(3))
    make, mods_of = READ[name]
    for change in CHANGES.values():
        read = make()
        call = ENTRIES[entry](mods_of(read))
        if entry == "torch.func":
            out, pull = torch.func.vjp(lambda q, call=call: call(q, k.detach(), v.detach()), q.detach())
        else:
            out = call(q, k, v)
            pull = lambda dout, out=out: torch.autograd.grad(out, (q, k, v), dout)  # noqa: E731
        with pytest.raises(RuntimeError, match=r"other memory|inplace operation"):
            change(read)
            pull(torch.ones_like(out))


def test_what_wants_a_gradient_later_has_not_changed() -> None:
    q = torch.randn(1, 2, LENGTH, 4).requires_grad_()
    table = torch.randn(2, LENGTH)
    out = ca.attention(q, q, q, score_mod=lambda s, b, h, i, j: s + table[h, j])
    table.requires_grad_()
    out.sum().backward()


def test_a_copy_that_was_saved_stands() -> None:
    """Offloading keeps what the call read, whatever the tensor is given meanwhile."""
    q = torch.randn(1, 2, LENGTH, 4, dtype=torch.float64).requires_grad_()
    table = torch.randn(2, LENGTH, dtype=torch.float64)
    score = lambda s, b, h, i, j: s + table[h, j]  # noqa: E731
    (wanted,) = torch.autograd.grad(ca.attention(q, q, q, score_mod=score).sin().sum(), q)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        out = ca.attention(q, q, q, score_mod=score).sin().sum()
    table.data = torch.zeros_like(table)
    torch.testing.assert_close(torch.autograd.grad(out, q)[0], wanted)


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_borrowed_and_has_changed_is_not_valid(change: str) -> None:
    table = torch.randn(LENGTH, LENGTH)
    borrowed = borrow([table])
    assert borrowed is not None and borrowed.is_valid()
    borrowed.refuse_written()
    table.requires_grad_()
    borrowed.refuse_written()
    table.requires_grad_(False)
    CHANGES[change](table)
    assert not borrowed.is_valid()
    with pytest.raises(RuntimeError, match=r"other memory|inplace operation"):
        borrowed.refuse_written()


@pytest.mark.parametrize("is_kept", [False, True], ids=["planned", "kept"])
@pytest.mark.parametrize("name", ["ids", "a table", "a learned table", "blocks"])
def test_kernels_of_a_known_form_are_refused_too(name: str, is_kept: bool) -> None:
    q, k, v = (torch.randn(1, 2, LENGTH, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    make, mods_of = READ[name]
    with without_kernels(lambda plan: lambda *arguments: None):
        for steps in (0, 2):
            for change in CHANGES.values():
                read = make()
                mods = mods_of(read)
                call = ENTRIES["attention" if is_kept else "Attention"](mods)
                for _ in range(steps):
                    call(q, k, v).backward(torch.ones_like(q))
                out = call(q, k, v)
                with pytest.raises(RuntimeError, match=r"other memory|inplace"):
                    change(read)
                    out.backward(torch.ones_like(out))


UNCOUNTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "apply_": lambda t: t.apply_(lambda x: x // 70),
    "map_": lambda t: t.map_(t // 70, lambda a, b: b),
    "a storage": lambda t: t.untyped_storage().copy_((t // 70).untyped_storage()),
    "numpy": lambda t: t.numpy().__ifloordiv__(70),
}


@pytest.mark.parametrize("write", UNCOUNTED)
def test_a_write_that_torch_does_not_count_is_seen_once_the_tensor_was_copied_onto_itself(write: str) -> None:
    q = torch.randn(1, 1, 320, 4)
    ids = torch.arange(320)
    mask = lambda b, h, i, j: ids[i] == ids[j]  # noqa: E731
    ca.attention(q, q, q, mask_mod=mask)
    version = ids._version
    UNCOUNTED[write](ids)
    assert ids._version == version
    ids.copy_(ids)
    wanted = (q @ q.mT / 2).masked_fill(ids[:, None] != ids, -torch.inf).softmax(-1) @ q
    torch.testing.assert_close(ca.attention(q, q, q, mask_mod=mask), wanted)
