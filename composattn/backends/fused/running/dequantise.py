"""Keys and values of 8 bits as 16-bit tensors, by one kernel that reads and writes each number once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ....call.eight_bits import EIGHT_BITS
from ..planning.arguments import DequantiseArguments
from ..planning.plan_dequantise import DequantisePlan
from ..tiles.target import Target

PIECE = 8  # numbers, and bytes, that a thread reads at once


def dequantised(
    k: torch.Tensor, v: torch.Tensor, target: Target, dtype: torch.dtype, kernel_of: Callable[[Any], Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v in 16 bits, laid out as they are. PyTorch casts what lies with gaps in memory.

    `kernel_of`: what makes a kernel of a plan.
    """
    if not (_is_whole(k) and _is_whole(v)):
        return k.to(dtype), v.to(dtype)
    wide_k, wide_v = (torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device) for x in (k, v))
    given = DequantiseArguments(*(x.as_strided((x.numel(),), (1,)) for x in (k, v, wide_k, wide_v)))
    _kernel(target, dtype, k.dtype, v.dtype, kernel_of)(*given)
    return wide_k, wide_v


def _is_whole(x: torch.Tensor) -> bool:
    """Whether a tensor of 8 bits fills the memory from its first to its last number, in whole pieces."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.dtype in EIGHT_BITS and extent == x.numel() and not (x.numel() | x.data_ptr()) % PIECE


@functools.lru_cache(maxsize=64)
def _kernel(
    target: Target, dtype: torch.dtype, of_keys: torch.dtype, of_values: torch.dtype, kernel_of: Callable[[Any], Any]
) -> Callable[..., Any]:
    """The kernel for these types, found without its key, which takes longer than a launch."""
    return kernel_of(DequantisePlan(target=target, dtype=dtype, of_keys=of_keys, of_values=of_values))  # type: ignore[no-any-return]
