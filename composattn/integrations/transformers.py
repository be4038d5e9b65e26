"""`attn_implementation="composattn"` for the models of Hugging Face transformers.

    import composattn.integrations.transformers as integration

    integration.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="composattn")

A model's mask stays the function that transformers composes (causal, window, chunks, padding, packed documents): no
(S, S) tensor and no block mask is made of it. One mask object serves all layers of a forward. Where queries and keys
begin in a cache is a run-time number, so decoding plans nothing anew for a new token.

Tested with transformers 5.23. Models that don't ask `AttentionInterface` (MPT, BLOOM, Falcon) are not reached.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from ..api import attention
from ..call.sequences import Varlen
from ..errors import MissingDependency, ShapeMismatch, UnsupportedOption
from ..mods.mask import Mask
from ..mods.masks import causal
from ..mods.mod import title
from ..mods.score import Score
from ..mods.scores import softcap as soft_cap
from .tables import reader

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers import masking_utils as theirs
except ImportError as missing:
    raise MissingDependency(
        "composattn.integrations.transformers needs transformers: pip install transformers"
    ) from missing

MaskFunction = Callable[[Any, Any, Any, Any], Any]


def register(name: str = "composattn") -> None:
    """Make `attn_implementation=name` mean composattn, for all models of transformers in this process."""
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)


class ModelMask(BlockMask):  # type: ignore[misc]
    """What transformers carries from its masks to its layers: a mask mod, and the lengths it is for.

    A `BlockMask` by name alone, as `generate` knows a mask that is ready by this class; it has no blocks.
    """

    def __init__(self, mask_mod: Mask | MaskFunction | None, shape: tuple[int, int, int, int]) -> None:
        self.mask_mod, self.lengths = mask_mod, shape  # type: ignore[assignment]

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, 1, Sq, Skv)."""
        return self.lengths

    @property
    def ndim(self) -> int:
        """4, as of a mask that is ready."""
        return len(self.lengths)

    def contiguous(self) -> ModelMask:
        return self

    def to(self, *_: Any, **__: Any) -> ModelMask:
        return self  # what it reads lies where transformers put it

    def __repr__(self) -> str:
        return f"ModelMask({None if self.mask_mod is None else title(self.mask_mod)}, {self.lengths})"

    __str__ = __repr__


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    mask_function: MaskFunction = theirs.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> ModelMask:
    """The mask of a model's forward, as `AttentionMaskInterface` asks for it.

    attention_mask: (B, at most kv_offset + Skv) bool, False where a token is padding.
    """
    shape = (batch_size, 1, q_length, kv_length)
    padding = None if attention_mask is None else _padding(attention_mask, kv_length, kv_offset)
    if padding is None and _sees_all(mask_function, q_length, q_offset, kv_offset + kv_length):
        return ModelMask(None, shape)
    if padding is not None:
        mask_function = theirs.and_masks(mask_function, padding)
    mask_function = _shifted(mask_function, q_offset, kv_offset, device)
    return ModelMask(mask_function if torch.compiler.is_compiling() else Mask.of(mask_function), shape)


def _sees_all(mask_function: MaskFunction, q_length: int, q_offset: Any, kv_end: Any) -> bool:
    """Whether every key is seen: with no order, or by a causal query behind all keys; False where the device knows."""
    if mask_function is theirs.bidirectional_mask_function:
        return True
    known = not torch.compiler.is_compiling() and isinstance(q_offset, int) and isinstance(kv_end, int)
    return known and mask_function is theirs.causal_mask_function and q_length == 1 and q_offset + 1 >= kv_end


def _padding(tokens: torch.Tensor, kv_length: int, kv_offset: Any) -> MaskFunction | None:
    """The mask of (B, S) `tokens`, False where padding; None where there is none.

    Waits for the device to say whether there is any, as transformers' own masks do, and once more where there is.
    Tokens that follow each other, as with padding left or right of them, are two bounds per sequence: tiles beyond
    are skipped, and a longer table is no new plan.
    """
    if not torch.compiler.is_compiling():
        if bool(tokens.all()):
            return None
        begin, count = tokens.int().argmax(-1), tokens.sum(-1)
        end = torch.where(count == 0, begin, tokens.shape[1] - tokens.flip(-1).int().argmax(-1))
        if bool((end - begin == count).all()):
            return lambda b, h, q_idx, kv_idx: (kv_idx >= begin[b]) & (kv_idx < end[b])
    table = theirs.prepare_padding_mask(tokens, kv_length, kv_offset)
    return theirs.padding_mask_function(table)  # type: ignore[no-any-return]


def _shifted(mask_function: MaskFunction, q_offset: Any, kv_offset: Any, device: Any) -> MaskFunction:
    """`mask_function` of positions in the whole sequence, where queries and keys begin at these."""
    q_begin, kv_begin = (_number(offset, device) for offset in (q_offset, kv_offset))

    def from_there(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_function(b, h, q_idx + q_begin, kv_idx + kv_begin)

    return from_there


def _number(offset: Any, device: Any) -> Any:
    """0, or a run-time number: a constant would be another plan for each new token."""
    if isinstance(offset, torch.Tensor):
        return offset.reshape(()).clone()  # a static cache counts on in this tensor before the layers are called
    return torch.tensor(offset, device=device) if offset and not torch.compiler.is_compiling() else offset


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
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    output_attentions: bool = False,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, as `AttentionInterface` asks for it: ((B, Sq, Hq, Dv), no weights).

    query (B, Hq, Sq, D), key (B, Hkv, Skv, D), value (B, Hkv, Skv, Dv).
    attention_mask: what `mask` made; or a 4-d tensor, bool (True where visible) or added to the scores; or None, where
        the module's `is_causal` decides as in `sdpa`.
    softcap: c·tanh(score / c). position_bias: (B or 1, Hq or 1, Sq or 1, Skv), added to the scores, differentiable.
    dropout: of weights, as `dropout_p` of `ca.attention`.
    s_aux: (Hq,) sinks, a logit beside those of the keys with no value, differentiable.
    cu_seq_lens_q, cu_seq_lens_k: (documents + 1,) int32, where packed documents begin in a batch of one; max_length_q,
        max_length_k: their greatest lengths. No document sees another, whatever the mask says.

    Raises: `UnsupportedOption` for output_attentions and packed documents in more than one row,
    `ShapeMismatch` for a causal layer without a mask where Sq is not Skv and for a mask of other lengths, and what
    `ca.attention` raises.
    """
    if output_attentions:
        raise UnsupportedOption('attention weights are never formed here; use attn_implementation="eager" to see them')
    mask_mod, bias = _told(module, query, key, attention_mask, is_causal)
    score_mod = _scores(softcap, [b for b in (bias, position_bias) if b is not None])
    documents = None
    if cu_seq_lens_q is not None:
        documents = Varlen(cu_seq_lens_q, cu_seq_lens_k, max_seqlen_q=max_length_q, max_seqlen_k=max_length_k)
    out = _attention(query, key, value, score_mod, mask_mod, documents, scale=scaling, sinks=s_aux, dropout_p=dropout)
    return out.transpose(1, 2).contiguous(), None


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any,
    mask_mod: Any,
    documents: Varlen | None,
    **options: Any,
) -> torch.Tensor:
    """out of (B, H, S, D) tensors; of documents packed in a batch of one, too."""
    if documents is None:
        return attention(query, key, value, score_mod=score_mod, mask_mod=mask_mod, **options)
    if query.shape[0] != 1:
        raise UnsupportedOption(f"cu_seq_lens_q packs documents in a batch of one, got a batch of {query.shape[0]}")
    mask_mod = None if mask_mod is None else _of_packed(Mask.of(mask_mod), documents)
    score_mod = None if score_mod is None else _of_packed(score_mod, documents)
    packed = (t[0].transpose(0, 1) for t in (query, key, value))
    out = attention(*packed, score_mod=score_mod, mask_mod=mask_mod, varlen=documents, **options)
    return out.transpose(0, 1)[None]


def _of_packed(mod: Any, documents: Varlen) -> Any:
    """`mod` of positions in the packed row, asked with a document and positions in it."""
    q_begin = documents.cu_seqlens_q
    kv_begin = q_begin if documents.cu_seqlens_k is None else documents.cu_seqlens_k
    if isinstance(mod, Score):
        return lambda score, b, h, q_idx, kv_idx: mod(score, 0, h, q_idx + q_begin[b], kv_idx + kv_begin[b])
    return lambda b, h, q_idx, kv_idx: mod(0, h, q_idx + q_begin[b], kv_idx + kv_begin[b])


def _told(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, given: Any, is_causal: bool | None
) -> tuple[Any, torch.Tensor | None]:
    """(mask mod, bias) that a layer's mask says."""
    if isinstance(given, ModelMask):
        q_length, kv_length = given.lengths[2:]
        if query.shape[2] != q_length or key.shape[2] > kv_length:
            raise ShapeMismatch(
                f"the model's mask is for {q_length} queries and {kv_length} keys; this layer has {query.shape[2]} and "
                f"{key.shape[2]}"
            )
        return given.mask_mod, None
    if given is None:
        if query.shape[2] == 1 or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            return None, None
        if query.shape[2] != key.shape[2]:
            raise ShapeMismatch(
                f"a causal layer got no mask for {query.shape[2]} queries and {key.shape[2]} keys, so nothing says "
                "where the queries begin; the model must make its mask by transformers.masking_utils"
            )
        return causal(), None
    seen = given[..., : key.shape[2]]
    return (reader(seen), None) if seen.dtype is torch.bool else (None, seen)


def _adding(table: torch.Tensor) -> Score:
    """The score mod that adds what a table says of the pair."""
    at = reader(table)
    return Score.of(lambda score, b, h, q_idx, kv_idx: score + at(b, h, q_idx, kv_idx))


def _scores(cap: float | None, biases: list[torch.Tensor]) -> Score | None:
    """The score mod of a layer: its soft cap, then what is added; None where it changes nothing."""
    mods = [*([] if cap is None else [Score.of(soft_cap(cap))]), *map(_adding, biases)]
    return functools.reduce(lambda first, then: first >> then, mods) if mods else None
