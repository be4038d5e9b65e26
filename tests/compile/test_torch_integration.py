"""The generated kernels, emulated, inside torch's machinery: what needs no GPU to go wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import composattn as ca
from composattn.mods import causal
from composattn.testing import make_paged_case, make_varlen_case

pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")


def biased() -> tuple[ca.Attention, torch.Tensor]:
    table = torch.randn(1, 301, requires_grad=True)
    attention = ca.Attention(
        score_mod=lambda s, b, h, q, kv: s + table[h, q - kv + 150],
        mask_mod=lambda b, h, q, kv: q >= kv,
        backend="hopper-emulated",
    )
    return attention, table


def draw(generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randn(1, 1, 100, 64, generator=generator).bfloat16().requires_grad_() for _ in range(3)]


def loss(attention: ca.Attention, *x: torch.Tensor) -> torch.Tensor:
    out, lse = attention(*x, return_lse=True)
    return out.float().sin().sum() + lse.cos().sum()


def test_compile_func_and_second_derivatives(generator: torch.Generator) -> None:
    attention, table = biased()
    inputs = draw(generator)
    wanted = torch.autograd.grad(loss(attention, *inputs), [*inputs, table])

    compiled = torch.compile(lambda *x: loss(attention, *x), fullgraph=True, backend="aot_eager")
    for got, want in zip(torch.autograd.grad(compiled(*inputs), [*inputs, table]), wanted, strict=True):
        torch.testing.assert_close(got, want)

    plain = [t.detach() for t in inputs]
    found: Any = torch.func.grad(lambda *x: loss(attention, *x), argnums=(0, 1, 2))(*plain)
    for got, want in zip(found, wanted[:3], strict=True):
        torch.testing.assert_close(got, want)

    (dq,) = torch.autograd.grad(loss(attention, *inputs), inputs[:1], create_graph=True)
    torch.testing.assert_close(dq, wanted[0])
    with pytest.raises(ca.errors.GradientUnsupported, match="streaming"):
        torch.autograd.grad(dq.float().pow(2).sum(), inputs)


def test_packed_sequences_and_pages_compile_whole() -> None:
    table = torch.randn(4, 301, requires_grad=True)
    attention = ca.Attention(
        score_mod=lambda s, b, h, q, kv: s + table[h, q - kv + 150],
        mask_mod=causal("bottom_right"),
        backend="hopper-emulated",
        deterministic=True,
    )
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dim": 64, "dtype": torch.bfloat16}
    case, pages = make_varlen_case(0, (70, 0, 28), **shape), make_paged_case(0, (70, 0, 28), **shape)
    inputs = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]

    def forward(*tensors: torch.Tensor, **lengths: Any) -> Any:
        return attention(*tensors, **lengths)

    def gradients(forward: Any) -> list[torch.Tensor]:
        out = forward(*inputs, varlen=case.varlen)
        return [out, *torch.autograd.grad(out, [*inputs, table], case.dout)]

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, gradients(compiled), gradients(forward)))
    with torch.no_grad():
        tensors = (pages.q, pages.k, pages.v)
        assert torch.equal(compiled(*tensors, paged=pages.paged), forward(*tensors, paged=pages.paged))


@pytest.mark.parametrize("way", ["mask", "blocks"])
def test_compiled_steps_with_a_new_mask_each(way: str, generator: torch.Generator) -> None:
    """From the third step on operators know the call by its forms, and a backward reads what its forward derived."""

    def mask_of(ids: torch.Tensor) -> Any:
        return lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv])

    def by_mask(q: Any, k: Any, v: Any, ids: torch.Tensor) -> Any:
        return ca.attention(q, k, v, mask_mod=mask_of(ids), backend="hopper-emulated")

    def by_blocks(q: Any, k: Any, v: Any, blocks: Any) -> Any:
        return ca.flex_attention(q, k, v, block_mask=blocks, backend="hopper-emulated")

    def gradients(attend: Any, of: Any) -> list[torch.Tensor]:
        out = attend(*inputs, of)
        return [out, *torch.autograd.grad(out, inputs, dout)]

    compiled = torch.compile(by_mask if way == "mask" else by_blocks, fullgraph=True, backend="aot_eager")
    inputs, dout = draw(generator), draw(generator)[0]
    for _ in range(4):
        ids = torch.randint(0, 3, (100,), generator=generator)
        blocks = create_block_mask(mask_of(ids), None, None, 100, 100, device="cpu")
        found = gradients(compiled, ids if way == "mask" else blocks)
        for got, want in zip(found, gradients(by_mask, ids), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_per_sample_gradients_by_the_kernels(batch: int, generator: torch.Generator) -> None:
    """The N calls are one launch: the kernels see N times the batch and a bias with one more index."""
    shape = (2, batch, 2, 70, 64)
    inputs = [torch.randn(*shape, generator=generator).bfloat16()[:, :, :heads] for heads in (2, 1, 1)]
    table = torch.randn(2, 141, generator=generator)

    def gradients(backend: str) -> Any:
        def objective(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            score = lambda s, b, h, q, kv: s + table[h, q - kv + 70]  # noqa: E731
            out: Any = ca.attention(q, k, v, score_mod=score, mask_mod=causal(), backend=backend)
            return out.float().sin().sum()

        return torch.func.vmap(torch.func.grad(objective, (0, 1, 2, 3)), (0, 0, 0, None))(*inputs, table)

    for got, want in zip(gradients("hopper-emulated"), gradients("reference"), strict=True):
        assert (got.double() - want.double()).abs().max() <= 2**-6 * want.double().abs().max()


def test_forward_mode_and_derivatives_of_gradients_are_refused(generator: torch.Generator) -> None:
    attention, _ = biased()
    q, k, v = (t.detach() for t in draw(generator))
    for transform in (
        lambda: torch.func.jvp(lambda q: attention(q, k, v), (q,), (q,)),
        lambda: torch.func.grad(lambda q: torch.func.grad(lambda q: loss(attention, q, k, v))(q).float().sum())(q),
    ):
        with pytest.raises(ca.errors.GradientUnsupported, match="streaming"):
            transform()
