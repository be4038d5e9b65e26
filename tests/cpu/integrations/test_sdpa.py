"""torch's scaled_dot_product_attention's arguments, and its calls routed here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import composattn
from composattn import errors
from composattn.integrations import sdpa

SHAPES: list[tuple[Any, ...]] = [
    ((4, 8), (6, 8)),
    ((2, 4, 8), (2, 6, 8)),
    ((2, 4, 8), (3, 2, 6, 8)),
    ((1, 2, 4, 8), (3, 2, 6, 8)),
    ((3, 2, 4, 8), (3, 1, 6, 8)),
    ((5, 3, 2, 4, 8), (5, 1, 2, 6, 8)),
]


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert float((found - wanted).detach().abs().max()) <= 2e-6


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("q_shape", "kv_shape"), SHAPES)
def test_shapes_are_torchs(q_shape: Any, kv_shape: Any, is_causal: bool) -> None:
    q, k, v = torch.randn(q_shape), torch.randn(kv_shape), torch.randn((*kv_shape[:-1], 5))
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.3)
    close(sdpa.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.3), wanted)


def test_grouped_heads_are_torchs() -> None:
    q, k = torch.randn(2, 6, 4, 8), torch.randn(2, 2, 6, 8)
    close(
        sdpa.scaled_dot_product_attention(q, k, k, enable_gqa=True),
        F.scaled_dot_product_attention(q, k, k, enable_gqa=True),
    )
    with pytest.raises(errors.ShapeMismatch, match="enable_gqa=True"):
        sdpa.scaled_dot_product_attention(q, k, k)


MASKS = [(4, 6), (4, 1), (1, 6), (2, 4, 6), (3, 1, 4, 6), (1, 2, 1, 6), (3, 2, 4, 6)]


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("shape", MASKS)
def test_masks_broadcast_as_torchs_with_their_gradients(shape: tuple[int, ...], kind: torch.dtype) -> None:
    q, k, v = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 6, 8), torch.randn(3, 2, 6, 8)
    tensors = [t.requires_grad_() for t in (q, k, v)]
    mask = torch.rand(shape) > 0.2 if kind is torch.bool else torch.randn(shape, requires_grad=True)
    if kind is not torch.bool:
        tensors.append(mask)
    loss = torch.randn(3, 2, 4, 8)
    outs = [f(q, k, v, attn_mask=mask) for f in (sdpa.scaled_dot_product_attention, F.scaled_dot_product_attention)]
    close(*outs)
    found, wanted = (torch.autograd.grad((out * loss).sum(), tensors) for out in outs)
    for ours, theirs in zip(found, wanted, strict=True):
        close(ours, theirs)


def test_a_mask_of_several_batch_dimensions_may_be_one_for_some() -> None:
    q = torch.randn(2, 3, 2, 4, 8)
    mask = torch.randn(2, 1, 1, 4, 4)
    close(
        sdpa.scaled_dot_product_attention(q, q, q, attn_mask=mask),
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask),
    )


def test_a_row_that_sees_nothing_gives_0() -> None:
    q = torch.randn(1, 1, 4, 8)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    assert not sdpa.scaled_dot_product_attention(q, q, q, attn_mask=mask)[0, 0, 1].any()


class Layer(torch.nn.Module):
    """Calls torch's function by a name of its own, and inside of torch's own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch_sdpa(x, x, x) + self.inner(x, x, x, need_weights=False)[0]


def test_calls_inside_come_here_and_calls_outside_do_not(monkeypatch: Any) -> None:
    seen = []
    ours = composattn.attention
    monkeypatch.setattr(sdpa, "attention", lambda *a, **k: (seen.append(k["backend"]), ours(*a, **k))[1])
    layer, x = Layer().train(), torch.randn(2, 5, 16)
    wanted = layer(x)
    assert not seen
    with sdpa.routed(backend="reference"):
        close(layer(x), wanted)
        with sdpa.routed(), ThreadPoolExecutor(1) as other:
            close(layer(x), wanted)
            close(other.submit(layer, x).result(), wanted)  # not in this context
        layer(x)
    assert seen == ["reference", "reference", None, None, "reference", "reference"]
    layer(x)
    assert len(seen) == 6


def test_what_was_compiled_before_is_routed_too(monkeypatch: Any) -> None:
    seen = []
    ours = composattn.attention
    monkeypatch.setattr(sdpa, "attention", lambda *a, **k: (seen.append(1), ours(*a, **k))[1])
    layer, x = Layer().train(), torch.randn(2, 5, 16)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    wanted = compiled(x)
    assert not seen
    with sdpa.routed():
        close(compiled(x), wanted)
    assert len(seen) == 2
    compiled(x)
    assert len(seen) == 2


def test_the_function_itself_compiles() -> None:
    q, mask = torch.randn(2, 3, 5, 8), torch.randn(5, 5)
    torch._dynamo.reset()
    compiled = torch.compile(sdpa.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    close(compiled(q, q, q, attn_mask=mask), F.scaled_dot_product_attention(q, q, q, attn_mask=mask))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dropout_p": 1.5}, errors.UnsupportedOption, "dropout"),
        ({"is_causal": True, "attn_mask": torch.ones(4, 4, dtype=torch.bool)}, errors.UnsupportedOption, "exclude"),
        ({"attn_mask": torch.zeros(4, 4, dtype=torch.int32)}, errors.DTypeMismatch, "int32"),
        ({"attn_mask": torch.zeros(4)}, errors.WrongRank, "Sq, Skv"),
        ({"attn_mask": torch.zeros(3, 4)}, errors.ShapeMismatch, "does not broadcast"),
        ({"attn_mask": torch.zeros(7, 1, 1, 4, 4)}, errors.ShapeMismatch, "does not broadcast"),
    ],
)
def test_what_torch_refuses_is_refused_by_name(options: dict[str, Any], error: Any, words: str) -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(error, match=words):
        sdpa.scaled_dot_product_attention(q, q, q, **options)
    with pytest.raises(errors.WrongRank, match="query"):
        sdpa.scaled_dot_product_attention(q[0, 0, 0], q, q)
