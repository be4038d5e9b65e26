"""What makes configurations of transformers small: values by the names of fields, and what single classes want."""

from __future__ import annotations

from typing import Any

WORDS = 99  # in the vocabulary

_WIDTHS = {
    64: "hidden_size d_model n_embd dim embedding_size lru_width word_embed_proj_dim",
    96: "hidden_dim intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size",
    32: "moe_intermediate_size shared_expert_intermediate_size mamba_d_head q_lora_rank kv_lora_rank index_head_dim",
    128: "max_position_embeddings n_positions n_ctx max_source_positions max_target_positions max_seq_len mamba_d_ssm",
    16: "head_dim d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim sliding_window local_attention "
    "attention_chunk_size mamba_d_state linear_key_head_dim linear_value_head_dim",
    8: "hidden_size_per_layer_input mamba_dt_rank index_topk",
    WORDS: "vocab_size vocab_size_per_layer_input",
}
_COUNTS = {
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "encoder_num_layers num_key_value_heads num_experts_per_tok type_vocab_size linear_num_key_heads mamba_expand "
    "index_n_heads",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts mamba_n_heads mamba_d_conv linear_num_value_heads",
    1: "n_group topk_group mamba_n_groups first_k_dense_replace bos_token_id decoder_start_token_id",
    0: "pad_token_id pad_token_idx",
}
_RATES = (
    "attention_dropout dropout hidden_dropout_prob attention_probs_dropout_prob attn_pdrop resid_pdrop embd_pdrop "
    "activation_dropout hidden_dropout dropout_rate classifier_dropout layerdrop encoder_layerdrop decoder_layerdrop"
)
SIZES: dict[str, Any] = {
    name: value for table in (_WIDTHS, _COUNTS) for value, names in table.items() for name in names.split()
}
SIZES |= dict.fromkeys(_RATES.split(), 0.0) | {"eos_token_id": 2, "use_mamba_kernels": False}
# what names of fields alone don't make: fields of one configuration beside those of SIZES, by dotted names
LATENT = "kv_lora_rank"  # keys and values made of one vector per token, as many as queries
PARTICULAR: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [0]},
    "codegen": {"rotary_dim": 8},
    "dbrx": {"attn_config.kv_n_heads": 2, "attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0}
    | {"ffn_config.ffn_hidden_size": 32},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"num_key_value_heads": 4, "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
    | {"n_shared_experts": 1},
    "dory": {"use_cache": False},
    "esm": {"vocab_size": WORDS, "pad_token_id": 1, "mask_token_id": 3},
    "esmc": {"head_dim": 16, "num_key_value_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["full_attention", "linear_attention"]},
    "hrm_text": {"use_cache": False},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 0},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "longcat_flash": {"num_layers": 1, "qk_head_dim": 32},
    "luke": {"entity_vocab_size": 20},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": {"head_dim": 16},
    "musicgen": {"num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "perceiver": {"d_latents": 64, "num_latents": 16, "num_self_attends_per_block": 1, "qk_channels": 32}
    | {"v_channels": 64},
    "recurrent_gemma": {"block_types": ["attention", "recurrent"], "attention_window_size": 16},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"], "local_attn_chunk_length": 8}
    | {"feed_forward_size": 96, "hidden_dropout_prob": 0.0},
    "rwkv": {"attention_hidden_size": 64},
    "t5gemma": {"decoder.cross_attention_hidden_size": 64},
    "xmod": {"default_language": "en_XX"},
}
# configurations whose fields hang together so that they are made at once
GEMMA4 = {
    "vocab_size": WORDS, "vocab_size_per_layer_input": WORDS, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32,
    "sliding_window": 16, "max_position_embeddings": 128, "hidden_size_per_layer_input": 8, "pad_token_id": 0,
    "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
NARROW = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
_DRAFTED = {  # a drafter: all of its layers read keys and values of another model
    **{k: v for k, v in GEMMA4.items() if k != "num_kv_shared_layers"},
    "vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 4,
}  # fmt: skip
_MANY_EXPERTS = {
    "moe_intermediate_size": 32, "num_experts_per_tok": 2, "vocab_size": WORDS, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 16,
}  # fmt: skip
_DOTS3 = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "kv_lora_rank": 32, "q_lora_rank": 32,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "index_topk": 8, "index_head_dim": 16,
    "index_n_heads": 2, "sliding_window": 16, "layer_types": ["indexed_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse"], "shared_experts_intermediate_size": 32,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 32, "swa_kv_lora_rank": 32,
    "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 16, **_MANY_EXPERTS, **NARROW,
}  # fmt: skip
_QWEN4 = {
    "num_key_value_heads": 2, "num_experts": 4, "shared_expert_intermediate_size": 32, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "hc_lowrank": 8,
    "layer_types": ["linear_attention", "indexed_attention"], "indexer_n_heads": 2, "indexer_kv_heads": 1,
    "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 4, **_MANY_EXPERTS,
    **{k: v for k, v in NARROW.items() if k != "intermediate_size"},
}  # fmt: skip
_BYTES = {"max_position_embeddings": 128, **NARROW}
AT_ONCE: dict[str, dict[str, Any]] = {
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **_DRAFTED}, "backbone_hidden_size": 32},
    "gemma4_unified_assistant": {
        "text_config": {"model_type": "gemma4_unified_text", **_DRAFTED}, "backbone_hidden_size": 32,
    },
    "blt": {
        "vocab_size": 260, "encoder_hash_byte_group_vocab": 50, "encoder_hash_byte_group_size": [3, 4],
        "local_attention_window_len": 16, "use_cache": False,
        "patcher_config": {"vocab_size": 260, "sliding_window": 16, **_BYTES},
        "encoder_config": {"vocab_size": 260, "hidden_size_global": 128, **_BYTES},
        "decoder_config": {"vocab_size": 260, "hidden_size_global": 128, **_BYTES},
        "global_config": {**_BYTES, "hidden_size": 128},
    },
    "cohere_compass_text": {
        "vocab_size": WORDS, "num_key_value_heads": 2, "max_position_embeddings": 128, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0, "eos_token_id": 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
            for kind in ("sliding_attention", "full_attention")
        },
        **NARROW,
    },
    "rwkv": {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2, "context_length": 64, "use_cache": False},
    "xlstm": {"vocab_size": WORDS, "hidden_size": 128, "num_hidden_layers": 2, "num_heads": 4, "mode": "train"}
    | {"chunk_size": 8},
    "dots3_note_text": _DOTS3,
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64, "mlp_layer_types": ["dense"] * 2, **NARROW},
        "audio_config": {
            "adapter_input_size": 64, "adapter_out_dim": 64, "feature_size": 16, "downsample_hidden_size": 8, **NARROW,
        },
    },
    "vibevoice_asr": {
        "text_config": {
            "model_type": "qwen2", "vocab_size": WORDS, "num_key_value_heads": 2, "max_position_embeddings": 128,
            "pad_token_id": 0, **NARROW,
        },
        **{
            f"{kind}_tokenizer_encoder_config": {
                "model_type": "vibevoice_acoustic_tokenizer_encoder", "hidden_size": 16, "num_filters": 4,
                "downsampling_ratios": [2, 2], "depths": [1, 1, 1],
            }
            for kind in ("acoustic", "semantic")
        },
        "audio_token_id": WORDS - 1, "audio_bos_token_id": WORDS - 2, "audio_eos_token_id": WORDS - 3,
    },
    "gemma3n": {
        "text_config": {
            "vocab_size": WORDS, "vocab_size_per_layer_input": WORDS, "num_key_value_heads": 2, "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0, "sliding_window": 16,
            "hidden_size_per_layer_input": 8, "laurel_rank": 8, "activation_sparsity_pattern": [0.0, 0.0],
            "max_position_embeddings": 128, "pad_token_id": 0, **NARROW,
        },
        "audio_config": {"hidden_size": 64, "conf_num_hidden_layers": 1, "conf_num_attention_heads": 4},
    },
    "qwen4_exp_text": _QWEN4,
    "qwen4_exp": {"text_config": _QWEN4},
    "zamba": {
        "vocab_size": WORDS, "num_hidden_layers": 6, "num_key_value_heads": 4, "n_mamba_heads": 2, "mamba_d_state": 16,
        "attn_layer_period": 3, "attn_layer_offset": 2, "use_mamba_kernels": False, "pad_token_id": 0,
        **{k: v for k, v in NARROW.items() if k != "num_hidden_layers"},
    },
    "zamba2": {
        "vocab_size": WORDS, "num_hidden_layers": 4, "num_key_value_heads": 4, "n_mamba_heads": 8, "mamba_d_state": 16,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "use_mamba_kernels": False, "pad_token_id": 0,
        "mamba_ngroups": 1, "chunk_size": 8, "adapter_rank": 8, "use_mem_rope": True,
        **{k: v for k, v in NARROW.items() if k != "num_hidden_layers"},
    },
}  # fmt: skip
