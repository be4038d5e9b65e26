"""`set_attention_backend("composattn")` for the models of Hugging Face diffusers, with windows of video as masks.

    import composattn.integrations.diffusers as integration

    integration.register()
    model.set_attention_backend("composattn")        # Flux, Wan, Qwen-Image, ...: all that ask diffusers' dispatcher

    integration.register("composattn_window", mask_mod=neighborhood((frames, rows, columns), (5, 9, 9)))
    for block in model.blocks:
        block.attn1.set_attention_backend("composattn_window")

A backend is a name with its mods, so layers that see other things have other names. Masks that the model makes itself,
tensors, are joined with them. Tested with diffusers 0.42. Older processors, which call torch's function themselves
(SD3, DiT, UNet), are served by `composattn.integrations.sdpa.routed()`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from ..api import attention
from ..errors import MissingDependency, ShapeMismatch, UnsupportedOption
from ..extras import how_to_install
from ..mods.mask import Mask
from ..mods.score import Score
from .sdpa import four_dimensions, mods_of
from .tables import joined

try:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
except ImportError as missing:
    raise MissingDependency(
        f"composattn.integrations.diffusers needs diffusers: {how_to_install('diffusers')}"
    ) from missing


def register(
    name: str = "composattn",
    *,
    mask_mod: Callable[..., Any] | None = None,
    score_mod: Callable[..., Any] | None = None,
    backend: str | None = None,
) -> None:
    """Make `set_attention_backend(name)` and `attention_backend(name)` of diffusers mean composattn with these mods.

    name: lower case, as diffusers asks for it; of one of ours the mods are replaced.
    mask_mod: `(b, h, q_idx, kv_idx) -> bool`, of positions in the sequence as the model has it, which for Flux is text,
        then image. Calls with fewer or more keys than queries refuse it: set it on the layers of self-attention.
    score_mod, backend: as of `ca.attention`.

    Raises: `UnsupportedOption` for a name of diffusers' own, and what `ca.mask` and `ca.score` raise.
    """
    theirs = {member.value for member in AttentionBackendName.__members__.values()}
    if name != name.lower() or (name in theirs and name not in _ours):
        raise UnsupportedOption(
            f"{name!r} can't be registered: a name is in lower case and none of diffusers' own; take 'composattn', or "
            "'composattn_window'"
        )
    score = None if score_mod is None else Score.of(score_mod)
    mask = None if mask_mod is None else Mask.of(mask_mod)
    _AttentionBackendRegistry.register(_member(name))(_attend_with(score, mask, backend))
    _ours.add(name)


_ours: set[str] = set()


def _member(name: str) -> AttentionBackendName:
    """The member of diffusers' enumeration of this value, made where there is none: an Enum has no way to be told."""
    known = AttentionBackendName._value2member_map_.get(name)
    if known is not None:
        return known
    made = str.__new__(AttentionBackendName, name)
    made._name_, made._value_ = name.upper(), name
    AttentionBackendName._member_map_[made._name_] = AttentionBackendName._value2member_map_[name] = made
    AttentionBackendName._member_names_.append(made._name_)
    return made


def _attend_with(score: Score | None, mask: Mask | None, backend: str | None) -> Callable[..., torch.Tensor]:
    """What the dispatcher calls."""

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> torch.Tensor:
        """out (B, Sq, Hq, Dv) of query (B, Sq, Hq, D), key (B, Skv, Hkv, D), value (B, Skv, Hkv, Dv).

        attn_mask: bool, True where visible, or added to the scores: (B, Skv), else what broadcasts to (B, Hq, Sq, Skv).

        Raises: `UnsupportedOption` for context parallelism of diffusers, `ShapeMismatch` for mods of another length
        and for fewer heads of keys without `enable_gqa`, and what `sdpa.scaled_dot_product_attention` raises.
        """
        if _parallel_config is not None or return_lse:
            raise UnsupportedOption(
                "diffusers' context parallelism exchanges tensors by its own backends; share a sequence among ranks by "
                "ca.ContextParallel, or set one of those backends"
            )
        if (score is not None or mask is not None) and query.shape[1] != key.shape[1]:
            raise ShapeMismatch(
                f"this backend has a mask or score mod; a call has {query.shape[1]} queries and {key.shape[1]} keys: "
                "set it on layers of self-attention alone, as block.attn1.set_attention_backend(...)"
            )
        if attn_mask is not None and attn_mask.shape == (key.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None, :]
        by_head = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        q, k, v, leading = four_dimensions(*by_head, enable_gqa)
        told_score, told_mask = mods_of(attn_mask, is_causal, leading, q, k)
        out = attention(
            q, k, v, score_mod=joined(operator.rshift, (told_score, score)),
            mask_mod=joined(operator.and_, (told_mask, mask)), scale=scale, dropout_p=dropout_p, backend=backend,
        )  # fmt: skip
        return out.transpose(1, 2)

    return attend


__all__ = ["register"]
