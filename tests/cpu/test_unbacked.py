"""Lengths that only the run knows (nonzero, repeat_interleave, an item) in one compiled or exported graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import composattn as ca
from composattn import errors
from composattn.integrations.flash_attn import flash_attn_func
from composattn.integrations.sdpa import scaled_dot_product_attention
from composattn.mods import bias, causal, document, global_tokens

T = torch.Tensor
X = torch.randn(1, 4, 60, 8, generator=torch.Generator().manual_seed(0))
KEEP = torch.rand(60, generator=torch.Generator().manual_seed(1)) > 0.4
LENGTHS = torch.tensor([10, 3, 30])


def kept(x: T, keep: T) -> T:
    return x[:, :, keep.nonzero()[:, 0]]


def packed(x: T, keep: T) -> tuple[T, T, T]:
    """The visible rows of two sequences of 30, where they begin, and the longest."""
    counts = keep.view(2, 30).sum(-1)
    return x[0].transpose(0, 1)[keep.nonzero()[:, 0]], F.pad(counts.cumsum(0), (1, 0)).to(torch.int32), counts.max()


def of_two(x: T, keep: T, lengths: T) -> T:
    queries, keys = kept(x, keep), kept(x, ~keep)
    return ca.attention(queries, keys, keys, mask_mod=causal("bottom_right"))  # type: ignore[return-value]


def by_rows(x: T, keep: T, lengths: T) -> Any:
    y = x.transpose(1, 2)[:, keep.nonzero()[:, 0]].transpose(1, 2)
    return ca.attention(y, y, y, mask_mod=causal(), return_lse=True, return_max_scores=True)


def by_lengths(x: T, keep: T, lengths: T) -> Any:
    ids = torch.repeat_interleave(torch.arange(lengths.shape[0]), lengths)
    y = x[:, :, : ids.shape[0]]
    return ca.attention(y, y, y, mask_mod=causal() & document(ids) | global_tokens(keep, "keys"))


def unpadded(x: T, keep: T, lengths: T) -> Any:
    y, cu, longest = packed(x, keep)
    return ca.attention(y, y, y, mask_mod=causal(), varlen=ca.Varlen(cu, max_seqlen_q=longest.item()))  # type: ignore[arg-type]


def of_some_sequences(x: T, keep: T, lengths: T) -> Any:
    used = lengths[(lengths > 5).nonzero()[:, 0]]
    cu = F.pad(used.cumsum(0), (1, 0)).to(torch.int32)
    y = x[0].transpose(0, 1)[:40]
    return ca.attention(y, y, y, varlen=ca.Varlen(cu, seqused_q=used.int()))


def biased(x: T, keep: T, lengths: T) -> Any:
    at = keep.nonzero()[:, 0]
    return ca.attention(kept(x, keep), kept(x, keep), kept(x, keep), score_mod=bias((x[0, 0] @ x[0, 0].T)[at][:, at]))


def by_name(x: T, keep: T, lengths: T) -> Any:
    y = kept(x, keep)
    rows = y.transpose(1, 2)
    local = flash_attn_func(rows, rows, rows, causal=True, window_size=(4, 0))
    return ca.flex_attention(y, y, y), scaled_dot_product_attention(y, y, y, is_causal=True), local


CALLS: dict[str, Callable[..., Any]] = {
    "queries and keys of two lengths": of_two,
    "rows before heads": by_rows,
    "ids by repeat_interleave": by_lengths,
    "packed rows and their maximum": unpadded,
    "some sequences": of_some_sequences,
    "a bias of those rows": biased,
    "other libraries' names": by_name,
}
SINGLE = {"queries and keys of two lengths", "rows before heads", "packed rows and their maximum"}


@pytest.fixture(autouse=True)
def of_any_length() -> Any:
    """What `nonzero` and `item` give stays in the graph."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        yield


def with_gradient(call: Callable[..., Any], *given: T) -> list[T]:
    x = given[0].clone().requires_grad_()
    found = call(x, *given[1:])
    outs = [found] if isinstance(found, torch.Tensor) else list(found)
    return [*outs, *torch.autograd.grad(sum(out.sum() for out in outs if out.requires_grad), x)]


@pytest.mark.parametrize("name", CALLS)
def test_lengths_of_the_run_are_one_graph_of_all_lengths(name: str) -> None:
    call = CALLS[name]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    one, none = torch.zeros_like(KEEP), torch.zeros_like(KEEP)
    one[7] = True
    for keep in (KEEP, *((one, none) if name in SINGLE else (one,))):
        for found, wanted in zip(
            with_gradient(compiled, X, keep, LENGTHS), with_gradient(call, X, keep, LENGTHS), strict=True
        ):
            torch.testing.assert_close(found, wanted)


BLOCKS = torch.ones(1, 1, 3, 3, dtype=torch.bool)


def empty_batch(x: T, keep: T) -> Any:
    y = x[0, :, :, None][:, keep.nonzero()[:, 0]].movedim(1, 0)
    return ca.attention(y, y, y)


def keys_and_values_of_two_lengths(x: T, keep: T) -> Any:
    return ca.attention(x, kept(x, keep), kept(x, ~keep))


def packed_keys_of_another_total(x: T, keep: T) -> Any:
    y, cu, _ = packed(x, keep)
    rows = x[0].transpose(0, 1)
    return ca.attention(y, rows, rows, varlen=ca.Varlen(cu))


def blocks_of_another_length(x: T, keep: T) -> Any:
    y = kept(x, ~keep)
    return ca.attention(y, y, y, mask_mod=ca.BlockSparse(BLOCKS, 16))


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (errors.EmptyDimension, empty_batch),
        (errors.ShapeMismatch, keys_and_values_of_two_lengths),
        (errors.ShapeMismatch, packed_keys_of_another_total),
        (errors.BlockMaskMismatch, blocks_of_another_length),
    ],
)
def test_sizes_that_are_wrong_are_refused_by_name_when_the_operator_runs(error: type[Exception], call: Any) -> None:
    keep = torch.zeros_like(KEEP)
    with pytest.raises(error) as eager:
        call(X, keep)
    with pytest.raises(error) as compiled:
        torch.compile(call, fullgraph=True, backend="aot_eager")(X, keep)
    assert str(compiled.value) == str(eager.value)


def test_as_many_blocks_as_the_run_says_are_refused_by_name() -> None:
    def call(x: T, keep: T) -> Any:
        y = kept(x, keep)
        length = y.shape[2]
        indices = torch.zeros(1, 1, (length + 15) // 16, 1, dtype=torch.int32)
        return ca.attention(y, y, y, mask_mod=ca.BlockSparse.topk(indices, 16, length, length))

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"UnsupportedTransform.*BlockSparse\(tiles, block\)"):
        torch.compile(call, fullgraph=True, backend="eager")(X, KEEP)


def test_dimensions_that_are_marked_unbacked_ask_nothing() -> None:
    def call(q: T, k: T) -> Any:
        return ca.attention(q, k, k, mask_mod=causal())

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    q, k = torch.randn(3, 4, 20, 8), torch.randn(3, 2, 20, 8)
    for t in (q, k):
        for dim in (0, 2):
            torch._dynamo.decorators.mark_unbacked(t, dim)
    torch.testing.assert_close(compiled(q, k), call(q, k))
    for batch, length in ((2, 7), (1, 1), (2, 0)):
        q, k = torch.randn(batch, 4, length, 8), torch.randn(batch, 2, length, 8)
        torch.testing.assert_close(compiled(q, k), call(q, k))
    with pytest.raises(errors.EmptyDimension):
        compiled(torch.randn(0, 4, 7, 8), torch.randn(0, 2, 7, 8))


def test_lengths_of_the_run_are_exported() -> None:
    class Unpadded(torch.nn.Module):
        def forward(self, x: T, keep: T) -> Any:
            return by_rows(x, keep, LENGTHS)

    program = torch.export.export(Unpadded(), (X, KEEP)).module()
    for keep in (KEEP, ~KEEP, torch.zeros_like(KEEP)):
        torch.testing.assert_close(program(X, keep), Unpadded()(X, keep))
