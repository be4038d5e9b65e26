"""A call made of its shape alone, in any layout: what the command line explains and compiles."""

from __future__ import annotations

import torch

from .call.inputs import Inputs
from .call.sequences import Paged, Varlen

Shape = tuple[int, int, int, int, int, int, int]  # B, Hq, Hkv, Sq, Skv, D, Dv


def shaped(
    shape: Shape,
    dtype: torch.dtype,
    device: str,
    *,
    varlen: bool = False,
    seqused: bool = False,
    page_size: int | None = None,
) -> Inputs:
    """q, k and v, whose memory is reserved and never touched: B sequences of Sq queries and Skv keys.

    `varlen` packs them, `seqused` says besides how many rows of each are used, `page_size` puts keys into pages.
    Raises: `UnsupportedPageSize`; RuntimeError where there is no such memory.
    """
    batch, heads, kv_heads, q_len, kv_len, dim, v_dim = shape

    def rows(heads: int, length: int, dim: int) -> torch.Tensor:
        sizes = (batch * length, heads, dim) if varlen else (batch, heads, length, dim)
        return torch.empty(sizes, dtype=dtype, device=device)

    def all_of(length: int) -> torch.Tensor:
        return torch.full((batch,), length, dtype=torch.int32, device=device)

    def ends(length: int) -> torch.Tensor:
        return torch.arange(batch + 1, dtype=torch.int32, device=device) * length

    q = rows(heads, q_len, dim)
    if page_size is None:
        k, v, paged = rows(kv_heads, kv_len, dim), rows(kv_heads, kv_len, v_dim), None
    else:
        each = -(-kv_len // page_size)
        table = torch.arange(batch * each, dtype=torch.int32, device=device).view(batch, each)
        paged = Paged(table, page_size, all_of(kv_len))
        k, v = (torch.empty(batch * each, kv_heads, page_size, d, dtype=dtype, device=device) for d in (dim, v_dim))
    if not varlen:
        return Inputs(q, k, v, None, paged)
    packed = Varlen(
        ends(q_len),
        ends(kv_len) if paged is None else None,
        seqused_q=all_of(q_len) if seqused else None,
        seqused_k=all_of(kv_len) if seqused and paged is None else None,
    )
    return Inputs(q, k, v, packed, paged)
