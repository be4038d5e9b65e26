"""Small models of transformers with random weights, one per family, and what they are called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as hf

TOKENS, WORDS, FRAMES = 40, 99, 20  # tokens per sequence; in the vocabulary; frames of sound after Whisper's strides

_SIZES = {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_DECODER = _SIZES | {
    "intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_ENCODER = _SIZES | {"intermediate_size": 96, "max_position_embeddings": 256}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_BART = {
    "vocab_size": WORDS, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 256,
    "dropout": 0.0,
}  # fmt: skip


class Family(NamedTuple):
    """How a model is made, and what it is called with beside a padding mask."""

    model: Callable[..., Any]
    config: Any
    inputs: Callable[[], dict[str, torch.Tensor]]
    decodes: bool = True


def _words(batch: int = 2) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(1, WORDS, (batch, TOKENS))}


def _words_to_words() -> dict[str, torch.Tensor]:
    return _words() | {"decoder_input_ids": torch.randint(1, WORDS, (2, 24))}


def _decoder(name: str, **config: Any) -> Family:
    return Family(getattr(hf, f"{name}ForCausalLM"), getattr(hf, f"{name}Config")(**(_DECODER | config)), _words)


def _pictures() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def _sound() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(2, 16, 2 * FRAMES), "decoder_input_ids": torch.randint(1, WORDS, (2, 24))}


def _gemma3() -> Family:
    layers = ["sliding_attention", "full_attention"]
    config = hf.Gemma3TextConfig(**_DECODER, head_dim=16, sliding_window=8, layer_types=layers)
    return Family(hf.Gemma3ForCausalLM, config, _words)


def _llama4() -> Family:
    sizes: dict[str, Any] = {"head_dim": 16, "attention_chunk_size": 16, "intermediate_size_mlp": 96}
    layers = {"no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"]}
    config = hf.Llama4TextConfig(**_DECODER, **sizes, **layers, num_local_experts=2)
    return Family(hf.Llama4ForCausalLM, config, _words)


def _deepseek_v3() -> Family:
    heads = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    sizes = {"num_key_value_heads": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    return _decoder("DeepseekV3", **heads, **experts, **sizes)


def _gpt_neox() -> Family:
    config = hf.GPTNeoXConfig(**_ENCODER, hidden_dropout=0.0, attention_dropout=0.0, eos_token_id=None)
    return Family(hf.GPTNeoXForCausalLM, config, _words)


def _gpt2() -> Family:
    sizes = {"vocab_size": WORDS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
    config = hf.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, eos_token_id=None)
    return Family(hf.GPT2LMHeadModel, config, _words)


def _bert() -> Family:
    config = hf.BertConfig(**_ENCODER, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return Family(hf.BertForMaskedLM, config, _words, decodes=False)


def _modernbert() -> Family:
    special = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "eos_token_id": 3, "bos_token_id": 4}
    config = hf.ModernBertConfig(**_ENCODER, **special, local_attention=16)
    return Family(hf.ModernBertForMaskedLM, config, _words, decodes=False)


def _vit() -> Family:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    kept = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = hf.ViTConfig(**sizes, **kept, image_size=32, patch_size=8)
    return Family(hf.ViTForImageClassification, config, _pictures, decodes=False)


def _bart() -> Family:
    return Family(hf.BartForConditionalGeneration, hf.BartConfig(**_BART), _words_to_words, decodes=False)


def _whisper() -> Family:
    sizes = _BART | {"max_source_positions": FRAMES, "num_mel_bins": 16, "max_target_positions": 64}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return Family(hf.WhisperForConditionalGeneration, hf.WhisperConfig(**sizes, **special), _sound, decodes=False)


def _t5() -> Family:
    sizes = {"vocab_size": WORDS, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    config = hf.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return Family(hf.T5ForConditionalGeneration, config, _words_to_words, decodes=False)


FAMILIES: dict[str, Callable[[], Family]] = {
    "llama": lambda: _decoder("Llama"),
    "mistral": lambda: _decoder("Mistral", sliding_window=8),
    "gemma2": lambda: _decoder("Gemma2", head_dim=16, sliding_window=8, query_pre_attn_scalar=16),
    "gemma3": _gemma3,
    "gpt-oss": lambda: _decoder("GptOss", head_dim=16, sliding_window=8, **_EXPERTS),
    "qwen3": lambda: _decoder("Qwen3", head_dim=16),
    "phi3": lambda: _decoder("Phi3", sliding_window=8),
    "olmo2": lambda: _decoder("Olmo2"),
    "cohere2": lambda: _decoder("Cohere2", sliding_window=8),
    "starcoder2": lambda: _decoder("Starcoder2", sliding_window=8),
    "mixtral": lambda: _decoder("Mixtral", **_EXPERTS),
    "deepseek-v3": _deepseek_v3,
    "llama4": _llama4,
    "gpt-neox": _gpt_neox,
    "gpt2": _gpt2,
    "bert": _bert,
    "modernbert": _modernbert,
    "vit": _vit,
    "bart": _bart,
    "whisper": _whisper,
    "t5": _t5,
}
