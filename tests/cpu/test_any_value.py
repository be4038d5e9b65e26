"""Any value as any argument of the public functions: taken, or refused by an error of ours, not of Python or torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import composattn as ca
from composattn import errors, mods
from composattn.integrations import flash_attn, sdpa

VALUES: list[Any] = [
    None, "a", b"x", 1.5, -1, 0, 2**70, float("nan"), True, 1j, [1], (), {}, range(3), object(), lambda: 0,
    np.float32(2), np.int64(3), Fraction(1, 2), Decimal(1), torch.tensor(1.5), torch.randn(2, 2), torch.tensor([1, 2]),
    torch.zeros(0), torch.tensor([1j]), torch.nn.UninitializedParameter(), torch.sparse_coo_tensor(size=(2, 2)),
    torch.empty(2, device="meta"),
]  # fmt: skip
Q = torch.randn(1, 1, 16, 8)
TILES, PICKED = torch.ones(1, 1, 1, 1, dtype=torch.bool), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
CAUSAL, ALIBI = mods.causal(), mods.alibi(torch.ones(2))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def packed(varlen: Any) -> Any:
    rows = Q[0].transpose(0, 1)
    return ca.attention(rows, rows, rows, varlen=varlen)


def scored(mod: Callable[..., Any]) -> Any:
    return ca.attention(Q, Q, Q, score_mod=mod)


def appended(*given: Any, **named: Any) -> Any:
    return ca.Paged(int32(0)[None], 16, int32(4)).append(*given, **named)


Q8, PAGES, ROWS = Q.to(torch.float8_e4m3fn), torch.zeros(1, 1, 16, 8), torch.ones(1, 1, 2, 8)
GRID = {"block": 16, "q_len": 16, "kv_len": 16}
FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    # name: (function, good arguments); each argument is replaced in turn
    "attention": (
        ca.attention,
        {
            "q": Q,
            "k": Q,
            "v": Q,
            "score_mod": None,
            "mask_mod": None,
            "scale": None,
            "backend": None,
            "deterministic": None,
            "varlen": None,
            "paged": None,
            "schedule": None,
        },
    ),
    "flex_attention": (
        ca.flex_attention,
        {"query": Q, "key": Q, "value": Q, "score_mod": None, "block_mask": None, "scale": None},
    ),
    "BlockSparse": (ca.BlockSparse, {"tiles": TILES, "block": 16, "partial": None}),
    "topk": (ca.BlockSparse.topk, {"indices": PICKED, **GRID}),
    "from_csr": (ca.BlockSparse.from_csr, {"indptr": int32(0, 1), "indices": int32(0), **GRID}),
    "from_coo": (ca.BlockSparse.from_coo, {"rows": int32(0), "columns": int32(0), **GRID}),
    "from_block_mask": (ca.BlockSparse.from_block_mask, {"block_mask": None}),
    "Varlen": (
        ca.Varlen,
        {
            "cu_seqlens_q": int32(0, 4),
            "cu_seqlens_k": None,
            "seqused_q": None,
            "seqused_k": None,
            "max_seqlen_q": None,
            "max_seqlen_k": None,
        },
    ),
    "Varlen of a call": (packed, {"varlen": None}),
    "options of a call": (
        lambda **given: ca.attention(Q, Q, Q, **given),
        {
            "return_lse": False,
            "return_max_scores": False,
            "sinks": None,
            "dropout_p": 0.0,
            "dropout_seed": None,
            "context_parallel": None,
        },
    ),
    "a call of 8 bits": (
        ca.attention,
        {"q": Q8, "k": Q8, "v": Q8, "q_scale": 1.0, "k_scale": None, "v_scale": None, "out_dtype": None},
    ),
    "Quantized of a call": (
        lambda **given: ca.attention(Q, ca.Quantized(**given), Q8, return_lse=True),
        {"data": Q8, "scale": None, "mean": None, "wide": None, "dtype": torch.bfloat16},
    ),
    "dequantised": (
        lambda dtype, **given: ca.Quantized(**given).dequantised(dtype),
        {"dtype": torch.float32, "data": Q8, "scale": None},
    ),
    "quantize": (
        ca.quantize,
        {
            "q": Q,
            "k": Q,
            "v": Q,
            "scale": "head",
            "block": 64,
            "hadamard": True,
            "center": True,
            "power_of_two": True,
            "dtype": Q8.dtype,
        },
    ),
    "append": (appended, {"k_cache": PAGES, "v_cache": PAGES, "k": ROWS, "v": ROWS, "varlen": None}),
    "append to 8 bits": (
        lambda scale: appended(ca.Quantized(PAGES.to(Q8.dtype), scale), PAGES, ROWS, ROWS),
        {"scale": None},
    ),
    "merge_states": (ca.merge_states, {"parts": [(Q, Q[..., 0])]}),
    "a part that is merged": (lambda out, lse: ca.merge_states([(out, lse)]), {"out": Q, "lse": Q[..., 0]}),
    "attention_weights": (
        ca.attention_weights,
        {"q": Q, "k": Q, "rows": [0], "score_mod": None, "mask_mod": None, "sinks": None, "scale": None},
    ),
    "explain": (ca.Attention().explain, {"q": Q, "k": Q, "v": Q, "varlen": None, "paged": None, "emulate": False}),
    "named": (CAUSAL.named, {"name": "mine"}),
    "shifted": (CAUSAL.shifted, {"b": None, "h": None, "q": None, "kv": None}),
    ".to": (ca.Varlen(int32(0, 4)).to, {"device": "cpu"}),
    "scaled_dot_product_attention": (
        sdpa.scaled_dot_product_attention,
        {
            "query": Q,
            "key": Q,
            "value": Q,
            "attn_mask": None,
            "dropout_p": 0.0,
            "is_causal": False,
            "scale": None,
            "enable_gqa": False,
        },
    ),
    "flash_attn_func": (
        flash_attn.flash_attn_func,
        {
            "q": Q,
            "k": Q,
            "v": Q,
            "dropout_p": 0.0,
            "softmax_scale": None,
            "causal": False,
            "window_size": (-1, -1),
            "softcap": 0.0,
            "alibi_slopes": None,
            "deterministic": False,
            "return_attn_probs": False,
            "learnable_sink": None,
        },
    ),
    "Paged": (ca.Paged, {"page_table": int32(0)[None], "page_size": 16, "seqused": int32(4)}),
    "Schedule": (ca.Schedule, dict.fromkeys(inspect.signature(ca.Schedule).parameters, None)),
    "Mask": (ca.Mask, {"mod": CAUSAL}),
    "Score": (ca.Score, {"mod": ALIBI}),
    "scalar": (ca.scalar, {"value": 1}),
    "value of a scalar": (lambda value: setattr(ca.scalar(2), "value", value), {"value": 1}),
    "a mask at positions": (CAUSAL, {"b": 0, "h": 0, "q_idx": 1, "kv_idx": 2, "q_len": 4, "kv_len": 4}),
    "a score at positions": (ALIBI, {"score": 1.0, "b": 0, "h": 0, "q_idx": 1, "kv_idx": 2}),
    "dense": (CAUSAL.dense, {"q_len": 4, "kv_len": 4, "batch": 1, "heads": 1, "device": None}),
    "tiles": (
        CAUSAL.tiles,
        {"q_len": 4, "kv_len": 4, "tile": (4, 4), "batch": 1, "heads": 1, "refine": False, "device": None},
    ),
    "&": (lambda x: CAUSAL & x, {"x": CAUSAL}),
    "|": (lambda x: x | CAUSAL, {"x": CAUSAL}),
    ">>": (lambda x: ALIBI >> x, {"x": ALIBI}),
    "+": (lambda x: x + ALIBI, {"x": ALIBI}),
    "captured": (lambda x: scored(lambda s, b, h, q, kv: s + x), {"x": 1.0}),
    "captured and read": (lambda x: scored(lambda s, b, h, q, kv: s + x[h]), {"x": torch.ones(1)}),
    "captured in a mask": (
        lambda x: ca.attention(Q, Q, Q, mask_mod=lambda b, h, q, kv: x[q] > x[kv]),
        {"x": torch.ones(16)},
    ),
    "an index": (lambda x: scored(lambda s, b, h, q, kv: s + torch.ones(4)[x]), {"x": 0}),
    "a branch": (lambda x: scored(lambda s, b, h, q, kv: torch.where(q > kv, s, x)), {"x": 1.0}),
    "a dimension": (lambda x: scored(lambda s, b, h, q, kv: s + torch.ones(4).sum(x)), {"x": -1}),
    **{
        f"mods.{name}": (fn, {p: 2 if d.default is d.empty else d.default for p, d in parameters.items()})
        for name, fn in inspect.getmembers(mods, inspect.isfunction)
        if (parameters := inspect.signature(fn).parameters)
    },
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_value_is_taken_or_refused_by_name(name: str) -> None:
    function, good = FUNCTIONS[name]
    unnamed = []
    for argument in good:
        for value in VALUES:
            try:
                function(**{**good, argument: value})
            except errors.ComposattnError:
                pass
            except Exception as error:
                unnamed.append(f"{argument}={value!r:.30}: {type(error).__name__} {error!s:.80}")
    assert not unnamed, "\n".join(unnamed)
