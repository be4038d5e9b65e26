"""Queries, keys and values of 8 bits made of wide ones, so that little of the attention is lost.

A number of e4m3 has four significant bits, whatever its size: what costs accuracy are outliers, which make the scale of
all others large. A rotation of q and k by a Hadamard matrix leaves q·k as it is and spreads an outlier over all
channels (Shah et al. 2024, FlashAttention-3, section 3.3: incoherent processing). The mean of all keys is a number more
in each row of scores, which the softmax does not see (Zhang et al. 2024, SageAttention, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import errors
from .backends.fused.running.quantise import Rounded, rounded, target_of
from .call.autograd import without_autocast
from .call.checks import check_flag
from .call.eight_bits import EIGHT_BITS, MANTISSAS, Quantized, Rounding, narrowed, scale_for
from .call.problem import check_on_one_device, refuse_unreadable
from .dispatch.transforms import active as transforms_active
from .graph.dynamo import dispatch_modes, function_modes
from .graph.foreign import in_memory
from .graph.sizes import differ, surely

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
        With scale="head" the lengths of their rows are 1e-19 to 1e19, as squares of others leave fp32, unsaid: give
        such ones "token", or hadamard=False.
    center: k's mean, of 1,024 rows or more, is taken from it. Scores get it back before the score mod, as one number a
        query, so every mod, LSE and sinks are right.
    power_of_two: scales are powers of two. False: 1, 1.25, 1.5 or 1.75 times one, by which of these the numbers that
        share the scale are rounded best. `dequantised` is exact in 16 bits by either.
    dtype: float8_e4m3fn, or float8_e5m2, which has a bit less and needs no scale for its range.

    One kernel computes it on GPUs whose kernels ran, of 16-bit rows of whole 8 channels; a second one before it finds
    the largest number where heads share a scale. PyTorch computes the same bits elsewhere, where a tensor learns, in
    compiled code, of blocks below 16 rows or too many, and of scale="head" with power_of_two=False.

    Gradients of a call go straight through the rounding to q, k and v.

    Source: Shah et al. 2024, FlashAttention-3, "Low-precision with FP8": scales of blocks, and the rotation.

    Raises: `NotATensor`, `UnsupportedLayout`, `WrongRank`, `ShapeMismatch`, `EmptyDimension`, `DeviceMismatch`,
    `UnsupportedDType`, `UnsupportedHeadDim`, `UnsupportedBlockSize`, `UnsupportedOption`.
    """
    how = Rounding(scale, block, hadamard, center, power_of_two, dtype)
    _check_options(how)
    _check_tensors({"q": q, "k": k, "v": v}, scale == "block", hadamard)
    return without_autocast(q, _quantized, (q, k, v), how)


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
MEAN_OF = 1024


def _quantized(given: Tensors, how: Rounding) -> QuantizedInputs:
    mean = None
    if how.center:
        mean = _mean(given[1].detach())
    if not _is_followed(given):
        q, k, v = (in_memory(_by_head(x)) for x in given)
        target = target_of((q, k, v), how)
        if target is not None:
            found = rounded((q, k, v), None if mean is None else _by_head(mean), how, target)
            return _of_kernels(given, how, found)
    return _of_torch(given, mean, how)


def _mean(k: torch.Tensor) -> torch.Tensor:
    """The mean of `MEAN_OF` rows or some more of each head, evenly spaced: (B, H, 1, D), or (1, H, D) of packed rows.

    Whatever is taken from all keys is put back exactly: this is as good as the mean of all, of which torch takes 40 µs
    for 16k rows of 16 heads (H200), a third of what else there is to do.
    """
    dim = -2 if k.ndim == 4 else 0
    every = max(1, k.shape[dim] // MEAN_OF)
    some = k[:, :, ::every] if k.ndim == 4 else k[::every]
    return some.mean(dim, keepdim=True, dtype=torch.promote_types(k.dtype, torch.float32))


def _is_followed(given: Tensors) -> bool:
    """Whether torch has to see each operation, as it compiles, differentiates or writes down what is done."""
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    if torch.compiler.is_compiling() or learns or transforms_active():
        return True
    return bool(function_modes() or dispatch_modes()) or any(isinstance(x, FakeTensor) for x in given)


def _of_kernels(given: Tensors, how: Rounding, found: Rounded) -> QuantizedInputs:
    """What the kernels have written, in the shapes of the call."""

    def packed_again(x: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        return written if x.ndim == 4 else written[0].transpose(0, 1)

    made = [
        Quantized(packed_again(x, data), scale if how.scale == "head" else packed_again(x, scale), dtype=x.dtype)
        for x, data, scale in zip(given, found.data, found.scales, strict=True)
    ]
    q, k = (x._replace(rotated=how.hadamard) for x in made[:2])
    return QuantizedInputs(q, k._replace(mean=found.mean), made[2])


def _by_head(x: torch.Tensor) -> torch.Tensor:
    """(B, H, S, D) of packed rows (total, H, D), which are one sequence then."""
    return x if x.ndim == 4 else x.transpose(0, 1).unsqueeze(0)


def _of_torch(given: Tensors, mean: torch.Tensor | None, how: Rounding) -> QuantizedInputs:
    """What the kernels compute, bit for bit, by operations of torch."""
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in given)
    if mean is not None:
        k = k - mean
    if how.hadamard:
        signs = signs_of(q.shape[-1], q.device)
        q, k = rotated(q, signs), rotated(k, signs)
        mean = None if mean is None else rotated(mean, signs)
    turned = how.hadamard, how.hadamard, False
    of_q, of_k, of_v = (_narrow(*of, how) for of in zip(given, (q, k, v), turned, strict=True))
    return QuantizedInputs(of_q, of_k._replace(mean=None if mean is None else _by_head(mean)), of_v)


def _narrow(given: torch.Tensor, x: torch.Tensor, turned: bool, how: Rounding) -> Quantized:
    """`x`, which was made of `given`, in 8 bits; `turned`: its rows were rotated."""
    learns, x_here = torch.is_grad_enabled() and given.requires_grad, x.detach()
    scale = of_rows = _scales(x_here, turned, how)
    if how.scale == "block" and not surely(x.shape[2] <= how.block):
        of_rows = scale.repeat_interleave(how.block, 2)[:, :, : x.shape[2]]
    if how.scale == "head":
        scale = _by_head(scale)  # (1, H, 1, 1) of packed rows, which can mean nothing but heads
    data = narrowed(x_here * of_rows.reciprocal(), how.dtype)
    return Quantized(data, scale, wide=x if learns else None, dtype=given.dtype, rotated=turned)


def _scales(x: torch.Tensor, turned: bool, how: Rounding) -> torch.Tensor:
    """(B, H, 1, 1), (B, H, blocks, 1) or (B, H, S, 1); of packed rows (1, H, 1) or (total, H, 1).

    A head's fits numbers as large as its longest row, if rows are rotated: a kernel finds that with no rotation, and
    floats have room for what is lost. Else a scale fits the largest number.
    """
    by_length = turned and how.scale == "head"
    sizes = torch.linalg.vector_norm(x, dim=-1, keepdim=True) if by_length else x.abs()
    largest = _together(torch.amax, sizes, how)
    if how.power_of_two:
        return scale_for(largest, how.dtype)
    errors = [_together(torch.sum, rounding_error(x, m, how.dtype) ** 2, how) for m in MANTISSAS]
    mantissa = MANTISSAS[0] + torch.stack(errors).argmin(0).float() / len(MANTISSAS)
    return scale_for(largest * mantissa.reciprocal(), how.dtype) * mantissa


def _together(fold: Callable[..., torch.Tensor], x: torch.Tensor, how: Rounding) -> torch.Tensor:
    """`fold` of the numbers that share a scale, in the shape of `_scales`."""
    of_rows = fold(x, -1, keepdim=True)
    if how.scale == "head":
        dim = -2 if x.ndim == 4 else 0
        if surely(x.shape[dim] == 0):
            return x.new_zeros([1 if n == 0 else n for n in of_rows.shape])  # no row, which amax refuses
        return fold(of_rows, dim, keepdim=True)
    if how.scale == "block":
        if surely(x.shape[2] <= how.block):  # one block at most, however large it was asked for
            return fold(of_rows, 2, keepdim=True) if surely(x.shape[2] > 0) else of_rows
        rows = torch.nn.functional.pad(of_rows, (0, 0, 0, -x.shape[2] % how.block))
        return fold(rows.unflatten(2, (-1, how.block)), 3)
    return of_rows


def _check_tensors(tensors: dict[str, torch.Tensor], by_block: bool, rotates: bool) -> None:
    for name, t in tensors.items():
        refuse_unreadable(name, t)
        if t.ndim not in (3, 4):
            raise errors.WrongRank(
                f"{name} has shape {tuple(t.shape)}; it must be (B, H, S, D), or packed (total, H, D)"
            )
        if not t.is_floating_point() or t.dtype.itemsize == 1:
            raise errors.UnsupportedDType(f"{name} is {t.dtype}; quantise floats of 16 bits or more")
        if by_block and t.ndim == 3:
            raise errors.UnsupportedOption('blocks of packed rows would cross sequences; pass scale="token" or "head"')
    check_on_one_device(tensors)
    head_dim, of_k = (tensors[name].shape[-1] for name in "qk")
    if differ(head_dim, of_k):
        raise errors.ShapeMismatch(f"q and k must have the same head dimension, got {head_dim} and {of_k}")
    if surely(head_dim == 0):
        raise errors.EmptyDimension(f"q has shape {tuple(tensors['q'].shape)}; only the length may be zero")
    if rotates and head_dim % 2:
        raise errors.UnsupportedHeadDim(
            f"hadamard=True rotates pairs of channels at least, D is {head_dim}; pass hadamard=False"
        )


def _check_options(how: Rounding) -> None:
    for name in ("hadamard", "center", "power_of_two"):
        check_flag(name, getattr(how, name))
    if not isinstance(how.scale, str) or how.scale not in ("head", "block", "token"):
        raise errors.UnsupportedOption(f'scale is {how.scale!r:.40}; it must be "head", "block" or "token"')
    block = how.block
    if not isinstance(block, int) or block < 2 or block & (block - 1):
        raise errors.UnsupportedBlockSize(f"block is {block!r:.40}; it must be a power of two from 2 on")
    if not isinstance(how.dtype, torch.dtype) or how.dtype not in EIGHT_BITS:
        raise errors.UnsupportedDType(
            f"dtype is {how.dtype!r:.40}; it must be one of {', '.join(map(str, EIGHT_BITS))}"
        )


def rounding_error(x: torch.Tensor, mantissa: float, dtype: torch.dtype) -> torch.Tensor:
    """What rounding to `dtype` at this scale, times any power of two, adds to each number that is no subnormal one."""
    scaled = x * (1 / mantissa)
    above = scaled * (torch.finfo(dtype).eps / torch.finfo(x.dtype).eps)  # so large that a sum keeps the digits wanted
    return ((scaled + above - above) - scaled) * mantissa


def rotation_size(head_dim: int) -> int:
    """How many channels are rotated together: the largest power of two that divides their number."""
    return head_dim & -head_dim


def signs_of(head_dim: int, device: torch.device) -> torch.Tensor:
    """Signs of the channels that are rotated together: those of a bent function, one of each two bits' product.

    What all channels share is spread by them too, where Hadamard's matrix alone has it in one.
    """
    i = torch.arange(rotation_size(head_dim), device=device)
    odd = i & i >> 1 & 0x5555
    for bits in (8, 4, 2, 1):
        odd = odd ^ odd >> bits
    return 1 - 2 * (odd & 1)


def rotated(x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """`x` times an orthogonal matrix along its last dimension: signs, then Hadamard's, in blocks of a power of two.

    Sums and differences of channels 1, 2, 4, ... apart, in this order on every device, so that bits are equal.
    """
    size, distance = signs.numel(), 1
    x = (x.unflatten(-1, (-1, size)) * signs).flatten(-2)
    while distance < size:
        a, b = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        distance *= 2
    return x * size**-0.5
