"""`attn_implementation="composattn"` for the models of Hugging Face transformers.

    import composattn.integrations.transformers as integration

    integration.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="composattn")

A model's mask stays the function that transformers composes (causal, window, chunks, padding, packed documents): no
(S, S) tensor and no block mask is made of it, but where a model's own code reads one. One mask object serves all layers
of a forward. Where queries and keys begin in a cache is a run-time number, so decoding plans nothing anew for a new
token.

Tested with transformers 5.23 and 5.24. Classes that don't ask `AttentionInterface` (MPT, BLOOM, Falcon) are refused
when they are loaded.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from ..api import attention
from ..call.block_sparse import SMALLEST_BLOCK, BlockSparse
from ..call.eight_bits import Quantized
from ..call.problem import refuse_unreadable
from ..call.sequences import Varlen
from ..errors import DTypeMismatch, MissingDependency, ShapeMismatch, UnknownKeyword, UnsupportedOption, WrongRank
from ..extras import how_to_install
from ..mods.mask import Mask
from ..mods.masks import causal
from ..mods.masks import sliding_window as window_before
from ..mods.score import Score
from ..mods.scores import softcap as soft_cap
from .tables import joined, reader

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as missing:
    raise MissingDependency(
        f"composattn.integrations.transformers needs transformers: {how_to_install('transformers')}"
    ) from missing

import functools

from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from .model_caches import as_quantised, eight_bit_cache
from .model_classes import check_when_loaded
from .model_masks import ModelMask, mask


def register(name: str = "composattn") -> None:
    """Make `attn_implementation=name` mean composattn, for all models of transformers in this process.

    A class that would not ask for it raises `UnsupportedOption` when it is loaded.
    """
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    check_when_loaded(name)
    serve_batches(name)


# What reaches a layer's attention and changes nothing there, each with why. transformers hands the keywords of a
# model's forward on to its layers, and these to their attention.
_CHANGES_NOTHING = {
    "position_ids": "q and k are rotated by them, and masks were told of them",
    "position_embeddings": "q and k are rotated by them before",
    "deterministic": "an option of flash-attn's backward",
    "cache": "k and v are what is kept in it",
    "past_key_values": "the cache by an older name",
    "past_key_value": "the cache by an older name",
    "cache_position": "where the mask's queries begin",
    "use_cache": "whether the model gives its cache back",
    "output_hidden_states": "what the model gives back",
    "output_router_logits": "what the model gives back",
    "return_dict": "what the model gives back",
    "logits_to_keep": "which rows become logits",
    "labels": "for the loss",
    "num_items_in_batch": "for the loss",
    "seq_idx": "documents for layers without attention",
    "read_index": "which rows of a cache of pages the keys are, which it has read",
    "write_index": "where a cache of pages has put the new ones",
    "logits_indices": "which rows become logits",
    "logits_processor_args": "for what is drawn of them",
    "input_ids": "what the model embedded",
    "decoder_input_ids": "what the model embedded",
    "inputs_embeds": "what the model embedded",
    "token_type_ids": "embedded, or told to the mask",
    "mm_token_type_ids": "told to the mask",
}


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: ModelMask | torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    output_attentions: bool | None = False,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    sliding_window: int | None = None,
    **unknown: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, as `AttentionInterface` asks for it: ((B, Sq, Hq, Dv), no weights).

    query (B, Hq, Sq, D), key (B, Hkv, Skv, D), value (B, Hkv, Skv, Dv); those of `eight_bit_cache` have their scales.
    attention_mask: what `mask` made; or a 4-d tensor, bool (True where visible) or added to the scores; or None, where
        the module's `is_causal` decides as in `sdpa`.
    softcap: c·tanh(score / c). position_bias: (B or 1, Hq or 1, Sq or 1, Skv), added to the scores, differentiable.
    dropout: of weights, as `dropout_p` of `ca.attention`.
    s_aux, sinks: a logit beside those of the keys with no value, (Hq,) or (B, Hq, Sq, 1), differentiable.
    block_indices: int (B, H, Sq, K), for each query the blocks of `module.config.index_block_size` keys that it sees
        of what the mask shows, -1 for none; Hq a multiple of H.
    cu_seq_lens_q, cu_seq_lens_k: (documents + 1,) int32, where packed documents begin in a batch of one; max_length_q,
        max_length_k: their greatest lengths. No document sees another, whatever the mask says. With no mask (continuous
        batching, whose keys are those of a cache) documents are causal, the last query at the last key.
    sliding_window: how many keys a query sees to each side, itself among them, where there is no mask; else the mask
        says it. The last query is at the last key.

    Raises: `UnknownKeyword` for a keyword that may change the result and is none of these; `UnsupportedOption` for
    output_attentions, token indices and packed documents in more than one row; `ShapeMismatch` for a causal layer
    without a mask where Sq is not Skv and for a mask, sinks or indices of other lengths; `NotATensor`, `WrongRank`
    and `DTypeMismatch` of a mask; and what `ca.attention` raises.
    """
    _refuse_keywords(module, unknown)
    if output_attentions:
        raise UnsupportedOption('attention weights are never formed here; use attn_implementation="eager" to see them')
    keys, values = as_quantised("key", key), as_quantised("value", value)
    documents = _documents(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    aligned = None
    if attention_mask is None:
        aligned = _aligned(documents is not None and _is_causal(module, is_causal), sliding_window)
    in_documents = documents is not None and attention_mask is None
    mask_mod, bias = (None, None) if in_documents else _told(module, query, key, attention_mask, is_causal)
    if block_indices is not None:
        picked = _picked_blocks(module, block_indices, query, key)
        mask_mod = picked if mask_mod is None else Mask.of(mask_mod) & picked
    score_mod = _scores(softcap, [b for b in (bias, position_bias) if b is not None])
    of_heads, of_rows = _sinks(query, s_aux, sinks)
    out = _attention(
        query, keys, values, score_mod, mask_mod, documents, of_rows, aligned, scale=scaling, sinks=of_heads,
        dropout_p=dropout,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _refuse_keywords(module: torch.nn.Module, unknown: dict[str, Any]) -> None:
    """Raises `UnsupportedOption` and `UnknownKeyword`."""
    for name, given in unknown.items():
        if given is None or name in _CHANGES_NOTHING:
            continue
        if name == "indices":
            raise UnsupportedOption(
                f"{type(module).__name__} picks single keys for each query (indices=), which is not served here; load "
                'the model with attn_implementation="eager"'
            )
        raise UnknownKeyword(
            f"{type(module).__name__} hands {name}= to its attention, of which composattn does not know whether it "
            'changes the result; leave it out of the model\'s call, or load the model with attn_implementation="eager"'
        )


def _documents(q_begins: Any, kv_begins: Any, q_most: int | None, kv_most: int | None) -> Varlen | None:
    """Packed documents, if there are any. Raises: `UnsupportedOption` for those of keys alone."""
    if q_begins is not None:
        return Varlen(q_begins, kv_begins, max_seqlen_q=q_most, max_seqlen_k=kv_most)
    if kv_begins is not None:
        raise UnsupportedOption("cu_seq_lens_k says where documents of keys begin; give cu_seq_lens_q as well")
    return None


def _sinks(query: torch.Tensor, *given: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Sinks of heads (Hq,), and of rows (B, Hq, Sq). Raises: `UnsupportedOption`, `ShapeMismatch`."""
    named = [sinks for sinks in given if sinks is not None]
    if not named:
        return None, None
    if len(named) > 1:
        raise UnsupportedOption("s_aux and sinks both say what the sinks are; give one of them")
    (sinks,) = named
    if sinks.ndim == 1:
        return sinks, None
    if sinks.shape != (*query.shape[:3], 1):
        raise ShapeMismatch(
            f"sinks has shape {tuple(sinks.shape)}; it must be (Hq,), or a number for each query: "
            f"{(*query.shape[:3], 1)}"
        )
    return None, sinks[..., 0]


def _picked_blocks(module: torch.nn.Module, indices: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Mask:
    """The blocks of keys that each query picked; tiles of queries that all leave a block out skip it.

    Raises: `UnsupportedOption`, `ShapeMismatch`.
    """
    size = getattr(getattr(module, "config", None), "index_block_size", None)
    if not isinstance(size, int):
        raise UnsupportedOption("block_indices= needs the size of a block, in the layer's config.index_block_size")
    batch, q_heads, q_length, _ = query.shape
    if indices.ndim != 4 or (indices.shape[0], indices.shape[2]) != (batch, q_length) or q_heads % indices.shape[1]:
        raise ShapeMismatch(
            f"block_indices has shape {tuple(indices.shape)} for queries {tuple(query.shape)}; it must be (B, H, Sq, K)"
        )
    shared, count = q_heads // indices.shape[1], -(-key.shape[2] // size)
    none = indices.new_zeros((*indices.shape[:3], count + 1), dtype=torch.bool)
    place = torch.where((indices < 0) | (indices >= count), count, indices).long()
    seen = none.scatter(-1, place, True)[..., :count]

    def picked(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return seen[b, h // shared, q_idx, kv_idx // size]

    if size % SMALLEST_BLOCK:
        return Mask.of(picked)
    rows = torch.nn.functional.pad(seen, (0, 0, 0, -q_length % _ROWS)).unflatten(2, (-1, _ROWS))
    kinds = rows.any(3).to(torch.int8) + rows.all(3).to(torch.int8)
    return BlockSparse(kinds.repeat_interleave(shared, 1), (_ROWS, size), partial=picked)


_ROWS = 128  # queries whose picked blocks are looked at together, as many as a kernel's tile has


def _attention(
    query: torch.Tensor,
    key: torch.Tensor | Quantized,
    value: torch.Tensor | Quantized,
    score_mod: Any,
    mask_mod: Any,
    documents: Varlen | None,
    sinks_of_rows: torch.Tensor | None,
    aligned: Mask | None,
    **options: Any,
) -> torch.Tensor:
    """out of (B, H, S, D) tensors; of documents packed in a batch of one, too.

    `aligned`: a mask of positions in a document; `mask_mod` and `score_mod` are of those in the packed row.
    """
    tensors = query, key, value
    if documents is not None:
        if query.shape[0] != 1:
            raise UnsupportedOption(f"cu_seq_lens_q packs documents in a batch of one, got a batch of {query.shape[0]}")
        mask_mod = None if mask_mod is None else _of_packed(Mask.of(mask_mod), documents)
        score_mod = None if score_mod is None else _of_packed(score_mod, documents)
        if isinstance(key, Quantized) or isinstance(value, Quantized):
            raise UnsupportedOption("packed documents (cu_seq_lens_q) with a cache in 8 bits; give it one in 16 bits")
        tensors = tuple(t[0].transpose(0, 1) for t in tensors)  # type: ignore[assignment,union-attr]
        options["varlen"] = documents
    options |= {"score_mod": score_mod, "mask_mod": joined(operator.and_, (aligned, mask_mod))}
    if sinks_of_rows is None:
        out = attention(*tensors, **options)
        return out if documents is None else out.transpose(0, 1)[None]
    out, lse = attention(*tensors, return_lse=True, **options)
    if documents is not None:
        out, lse = out.transpose(0, 1)[None], lse[None]
    # exp(sink) beside the exponentials that lse is the sum of
    return (out * torch.sigmoid(lse - sinks_of_rows)[..., None]).to(out.dtype)


def _of_packed(mod: Any, documents: Varlen) -> Any:
    """`mod` of positions in the packed row, asked with a document and positions in it."""
    q_begin = documents.cu_seqlens_q
    kv_begin = q_begin if documents.cu_seqlens_k is None else documents.cu_seqlens_k
    # offsets have one more entry than there are sequences, which b + 0 says
    if isinstance(mod, Score):
        return lambda score, b, h, q_idx, kv_idx: mod(score, 0, h, q_idx + q_begin[b + 0], kv_idx + kv_begin[b + 0])
    return lambda b, h, q_idx, kv_idx: mod(0, h, q_idx + q_begin[b + 0], kv_idx + kv_begin[b + 0])


def _is_causal(module: torch.nn.Module, said: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if said is None else said)


def _aligned(before: bool, window: int | None) -> Mask | None:
    """What queries see by `before`, no later key, and by a window; None where that is all."""
    end = "bottom_right"
    near = None if window is None else window_before((window - 1, window - 1), end)
    return joined(operator.and_, (causal(end) if before else None, near))  # type: ignore[no-any-return]


def _told(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, given: Any, is_causal: bool | None
) -> tuple[Any, torch.Tensor | None]:
    """(mask mod, bias) that a layer's mask says.

    Raises: `ShapeMismatch`; for a mask that is none of pairs `NotATensor`, `WrongRank` and `DTypeMismatch`.
    """
    if isinstance(given, ModelMask):
        q_length, kv_length = given.lengths[2:]
        if query.shape[2] != q_length or key.shape[2] > kv_length:
            raise ShapeMismatch(
                f"the model's mask is for {q_length} queries and {kv_length} keys; this layer has {query.shape[2]} and "
                f"{key.shape[2]}"
            )
        return given.mask_mod, None
    if given is None:
        if query.shape[2] == 1 or not _is_causal(module, is_causal):
            return None, None
        if query.shape[2] != key.shape[2]:
            raise ShapeMismatch(
                f"a causal layer got no mask for {query.shape[2]} queries and {key.shape[2]} keys, so nothing says "
                "where the queries begin; the model must make its mask by transformers.masking_utils"
            )
        return causal(), None
    refuse_unreadable("attention_mask", given)
    if given.ndim != 4:
        raise WrongRank(f"attention_mask has shape {tuple(given.shape)}; a layer takes (B, 1 or Hq, Sq, Skv)")
    if given.dtype is not torch.bool and not given.is_floating_point():
        raise DTypeMismatch(f"attention_mask is {given.dtype}; it must be bool, or floats that are added to the scores")
    seen = given[..., : key.shape[2]]
    return (reader(seen), None) if seen.dtype is torch.bool else (None, seen)


def _adding(table: torch.Tensor) -> Score:
    """The score mod that adds what a table says of the pair."""
    at = reader(table)
    return Score.of(lambda score, b, h, q_idx, kv_idx: score + at(b, h, q_idx, kv_idx))


def _scores(cap: float | None, biases: list[torch.Tensor]) -> Score | None:
    """The score mod of a layer: its soft cap, then what is added; None where it changes nothing."""
    return joined(operator.rshift, (None if cap is None else soft_cap(cap), *map(_adding, biases)))  # type: ignore[no-any-return]


__all__ = ["ModelMask", "attend", "eight_bit_cache", "mask", "register"]


_names: set[str] = set()  # that mean composattn


def serve_batches(name: str) -> None:
    """Lets a model of this implementation batch requests as it is, neither refused nor switched to another one."""
    _names.add(name)
    theirs = getattr(ContinuousBatchingManager, "switch_to_cb_friendly_attn", None)
    if theirs is None or getattr(theirs, "_knows_composattn", False):
        return

    @functools.wraps(theirs)
    def switched(self: Any, model: Any, *args: Any, **options: Any) -> Any:
        if model.config._attn_implementation in _names:
            return None
        return theirs(self, model, *args, **options)

    switched._knows_composattn = True  # type: ignore[attr-defined]
    ContinuousBatchingManager.switch_to_cb_friendly_attn = switched
