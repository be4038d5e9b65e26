"""What a mod takes from captured tensors is read at every call, with its gradient, or refused: nothing is frozen.

Each form here gives, in plain torch, a value that changes with the captured tensor, or a gradient that is not the
formula's. Traced, it must follow both, or be refused by name.
"""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

import composattn as ca
from composattn import errors
from composattn.graph import copies
from composattn.graph.expr import captures
from composattn.mods import causal, document, global_tokens, shared_prefix, sliding_window
from composattn.mods.mask import Mask
from composattn.mods.score import Score

ONE, TWO = (torch.nn.Parameter(torch.tensor(n)) for n in (1.0, 2.0))
LEARNED = torch.nn.Parameter(torch.arange(1.0, 9.0))
FIXED, LONG, SQUARE = torch.arange(1.0, 9.0), torch.arange(100.0), torch.randn(8, 8)
NUMBER = torch.tensor(3.0)
NESTED = Score.of(lambda s, b, h, q, kv: s * ONE)


SCRIPTED = torch.jit.CompilationUnit("def double(x: Tensor) -> Tensor:\n    return x * 2\n").double
ARRAY = FIXED.numpy()


class OwnTensor(torch.Tensor):
    pass


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return -grad


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.mark_non_differentiable(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


class OwnTanh(torch.autograd.Function):
    """Its backward is the gradient of its forward."""

    @staticmethod
    def forward(x: Any) -> Any:
        return torch.tanh(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (out,) = ctx.saved_tensors
        return grad * (1 - out * out)


def without_gradient(context: Callable[[], Any], value: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        with context():
            cut = value(s, h)
        return s + cut

    return mod


def replaced(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    FIXED.data = torch.zeros(8)
    return s + FIXED[h]


def no_longer_learned(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    LEARNED.requires_grad = False
    return s + LEARNED[h]


REFUSED: dict[str, Callable[..., Any]] = {
    "stack": lambda s, b, h, q, kv: s * torch.stack([ONE, TWO])[h],
    "stack by keyword": lambda s, b, h, q, kv: s * torch.stack(tensors=(ONE, TWO))[h],
    "cat": lambda s, b, h, q, kv: s * torch.cat([LONG, LONG])[h],
    "vstack": lambda s, b, h, q, kv: s * torch.vstack([FIXED, FIXED])[0, h],
    "einsum": lambda s, b, h, q, kv: s * torch.einsum("ij->i", [SQUARE])[h],
    "meshgrid": lambda s, b, h, q, kv: s * torch.meshgrid([FIXED, FIXED], indexing="ij")[0][h, h],
    "broadcast_tensors": lambda s, b, h, q, kv: s * torch.broadcast_tensors(FIXED, FIXED)[0][h],
    "block_diag": lambda s, b, h, q, kv: s * torch.block_diag(SQUARE, SQUARE)[h, h],
    "multi_dot": lambda s, b, h, q, kv: s * torch.linalg.multi_dot([SQUARE, SQUARE])[h, h],
    "foreach": lambda s, b, h, q, kv: s * torch._foreach_mul([LONG], 2.0)[0][h],
    "foreach in place": lambda s, b, h, q, kv: (torch._foreach_add_([FIXED], 1.0), s)[1],
    "aten by name": lambda s, b, h, q, kv: s * torch.ops.aten.cat.default([LONG, LONG])[h],
    "clone": lambda s, b, h, q, kv: s * LONG.clone()[h],
    "slice": lambda s, b, h, q, kv: s * LONG[2:][h],
    "transpose": lambda s, b, h, q, kv: s * SQUARE.T[h, h],
    "grad": lambda s, b, h, q, kv: s * LEARNED.grad[h],
    "numpy": lambda s, b, h, q, kv: s * FIXED.numpy()[0],
    "text by format": lambda s, b, h, q, kv: s * float(f"{FIXED[0]}"[:1] + f"{TWO:.1f}"),
    "text of a whole tensor": lambda s, b, h, q, kv: s * float("1" in f"{FIXED}"),
    "text by str": lambda s, b, h, q, kv: s * len(str(TWO)),
    "text by repr": lambda s, b, h, q, kv: s * len(repr(TWO)),
    "text by a template": lambda s, b, h, q, kv: s * len("%s" % TWO),  # noqa: UP031
    "printed": lambda s, b, h, q, kv: (print(TWO), s)[1],
    "an address": lambda s, b, h, q, kv: s * (FIXED.data_ptr() % 7),
    "a count of writes": lambda s, b, h, q, kv: s * FIXED._version,
    "deepcopy": lambda s, b, h, q, kv: s * copy.deepcopy(FIXED)[h],
    "copy": lambda s, b, h, q, kv: s * copy.copy(FIXED)[h],
    "dlpack": lambda s, b, h, q, kv: s * torch.from_dlpack(FIXED)[h],
    "vmap": lambda s, b, h, q, kv: s * torch.vmap(lambda x: x * 2)(LONG)[h],
    "grad of torch.func": lambda s, b, h, q, kv: torch.func.grad(torch.tanh)(s),
    "data of a learned one": lambda s, b, h, q, kv: s + LEARNED.data[h],
    "detach of a learned one": lambda s, b, h, q, kv: s + LEARNED.detach()[h],
    "data of the score": lambda s, b, h, q, kv: s.data,
    "data of an element": lambda s, b, h, q, kv: s * LEARNED[h].data,
    "tensor of learned ones": lambda s, b, h, q, kv: s * torch.tensor([ONE, TWO]).sum(),
    "tensor of a learned one": lambda s, b, h, q, kv: s * torch.tensor(ONE),
    "tensor of the score": lambda s, b, h, q, kv: torch.tensor(s),
    "full of a learned one": lambda s, b, h, q, kv: s * s.new_full((), ONE),
    "a new learned tensor": lambda s, b, h, q, kv: s + torch.zeros((), requires_grad=True),
    "memory as it is": lambda s, b, h, q, kv: s * torch.empty(8)[h],
    "straight-through": lambda s, b, h, q, kv: StraightThrough.apply(s),
    "reversed gradient": lambda s, b, h, q, kv: Reversed.apply(s),
    "reversed gradient of an element": lambda s, b, h, q, kv: s * Reversed.apply(LEARNED[h]),
    "marked as not differentiable": lambda s, b, h, q, kv: Marked.apply(s),
    "no_grad": without_gradient(torch.no_grad, lambda s, h: torch.tanh(s)),
    "no_grad of an element": without_gradient(torch.no_grad, lambda s, h: LEARNED[h]),
    "inference_mode": without_gradient(torch.inference_mode, lambda s, h: LEARNED[h] * 2),
    "no_grad of a mod": without_gradient(torch.no_grad, lambda s, h: NESTED(s, 0, h, 0, 0)),
    "a hook": lambda s, b, h, q, kv: (ONE.register_hook(lambda g: -g), s)[1],
    "data replaced": replaced,
    "requires_grad changed": no_longer_learned,
    "a type by its name": lambda s, b, h, q, kv: s.type("torch.IntTensor"),
    "equal": lambda s, b, h, q, kv: s if torch.equal(FIXED, FIXED) else -s,
    "a parameter": lambda s, b, h, q, kv: s * torch.nn.Parameter(FIXED)[h],
    "a parameter of a learned one": lambda s, b, h, q, kv: s * torch.nn.Parameter(LEARNED)[h],
    "a parameter of a number": lambda s, b, h, q, kv: s * torch.nn.Parameter(NUMBER),
    "a parameter read twice": lambda s, b, h, q, kv: s * (lambda p: p[h] + p[q])(torch.nn.Parameter(FIXED)),
    "a buffer": lambda s, b, h, q, kv: s * torch.nn.Buffer(FIXED)[h],
    "a variable": lambda s, b, h, q, kv: s * torch.autograd.Variable(FIXED)[h],
    "of another class": lambda s, b, h, q, kv: s * FIXED.as_subclass(OwnTensor)[h],
    "made of another class": lambda s, b, h, q, kv: s * torch.Tensor._make_subclass(OwnTensor, FIXED)[h],
    "by the class": lambda s, b, h, q, kv: s * torch.Tensor(FIXED)[h],
    "by the class, of a number": lambda s, b, h, q, kv: s * torch.Tensor(NUMBER),
    "by the class, of a type": lambda s, b, h, q, kv: s * torch.FloatTensor(FIXED)[h],
    "memory as it is, by the class": lambda s, b, h, q, kv: s * torch.Tensor(8)[h],
    "to dlpack": lambda s, b, h, q, kv: s * from_dlpack(to_dlpack(FIXED))[h],
    "to dlpack and to a number": lambda s, b, h, q, kv: s * from_dlpack(to_dlpack(NUMBER)),
    "a scripted function": lambda s, b, h, q, kv: s * SCRIPTED(FIXED)[h],
    "a scripted function of a number": lambda s, b, h, q, kv: s * SCRIPTED(NUMBER),
    "a scripted function of a learned one": lambda s, b, h, q, kv: s * SCRIPTED(LEARNED)[h],
    "a functional tensor": lambda s, b, h, q, kv: s * torch._to_functional_tensor(FIXED)[h],
    "from numpy": lambda s, b, h, q, kv: s * torch.from_numpy(ARRAY)[h],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_frozen_or_cut_is_refused(name: str) -> None:
    before = [t.detach().clone() for t in (FIXED, LEARNED, LONG)]
    with pytest.raises(errors.TraceError) as refusal:
        Score.of(REFUSED[name])
    assert __file__ in str(refusal.value.line)
    assert all(torch.equal(x, y) for x, y in zip(before, (FIXED, LEARNED, LONG), strict=True))
    assert LEARNED.requires_grad and torch.is_grad_enabled()


FOLLOWED: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "data": (lambda s, b, h, q, kv: s + FIXED.data[h], FIXED),
    "detach": (lambda s, b, h, q, kv: s + FIXED.detach()[h], FIXED),
    "as_tensor": (lambda s, b, h, q, kv: s * torch.as_tensor(ONE), ONE),
    "tensor": (lambda s, b, h, q, kv: s * torch.tensor(NUMBER), NUMBER),
    "sum of a list": (lambda s, b, h, q, kv: s * sum([ONE, TWO]), ONE),
    "a reduced stack": (lambda s, b, h, q, kv: s * torch.stack([ONE, TWO]).sum(), ONE),
    "no_grad where there is none": (without_gradient(torch.no_grad, lambda s, h: FIXED[h] * 2), FIXED),
    "a functional call": (
        lambda s, b, h, q, kv: torch.func.functional_call(torch.nn.Tanh(), {}, (s * LEARNED[h],)),
        LEARNED,
    ),
}


def local_numbers(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    table, steps = torch.tensor([1.0, 2.0, 4.0, 8.0] * 2), torch.arange(8)
    return s * table[h] + steps[h] + torch.linspace(0, 1, 8)[h]


def test_tensors_of_numbers_may_be_made_inside(generator: torch.Generator) -> None:
    q = torch.randn(1, 8, 9, 8, generator=generator)
    heads = torch.arange(8)
    added, factor = heads + torch.linspace(0, 1, 8), torch.tensor([1.0, 2.0, 4.0, 8.0] * 2)
    wanted = ca.attention(q, q, q, score_mod=lambda s, b, h, i, j: s * factor[h] + added[h])
    torch.testing.assert_close(ca.attention(q, q, q, score_mod=local_numbers), wanted)


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_taken_holds_the_tensor_itself(name: str) -> None:
    mod, tensor = FOLLOWED[name]
    assert any(c.tensor is tensor for c in captures(Score.of(mod).expr))


def test_a_function_whose_backward_is_its_gradient_is_served(generator: torch.Generator) -> None:
    q, k, v = (torch.randn(1, 2, 9, 8, generator=generator).requires_grad_() for _ in range(3))
    found, wanted = (
        torch.autograd.grad(ca.attention(q, k, v, score_mod=lambda s, b, h, i, j, f=f: f(s)).sum(), (q, k, v))
        for f in (OwnTanh.apply, torch.tanh)
    )
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_gradients_under_no_grad_outside_are_nobodys_matter(generator: torch.Generator) -> None:
    q = torch.randn(1, len(LEARNED), 9, 8, generator=generator)
    with torch.no_grad():
        made = ca.Attention(score_mod=lambda s, b, h, i, j: s * LEARNED[h])
        made(q, q, q)
    made(q, q, q).sum().backward()
    assert LEARNED.grad is not None and bool(LEARNED.grad.any())
    LEARNED.grad = None


def test_masks_pass_no_gradient_so_they_may_cut_it() -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        with torch.no_grad():
            return (LEARNED[h] > 2) & (LEARNED.detach()[h] < 5) & (q - kv < ONE)

    assert {id(c.tensor) for c in captures(Mask.of(mask).expr)} == {id(LEARNED), id(ONE)}


@pytest.mark.parametrize("size", [600, 100])
@pytest.mark.parametrize("mask", ["ids", "limits"])
def test_a_captured_tensor_of_another_size_is_refused_by_name(mask: str, size: int) -> None:
    held = torch.arange(300) // 100
    masks = {"ids": lambda b, h, i, j: held[i] == held[j], "limits": lambda b, h, i, j: j <= held[i]}
    q = torch.randn(1, 1, 300, 8)
    made = ca.Attention(mask_mod=masks[mask])
    made(q, q, q)
    held.resize_(size).zero_()
    with pytest.raises(errors.CapturedTensorChanged, match="was made, and is"):
        made(q, q, q)


WIDTH = ca.scalar(9)
COPIED: dict[str, Callable[[torch.Tensor], Mask]] = {
    "documents": lambda t: document(offsets=t),
    "documents of keys": lambda t: document(offsets=t.clone(), kv_offsets=t),
    "joined and inverted": lambda t: causal() & ~document(offsets=t),
    "inside of a function": lambda t: (lambda inner: Mask.of(lambda b, h, q, kv: inner(b, h, q, kv)))(
        document(offsets=t)
    ),
    "shared prefixes": lambda t: shared_prefix(t),
    "tokens": lambda t: global_tokens(t),
    "beside a run-time number": lambda t: sliding_window(WIDTH) & document(offsets=t),
}
ENTRIES: dict[str, Callable[[Mask], Callable[..., Any]]] = {
    "attention": lambda mask: lambda *x: ca.attention(*x, mask_mod=mask),
    "Attention": lambda mask: ca.Attention(mask_mod=mask),
    "a compiled region": lambda mask: torch.compile(lambda *x: ca.attention(*x, mask_mod=mask), backend="eager"),
    "a compiled module": lambda mask: torch.compile(ca.nn.Attention(mask_mod=mask), fullgraph=True, backend="eager"),
    "weights": lambda mask: lambda q, k, v: ca.attention_weights(q, k, [1], mask_mod=mask),
    "tiles": lambda mask: lambda q, k, v: mask.tiles(20, 20, (4, 4)),
}


@pytest.mark.parametrize("write", ["in place", "data"])
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", COPIED)
def test_a_table_that_a_mask_made_of_a_tensor_that_was_written_to_since_is_refused(
    name: str, entry: str, write: str, generator: torch.Generator
) -> None:
    given, after = torch.tensor([0, 7, 20]), torch.tensor([0, 11, 20])
    x = [torch.randn(1, 1, 20, 8, generator=generator) for _ in range(3)]
    mask = COPIED[name](given)
    attend = ENTRIES[entry](mask)
    for _ in range(2):
        attend(*x)
    if write == "data":
        given.data = after
    else:
        given.copy_(after)
    for _ in range(2):
        with pytest.raises(errors.CapturedTensorChanged, match="make the mask again"):
            attend(*x)
    ENTRIES[entry](COPIED[name](given))(*x)


class Packed(torch.nn.Module):
    """A module whose mask was made of a buffer of its own."""

    def __init__(self, name: str, held_by: Callable[[Mask], Any]) -> None:
        super().__init__()
        self.register_buffer("given", torch.tensor([0, 7, 20]))
        self.attend = held_by(COPIED[name](self.given))

    def forward(self, x: torch.Tensor) -> Any:
        return self.attend(x, x, x)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


class Called:
    """A mask in an object that can be copied."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    def __call__(self, *x: torch.Tensor) -> Any:
        return ca.attention(*x, mask_mod=self.mask)


HOLDERS = {
    "mask": Called,
    "plan": lambda mask: ca.Attention(mask_mod=mask),
    "module": lambda mask: ca.nn.Attention(mask_mod=mask),
}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("name", ["inside of a function", "tokens"])
def test_a_copy_of_such_a_table_is_refused_once_the_copied_tensor_was_written_to(
    name: str, holder: str, duplicate: Callable[[Any], Any], generator: torch.Generator
) -> None:
    of, x = Packed(name, HOLDERS[holder]), torch.randn(1, 1, 20, 8, generator=generator)
    twin = duplicate(of)
    assert torch.equal(twin(x), of(x))
    twin.given.copy_(torch.tensor([0, 11, 20]))
    for again in (lambda: twin, lambda: duplicate(twin)):  # also a copy of what is outdated
        with pytest.raises(errors.CapturedTensorChanged, match="make the mask again"):
            again()(x)
    of(x)


def test_what_is_known_of_such_tables_ends_with_them() -> None:
    gc.collect()
    before = len(copies.made)
    mask = document(offsets=torch.tensor([0, 7, 20]))
    assert len(copies.made) == before + 2
    del mask
    gc.collect()
    assert len(copies.made) == before


def test_tiles_follow_writes_to_ids_that_a_mod_reads_through_data() -> None:
    ids = torch.arange(300) // 100
    q = torch.randn(1, 1, 300, 8)
    made = ca.Attention(mask_mod=lambda b, h, i, j: ids.data[i] == ids.data[j])
    made(q, q, q)
    ids.zero_()
    torch.testing.assert_close(made(q, q, q), ca.attention(q, q, q))
