"""`flash_attn_func`, `flash_attn_varlen_func` and their kin of packed tensors, computed by composattn.

    from composattn.integrations.flash_attn import flash_attn_func

    out = flash_attn_func(q, k, v, causal=True, window_size=(1024, 0))       # (B, S, H, D)

Positions are aligned at the end, as there: where Sq is not Skv, the last query stands at the last key.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from ..api import attention
from ..call.checks import check_flag
from ..call.problem import refuse_unreadable
from ..call.sequences import Varlen
from ..errors import ShapeMismatch, UnknownKeyword, UnsupportedOption, WrongRank
from ..mods.masks import causal as causal_mask
from ..mods.masks import sliding_window
from ..mods.scores import alibi
from ..mods.scores import softcap as soft_cap
from .tables import joined


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    backend: str | None = None,
    **unknown: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:
    """out (B, Sq, Hq, Dv) of q (B, Sq, Hq, D), k (B, Skv, Hkv, D), v (B, Skv, Hkv, Dv).

    dropout_p: as of `ca.attention`.
    window_size: (left, right) keys beside the query's own that it sees, -1 or None all of that side.
    softcap: c·tanh(score / c), 0 none. alibi_slopes: (H,) or (B, H) fp32, score - slope·|q + Skv - Sq - kv|.
    return_attn_probs: gives (out, lse, None), lse (B, Hq, Sq); weights are never formed.
    learnable_sink: (Hq,), a logit beside those of the keys (`sinks` of `ca.attention`), as in flash-attn 4.
    backend: as of `ca.attention`. Source: flash_attn.flash_attn_func, version 2.8.

    Raises: `UnknownKeyword`, `WrongRank`, `UnsupportedOption` for a window that is no pair and for flags that are none,
    and what `ca.attention` raises.
    """
    _refuse_keywords(unknown)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        refuse_unreadable(name, tensor)
        if tensor.ndim != 4:
            raise WrongRank(f"{name} needs (B, S, H, D), got {tuple(tensor.shape)}")
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    got: Any = attention(*heads_first, return_lse=return_attn_probs, sinks=learnable_sink, backend=backend, **options)
    return (got[0].transpose(1, 2), got[1], None) if return_attn_probs else got.transpose(1, 2)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    learnable_sink: torch.Tensor | None = None,
    backend: str | None = None,
    **unknown: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:
    """out (total_q, Hq, Dv) of packed q (total_q, Hq, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv).

    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as of `ca.Varlen`. With `return_attn_probs` lse (Hq,
    total_q). Other arguments as of `flash_attn_func`. Source: flash_attn.flash_attn_varlen_func, version 2.8.

    Raises: `UnsupportedOption` for block_table and for a window that is no pair, `UnknownKeyword`, and what `ca.Varlen`
    and `ca.attention` raise.
    """
    _refuse_keywords(unknown)
    if block_table is not None:
        raise UnsupportedOption("block_table is not taken here; keys in pages: ca.attention(..., paged=ca.Paged(...))")
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    varlen = Varlen(cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    got: Any = attention(
        q, k, v, varlen=varlen, return_lse=return_attn_probs, sinks=learnable_sink, backend=backend, **options
    )
    return (*got, None) if return_attn_probs else got


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, **options: Any) -> Any:
    """out (B, S, H, D) of q, k and v packed in one tensor (B, S, 3, H, D).

    Other arguments and errors as of `flash_attn_func`. Source: flash_attn.flash_attn_qkvpacked_func, version 2.8.
    """
    q, k, v = _packed("qkv", qkv, 3, "(B, S, 3, H, D)")
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **options: Any) -> Any:
    """out (B, Sq, Hq, D) of q (B, Sq, Hq, D), and k and v packed in one tensor (B, Skv, 2, Hkv, D).

    Other arguments and errors as of `flash_attn_func`. Source: flash_attn.flash_attn_kvpacked_func, version 2.8.
    """
    k, v = _packed("kv", kv, 2, "(B, Skv, 2, Hkv, D)")
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *args: Any, **options: Any
) -> Any:
    """out (total, H, D) of sequences whose q, k and v are packed in one tensor (total, 3, H, D).

    Other arguments and errors as of `flash_attn_varlen_func`. Source: flash_attn.flash_attn_varlen_qkvpacked_func,
    version 2.8.
    """
    q, k, v = _packed("qkv", qkv, 3, "(total, 3, H, D)")
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **options)


def flash_attn_varlen_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **options: Any) -> Any:
    """out (total_q, Hq, D) of q (total_q, Hq, D), and k and v packed in one tensor (total_k, 2, Hkv, D).

    Other arguments and errors as of `flash_attn_varlen_func`. Source: flash_attn.flash_attn_varlen_kvpacked_func,
    version 2.8.
    """
    k, v = _packed("kv", kv, 2, "(total_k, 2, Hkv, D)")
    return flash_attn_varlen_func(q, k, v, *args, **options)


def _packed(name: str, tensor: torch.Tensor, count: int, shape: str) -> tuple[torch.Tensor, ...]:
    """The parts of a tensor that are packed before its heads, as views. Raises: `WrongRank`, `ShapeMismatch`."""
    refuse_unreadable(name, tensor)
    if tensor.ndim != shape.count(",") + 1:
        raise WrongRank(f"{name} needs {shape}, got {tuple(tensor.shape)}")
    if tensor.shape[-3] != count:
        raise ShapeMismatch(
            f"{name} needs {shape}, got {tuple(tensor.shape)}: {count} tensors are packed before the heads"
        )
    return tensor.unbind(-3)


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int | None, int | None],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
) -> dict[str, Any]:
    """Keyword arguments of `ca.attention` that say what these of flash-attn say."""
    check_flag("causal", causal)
    check_flag("deterministic", deterministic)
    left, right = _window(window_size)
    end, is_capped = "bottom_right", not (softcap is None or (isinstance(softcap, (int, float)) and not softcap))
    window = None if left is None and right is None else sliding_window((left, right), align=end)
    biased = None if alibi_slopes is None else alibi(alibi_slopes, symmetric=True, align=end)
    return {
        "scale": softmax_scale,
        "mask_mod": joined(operator.and_, (causal_mask(align=end) if causal else None, window)),
        "score_mod": joined(operator.rshift, (soft_cap(softcap) if is_capped else None, biased)),
        "deterministic": deterministic or None,
        "dropout_p": dropout_p,
    }


def _window(sides: Any) -> tuple[int | None, int | None]:
    """Keys left and right, None all. Raises: `UnsupportedOption` for what is no pair."""
    if not isinstance(sides, (tuple, list)) or len(sides) != 2 or not all(isinstance(n, int | None) for n in sides):
        raise UnsupportedOption(
            f"window_size is {sides!r}; it must be (left, right), with -1 or None for all of a side"
        )
    left, right = (None if side is None or side < 0 else side for side in sides)
    return left, right


# arguments of later versions of flash-attn, and what says the same to composattn
_ELSEWHERE = {
    "seqused_q": "ca.attention(..., varlen=ca.Varlen(..., seqused_q=...))",
    "seqused_k": "ca.attention(..., varlen=ca.Varlen(..., seqused_k=...))",
    "block_table": "ca.attention(..., paged=ca.Paged(block_table, page_size, seqused))",
    "page_table": "ca.attention(..., paged=ca.Paged(page_table, page_size, seqused))",
    "attention_chunk": "ca.attention(..., mask_mod=ca.mods.chunked(...))",
    "score_mod": "ca.attention(..., score_mod=...)",
    "mask_mod": "ca.attention(..., mask_mod=...)",
    "q_descale": "ca.attention(..., q_scale=...)",
    "k_descale": "ca.attention(..., k_scale=...)",
    "v_descale": "ca.attention(..., v_scale=...)",
    "num_splits": "ca.attention(..., schedule=ca.Schedule(...))",
}


def _refuse_keywords(unknown: dict[str, Any]) -> None:
    """Raises `UnknownKeyword` for an argument that is given and not taken; flash-attn's None stands for none."""
    for name, given in unknown.items():
        if given is not None:
            way = _ELSEWHERE.get(name, "arguments are those of flash-attn 2.8, learnable_sink and backend")
            raise UnknownKeyword(f"{name} is not taken here; {way}")
