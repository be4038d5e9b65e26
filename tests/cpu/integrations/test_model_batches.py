"""Continuous batching of transformers: requests that share a batch, with composattn and with `paged|eager`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (extra: transformers)")

from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import composattn as ca
import composattn.integrations.transformers as integration
from composattn.mods import causal, sliding_window

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "windows": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)),
    "sinks": lambda: GptOssForCausalLM(
        GptOssConfig(**SIZES, head_dim=8, sliding_window=8, num_local_experts=4, num_experts_per_tok=2)
    ),
}
NEW, LENGTHS = 10, (5, 19, 11, 30)  # the last prompts are longer than what is left of a batch of 24: they come in parts


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


def generated(name: str, implementation: str) -> list[Any]:
    """What a random model says to prompts that are batched."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for weights in model.parameters():
        if weights.ndim >= 2:
            torch.nn.init.normal_(weights, std=0.3)
    model.set_attn_implementation(implementation)
    prompts = [torch.randint(3, 64, (length,)).tolist() for length in LENGTHS]
    said = model.generate_batch(
        inputs=prompts,
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=8, num_blocks=64, max_batch_tokens=24, return_logprobs=True
        ),
    )
    assert model.config._attn_implementation == implementation
    return list(said.values())


@pytest.mark.parametrize("name", MODELS)
def test_batched_requests_get_what_they_get_by_eager_attention(name: str) -> None:
    ours, theirs = generated(name, "composattn"), generated(name, "paged|eager")
    assert [r.generated_tokens for r in ours] == [r.generated_tokens for r in theirs]
    assert all(len(r.generated_tokens) == NEW and r.error is None for r in ours)
    logprobs = [torch.tensor([r.logprobs for r in said]) for said in (ours, theirs)]
    torch.testing.assert_close(*logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_documents_with_keys_of_a_cache_are_causal_from_their_ends(window: int | None) -> None:
    lengths = ((1, 9), (4, 4), (3, 12))  # of queries and of keys
    q_begins, kv_begins = (torch.tensor([0, *n]).cumsum(0).int() for n in zip(*lengths, strict=True))
    q, k, v = (torch.randn(1, 2, int(n[-1]), 8) for n in (q_begins, kv_begins, kv_begins))
    layer = torch.nn.Module()
    options = {"cu_seq_lens_q": q_begins, "cu_seq_lens_k": kv_begins, "max_length_q": 4, "max_length_k": 12}
    out, _ = integration.attend(layer, q, k, v, None, is_causal=True, sliding_window=window, **options)
    mask = causal("bottom_right")
    if window is not None:
        mask = mask & sliding_window(window - 1, "bottom_right")
    for b, (queries, keys) in enumerate(lengths):
        rows, columns = slice(q_begins[b], q_begins[b] + queries), slice(kv_begins[b], kv_begins[b] + keys)
        one = ca.attention(q[:, :, rows], k[:, :, columns], v[:, :, columns], mask_mod=mask, backend="reference")
        torch.testing.assert_close(out[:, rows], one.transpose(1, 2), rtol=1e-5, atol=1e-6)
