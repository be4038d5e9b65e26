"""Conversions between float formats that numpy lacks: bfloat16 and the two 8-bit formats, as bit patterns."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def bf16_to_f32(bits: Array) -> Array:
    """uint16 bit patterns to float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: Array) -> Array:
    """float32 to uint16 bit patterns, to nearest even; NaN becomes the canonical 0x7fff."""
    return (_rounded_to_bf16(x) >> np.uint32(16)).astype(np.uint16)


def f32_to_bf16x2(low: Array, high: Array) -> Array:
    """Two float32 arrays to one of pairs, as `f32_to_bf16` rounds."""
    return (_rounded_to_bf16(low) >> np.uint32(16)) | (_rounded_to_bf16(high) & np.uint32(0xFFFF0000))


def _rounded_to_bf16(x: Array) -> Array:
    """float32 to uint32 whose upper half is the bfloat16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    nan = x != x
    if nan.any():
        rounded[nan] = np.uint32(0x7FFF0000)
    return rounded


def _table(exponent: int, mantissa: int, finite_only: bool) -> Array:
    """Values of the 256 patterns of an 8-bit format (OCP 8-bit floating point specification)."""
    bias = (1 << (exponent - 1)) - 1
    out = np.empty(256, np.float32)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        e, m = (code & 0x7F) >> mantissa, code & ((1 << mantissa) - 1)
        top = (1 << exponent) - 1
        if finite_only and e == top and m == (1 << mantissa) - 1:
            value = float("nan")
        elif not finite_only and e == top:
            value = float("nan") if m else float("inf")
        elif e == 0:
            value = m * 2.0 ** (1 - bias - mantissa)
        else:
            value = (1 + m / (1 << mantissa)) * 2.0 ** (e - bias)
        out[code] = sign * value
    return out


E4M3 = _table(4, 3, finite_only=True)
E5M2 = _table(5, 2, finite_only=False)


def _encoder(table: Array) -> Any:
    codes = np.arange(127)
    finite = np.isfinite(table[:127])
    codes, values = codes[finite], table[:127][finite].astype(np.float64)
    halves = (values[1:] + values[:-1]) / 2
    nan = 0x7F

    def encode(x: Array) -> Array:
        """To nearest even, saturating to the largest finite value."""
        magnitude = np.abs(x.astype(np.float64))
        low = np.searchsorted(halves, magnitude, side="left")
        tie = (low < len(halves)) & (halves[np.minimum(low, len(halves) - 1)] == magnitude)
        index = np.where(tie & (codes[low] % 2 == 1), np.minimum(low + 1, len(codes) - 1), low)
        out = codes[index] | np.where(np.signbit(x), 0x80, 0)
        return np.where(np.isnan(x), nan, out).astype(np.uint8)

    return encode


f32_to_e4m3 = _encoder(E4M3)
f32_to_e5m2 = _encoder(E5M2)
