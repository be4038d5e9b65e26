"""torch's scaled_dot_product_attention's arguments, and its calls routed here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo import eval_frame
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
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


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_mask_of_keys_alone_has_one_dimension(kind: torch.dtype) -> None:
    q, k, mask = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 6, 8), torch.tensor([1, 0, 1, 1, 0, 1]).to(kind)
    close(*(sdpa.scaled_dot_product_attention(q, k, k, attn_mask=m) for m in (mask, mask.expand(4, 6))))


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


@pytest.mark.parametrize("is_routed", [False, True])
@pytest.mark.parametrize("sizes", [(4, 6), (6, 6), (6, 4)])
@pytest.mark.parametrize("made", [causal_upper_left, causal_lower_right])
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
def test_torchs_causal_biases_are_what_they_say(made: Any, sizes: tuple[int, int], is_routed: bool) -> None:
    q, k = torch.randn(1, 2, sizes[0], 8), torch.randn(1, 2, sizes[1], 8)
    shift = sizes[1] - sizes[0] if made is causal_lower_right else 0
    seen = torch.ones(sizes).tril(shift).bool()
    wanted = sdpa.scaled_dot_product_attention(q, k, k, attn_mask=seen)
    with sdpa.routed() if is_routed else nullcontext():
        function = F.scaled_dot_product_attention if is_routed else sdpa.scaled_dot_product_attention
        close(function(q, k, k, attn_mask=made(*sizes)), wanted)
    with pytest.raises(errors.ShapeMismatch, match="CausalBias of 3 queries"):
        sdpa.scaled_dot_product_attention(q, k, k, attn_mask=made(3, 3))


def test_tensors_whose_elements_are_not_what_they_mean_are_refused_wherever_a_mod_reads_them() -> None:
    q, plain = torch.randn(1, 2, 6, 8), torch.randn(6, 6)
    for _ in range(3):  # a call that is known is no way around it
        composattn.attention(q, q, q, score_mod=composattn.mods.bias(plain))
    for given in (causal_lower_right(6, 6), masked_tensor(plain, plain > 0)):
        with pytest.raises(errors.UnsupportedCapture, match="whose elements are not what it means"):
            composattn.attention(q, q, q, score_mod=composattn.mods.bias(given))
    with pytest.raises(errors.UnsupportedLayout, match="attn_mask is a MaskedTensor"):
        sdpa.scaled_dot_product_attention(q, q, q, attn_mask=masked_tensor(plain, plain > 0))


KINDS: dict[str, Any] = {
    "nested": lambda t: torch.nested.nested_tensor([t[0]]),
    "jagged": lambda t: torch.nested.nested_tensor([t[0]], layout=torch.jagged),
    "sparse": lambda t: t.to_sparse(),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "masked": lambda t: masked_tensor(t, t > 0),
    "fake": lambda t: FakeTensorMode().from_tensor(t),
}


@pytest.mark.parametrize("place", ["query", "key", "value", "attn_mask"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of", "ignore:torch.quantize_per_tensor")
def test_other_kinds_of_tensors_are_refused_by_name(kind: str, place: str) -> None:
    given = dict.fromkeys(("query", "key", "value"), torch.randn(1, 2, 6, 8)) | {"attn_mask": torch.randn(1, 2, 6, 6)}
    given[place] = KINDS[kind](given[place])
    if (kind, place) == ("fake", "query"):
        pytest.skip("torch says so itself, and has a setting that allows it")
    with pytest.raises(errors.ComposattnError, match=place[0] if place != "attn_mask" else "attn_mask|captured"):
        sdpa.scaled_dot_product_attention(**given)


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


def test_after_the_context_and_inside_of_it_torch_is_what_it_was() -> None:
    class Scripted(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    theirs, stance, x = F.scaled_dot_product_attention, eval_frame._stance, torch.randn(1, 2, 5, 8)
    with sdpa.routed():
        assert F.scaled_dot_product_attention is theirs
        close(torch.jit.script(Scripted())(x), sdpa.scaled_dot_product_attention(x, x, x))
    assert F.scaled_dot_product_attention is theirs and eval_frame._stance == stance


def test_threads_have_backends_of_their_own(monkeypatch: Any) -> None:
    seen, ours, q = [], composattn.attention, torch.randn(1, 2, 5, 8)
    monkeypatch.setattr(sdpa, "attention", lambda *a, **k: (seen.append(k["backend"]), ours(*a, **k))[1])
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        entered = [(one, sdpa.routed("reference")), (other, sdpa.routed("streaming"))]
        for thread, context in entered:
            thread.submit(context.__enter__).result()
        for thread, _ in entered:
            thread.submit(F.scaled_dot_product_attention, q, q, q).result()
        for thread, context in entered:
            thread.submit(context.__exit__, None, None, None).result()
    assert seen == ["reference", "streaming"]


def test_contexts_of_threads_that_leave_in_any_order_leave_nothing_behind() -> None:
    stance, first, second = eval_frame._stance, sdpa.routed(), sdpa.routed()
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        one.submit(first.__enter__).result()
        other.submit(second.__enter__).result()
        one.submit(first.__exit__, None, None, None).result()
        assert eval_frame._stance.stance == "force_eager"  # the other thread is inside
        other.submit(second.__exit__, None, None, None).result()
    assert eval_frame._stance == stance


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
