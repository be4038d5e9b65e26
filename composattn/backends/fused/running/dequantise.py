"""Keys and values of 8 bits as 16-bit tensors, by one kernel that reads and writes each number once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ....call.eight_bits import EIGHT_BITS
from ..planning.arguments import DequantiseArguments
from ..planning.plan_around import DequantisePlan
from ..tiles.architecture import architecture_of
from ..tiles.target import Target

PIECE = 8  # numbers, and bytes, that a thread reads at once


def dequantised(
    k: torch.Tensor, v: torch.Tensor, target: Target, dtype: torch.dtype, kernel_of: Callable[[Any], Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v in 16 bits, laid out as they are.

    PyTorch casts what lies with gaps in memory, or has a number twice, and for kernels that read no bytes.

    `kernel_of`: what makes a kernel of a plan.
    """
    if not (architecture_of(target).reads_eight_bits and _is_whole(k) and _is_whole(v)):
        return k.to(dtype), v.to(dtype)
    wide_k, wide_v = torch.empty_like(k, dtype=dtype), torch.empty_like(v, dtype=dtype)
    kernel = _kernel(target, dtype, k.dtype, v.dtype, k.ndim, kernel_of)
    kernel(*DequantiseArguments(k, v, wide_k, wide_v))
    return wide_k, wide_v


def _is_whole(x: torch.Tensor) -> bool:
    """Whether a tensor of 8 bits has each number of a range of memory once, in whole pieces."""
    whole = x.is_contiguous() or _is_permuted(x)
    return whole and x.dtype in EIGHT_BITS and not (x.numel() | x.data_ptr()) % PIECE


def _is_permuted(x: torch.Tensor) -> bool:
    """Whether it would be contiguous with its dimensions in another order."""
    below = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1 and stride != below:
            return False
        below *= size
    return True


@functools.lru_cache(maxsize=64)
def _kernel(
    target: Target,
    dtype: torch.dtype,
    of_keys: torch.dtype,
    of_values: torch.dtype,
    rank: int,
    kernel_of: Callable[[Any], Any],
) -> Callable[..., Any]:
    """The kernel for these types, found without its key, which takes longer than a launch."""
    plan = DequantisePlan(target=target, dtype=dtype, of_keys=of_keys, of_values=of_values, rank=rank)
    return kernel_of(plan)  # type: ignore[no-any-return]
