"""`torch.nn.functional.scaled_dot_product_attention`'s arguments, and a context in which its calls come here.

from composattn.integrations import sdpa

out = sdpa.scaled_dot_product_attention(q, k, v, is_causal=True)
with sdpa.routed():
    out = model(tokens)          # every call of torch's function inside, in this thread, computes with composattn
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..api import attention
from ..errors import DTypeMismatch, ShapeMismatch, UnsupportedOption, WrongRank
from ..mods.masks import causal
from .tables import reader

_THEIRS = torch.nn.functional.scaled_dot_product_attention


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """torch's function, computed by composattn: out (..., Hq, Sq, Dv).

    query (..., Hq, Sq, D), key (..., Hkv, Skv, D), value (..., Hkv, Skv, Dv); leading dimensions broadcast, as do heads
        without `enable_gqa`, by reading one of them again.
    attn_mask: bool, True where visible, or added to the scores (differentiable), broadcast to (..., Hq, Sq, Skv).
    is_causal: query i sees keys up to i, whatever the lengths.
    dropout_p, backend: as of `ca.attention`; torch's own generator decides otherwise which weights are dropped.

    A row that sees nothing gives 0. Source: torch.nn.functional.scaled_dot_product_attention.

    Raises: `UnsupportedOption` for a mask beside `is_causal`, `WrongRank`, `ShapeMismatch`,
    `DTypeMismatch`, and what `ca.attention` raises.
    """
    if attn_mask is not None and is_causal:
        raise UnsupportedOption("attn_mask and is_causal exclude each other; hide later keys in attn_mask")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim < 2:
            raise WrongRank(f"{name} needs (..., S, D), got {tuple(tensor.shape)}")
    q, k, v, leading = _four_dimensions(query, key, value, enable_gqa)
    score_mod = mask_mod = None
    if attn_mask is not None:
        at = _table(attn_mask, leading, q.shape[2], k.shape[2], query.dtype)
        if attn_mask.dtype is torch.bool:
            mask_mod = at
        else:
            score_mod = lambda score, b, h, q_idx, kv_idx: score + at(b, h, q_idx, kv_idx)  # noqa: E731
    elif is_causal:
        mask_mod = causal()
    out: Any = attention(
        q, k, v, score_mod=score_mod, mask_mod=mask_mod, scale=scale, dropout_p=dropout_p, backend=backend
    )
    return out.reshape(*leading, *out.shape[2:])  # type: ignore[no-any-return]


def _four_dimensions(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Size]:
    """q, k, v as (B, H, S, D), and the leading dimensions of the result."""
    given = (query, key, value)
    grouped = enable_gqa and all(t.ndim > 2 for t in given)
    own = 3 if grouped else 2  # dimensions that are a tensor's own
    try:
        shared = torch.broadcast_shapes(*(t.shape[:-own] for t in given))
    except RuntimeError:
        shapes = ", ".join(str(tuple(t.shape)) for t in given)
        raise ShapeMismatch(
            f"the leading dimensions of query, key and value don't broadcast: {shapes}"
            + ("" if enable_gqa else "; fewer heads of keys want enable_gqa=True")
        ) from None
    heads = [t.shape[-3:-2] if grouped else shared[-1:] or torch.Size([1]) for t in given]
    batch = shared if grouped else shared[:-1]
    made = [
        t.expand(*shared, *t.shape[-own:]).reshape(batch.numel(), *h, *t.shape[-2:])
        for t, h in zip(given, heads, strict=True)
    ]
    return made[0], made[1], made[2], torch.Size([*batch, *heads[0]]) if grouped else shared


def _table(
    mask: torch.Tensor, leading: torch.Size, q_length: int, kv_length: int, dtype: torch.dtype
) -> Callable[..., Any]:
    """b, h, q, kv → what a mask says of the pair; where it is one for all, it is read there."""
    if mask.dtype not in (torch.bool, torch.float32, dtype):
        raise DTypeMismatch(f"attn_mask is bool, float32 or {dtype} as the query, got {mask.dtype}")
    if mask.ndim < 2:
        raise WrongRank(f"attn_mask needs (..., Sq, Skv), got {tuple(mask.shape)}")
    whole = torch.Size([*leading, q_length, kv_length])
    try:
        if torch.broadcast_shapes(mask.shape, whole) != whole:
            raise RuntimeError
    except RuntimeError:
        raise ShapeMismatch(f"attn_mask {tuple(mask.shape)} does not broadcast to {tuple(whole)}") from None
    padded = mask.reshape(*[1] * (len(whole) - mask.ndim), *mask.shape)
    batch, heads = padded.shape[:-3], padded.shape[-3:-2]
    if batch.numel() != 1:  # some of several batch dimensions may be one for all
        padded = padded.expand(*leading[:-1], *padded.shape[-3:])
    return reader(
        padded.reshape(1 if batch.numel() == 1 else leading[:-1].numel(), *(heads or [1]), *padded.shape[-2:])
    )


class _Routed(TorchFunctionMode):
    """Sees calls by any name; but none inside of torch's own Python functions, during which a mode is off."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_here if func is _THEIRS else func)(*args, **(kwargs or {}))


class _Local(threading.local):
    backends: tuple[str | None, ...] = ()  # of the contexts that this thread is in


_local = _Local()


def _here(*args: Any, **kwargs: Any) -> torch.Tensor:
    return scaled_dot_product_attention(*args, **kwargs, backend=_local.backends[-1])


@functools.wraps(_THEIRS)
def _by_thread(*args: Any, **kwargs: Any) -> torch.Tensor:
    return (_here if _local.backends else _THEIRS)(*args, **kwargs)


@contextmanager
def routed(backend: str | None = None) -> Iterator[None]:
    """Inside, calls of torch's scaled_dot_product_attention in this thread compute with composattn.

    What composattn can't do raises, nothing falls back. Compiled functions run in eager mode meanwhile, as their code
    has torch's function in it: to compile, call `sdpa.scaled_dot_product_attention`. Code that never calls torch's
    function is as before: `nn.TransformerEncoderLayer` in inference mode has a path of its own.
    """
    outer = _local.backends
    _local.backends = (*outer, backend)
    torch.nn.functional.scaled_dot_product_attention = _by_thread  # stays: it asks which thread it is in
    try:
        with torch.compiler.set_stance("force_eager"), _Routed():
            yield
    finally:
        _local.backends = outer
