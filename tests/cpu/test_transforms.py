"""Attention below transforms of torch: vmap, per-sample gradients, jacobians, forward mode, batched gradients.

Truth is attention written in plain torch, in fp64, below the same transform.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils import _pytree as pytree

import composattn as ca
from composattn.dispatch.planned import Planned
from composattn.mods import alibi, causal, document
from composattn.testing import make_paged_case

T = torch.Tensor
Attend = Callable[..., T]
BACKENDS = ["streaming", "reference"]
N, B, H, S, D = 3, 2, 4, 7, 4


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def draw(generator: torch.Generator, *shape: int) -> T:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def qkv(generator: torch.Generator, *lead: int, kv_heads: int = 2) -> list[T]:
    return [draw(generator, *lead, heads, S, D) for heads in (H, kv_heads, kv_heads)]


def plain(q: T, k: T, v: T, bias: T | float = 0.0, visible: T | None = None) -> T:
    """Attention by its definition; k and v have fewer heads."""
    group = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ v


def loss(attend: Attend) -> Attend:
    return lambda *x: attend(*x).sin().sum()


def assert_same(found: Any, wanted: Any) -> None:
    for x, y in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


PAST = torch.ones(S, S, dtype=torch.bool).tril()
APART = torch.arange(S)[:, None] - torch.arange(S)


def causal_attention(backend: str | None) -> tuple[Attend, Attend]:
    """Ours and the truth."""
    attention = ca.Attention(mask_mod=causal(), backend=backend)
    return lambda *x: attention(*x), lambda *x: plain(*x, visible=PAST)


def biased(backend: str | None) -> tuple[Attend, Attend]:
    """A bias by head and distance, which the sequence number scales: both are functions of (q, k, v, bias)."""

    def ours(q: T, k: T, v: T, bias: T) -> T:
        score = lambda s, b, h, q_idx, kv_idx: s + bias[h, q_idx - kv_idx + S] * (b + 1)  # noqa: E731
        return ca.attention(q, k, v, score_mod=score, mask_mod=causal(), backend=backend)  # type: ignore[return-value]

    def truth(q: T, k: T, v: T, bias: T) -> T:
        factor = torch.arange(1, q.shape[-4] + 1).view(-1, 1, 1, 1)
        return plain(q, k, v, bias[:, APART + S] * factor, PAST)

    return ours, truth


def with_ids(backend: str | None) -> tuple[Attend, Attend]:
    """Documents: which tiles are visited is read from the last argument."""

    def ours(q: T, k: T, v: T, ids: T) -> T:
        return ca.attention(q, k, v, mask_mod=document(ids) & causal(), backend=backend)  # type: ignore[return-value]

    return ours, lambda q, k, v, ids: plain(q, k, v, 0.0, PAST & (ids[:, None] == ids))


# --- vmap -------------------------------------------------------------------------------------------------------

IN_DIMS = [(0, 0, 0), (0, None, None), (None, 0, 0), (None, None, 1), (1, 0, 2), (-1, 4, None)]


@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
def test_vmap_over_any_dimensions_gives_outputs_and_gradients(
    in_dims: tuple[int | None, ...], backend: str, generator: torch.Generator
) -> None:
    ours, truth = causal_attention(backend)
    inputs = [
        t if d is None else t.expand(N, *t.shape) + draw(generator, N, *t.shape)
        for t, d in zip(qkv(generator, B), in_dims, strict=True)
    ]
    inputs = [t if d is None else t.movedim(0, d) for t, d in zip(inputs, in_dims, strict=True)]
    assert_same(vmap(ours, in_dims)(*inputs), vmap(truth, in_dims)(*inputs))
    both = [grad(loss(vmap(f, in_dims)), (0, 1, 2))(*inputs) for f in (ours, truth)]
    assert_same(*both)
    both = [vmap(grad(loss(f), (0, 1, 2)), in_dims)(*inputs) for f in (ours, truth)]
    assert_same(*both)
    leaves = [t.clone().requires_grad_() for t in inputs]
    both = [torch.autograd.grad(loss(vmap(f, in_dims))(*leaves), leaves) for f in (ours, truth)]
    assert_same(*both)


def test_vmap_takes_parts_and_gives_lse(backend: str, generator: torch.Generator) -> None:
    attention = ca.Attention(mask_mod=causal(), backend=backend)
    inputs = qkv(generator, 5, B)
    out, lse = vmap(lambda *x: attention(*x, return_lse=True), chunk_size=2)(*inputs)
    each = [attention(*x, return_lse=True) for x in zip(*inputs, strict=True)]
    assert_same((out, lse), tuple(map(torch.stack, zip(*each, strict=True))))
    both = [grad(lambda q, f=f: f(q).cos().sum())(inputs[0]) for f in (
        lambda q: vmap(lambda *x: attention(*x, return_lse=True)[1])(q, *inputs[1:]),
        lambda q: torch.stack([attention(*x, return_lse=True)[1] for x in zip(q, *inputs[1:], strict=True)]),
    )]  # fmt: skip
    assert_same(*both)


@pytest.mark.parametrize("mods", [biased, with_ids], ids=["bias", "documents"])
def test_vmap_over_captured_tensors(mods: Callable[..., Any], backend: str, generator: torch.Generator) -> None:
    ours, truth = mods(backend)
    table = draw(generator, N, H, 2 * S) if mods is biased else torch.randint(0, 2, (N, S), generator=generator)
    x = qkv(generator, N, B)
    assert_same(vmap(ours)(*x, table), vmap(truth)(*x, table))
    shared = (None, None, None, 0)
    assert_same(vmap(ours, shared)(*(t[0] for t in x), table), vmap(truth, shared)(*(t[0] for t in x), table))
    argnums = (0, 1, 2, 3) if mods is biased else (0, 1, 2)
    both = [vmap(grad(loss(f), argnums))(*x, table) for f in (ours, truth)]
    assert_same(*both)
    both = [grad(loss(vmap(f)), argnums)(*x, table) for f in (ours, truth)]
    assert_same(*both)


def test_nested_vmaps_over_different_inputs(backend: str, generator: torch.Generator) -> None:
    ours, truth = biased(backend)
    inputs = [*qkv(generator, N, B), draw(generator, 2, H, 2 * S)]

    def nested(attend: Attend) -> Attend:
        return vmap(vmap(attend, (0, None, 0, None)), (None, None, None, 0))

    inputs[1] = inputs[1][0]
    assert_same(nested(ours)(*inputs), nested(truth)(*inputs))
    both = [nested(grad(loss(f), (0, 1, 3)))(*inputs) for f in (ours, truth)]
    assert_same(*both)
    both = [grad(loss(nested(f)), (0, 1, 2, 3))(*inputs) for f in (ours, truth)]
    assert_same(*both)


@pytest.mark.parametrize("batch", [1, 2])
def test_per_sample_gradients_of_a_shared_bias(batch: int, backend: str, generator: torch.Generator) -> None:
    ours, truth = biased(backend)
    inputs = [*qkv(generator, N, batch), draw(generator, H, 2 * S)]
    both = [vmap(grad(loss(f), (0, 1, 2, 3)), (0, 0, 0, None))(*inputs) for f in (ours, truth)]
    assert_same(*both)


def test_a_tensor_and_its_copy_under_a_transform_are_told_apart(backend: str, generator: torch.Generator) -> None:
    """Peeled off, the argument of `grad` and the closed-over tensor are one object: only one read has a gradient."""
    slopes, inputs = draw(generator, H), qkv(generator, B)

    def ours(given: T) -> T:
        score = lambda s, b, h, q, kv: s + (given[h] + 2 * slopes[h] * given[h]) * (q - kv)  # noqa: E731
        return ca.attention(*inputs, score_mod=score, backend=backend)  # type: ignore[return-value]

    def truth(given: T) -> T:
        return plain(*inputs, bias=(given + 2 * slopes * given)[:, None, None] * APART)

    assert_same(grad(loss(ours))(slopes), grad(loss(truth))(slopes))


def test_run_time_numbers_stay_those_of_the_forward(generator: torch.Generator) -> None:
    factor = ca.scalar(2.0)
    inputs = qkv(generator, B)
    attention = ca.Attention(score_mod=lambda s, b, h, q, kv: s * factor)
    _, pull = vjp(lambda *x: attention(*x), *inputs)
    factor.value = 100.0
    cotangent = draw(generator, B, H, S, D)
    _, wanted = vjp(lambda q, k, v: plain(2 * q, k, v), *inputs)
    assert_same(pull(cotangent), wanted(cotangent))


def test_vmap_over_packed_sequences_and_their_lengths(backend: str, generator: torch.Generator) -> None:
    total = 9
    inputs = [draw(generator, N, total, heads, D) for heads in (H, 2, 2)]
    lengths = torch.tensor([[0, 2, 2, 9], [0, 0, 5, 9], [0, 3, 6, 9]], dtype=torch.int32)
    used = torch.tensor([[2, 0, 4], [0, 5, 4], [1, 2, 3]], dtype=torch.int32)
    slopes = draw(generator, 3)

    def ours(q: T, k: T, v: T, cu: T, used: T, slopes: T) -> T:
        score = lambda s, b, h, q_idx, kv_idx: s + slopes[b] * (q_idx - kv_idx)  # noqa: E731
        varlen = ca.Varlen(cu, seqused_q=used)
        out, lse = ca.attention(q, k, v, score_mod=score, varlen=varlen, backend=backend, return_lse=True)
        return torch.cat((out, torch.where(lse == -torch.inf, 0.0, lse).mT.unsqueeze(-1)), -1)

    for dims in ((0, 0, 0, 0, 0, None), (0, 0, 0, None, None, None)):
        x = [*inputs, lengths, used, slopes]
        x = [t if d == 0 or t is slopes else t[0] for t, d in zip(x, dims, strict=True)]
        each = [[t if d is None else t[n] for t, d in zip(x, dims, strict=True)] for n in range(N)]
        assert_same(vmap(ours, dims)(*x), torch.stack([ours(*one) for one in each]))
        wanted = [grad(loss(ours), (0, 1, 2, 5))(*one) for one in each]
        assert_same(vmap(grad(loss(ours), (0, 1, 2, 5)), dims)(*x), [torch.stack(t) for t in zip(*wanted, strict=True)])


def test_vmap_over_pages_gives_outputs_and_refuses_gradients(backend: str) -> None:
    case = make_paged_case(0, (70, 0, 28), page_size=16, dtype=torch.float64)
    x = torch.stack([case.q, case.q.flip(0)])
    paged, attention = case.paged, ca.Attention(mask_mod=causal("bottom_right"), backend=backend)

    def ours(q: T, k: T, v: T, table: T) -> T:
        return attention(q, k, v, paged=ca.Paged(table, paged.page_size, paged.seqused))  # type: ignore[return-value]

    def one(q: T, k: T, v: T, table: T) -> T:
        return ours(q, k, v, table)

    tables = torch.stack([paged.page_table, paged.page_table])
    wanted = torch.stack([one(q, case.k, case.v, paged.page_table) for q in x])
    assert_same(vmap(ours, (0, None, None, None))(x, case.k, case.v, paged.page_table), wanted)
    assert_same(vmap(ours, (0, None, None, 0))(x, case.k, case.v, tables), wanted)
    k, v = (torch.stack([t, 2 * t]) for t in (case.k, case.v))
    wanted = torch.stack([one(*each, paged.page_table) for each in zip(x, k, v, strict=True)])
    assert_same(vmap(ours, (0, 0, 0, None))(x, k, v, paged.page_table), wanted)
    dims = (0, None, None, None)
    for transformed in (vmap(grad(loss(ours)), dims), grad(loss(vmap(ours, dims)))):
        with pytest.raises(ca.errors.GradientUnsupported, match="forward only"):
            transformed(x, case.k, case.v, paged.page_table)


def test_vmap_over_picked_blocks(backend: str, generator: torch.Generator) -> None:
    inputs = [draw(generator, N, B, 2, 48, D) for _ in range(3)]
    picked = torch.randint(0, 3, (N, B, 1, 3, 2), generator=generator)

    def ours(q: T, k: T, v: T, picked: T) -> T:
        return ca.attention(q, k, v, mask_mod=ca.BlockSparse.topk(picked, 16, 48, 48), backend=backend)  # type: ignore[return-value]

    both = [torch.stack([f(*x) for x in zip(*inputs, picked, strict=True)]) for f in (ours,)]
    assert_same(vmap(ours)(*inputs, picked), *both)
    blocks = ca.BlockSparse.topk(picked[0], 16, 48, 48)
    attention = ca.Attention(mask_mod=blocks, backend=backend)
    assert_same(vmap(attention)(*inputs), torch.stack([attention(*x) for x in zip(*inputs, strict=True)]))
    picked[0].copy_(picked[1].clone())
    assert_same(vmap(attention)(*inputs), torch.stack([attention(*x) for x in zip(*inputs, strict=True)]))


# --- derivatives ------------------------------------------------------------------------------------------------

DERIVATIVES: dict[str, Callable[[Attend], Attend]] = {
    "jacrev": lambda f: jacrev(f, (0, 1, 2, 3)),
    "jacrev, in parts": lambda f: jacrev(f, (0, 3), chunk_size=5),
    "jacfwd": lambda f: jacfwd(f, (0, 1, 2, 3)),
    "jacobian": lambda f: lambda *x: torch.autograd.functional.jacobian(f, x, vectorize=True),
    "jacobian, forward": lambda f: (
        lambda *x: torch.autograd.functional.jacobian(f, x, vectorize=True, strategy="forward-mode")
    ),
    "jvp": lambda f: lambda *x: jvp(f, x, tuple(map(torch.cos, x))),
    "jvp of jvp": lambda f: lambda *x: jvp(lambda q: jvp(lambda b: f(q, *x[1:3], b), x[3:], x[3:])[1], x[:1], x[:1]),
    "linearize": lambda f: lambda *x: linearize(f, *x)[1](*map(torch.cos, x)),
    "jvp of vjp": lambda f: lambda *x: jvp(vjp(f, *x)[1], (x[0].cos(),), (x[0],)),
    "jvp of grad": lambda f: lambda *x: jvp(grad(loss(f), (0, 3)), x, tuple(map(torch.cos, x))),
    "grad of jvp": lambda f: grad(lambda *x: jvp(f, x, tuple(map(torch.cos, x)))[1].sum(), (0, 1, 2, 3)),
    "grad of grad": lambda f: grad(lambda *x: sum(g.sin().sum() for g in grad(loss(f), (0, 1, 2, 3))(*x)), (0, 1, 3)),
    "hessian": lambda f: hessian(loss(f), (0, 3)),
    "jacrev of jacrev": lambda f: jacrev(jacrev(loss(f), 3), (0, 3)),
    "hessian, vectorized": lambda f: lambda *x: torch.autograd.functional.hessian(loss(f), x, vectorize=True),
    "vmap of grad of grad": lambda f: vmap(
        grad(lambda *x: grad(loss(f), 3)(*x).sin().sum(), (0, 3)), (None, None, 0, None)
    ),
    "vmap of hessian": lambda f: vmap(hessian(loss(f), 3), (None, None, 0, None)),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_of_any_kind(name: str, backend: str, generator: torch.Generator) -> None:
    inputs = [draw(generator, 1, H, S, 2), draw(generator, 1, 2, S, 2), draw(generator, 1, 2, S, 2)]
    inputs.append(draw(generator, H, 2 * S))
    if name.startswith("vmap"):
        inputs[2] = draw(generator, 2, 1, 2, S, 2)
    both = [DERIVATIVES[name](f)(*inputs) for f in biased(backend)]
    assert_same(*both)


def test_gradcheck_in_all_modes(backend: str, generator: torch.Generator) -> None:
    slopes = torch.rand(2, generator=generator, dtype=torch.float64, requires_grad=True)
    inputs = [draw(generator, 1, 2, 4, 2).requires_grad_() for _ in range(3)]

    def ours(*x: T) -> Any:
        return ca.attention(*x[:3], score_mod=alibi(x[3]), mask_mod=causal(), return_lse=True, backend=backend)

    every = {"check_batched_grad": True, "check_forward_ad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(ours, (*inputs, slopes), **every)
    assert torch.autograd.gradgradcheck(ours, (*inputs, slopes), check_batched_grad=True, check_fwd_over_rev=True)


def test_dual_tensors_carry_their_tangents(backend: str, generator: torch.Generator) -> None:
    q, k, v, bias = *qkv(generator, B), draw(generator, H, 2 * S)
    ours, truth = biased(backend)
    with forward_ad.dual_level():
        for inputs in (
            (forward_ad.make_dual(q, q.cos()), k, v, bias),
            (q, k, v, forward_ad.make_dual(bias, bias.cos())),
        ):
            found, wanted = (forward_ad.unpack_dual(f(*inputs)) for f in (ours, truth))
            assert_same(tuple(found), tuple(wanted))
        assert forward_ad.unpack_dual(ours(q, k, v, bias)).tangent is None


def test_forward_mode_of_packed_sequences(backend: str, generator: torch.Generator) -> None:
    lengths = torch.tensor([0, 2, 2, 9, 12], dtype=torch.int32)
    used = torch.tensor([2, 0, 5, 0], dtype=torch.int32)
    inputs = [draw(generator, 12, 2, D) for _ in range(3)]

    def ours(*x: T) -> T:
        varlen = ca.Varlen(lengths, seqused_q=used)
        out, lse = ca.attention(*x, mask_mod=causal(), varlen=varlen, backend=backend, return_lse=True)
        return torch.cat((out, torch.where(lse == -torch.inf, 0.0, lse).mT.unsqueeze(-1)), -1)

    assert_same(jacfwd(ours, (0, 1, 2))(*inputs), jacrev(ours, (0, 1, 2))(*inputs))
    both = [mode(grad(loss(ours)))(*inputs) for mode in (jacfwd, jacrev)]
    assert_same(*both)


def test_forward_mode_with_a_vmap_over_lengths_is_refused(generator: torch.Generator) -> None:
    q, k, v = (draw(generator, 9, 2, D) for _ in range(3))
    lengths = torch.tensor([[0, 4, 9], [0, 7, 9]], dtype=torch.int32)

    def tangent(cu: T) -> Any:
        return jvp(lambda q: ca.attention(q, k, v, varlen=ca.Varlen(cu)), (q,), (q,))

    with pytest.raises(ca.errors.UnsupportedTransform, match="lengths"):
        vmap(tangent)(lengths)


def test_what_a_mod_gives_at_hidden_pairs_reaches_no_derivative(backend: str, generator: torch.Generator) -> None:
    inputs, factor = qkv(generator, B), draw(generator, H)
    visible = APART > 0

    def ours(q: T, k: T, v: T, factor: T) -> T:
        score = lambda s, b, h, q_idx, kv_idx: s * (1 + factor[h] * torch.sqrt(q_idx - kv_idx) + s.abs())  # noqa: E731
        mask = lambda b, h, q_idx, kv_idx: q_idx > kv_idx  # noqa: E731
        return ca.attention(q, k, v, score_mod=score, mask_mod=mask, backend=backend)  # type: ignore[return-value]

    def truth(q: T, k: T, v: T, factor: T) -> T:
        s = (q @ k.repeat_interleave(2, -3).mT / math.sqrt(D))[:, :, 1:]
        s = s * (1 + factor[:, None, None] * APART.clamp(min=1).double().sqrt()[1:] + s.abs())
        out = s.masked_fill(~visible[1:], -torch.inf).softmax(-1) @ v.repeat_interleave(2, -3)
        return torch.cat((torch.zeros_like(out[:, :, :1]), out), 2)

    x = [*inputs, factor]
    for transform in (
        lambda f: jvp(f, tuple(x), tuple(x)),
        lambda f: grad(lambda *x: grad(loss(f), 3)(*x).sum(), (0, 3))(*x),
        lambda f: vmap(grad(loss(f), (0, 1, 2, 3)))(*(t[None] for t in x)),
    ):
        assert_same(transform(ours), transform(truth))


def test_batched_gradients_are_those_of_each(generator: torch.Generator) -> None:
    leaves = [torch.randn(1, 2, 40, 16, generator=generator).requires_grad_() for _ in range(3)]
    bias = torch.randn(40, generator=generator).requires_grad_()
    weights = torch.randn(3, 1, 2, 40, 16, generator=generator)
    for backend, score_mod in itertools.product(
        ("streaming", "reference"), (None, lambda s, b, h, q, kv: s + bias[kv])
    ):
        out = ca.attention(*leaves, score_mod=score_mod, mask_mod=causal(), backend=backend)
        asked = leaves if score_mod is None else [*leaves, bias]
        found = torch.autograd.grad(out, asked, weights, is_grads_batched=True, retain_graph=True)
        each = [torch.autograd.grad(out, asked, one, retain_graph=True) for one in weights]
        for batched, one_by_one in zip(found, zip(*each, strict=True), strict=True):
            torch.testing.assert_close(batched, torch.stack(one_by_one))


def test_half_precision_stays_so_below_transforms(generator: torch.Generator) -> None:
    inputs = [t.bfloat16() for t in qkv(generator, N, B)]
    attention = ca.Attention(mask_mod=causal())
    out = vmap(lambda *x: attention(*x, return_lse=True))(*inputs)
    assert [t.dtype for t in out] == [torch.bfloat16, torch.float32]
    out = jvp(lambda *x: attention(*x, return_lse=True), tuple(t[0] for t in inputs), tuple(t[0] for t in inputs))
    assert [t.dtype for t in pytree.tree_leaves(out)] == [torch.bfloat16, torch.float32] * 2
    assert all(g.dtype is torch.bfloat16 for g in vmap(grad(loss(attention), (0, 1, 2)))(*inputs))


def test_repeated_calls_plan_once(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    slopes = torch.rand(B, H, generator=generator)  # by b, which folding another dimension into the batch rewrites
    attention = ca.Attention(score_mod=lambda s, b, h, q, kv: s + slopes[b, h] * (kv - q), mask_mod=causal())
    inputs = qkv(generator, N, B)
    vmap(grad(loss(attention)))(*inputs)
    planned: list[Any] = []
    begin = Planned.__init__
    monkeypatch.setattr(Planned, "__init__", lambda self, *given: planned.append(self) or begin(self, *given))
    vmap(grad(loss(attention)))(*inputs)
    assert planned == []


# --- what is refused --------------------------------------------------------------------------------------------


def test_a_mask_too_short_for_the_call_is_named_below_transforms(generator: torch.Generator) -> None:
    inputs, short = qkv(generator, N, B), draw(generator, H - 1)
    with pytest.raises(ca.errors.CapturedIndexOutOfRange):
        vmap(lambda *x: ca.attention(*x, score_mod=lambda s, b, h, q, kv: s + short[h]))(*inputs)
    with pytest.raises(ca.errors.WrongRank):
        vmap(ca.attention)(*(t[0] for t in inputs))


@pytest.mark.parametrize("ready", [True, False], ids=["ca.Attention", "ca.attention"])
@pytest.mark.parametrize("name", ["vmap", "grad", "jvp"])
def test_compiled_transforms_run_in_eager_mode_or_are_refused(
    name: str, ready: bool, generator: torch.Generator
) -> None:
    inputs = qkv(generator, N, B)
    attend = ca.Attention() if ready else ca.attention
    transformed: Attend = {
        "vmap": lambda *x: vmap(attend)(*x),
        "grad": lambda *x: grad(lambda *y: attend(*y).sum())(*(t[0] for t in x)),
        "jvp": lambda *x: jvp(lambda *y: attend(*y), tuple(t[0] for t in x), tuple(t[1] for t in x)),
    }[name]
    torch._dynamo.reset()
    assert_same(torch.compile(transformed, backend="aot_eager")(*inputs), transformed(*inputs))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="below a transform of torch"):
        torch.compile(transformed, backend="aot_eager", fullgraph=True)(*inputs)


def test_what_vmap_runs_in_eager_mode_is_not_compiled(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of mods are rewritten there, and Dynamo would guard the table of all that are known."""
    from torch._dynamo import convert_frame

    inputs, slopes = qkv(generator, N, B), draw(generator, H)
    mapped = vmap(lambda *x: ca.attention(*x, score_mod=alibi(slopes)))
    followed: list[str] = []
    compile_frame = convert_frame._compile

    def recorded(code: Any, *given: Any, **named: Any) -> Any:
        followed.append(f"{code.co_filename}:{code.co_name}")
        return compile_frame(code, *given, **named)

    monkeypatch.setattr(convert_frame, "_compile", recorded)
    torch._dynamo.reset()
    assert_same(torch.compile(lambda *x: mapped(*x), backend="aot_eager")(*inputs), mapped(*inputs))
    assert any("api.py:attention" in frame for frame in followed)
    of_transforms = {frame.partition(":")[2] for frame in followed if "dispatch/transforms.py" in frame}
    assert of_transforms <= {"active", "attend", "break_graph"}
    assert not any("backends/streaming.py" in frame for frame in followed)


@pytest.mark.parametrize("compiled_before", [False, True])
def test_compiled_code_in_a_dual_level_loses_no_tangent(compiled_before: bool, generator: torch.Generator) -> None:
    q, k, v = qkv(generator, B)
    attention = ca.Attention()
    for fullgraph in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(lambda *x: attention(*x) * 1.0, backend="aot_eager", fullgraph=fullgraph)
        if compiled_before:
            compiled(q, k, v)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(q, q.cos())
            if fullgraph:
                with pytest.raises(torch._dynamo.exc.Unsupported):
                    compiled(dual, k, v)
            else:
                found, wanted = (forward_ad.unpack_dual(f(dual, k, v)) for f in (compiled, attention))
                assert_same(tuple(found), tuple(wanted))


def test_jit_trace_is_refused_by_name(generator: torch.Generator) -> None:
    inputs = qkv(generator, B)

    def with_mods(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:  # whose sizes are tensors below torch.jit
        ids = torch.zeros(q.shape[0], q.shape[2], dtype=torch.int32)
        return ca.attention(q, k, v, mask_mod=causal() & document(ids), score_mod=alibi(q[0, :, 0, 0]))

    for attend in (ca.Attention(), ca.attention, with_mods):
        attend(*inputs)
        with pytest.raises(ca.errors.UnsupportedTransform, match=r"torch\.export"):
            torch.jit.trace(lambda *x, attend=attend: attend(*x), tuple(inputs))


def test_dtensors_are_refused_by_name_and_served_by_local_map(generator: torch.Generator, tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
    from torch.distributed.tensor.experimental import local_map

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        inputs, slopes = qkv(generator, B), torch.rand(H)
        spread = [DTensor.from_local(t, mesh, [Replicate()]) for t in (*inputs, slopes)]
        attention = ca.Attention()
        attention(*inputs)
        for mixed in itertools.product(*zip(inputs, spread[:3], strict=True)):
            if any(isinstance(t, DTensor) for t in mixed):
                with pytest.raises(ca.errors.UnsupportedTransform, match=r"to_local.*local_map"):
                    attention(*mixed)
        with pytest.raises(ca.errors.UnsupportedTransform, match="captured tensor is a DTensor"):
            ca.attention(*inputs, score_mod=alibi(spread[3]))
        by_heads = [Shard(1)]
        mapped = local_map(attention, out_placements=by_heads, in_placements=(by_heads,) * 3, device_mesh=mesh)
        found = mapped(*(DTensor.from_local(t, mesh, by_heads) for t in inputs))
        assert found.placements == tuple(by_heads) and torch.equal(found.to_local(), attention(*inputs))
    finally:
        dist.destroy_process_group()


def test_a_tensor_that_a_finished_transform_wrapped_is_taken_for_what_it_holds(generator: torch.Generator) -> None:
    left: list[torch.Tensor] = []

    def leaves_its_argument(x: torch.Tensor) -> torch.Tensor:
        left.append(x)
        return x.sum()

    q, k = (torch.randn(1, 2, 9, 8, generator=generator) for _ in range(2))
    torch.func.grad(leaves_its_argument)(q)
    k.requires_grad_()
    (found,) = torch.autograd.grad(ca.attention(left[0], k, k).sum(), k)
    (wanted,) = torch.autograd.grad(ca.attention(q, k, k).sum(), k)
    torch.testing.assert_close(found, wanted)
