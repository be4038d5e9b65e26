"""What is known of a value in a tile: whether it may be true or false, or between which numbers it lies.

Floats are bounded in fp64 and widened outward after each operation by more than fp32 rounding, and by more than the
error of fast instructions after a transcendental one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..graph.expr import DType
from ..graph.linear import INT64
from ..graph.ops import CASTS

T = torch.Tensor


@dataclass
class Bools:
    """May it be true, may it be false."""

    yes: T
    no: T


@dataclass
class Ints:
    """low <= value <= high and value ≡ residue (mod step); step 0: the value is residue everywhere.

    `width`: high - low in any tile is at most this; None where only the tensors know.
    """

    low: T
    high: T
    step: int = 1
    residue: int = 0
    width: int | None = None


@dataclass
class Floats:
    """low <= value <= high, or NaN where `nan`."""

    low: T
    high: T
    nan: T


Value = Bools | Ints | Floats

ROUNDING = 2.0**-21  # of one operation in fp32, with room
_MOST = 3e38  # beyond it fp32 is infinite


def unbounded(dtype: DType, device: torch.device | str) -> Value:
    """What is known where nothing is."""
    shape = (1, 1, 1, 1)
    true = torch.ones(shape, dtype=torch.bool, device=device)
    if dtype is DType.BOOL:
        return Bools(true, true)
    if dtype is DType.FLOAT:
        v = torch.full(shape, math.inf, dtype=torch.float64, device=device)
        return Floats(-v, v, true)
    least, most = (torch.full(shape, end, dtype=torch.int64, device=device) for end in INT64)
    return Ints(least, most)


def to_ints(v: Value) -> Ints:
    if isinstance(v, Bools):
        return Ints((~v.no).to(torch.int64), v.yes.to(torch.int64))
    assert isinstance(v, Ints)
    return v


def to_floats(v: Value) -> Floats:
    if isinstance(v, Floats):
        return v
    i = to_ints(v)
    low, high = i.low.to(torch.float64), i.high.to(torch.float64)
    nan = torch.zeros_like(low, dtype=torch.bool)
    wide = widened(low, high, nan)
    return Floats(
        torch.where(low.abs() <= 2**24, low, wide.low), torch.where(high.abs() <= 2**24, high, wide.high), nan
    )


def cast(name: str, v: Value) -> Value:
    dtype, type_ = CASTS[name]
    if type_ is DType.BOOL:
        if isinstance(v, Bools):
            return v
        hits_zero = (v.low <= 0) & (v.high >= 0)
        never = (v.low == 0) & (v.high == 0)
        return Bools(~never | v.nan, hits_zero) if isinstance(v, Floats) else Bools(~never, hits_zero)
    if type_.is_integer:
        if not isinstance(v, Floats):
            return to_ints(v)
        limit = 2.0**31 if type_ is DType.INT32 else 2.0**61
        lost = v.nan | (v.low <= -limit) | (v.high >= limit)
        low = torch.where(lost, -limit, v.low).trunc().to(torch.int64)
        high = torch.where(lost, limit, v.high).trunc().to(torch.int64)
        # what a float out of range becomes differs between machines
        return Ints(torch.where(lost, INT64[0], low), torch.where(lost, INT64[1], high))
    f = to_floats(v)
    if dtype is torch.float32:
        return f
    return Floats(f.low.to(dtype).to(torch.float64), f.high.to(dtype).to(torch.float64), f.nan)


def widened(low: T, high: T, nan: T, by: float = ROUNDING) -> Floats:
    """Outward by a relative error, and by an absolute one for what rounds to a denormal or to zero."""
    nan = nan | low.isnan() | high.isnan()
    low, high = torch.where(nan, -math.inf, low), torch.where(nan, math.inf, high)
    tiny = 1e-30 if by == ROUNDING else by * 1e-3
    low, high = torch.where(low < -_MOST, -math.inf, low), torch.where(high > _MOST, math.inf, high)
    return Floats(
        low - low.abs().nan_to_num(posinf=0.0) * by - tiny, high + high.abs().nan_to_num(posinf=0.0) * by + tiny, nan
    )
