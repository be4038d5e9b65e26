"""Ready masks and score mods, built on the same graph as users' own functions."""

from __future__ import annotations

from .masks import (
    block_diagonal,
    causal,
    chunked,
    dilated_window,
    document,
    global_tokens,
    neighborhood,
    padding,
    prefix_lm,
    shared_prefix,
    sliding_window,
)
from .scores import alibi, bias, relative_bias, scale_by_head, softcap, t5_bucket_bias, temperature

__all__ = [
    "alibi",
    "bias",
    "block_diagonal",
    "causal",
    "chunked",
    "dilated_window",
    "document",
    "global_tokens",
    "neighborhood",
    "padding",
    "prefix_lm",
    "relative_bias",
    "scale_by_head",
    "shared_prefix",
    "sliding_window",
    "softcap",
    "t5_bucket_bias",
    "temperature",
]
