"""A quantised tensor: 8-bit numbers and their scale; how it is made, and what it stands for."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from .. import errors
from ..graph.expr import refuse_lazy

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
"""The types of quantised tensors."""
MANTISSAS = (1.0, 1.25, 1.5, 1.75)
"""Of scales that are no powers of two: with four bits of a number, the seven of a product fit into 16-bit types."""


class Rounding(NamedTuple):
    """How q, k and v become 8-bit ones; see `ca.quantize`, whose arguments these are."""

    scale: Literal["head", "block", "token"]
    block: int
    hadamard: bool
    center: bool
    power_of_two: bool
    dtype: torch.dtype


class Quantized(NamedTuple):
    """A tensor as `data`, of 8 bits, times `scale`; `ca.attention` takes it in place of q, k or v.

    data: float8_e4m3fn or float8_e5m2, of the shape that q, k or v has in a call: dense, packed or in pages.
    scale: one number, (H,), (B, H), (B, H, S) for rows (the shape of `data` without its last dimension), blocks of
        rows (B, H, S / block), of v (B, H, S / block, 1), and for v also channels (B, H, 1, Dv); dimensions of 1 are
        shared. None: 1.
    mean: (B, H, 1, D), what was taken from each row of k before; scores get it back. None: nothing was.
    wide: what was quantised, where it asks for a gradient; None elsewhere.
    dtype: what it was quantised from, and what `dequantised` gives.
    rotated: whether `ca.quantize(hadamard=True)` turned its channels. Of q and k, both are or none.
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    wide: torch.Tensor | None = None
    dtype: torch.dtype = torch.bfloat16
    rotated: bool = False

    def dequantised(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """data · scale, in `dtype`, rounded once; exact in 16 bits where scales are powers of two.

        Its gradient goes straight through to the tensor that was quantised. A mean that was taken from k stays out: the
        softmax does not see it. Raises: `ShapeMismatch`, of scales (B, H) of packed rows too, `NotATensor`,
        `UnsupportedDType`, `InvalidScale`, `UnsupportedLayout` of a lazy scale.
        """
        dtype = self.dtype if dtype is None else dtype
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise errors.UnsupportedDType(f"dtype is {dtype!r:.40}; a tensor becomes floats: torch.bfloat16")
        if not isinstance(self.data, torch.Tensor):
            raise errors.NotATensor(f"data is a {type(self.data).__name__}; pass a tensor of 8 bits")
        wide = torch.promote_types(dtype, torch.float32)
        found = self.data.to(wide)
        if self.scale is not None:
            found = found * _spread(scale_tensor("data", self.scale, self.data.device), self.data).to(wide)
        found = found.to(dtype)
        return found if self.wide is None else _StraightThrough.apply(self.wide, found)  # type: ignore[no-any-return]


class _StraightThrough(torch.autograd.Function):
    """What a tensor was quantised to; its gradient is the tensor's own (Bengio et al. 2013, straight-through)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(wide: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        return found.view_as(found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.to(ctx.dtype), None


def refuse_narrow_gradient(name: str, t: torch.Tensor) -> None:
    """Raises `GradientUnsupported` where `t`, if it has 8 bits, asks for a gradient, which would have 8 bits too."""
    if t.dtype in EIGHT_BITS and t.requires_grad and torch.is_grad_enabled():
        raise errors.GradientUnsupported(
            f"{name} is {t.dtype}, whose gradient would have 8 bits; quantise the tensor that learns by "
            "ca.quantize(q, k, v), which gets it straight through"
        )


def scale_tensor(name: str, scale: Any, device: torch.device) -> torch.Tensor:
    """A scale of the tensor `name`, which may be a number, as floats that can be multiplied by.

    Raises: `NotATensor`, `UnsupportedLayout`, `UnsupportedDType`, `InvalidScale` of a number that is negative or that
    fp32 does not hold.
    """
    refuse_lazy(f"{name}_scale", scale)
    if isinstance(scale, torch.Tensor):
        if not scale.is_floating_point():
            raise errors.UnsupportedDType(f"{name}_scale is {scale.dtype}; pass floats: {name}_scale.float()")
        return scale.float() if scale.dtype.itemsize == 1 else scale  # float8_e8m0fnu: powers of two
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise errors.NotATensor(f"{name}_scale is a {type(scale).__name__}; pass a float tensor, or a number")
    if scale < 0:
        raise errors.InvalidScale(NEGATIVE.format(name, float(scale)))
    if not scale <= torch.finfo(torch.float32).max:
        raise errors.InvalidScale(f"{name}_scale is no number that fp32 holds; pass one from 0 to 3.4e38")
    return torch.full((), float(scale), dtype=torch.float32, device=device)


NEGATIVE = "{0}_scale has {1:g}; scales are not negative: give {0} the sign, or let a score mod multiply by it"


def scale_for(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32: the least power of two that numbers up to `largest` are divided by to fit into `dtype`.

    At least 2^-126, which 1 is divided by. That is the scale of zeros: products of 8 bits have little room for others'
    beside a large one.
    """
    mantissa, exponent = torch.frexp(largest.float() / torch.finfo(dtype).max)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)  # mantissas of [0.5, 1): a power of two itself has 0.5
    least = (exponent.clamp_min(-126) + 127 << 23).view(torch.float32)  # as bits: ldexp is inexact on some devices
    return torch.where(largest == 0, 2.0**-126, least)


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` rounded to 8 bits; what is beyond becomes the largest number, which torch's cast makes NaN or infinite."""
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype)


def _spread(scale: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """`scale` so that it broadcasts to `data`. Raises: `ShapeMismatch`."""
    found = scale
    if found.ndim == 1:
        found = found.view(1, -1, *[1] * (data.ndim - 2))
    elif found.ndim == 2 and data.ndim == 4:
        found = found[:, :, None, None]
    elif found.ndim == 4 and data.ndim == 3 and found.shape[0] == found.shape[2] == 1:
        found = found[0].transpose(0, 1)  # (1, H, 1, D) of packed rows
    elif found.ndim == data.ndim - 1 and found.ndim:
        found = found.unsqueeze(-1)
    if found.ndim == data.ndim == 4 and 1 < found.shape[2] < data.shape[2]:
        block = block_of(data.shape[2], found.shape[2])
        found = found.repeat_interleave(block, 2)[:, :, : data.shape[2]]
    if found.ndim and any(n not in (1, size) for n, size in zip(found.shape, data.shape, strict=False)):
        raise errors.ShapeMismatch(
            f"a scale of shape {tuple(scale.shape)} does not say the scale of each row of {tuple(data.shape)}; give "
            "it a dimension for each of the data's, 1 where it is shared"
        )
    return found


def block_of(length: int, blocks: int) -> int:
    """The power of two that cuts `length` rows into so many blocks; 0 where there is none."""
    size = 2
    while -(-length // size) > blocks > 0:
        size *= 2
    return size if -(-length // size) == blocks else 0
