"""Queries, keys and values of 8 bits made of wide ones, so that little of the attention is lost.

A number of e4m3 has four significant bits, whatever its size: what costs accuracy are outliers, which make the scale of
all others large. A rotation of q and k by a Hadamard matrix leaves q·k as it is and spreads an outlier over all
channels (Shah et al. 2024, FlashAttention-3, section 3.3: incoherent processing). The mean of all keys is a number more
in each row of scores, which the softmax does not see (Zhang et al. 2024, SageAttention, section 4.2).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch

from . import errors
from .call.autograd import without_autocast
from .call.eight_bits import EIGHT_BITS, Quantized, narrowed, scale_for

Kind = Literal["head", "block", "token"]


class QuantizedInputs(NamedTuple):
    """q, k and v of 8 bits, for a call: `ca.attention(*ca.quantize(q, k, v))`."""

    q: Quantized
    k: Quantized
    v: Quantized


def quantize(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: Kind = "head",
    block: int = 64,
    hadamard: bool = True,
    center: bool = True,
    power_of_two: bool = True,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> QuantizedInputs:
    """q, k and v, as a call takes them, in 8 bits with their scales.

    Dense (B, H, S, D), or packed (total, H, D). Quantise after rotary embedding: the rotation mixes channels.

    scale: one for each sequence and "head" (of packed rows for each head alone), for each "block" of `block` rows (a
        power of two; dense ones only), or for each row, "token".
    hadamard: q and k are rotated together, in blocks of channels as large as the power of two that divides D: 32 of 96.
    center: k's mean over its rows is taken from it. Scores get it back before the score mod, as one number a query, so
        every mod, LSE and sinks are right.
    power_of_two: scales are powers of two, so that `dequantised` is exact in 16 bits; up to one bit of range is lost.
    dtype: float8_e4m3fn, or float8_e5m2, which has a bit less and needs no scale for its range.

    Gradients of a call go straight through the rounding to q, k and v.

    Raises: `NotATensor`, `WrongRank`, `UnsupportedDType`, `UnsupportedHeadDim`, `UnsupportedBlockSize`,
    `UnsupportedOption`.
    """
    _check({"q": q, "k": k, "v": v}, scale, block, dtype)
    if hadamard and q.shape[-1] % 2:
        raise errors.UnsupportedHeadDim(
            f"hadamard=True rotates pairs of channels at least, D is {q.shape[-1]}; pass hadamard=False"
        )
    form = _Form(scale, block, power_of_two, dtype)
    return without_autocast(q, _quantized, (q, k, v), form, hadamard, center)


class _Form(NamedTuple):
    """What tensors are rounded to."""

    kind: Kind
    block: int
    power_of_two: bool
    dtype: torch.dtype

    def of(self, given: torch.Tensor, x: torch.Tensor) -> Quantized:
        """`x`, which was made of `given`."""
        learns, x_here = torch.is_grad_enabled() and given.requires_grad, x.detach()
        scale = of_rows = self.scales(x_here)
        if self.kind == "block":
            of_rows = scale.repeat_interleave(self.block, 2)[:, :, : x.shape[2]]
        if self.kind == "head" and x.ndim == 3:
            scale = scale.transpose(0, 1).unsqueeze(0)  # (1, H, 1, 1), which can mean nothing but heads
        data = narrowed(x_here / of_rows, self.dtype)
        return Quantized(data, scale, wide=x if learns else None, dtype=given.dtype)

    def scales(self, x: torch.Tensor) -> torch.Tensor:
        """(B, H, 1, 1), (B, H, blocks, 1) or (B, H, S, 1); of packed rows (1, H, 1) or (total, H, 1)."""
        largest = x.abs().amax(-1, keepdim=True)
        if self.kind == "head":
            largest = largest.amax(-2 if x.ndim == 4 else 0, keepdim=True)
        if self.kind == "block":
            rows = torch.nn.functional.pad(largest, (0, 0, 0, -x.shape[2] % self.block))
            largest = rows.unflatten(2, (-1, self.block)).amax(3)
        return scale_for(largest, self.dtype, self.power_of_two)


def _quantized(
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor], form: _Form, hadamard: bool, center: bool
) -> QuantizedInputs:
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in given)
    if hadamard:
        q, k = _rotated(q), _rotated(k)
    mean = None
    if center:
        mean = k.detach().mean(-2 if k.ndim == 4 else 0, keepdim=True)
        k = k - mean
        mean = mean if k.ndim == 4 else mean.transpose(0, 1).unsqueeze(0)
    of_q, of_k, of_v = (form.of(*each) for each in zip(given, (q, k, v), strict=True))
    return QuantizedInputs(of_q, of_k._replace(mean=mean), of_v)


def _check(tensors: dict[str, torch.Tensor], scale: str, block: int, dtype: torch.dtype) -> None:
    for name, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            raise errors.NotATensor(f"{name} is a {type(t).__name__}; pass a torch.Tensor")
        if t.ndim not in (3, 4):
            raise errors.WrongRank(
                f"{name} has shape {tuple(t.shape)}; it must be (B, H, S, D), or packed (total, H, D)"
            )
        if not t.is_floating_point() or t.dtype.itemsize == 1:
            raise errors.UnsupportedDType(f"{name} is {t.dtype}; quantise floats of 16 bits or more")
        if scale == "block" and t.ndim == 3:
            raise errors.UnsupportedOption('blocks of packed rows would cross sequences; pass scale="token" or "head"')
    if scale not in ("head", "block", "token"):
        raise errors.UnsupportedOption(f'scale is {scale!r}; it must be "head", "block" or "token"')
    if not isinstance(block, int) or block < 2 or block & (block - 1):
        raise errors.UnsupportedBlockSize(f"block is {block!r}; it must be a power of two from 2 on")
    if dtype not in EIGHT_BITS:
        raise errors.UnsupportedDType(f"dtype is {dtype}; it must be one of {', '.join(map(str, EIGHT_BITS))}")


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """`x` times an orthogonal matrix along its last dimension: signs, then Hadamard's, in blocks of a power of two."""
    size = x.shape[-1] & -x.shape[-1]
    matrix = torch.ones(1, 1, dtype=x.dtype, device=x.device)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    # signs of a bent function: what all channels share is spread too, where Hadamard's matrix alone has it in one
    signs = [1 - 2 * (bin(i & i >> 1 & 0x5555).count("1") % 2) for i in range(size)]
    matrix = torch.tensor(signs, dtype=x.dtype, device=x.device)[:, None] * matrix / math.sqrt(size)
    return (x.unflatten(-1, (-1, size)) @ matrix).flatten(-2)
