"""A layer of vLLM with a cache in 8 bits, with stand-ins for vLLM's classes: it is no part of this environment."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import composattn as ca
import composattn.integrations
from composattn import errors
from composattn.mods import causal

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 16
NAMES = ["AttentionBackend", "AttentionImpl", "AttentionMetadataBuilder", "AttentionType", "CommonAttentionMetadata"]


@pytest.fixture
def integration(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, imported beside modules that have what it asks vLLM for."""

    class Generic:
        def __class_getitem__(cls, _: Any) -> type:
            return cls

    class Kinds:
        DECODER = "decoder"

    backend = {name: Kinds if name == "AttentionType" else type(name, (Generic,), {}) for name in NAMES}
    registry = {"AttentionBackendEnum": {}, "register_backend": lambda *_: None}
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"envs": types.SimpleNamespace(VLLM_BATCH_INVARIANT=False)},
        "vllm.v1": {}, "vllm.v1.attention": {}, "vllm.v1.attention.backend": backend,
        "vllm.v1.attention.backends": {}, "vllm.v1.attention.backends.registry": registry,
    }  # fmt: skip
    for name, held in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(held)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "composattn.integrations.vllm", raising=False)
    yield importlib.import_module("composattn.integrations.vllm")
    sys.modules.pop("composattn.integrations.vllm", None)
    vars(composattn.integrations).pop("vllm")  # else it would be found without vLLM


def step(integration: Any) -> tuple[Any, torch.Tensor]:
    """Two sequences, of 5 and 20 keys, whose last 5 and 1 are new: metadata, slots of all keys."""
    table = torch.tensor([[3, 0], [1, 4]], dtype=torch.int32)
    lengths = torch.tensor([5, 20], dtype=torch.int32)
    slots = torch.cat(
        [table[b, torch.arange(n) // BLOCK] * BLOCK + torch.arange(n) % BLOCK for b, n in ((0, 5), (1, 20))]
    )
    varlen = ca.Varlen(torch.tensor([0, 5, 6], dtype=torch.int32))
    return integration.StepMetadata(6, varlen, ca.Paged(table, BLOCK, lengths), True), slots


def layer_of(k_scale: Any, v_scale: Any) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer._k_scale, layer._v_scale = k_scale, v_scale
    return layer


@pytest.mark.parametrize("scales", ["numbers", "heads"])
@pytest.mark.parametrize(("name", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_keys_in_8_bits_are_written_and_read_by_the_scales_of_their_layer(
    name: str, dtype: torch.dtype, scales: str, integration: Any
) -> None:
    k_scale, v_scale = torch.tensor(0.3), torch.tensor(1.7)
    if scales == "heads":
        k_scale, v_scale = torch.tensor([0.3, 0.05]), torch.tensor([1.7, 0.2])
    layer = layer_of(k_scale, v_scale)
    metadata, slots = step(integration)
    k, v = torch.randn(25, KV_HEADS, DIM), torch.randn(25, KV_HEADS, DIM)
    cache = torch.zeros(5, KV_HEADS, BLOCK, 2 * DIM, dtype=torch.uint8)  # as vLLM allocates 8 bits
    attend = integration.Layer(HEADS, DIM, 0.3, KV_HEADS, kv_cache_dtype=name)
    attend.do_kv_cache_update(layer, k, v, cache, slots)
    q = torch.randn(6, HEADS, DIM, dtype=torch.bfloat16)
    out = attend.forward(layer, q, q, q, cache, metadata, torch.zeros_like(q))
    held = [(x / scale.view(-1, 1)).to(dtype).float() * scale.view(-1, 1) for x, scale in ((k, k_scale), (v, v_scale))]
    for rows, keys in ((slice(0, 5), slice(0, 5)), (slice(5, 6), slice(5, 25))):
        tensors = (x.double().transpose(0, 1)[None] for x in (q[rows], held[0][keys], held[1][keys]))
        alone = ca.attention(*tensors, mask_mod=causal("bottom_right"), scale=0.3, backend="reference")
        torch.testing.assert_close(out[rows].double(), alone[0].transpose(0, 1), rtol=2**-8, atol=1e-4)


def test_what_is_beyond_the_largest_number_becomes_that(integration: Any) -> None:
    cache = torch.zeros(1, KV_HEADS, BLOCK, 2 * DIM, dtype=torch.uint8)
    attend = integration.Layer(HEADS, DIM, 0.3, KV_HEADS, kv_cache_dtype="fp8")
    k = torch.full((1, KV_HEADS, DIM), 1e4)
    attend.do_kv_cache_update(layer_of(torch.tensor(1.0), torch.tensor(1.0)), k, -k, cache, torch.tensor([0]))
    first = cache.view(torch.float8_e4m3fn)[0, :, 0].float()
    assert set(first[:, :DIM].flatten().tolist()) == {448.0} and set(first[:, DIM:].flatten().tolist()) == {-448.0}


def test_scales_are_never_dropped(integration: Any) -> None:
    cache, q = torch.zeros(5, KV_HEADS, BLOCK, 2 * DIM, dtype=torch.uint8), torch.randn(6, HEADS, DIM)
    attend = integration.Layer(HEADS, DIM, 0.3, KV_HEADS, kv_cache_dtype="fp8")
    metadata, slots = step(integration)
    with pytest.raises(errors.UnsupportedOption, match="without tensors _k_scale"):
        attend.forward(torch.nn.Module(), q, q, q, cache, metadata, torch.zeros_like(q))
    with pytest.raises(errors.UnsupportedOption, match="without tensors _k_scale"):
        attend.do_kv_cache_update(torch.nn.Module(), q[:, :2], q[:, :2], cache, slots[:6])
    with pytest.raises(errors.UnsupportedOption, match="'nvfp4'; composattn's backend in vLLM has auto"):
        integration.Layer(HEADS, DIM, 0.3, KV_HEADS, kv_cache_dtype="nvfp4")
    assert (
        "fp8" in integration.Backend.supported_kv_cache_dtypes and integration.Backend.supports_per_head_quant_scales()
    )
