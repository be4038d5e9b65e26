"""A drop-in for `torch.nn.attention.flex_attention.flex_attention`: same arguments, one import changed."""

from __future__ import annotations

import warnings
import weakref
from functools import partial
from typing import Any

import torch

from . import errors
from .api import attention
from .block_sparse import TESTED, VISIBLE, BlockSparse, Table
from .graph.evaluate import Env, evaluate
from .graph.expr import Dep, Expr
from .graph.mask import Mask

_PAIRS_AT_ONCE = 1 << 24  # elements of a dense mask that are looked at together: 16 MiB of bools


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
    backend: str | None = None,
) -> Any:
    """`flex_attention` of torch 2.11-2.13, on our backends; needs no torch.compile.

    query (B, Hq, Sq, D), key (B|1, Hkv, Skv, D), value (B|1, Hkv, Skv, Dv). `block_mask` is torch's `BlockMask`: its
    mask_mod is traced and its block lists are honoured as torch's compiled kernel does (a listed full block is
    visible whole, a listed partial block by the mask_mod, others not at all). Returns out, or (out, lse) with
    `return_lse`, or (out, AuxOutput) with `return_aux`.

    Raises: what `Attention` raises; `GroupMismatch` for unequal head counts without `enable_gqa`;
    `BlockMaskMismatch`; `UnsupportedOption` for `return_aux.max_scores`. `kernel_options` tune torch's kernels; here
    they have no effect and warn.
    """
    if kernel_options:
        warnings.warn(
            f"kernel_options {sorted(kernel_options)} tune torch's kernels and have no effect here", stacklevel=2
        )
    if return_aux is not None and getattr(return_aux, "max_scores", False):
        raise errors.UnsupportedOption("return_aux=AuxRequest(max_scores=True) is not computed; lse is available")
    if isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and query.ndim == key.ndim == 4:
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise errors.GroupMismatch(
                f"{query.shape[1]} query heads and {key.shape[1]} key/value heads; pass enable_gqa=True to share heads"
            )
        if key.shape[0] == 1 and query.shape[0] > 1:
            key, value = key.expand(query.shape[0], -1, -1, -1), value.expand(query.shape[0], -1, -1, -1)
    mask = None if block_mask is None else mask_of(block_mask, query, key)
    attend = partial(attention, score_mod=score_mod, mask_mod=mask, scale=scale, backend=backend)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        out, lse = attend(query, key, value, return_lse=True)
        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
    return attend(query, key, value, return_lse=return_lse)


# --- torch's BlockMask as a Mask --------------------------------------------------------------------------------

_known: weakref.WeakKeyDictionary[Any, Mask] = weakref.WeakKeyDictionary()


def mask_of(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> Mask:
    """The mask that a torch `BlockMask` means: its mask_mod where its lists add nothing, else both together.

    Whether they do is found out once per BlockMask, at about the cost of having made it.
    """
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        raise errors.BlockMaskMismatch(
            f"block_mask is a {type(block_mask).__name__}; pass torch's BlockMask, or a mask_mod to ca.attention"
        )
    _check_extent(block_mask, query, key)
    if torch.compiler.is_compiling():
        return BlockSparse.from_block_mask(block_mask)  # looking at the lists would wait for them
    if block_mask not in _known:
        _known[block_mask] = _build(block_mask)
    return _known[block_mask]


def _check_extent(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> None:
    lengths = (query.shape[2], key.shape[2])
    if tuple(block_mask.seq_lengths) != lengths:
        raise errors.BlockMaskMismatch(
            f"block_mask was made for lengths {tuple(block_mask.seq_lengths)}, q and k have {lengths}; "
            "make it anew with create_block_mask, or pass its mask_mod to ca.attention, which needs no lengths"
        )
    for name, made, given in zip(("batch", "heads"), block_mask.kv_num_blocks.shape[:2], query.shape[:2], strict=True):
        if made not in (1, given):
            raise errors.BlockMaskMismatch(f"block_mask is for {name} {made}, q has {given}; make it for that or 1")


def _build(block_mask: Any) -> Mask:
    inner = Mask.of(block_mask.mask_mod)
    listed = BlockSparse.from_block_mask(block_mask, inner)
    return inner if _lists_add_nothing(inner.expr, listed.table, block_mask) else listed


def _lists_add_nothing(mask: Expr, table: Table, block_mask: Any) -> bool:
    """Whether the lists say just what the mask says: nothing visible in unlisted blocks, full blocks full."""
    kinds = table.tensor
    if (mask.deps & Dep.B and kinds.shape[0] == 1) or (mask.deps & Dep.H and kinds.shape[1] == 1):
        return False  # one list for all heads (batches), made from the first one's mask
    q_len, kv_len = block_mask.seq_lengths
    rows, columns = table.block
    device = kinds.device
    kv = torch.arange(kv_len, device=device)
    chunk = max(1, _PAIRS_AT_ONCE // max(1, kv_len * kinds.shape[0] * kinds.shape[1]))
    at = {
        "b": torch.arange(kinds.shape[0], device=device).view(-1, 1, 1, 1),
        "h": torch.arange(kinds.shape[1], device=device).view(1, -1, 1, 1),
    }
    for start in range(0, q_len, chunk):
        q = torch.arange(start, min(start + chunk, q_len), device=device)
        index = {**at, "q": q.view(-1, 1), "kv": kv, "q_len": q_len, "kv_len": kv_len}
        visible = evaluate(mask, Env(index=index, device=device))
        kind = kinds[:, :, q // rows][..., kv // columns]
        listed = torch.where(kind == VISIBLE, True, (kind == TESTED) & visible)
        if bool((listed != visible).any()):
            return False
    return True
