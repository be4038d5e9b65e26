"""Conversions to and from the 8-bit float formats, and to fp16 that is not negative, as rows of OPCODES."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from composattn.emulator.opcodes.alu import OPCODES, pack_halves
from composattn.emulator.opcodes.alu_row import Alu
from composattn.emulator.opcodes.floats import E4M3, E5M2, f32_to_e4m3, f32_to_e5m2

Array = np.ndarray[Any, Any]


def _narrow(encode: Any) -> Any:
    return lambda hi, lo: encode(lo).astype(np.uint16) | (encode(hi).astype(np.uint16) << np.uint16(8))


def _of_halves(encode: Any) -> Any:
    def run(a: Array) -> Array:
        low, high = (part.astype(np.uint16).view(np.float16).astype(np.float32) for part in (a & 0xFFFF, a >> 16))
        return cast(Array, _narrow(encode)(high, low))

    return run


def _wide(table: Array) -> Any:
    return lambda a: pack_halves(table[a & np.uint16(255)], table[a >> np.uint16(8)], "f16")


for _name, _encode, _table in (("e4m3x2", f32_to_e4m3, E4M3), ("e5m2x2", f32_to_e5m2, E5M2)):
    OPCODES[f"cvt.rn.satfinite.{_name}.f32"] = Alu("b16", ("f32", "f32"), _narrow(_encode))
    OPCODES[f"cvt.rn.satfinite.{_name}.f16x2"] = Alu("b16", ("b32",), _of_halves(_encode))
    OPCODES[f"cvt.rn.f16x2.{_name}"] = Alu("b32", ("b16",), _wide(_table))


def _not_negative(a: Array) -> Array:
    """In fp16; NaN has all its bits, as on the device."""
    with np.errstate(over="ignore"):
        rounded = np.maximum(a, np.float32(0.0)).astype(np.float16)
    return np.where(np.isnan(a), np.uint16(0x7FFF).view(np.float16), rounded)


OPCODES["cvt.rn.relu.f16x2.f32"] = Alu(
    "b32", ("f32", "f32"), lambda hi, lo: pack_halves(_not_negative(lo), _not_negative(hi), "f16")
)

__all__ = ["OPCODES"]
