"""`ca.quantize` on GPUs: which calls its kernels take, and their launch."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ....call.eight_bits import Rounding
from ..compiling.compile import compile_plan
from ..planning.arguments import QuantiseArguments, QuantisedTensor
from ..planning.plan_around import QuantisePlan, rows_at_once
from ..tiles.architecture import ARCHITECTURES
from ..tiles.target import TARGETS, Target
from .bulk import tidy

ROWS = 64  # of a block of threads, where rows that share a scale do not say how many
SMALLEST_BLOCK = 16

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Rounded(NamedTuple):
    """Data of 8 bits and scales (B, H, groups, 1) of q, k and v; the mean that was taken from k, rotated as k is."""

    data: Tensors
    scales: Tensors
    mean: torch.Tensor | None


def target_of(tensors: Tensors, how: Rounding) -> Target | None:
    """Whose kernels take tensors (B, H, S, D); None where PyTorch has to."""
    q, k, v = tensors
    if q.device.type != "cuda" or not serves(q, v, how):
        return None
    target = TARGETS.get(torch.cuda.get_device_capability(q.device))
    if target is None or not ARCHITECTURES[target.backend].ran or importlib.util.find_spec("cutlass") is None:
        return None
    alike = all(x.device == q.device and x.dtype == q.dtype and x.shape[0] == q.shape[0] for x in (k, v))
    lie_well = all(x.numel() and tidy(x) is not None for x in tensors)
    return target if alike and lie_well and k.shape[-1] == q.shape[-1] else None


def serves(q: torch.Tensor, v: torch.Tensor, how: Rounding) -> bool:
    """Whether there are kernels for such types, channels and scales."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return False
    most = rows_at_once(q.shape[-1], v.shape[-1])
    if how.scale == "block":
        return SMALLEST_BLOCK <= how.block <= most
    # of a head, the least error of four mantissas would take a pass more over all rows
    return most > 0 and (how.power_of_two or how.scale != "head")


def rounded(
    tensors: Tensors,
    mean: torch.Tensor | None,
    how: Rounding,
    target: Target,
    kernel_of: Callable[[Any], Callable[..., Any]] = compile_plan,
) -> Rounded:
    """q (B, Hq, Sq, D), k (B, Hkv, Skv, D) and v (B, Hkv, Skv, Dv), of which `target_of` says whose kernels take them.

    mean: (B, Hkv, 1, D) fp32, taken from k before all else.
    """
    given = [tidy(x) for x in tensors]
    q, k, v = (x for x in given if x is not None)
    if q.is_cuda and q.get_device() != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return rounded(tensors, mean, how, target, kernel_of)
    rows = how.block if how.scale == "block" else min(ROWS, rows_at_once(q.shape[-1], v.shape[-1]))
    plan = QuantisePlan(
        target=target, dtype=q.dtype, head_dim=q.shape[-1], head_dim_v=v.shape[-1], to=how.dtype, scale=how.scale,
        rows=rows, hadamard=how.hadamard, center=mean is not None, power_of_two=how.power_of_two,
    )  # fmt: skip
    of_q, of_k, of_v = (QuantisedTensor(x, None, None, None) for x in (q, k, v))
    if how.scale == "head":
        of_q, of_k, of_v = (_with_largest(x) for x in (of_q, of_k, of_v))
        largest = _kernel(dataclasses.replace(plan, finds_largest=True), kernel_of)
        largest(*QuantiseArguments(of_q, of_k, of_v, mean, None))
    of_q, of_k, of_v = (_with_results(x, how) for x in (of_q, of_k, of_v))
    turned = torch.empty_like(mean) if mean is not None and how.hadamard else None
    _kernel(plan, kernel_of)(*QuantiseArguments(of_q, of_k, of_v, mean, turned))
    data = of_q.data.view(how.dtype), of_k.data.view(how.dtype), of_v.data.view(how.dtype)
    return Rounded(data, (of_q.scale, of_k.scale, of_v.scale), mean if turned is None else turned)


def _with_largest(x: QuantisedTensor) -> QuantisedTensor:
    """With a place for the largest number of each head."""
    return x._replace(largest=x.given.new_zeros((*x.given.shape[:2], 1), dtype=torch.int32))


def _with_results(x: QuantisedTensor, how: Rounding) -> QuantisedTensor:
    """With places for 8 bits and scales."""
    *sequences, length, _ = x.given.shape
    scale = x.given.new_empty((*sequences, _scales(length, how), 1), dtype=torch.float32)
    return x._replace(data=torch.empty_like(x.given, dtype=torch.uint8), scale=scale)


def _scales(length: int, how: Rounding) -> int:
    """Scales of so many rows."""
    return {"head": 1, "block": -(-length // how.block), "token": length}[how.scale]


@functools.lru_cache(maxsize=64)
def _kernel(plan: QuantisePlan, kernel_of: Callable[[Any], Any]) -> Any:
    """A plan's kernel, found without its key, which takes longer than a launch."""
    return kernel_of(plan)
