"""Models of diffusers, small and random, by our backend in its dispatcher and by its native one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import composattn as ca
from composattn import errors
from composattn.mods import neighborhood, softcap

diffusers = pytest.importorskip("diffusers")

from diffusers.models.attention_dispatch import (  # noqa: E402
    AttentionBackendName,
    attention_backend,
    dispatch_attention_fn,
)
from diffusers.models.attention_dispatch import (  # noqa: E402
    _AttentionBackendRegistry as registry,
)

import composattn.integrations.diffusers as integration  # noqa: E402

TEXT, FRAMES, ROWS, COLUMNS = 8, 3, 4, 4
VIDEO = (FRAMES, ROWS, COLUMNS)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    before, _ = registry.get_active_backend()  # which a model's set_attention_backend sets too
    integration.register()
    yield
    registry.set_active_backend(before)


def flux() -> tuple[Any, dict[str, Any]]:
    """A model of images with text in front, and inputs."""
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, ROWS * COLUMNS, 4), "encoder_hidden_states": torch.randn(1, TEXT, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([1.0]),
        "img_ids": torch.randn(ROWS * COLUMNS, 3), "txt_ids": torch.zeros(TEXT, 3),
    }  # fmt: skip
    return sharpened(model), inputs


def wan() -> tuple[Any, dict[str, Any]]:
    """A model of video, with cross-attention to text, and inputs; patches of 1 x 2 x 2."""
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=256, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 4, FRAMES, 2 * ROWS, 2 * COLUMNS), "timestep": torch.tensor([1]),
        "encoder_hidden_states": torch.randn(1, TEXT, 16),
    }  # fmt: skip
    return sharpened(model), inputs


def sharpened(model: Any) -> Any:
    """Weights with which attention looks at some keys more than at others."""
    for weights in model.parameters():
        if weights.ndim >= 2:
            torch.nn.init.normal_(weights, std=0.2)
    return model.eval()


def results(model: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """What it gives, and gradients of all its weights."""
    out = model(**inputs).sample
    model.zero_grad()
    out.square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The greatest one of any tensor, of its largest number."""
    pairs = [
        (a - b).detach().abs().max() / b.detach().abs().max().clamp_min(1e-3) for a, b in zip(ours, theirs, strict=True)
    ]
    return max(float(d) for d in pairs)


@pytest.mark.parametrize("made", [flux, wan])
def test_a_model_gives_what_it_gives_by_native_attention(made: Any) -> None:
    model, inputs = made()
    native = results(model, inputs)
    wide = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    exact = results(copy.deepcopy(model).double(), wide)
    model.set_attention_backend("composattn")
    ours = results(model, inputs)
    assert distance(ours[:1], native[:1]) < 1e-6
    assert distance(ours, exact) < 2 * distance(native, exact)


def test_the_context_of_diffusers_serves_too() -> None:
    model, inputs = flux()
    native = model(**inputs).sample
    with attention_backend("composattn"):
        assert distance([model(**inputs).sample], [native]) < 1e-6


def dense(mask: Any, length: int) -> torch.Tensor:
    return ca.mask(mask).dense(length, length)


def test_a_window_of_video_is_the_dense_mask_of_the_same_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    window = neighborhood(VIDEO, (3, 3, 3))
    model, inputs = wan()
    integration.register("composattn_window", mask_mod=window)
    whole = results(model, inputs)
    for block in model.blocks:
        block.attn1.set_attention_backend("composattn_window")
    ours = results(model, inputs)
    pairs = dense(window, FRAMES * ROWS * COLUMNS)
    assert 0 < pairs.float().mean() < 1
    native = diffusers.models.transformers.transformer_wan.dispatch_attention_fn

    def masked(query: Any, key: Any, value: Any, **options: Any) -> Any:
        own = query.shape[1] == key.shape[1]
        return native(query, key, value, **{**options, "backend": "native", "attn_mask": pairs if own else None})

    monkeypatch.setattr(diffusers.models.transformers.transformer_wan, "dispatch_attention_fn", masked)
    theirs = results(model, inputs)
    assert distance(ours, theirs) < 1e-6
    assert distance(ours, whole) > 1e-3


def test_a_window_behind_text_is_a_mask_of_the_joint_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    window = neighborhood((ROWS, COLUMNS), (3, 3))

    def joint(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q < TEXT) | (kv < TEXT) | window(b, h, q - TEXT, kv - TEXT)

    model, inputs = flux()
    integration.register("composattn_joint", mask_mod=joint)
    model.set_attention_backend("composattn_joint")
    ours = results(model, inputs)
    pairs = torch.ones(TEXT + ROWS * COLUMNS, TEXT + ROWS * COLUMNS, dtype=torch.bool)
    pairs[TEXT:, TEXT:] = dense(window, ROWS * COLUMNS)
    native = diffusers.models.transformers.transformer_flux.dispatch_attention_fn
    monkeypatch.setattr(
        diffusers.models.transformers.transformer_flux, "dispatch_attention_fn",
        lambda *qkv, **options: native(*qkv, **{**options, "backend": "native", "attn_mask": pairs}),
    )  # fmt: skip
    theirs, model, inputs = results(model, inputs), model.double(), {k: in_fp64(v) for k, v in inputs.items()}
    exact = results(model, inputs)
    # torch's own is 2e-6 off; how far from ours depends on versions of diffusers
    assert distance(of_fp64(ours), exact) <= 2 * distance(of_fp64(theirs), exact) < 1e-5


def in_fp64(given: Any) -> Any:
    return given.double() if isinstance(given, torch.Tensor) and given.is_floating_point() else given


def of_fp64(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.double() for tensor in tensors]


def qkv(length: int = 16) -> list[torch.Tensor]:
    return [torch.randn(2, length, 4, 8) for _ in range(3)]


@pytest.mark.parametrize(
    "mask",
    [torch.arange(16) < torch.tensor([[9], [16]]), torch.rand(2, 1, 16, 16) < 0.5, torch.randn(1, 4, 16, 16)],
    ids=["padding", "pairs", "bias"],
)
def test_masks_of_the_model_are_those_of_native_attention(mask: torch.Tensor) -> None:
    q, k, v = qkv()
    ours, theirs = (dispatch_attention_fn(q, k, v, attn_mask=mask, backend=b) for b in ("composattn", "native"))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_masks_of_the_model_and_of_the_backend_are_joined() -> None:
    q, k, v = qkv()
    padding, window = torch.arange(16) < torch.tensor([[9], [16]]), neighborhood((4, 4), (3, 3))
    integration.register("composattn_window", mask_mod=window, score_mod=softcap(2.0))
    found = dispatch_attention_fn(q, k, v, attn_mask=padding, backend="composattn_window")
    both = padding[:, None, None] & dense(window, 16)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    wanted = ca.attention(
        q, k, v, mask_mod=lambda b, h, i, j: both[b, 0, i, j], score_mod=softcap(2.0), backend="reference"
    )
    torch.testing.assert_close(found, wanted.transpose(1, 2), rtol=1e-6, atol=1e-6)


def test_a_name_is_registered_once_and_takes_other_mods_later() -> None:
    before = len(AttentionBackendName)
    for width in (1, 3):
        integration.register("composattn_again", mask_mod=neighborhood((16,), width))
    assert len(AttentionBackendName) == before + 1
    assert AttentionBackendName("composattn_again") is AttentionBackendName["COMPOSATTN_AGAIN"]
    q, k, v = qkv()
    wider = dispatch_attention_fn(q, k, v, backend="composattn_again")
    theirs = dispatch_attention_fn(q, k, v, attn_mask=dense(neighborhood((16,), 3), 16), backend="native")
    torch.testing.assert_close(wider, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["native", "Composattn"])
def test_names_that_mean_something_else_are_refused(name: str) -> None:
    with pytest.raises(errors.UnsupportedOption, match="lower case and none of diffusers' own"):
        integration.register(name)


def test_a_mask_of_self_attention_is_refused_elsewhere() -> None:
    model, inputs = wan()
    integration.register("composattn_window", mask_mod=neighborhood(VIDEO, (3, 3, 3)))
    model.set_attention_backend("composattn_window")
    with pytest.raises(errors.ShapeMismatch, match=r"48 queries and 8 keys.*attn1"):
        model(**inputs)


def test_fewer_heads_of_keys_are_shared_where_that_is_asked_for_alone() -> None:
    q, k = torch.randn(1, 20, 4, 16), torch.randn(1, 20, 2, 16)
    with pytest.raises(errors.ShapeMismatch, match="enable_gqa=True"), attention_backend("composattn"):
        dispatch_attention_fn(q, k, k)
    with attention_backend("composattn"):
        out = dispatch_attention_fn(q, k, k, enable_gqa=True)
    with attention_backend("native"):
        torch.testing.assert_close(out, dispatch_attention_fn(q, k, k, enable_gqa=True))


def test_context_parallelism_of_diffusers_is_refused() -> None:
    with pytest.raises(errors.UnsupportedOption, match=r"ca\.ContextParallel"):
        dispatch_attention_fn(*qkv(), backend="composattn", parallel_config=object())
