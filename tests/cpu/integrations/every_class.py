"""Every class of transformers that reads and writes tokens, small, with random weights, under composattn and `eager`.

A class is found by transformers' own lists, its configuration made small by the names of its fields. `Verdict` says
what came out: right, refused by name, or what nobody may find here without a word.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto import modeling_auto

import composattn.integrations.transformers as integration
from composattn.errors import ComposattnError

TOKENS, TARGETS, WORDS = 24, 10, 99  # per sequence, of a decoder with an encoder, in the vocabulary
LARGEST = 30_000_000  # parameters
SHARP = 12.0  # what weights of queries and keys are multiplied with, so that masks, scales and caps show
# of the largest number: plain, all classes stay below 3e-6; sharp, eager itself is 9e-3 from fp64 (mT5), and what was
# dropped moved models by 4e-2 or more
TOLERANCE = {False: 1e-4, True: 2e-3}

KINDS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "encoder and decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}

# classes whose layers have no attention with a softmax over keys: nothing to ask composattn for
WITHOUT_ATTENTION = {"falcon_mamba", "fnet", "mamba", "mamba2", "rwkv", "xlstm"}

# classes whose recurrent layers read what attention says of padding: 0 here and with sdpa, the mean of V in eager
READ_PADDING = {"recurrent_gemma"}

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
_LATENT = "kv_lora_rank"  # keys and values made of one vector per token, as many as queries
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
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "rwkv": {"attention_hidden_size": 64},
    "t5gemma": {"decoder.cross_attention_hidden_size": 64},
    "xmod": {"default_language": "en_XX"},
}
# configurations whose fields hang together so that they are made at once
_GEMMA4 = {
    "vocab_size": WORDS, "vocab_size_per_layer_input": WORDS, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32,
    "sliding_window": 16, "max_position_embeddings": 128, "hidden_size_per_layer_input": 8, "pad_token_id": 0,
    "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
AT_ONCE: dict[str, dict[str, Any]] = {"gemma4_text": _GEMMA4, "gemma4_unified_text": _GEMMA4}

_LISTS_OF_LAYERS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")
_OF_QUERIES_AND_KEYS = re.compile(r"q_proj|k_proj|query|key|qkv|c_attn|q_lin|k_lin|\.q\.|\.k\.|q_[ab]|kv_[ab]|in_proj")


class Verdict(enum.Enum):
    """What a class is under composattn, beside `eager`."""

    RIGHT = "right"
    REFUSED = "refused by name"
    NOT_ASKED = "composattn was not asked, and nothing said so"
    DIFFERENT = "other logits or gradients"
    UNNAMED = "an error without a name of ours"
    NOT_MADE = "no small model that runs in eager"


class Found(NamedTuple):
    """A verdict and what it rests on."""

    verdict: Verdict
    why: str = ""


def classes(kind: str) -> Iterator[str]:
    """The names of the configurations that a list of transformers has a class for."""
    yield from sorted(KINDS[kind])


def small(config: Any, depth: int = 0) -> Any:
    """`config` with few narrow layers, one of each kind."""
    for name, value in SIZES.items():
        with contextlib.suppress(Exception):  # a field that each layer has its own of
            if isinstance(getattr(config, name, None), (int, float, str)):
                setattr(config, name, value)
    with contextlib.suppress(Exception):
        if getattr(config, _LATENT, None) is not None:
            config.num_key_value_heads = config.num_attention_heads
    for name in _LISTS_OF_LAYERS:
        given = getattr(config, name, None)
        if isinstance(given, (list, tuple)) and given:
            each = list(dict.fromkeys(given))
            count = max(getattr(config, "num_hidden_layers", 2), len(each))
            _set(config, name, (each * count)[:count])
            _set(config, "num_hidden_layers", count)
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None and depth < 3:
            small(part, depth + 1)
    return config


def _set(config: Any, name: str, value: Any) -> None:
    with contextlib.suppress(Exception):  # a field that follows others
        setattr(config, name, value)


def made(kind: str, name: str) -> tuple[Any, Any]:
    """The class and its small configuration."""
    listed = KINDS[kind][name]
    of = getattr(transformers, listed if isinstance(listed, str) else listed[0])
    if name in AT_ONCE:
        return of, transformers.CONFIG_MAPPING[name](**AT_ONCE[name])
    config = transformers.CONFIG_MAPPING[name]()
    if of.config_class is not None and not isinstance(config, of.config_class):
        parts = [getattr(config, part) for part in config.sub_configs]
        config = next((p for p in parts if isinstance(p, of.config_class)), None) or config.get_text_config()
    small(config)
    for place, value in PARTICULAR.get(name, {}).items():
        *parts, field = place.split(".")
        setattr(functools.reduce(getattr, parts, config), field, value)
    return of, config


def built(of: Any, config: Any, implementation: str, sharp: bool = False) -> Any:
    """A model of random weights: the same ones for the same configuration."""
    torch.manual_seed(0)
    model = of._from_config(copy.deepcopy(config), attn_implementation=implementation).eval()
    if sharp:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1 and _OF_QUERIES_AND_KEYS.search(name.lower()):
                    parameter.mul_(SHARP)
    return model


def inputs(of: Any) -> dict[str, torch.Tensor]:
    """Two sequences for a model, of which one has padding at its left."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, WORDS - 9, (2, TOKENS), generator=draw)
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    given["attention_mask"][1, :9] = 0
    if of.config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens[:, :TARGETS]
    return given


def logits_and_gradients(model: Any, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logits of what is no padding, and what a random loss of them says to each parameter."""
    logits = model(**given).logits
    if logits.shape[1] == TOKENS:
        logits = logits[given["attention_mask"].bool()]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits.float() * weights).sum().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None and p.numel()}


def judged(kind: str, name: str, sharp: bool = False) -> Found:
    """How a class under composattn compares with itself in `eager`."""
    try:
        of, config = made(kind, name)
        reference = built(of, config, "sdpa" if name in READ_PADDING else "eager", sharp)
        if sum(p.numel() for p in reference.parameters()) > LARGEST:
            return Found(Verdict.NOT_MADE, "too large")
        wanted = logits_and_gradients(reference, inputs(reference))
    except Exception as error:  # whatever a configuration made by names alone may meet
        return Found(Verdict.NOT_MADE, _line(error))
    calls: list[int] = []
    try:
        model = built(of, config, "composattn", sharp)
        model.load_state_dict(reference.state_dict())
        with _counted(calls):
            found = logits_and_gradients(model, inputs(model))
    except ComposattnError as error:
        return Found(Verdict.REFUSED, _line(error))
    except Exception as error:
        return Found(Verdict.UNNAMED, _line(error))
    difference = _greatest_difference(found, wanted)
    if not difference <= TOLERANCE[sharp]:
        return Found(Verdict.DIFFERENT, f"{difference:.1e} of the greatest, {len(calls)} calls")
    if not calls and name not in WITHOUT_ATTENTION:
        return Found(Verdict.NOT_ASKED)
    return Found(Verdict.RIGHT, f"{difference:.1e}, {len(calls)} calls")


def _greatest_difference(found: Any, wanted: Any) -> float:
    """The greatest difference of logits and of gradients, relative to the largest number of each kind."""
    (logits, gradients), (right_logits, right_gradients) = found, wanted
    if logits.shape != right_logits.shape or gradients.keys() != right_gradients.keys():
        return float("inf")
    of_logits = float((logits - right_logits).abs().max()) / max(1.0, float(right_logits.abs().max()))
    largest = max(float(g.abs().max()) for g in right_gradients.values())
    errors = [
        float((gradients[name] - g).abs().max()) / (float(g.abs().max()) + 1e-2 * largest)
        for name, g in right_gradients.items()
    ]
    return max(of_logits, *errors)


class _counted:
    """Notes each call of `ca.attention` that the integration makes."""

    def __init__(self, calls: list[int]) -> None:
        self.calls, self.theirs = calls, integration.attention  # type: ignore[attr-defined]

    def __enter__(self) -> None:
        theirs: Callable[..., Any] = self.theirs

        @functools.wraps(theirs)
        def noted(*args: Any, **options: Any) -> Any:
            self.calls.append(1)
            return theirs(*args, **options)

        integration.attention = noted  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        integration.attention = self.theirs  # type: ignore[attr-defined]


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
