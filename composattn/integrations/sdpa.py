"""`torch.nn.functional.scaled_dot_product_attention`'s arguments, and a context in which its calls come here.

from composattn.integrations import sdpa

out = sdpa.scaled_dot_product_attention(q, k, v, is_causal=True)
with sdpa.routed():
    out = model(tokens)          # every call of torch's function inside, in this thread, computes with composattn

torch itself is changed by none of this: its function stays the same object, inside of the context too.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode

from ..api import attention
from ..call.checks import check_flag
from ..call.problem import refuse_unreadable
from ..errors import DTypeMismatch, ShapeMismatch, UnsupportedOption, WrongRank
from ..mods.mask import Mask
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
    attn_mask: bool, True where visible, or added to the scores (differentiable), broadcast to (..., Hq, Sq, Skv); or
        `causal_upper_left` or `causal_lower_right` of torch.nn.attention.bias.
    is_causal: query i sees keys up to i, whatever the lengths.
    dropout_p, backend: as of `ca.attention`; torch's own generator decides otherwise which weights are dropped.

    A row that sees nothing gives 0. Source: torch.nn.functional.scaled_dot_product_attention.

    Raises: `UnsupportedOption` for a mask beside `is_causal` and for flags that are none, `WrongRank`, `ShapeMismatch`,
    `DTypeMismatch`, `UnsupportedLayout`, and what `ca.attention` raises.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        refuse_unreadable(name, tensor)
        if tensor.ndim < 2:
            raise WrongRank(f"{name} needs (..., S, D), got {tuple(tensor.shape)}")
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    q, k, v, leading = four_dimensions(query, key, value, enable_gqa)
    score_mod, mask_mod = mods_of(attn_mask, is_causal, leading, q, k)
    out: Any = attention(
        q, k, v, score_mod=score_mod, mask_mod=mask_mod, scale=scale, dropout_p=dropout_p, backend=backend
    )
    return out.reshape(*leading, *out.shape[2:])  # type: ignore[no-any-return]


def mods_of(
    attn_mask: torch.Tensor | None, is_causal: bool, leading: torch.Size, q: torch.Tensor, k: torch.Tensor
) -> tuple[Any, Any]:
    """(score mod, mask mod) that torch's arguments say of q (B, Hq, Sq, D) and k; `leading`: dimensions of the result.

    Raises: `UnsupportedOption`, `DTypeMismatch`, `ShapeMismatch`, `UnsupportedLayout`.
    """
    if attn_mask is not None and is_causal:
        raise UnsupportedOption("attn_mask and is_causal exclude each other; hide later keys in attn_mask")
    if attn_mask is None:
        return None, causal() if is_causal else None
    if isinstance(attn_mask, CausalBias):
        return None, _of_torchs_bias(attn_mask, q.shape[2], k.shape[2])
    refuse_unreadable("attn_mask", attn_mask)
    at = _table(attn_mask, leading, q.shape[2], k.shape[2], q.dtype)
    if attn_mask.dtype is torch.bool:
        return None, at
    return lambda score, b, h, q_idx, kv_idx: score + at(b, h, q_idx, kv_idx), None


def _of_torchs_bias(bias: CausalBias, q_length: int, kv_length: int) -> Mask:
    """A tensor by class alone: torch never writes to its memory. Raises `ShapeMismatch`."""
    if (bias.seq_len_q, bias.seq_len_kv) != (q_length, kv_length):
        raise ShapeMismatch(
            f"attn_mask is a CausalBias of {bias.seq_len_q} queries and {bias.seq_len_kv} keys; there are {q_length} "
            f"and {kv_length}"
        )
    return causal(align="top_left" if bias.variant is CausalVariant.UPPER_LEFT else "bottom_right")


def four_dimensions(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Size]:
    """q, k, v as (B, H, S, D), and the leading dimensions of the result. Raises: `ShapeMismatch`."""
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
    """Sees calls by any name. During one of torch's own Python functions a mode is off: those that call the function
    run as a copy that finds ours by its name."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _with_ours(func)(*args, **(kwargs or {}))


def _with_ours(func: Any) -> Any:
    if func is _THEIRS:
        return _here
    name = _THEIRS.__name__
    calls_it = isinstance(func, types.FunctionType) and name in func.__code__.co_names
    if not calls_it or func.__globals__.get(name) is not _THEIRS:
        return func
    names = {**func.__globals__, name: _here}
    copied = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copied.__kwdefaults__ = func.__kwdefaults__
    return copied


class _Options(threading.local):
    backends: tuple[str | None, ...] = ()  # of the contexts that this thread is in


_local = _Options()


def _here(*args: Any, **kwargs: Any) -> torch.Tensor:
    return scaled_dot_product_attention(*args, **kwargs, backend=_local.backends[-1])


class _Eager:
    """Compiled functions run in eager mode while any thread is inside: torch has one such setting for all threads."""

    def __init__(self) -> None:
        self.lock, self.inside, self.stance = threading.Lock(), 0, None

    def __enter__(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.stance = torch.compiler.set_stance("force_eager")
            self.inside += 1

    def __exit__(self, *error: Any) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:  # the first one's: threads may leave in any order
                self.stance.__exit__(*error)  # type: ignore[attr-defined]


_eager = _Eager()


@contextmanager
def routed(backend: str | None = None) -> Iterator[None]:
    """Inside, calls of torch's scaled_dot_product_attention in this thread compute with composattn.

    What composattn can't do raises, nothing falls back. Contexts nest: the innermost one's backend counts. Other
    threads are as before, but for one thing: compiled functions run in eager mode meanwhile, in all threads, as their
    code has torch's function in it. To compile, call `sdpa.scaled_dot_product_attention`. After the last context all is
    as it was. Code that never calls torch's function is as before: `nn.TransformerEncoderLayer` in inference mode has a
    path of its own.
    """
    outer = _local.backends
    _local.backends = (*outer, backend)
    try:
        with _eager, nullcontext() if outer else _Routed():
            yield
    finally:
        _local.backends = outer
