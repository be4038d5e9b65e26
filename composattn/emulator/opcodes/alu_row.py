"""What a row of the arithmetic table says: result type, operand types, a numpy function, the pipe it runs on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Alu:
    """An instruction that is a pure function of its operands, lane by lane.

    `fn` takes one array an operand, of the types in `inputs`, and returns the result. Where `out` is true it is a numpy
    ufunc that may write its result in place.
    """

    result: str
    inputs: tuple[str, ...]
    fn: Callable[..., Any]
    pipe: str = "alu"
    out: bool = False


DTYPES: dict[str, Any] = {
    "u8": np.uint8, "s8": np.int8, "b8": np.uint8,
    "u16": np.uint16, "s16": np.int16, "b16": np.uint16, "f16": np.float16, "bf16": np.uint16,
    "u32": np.uint32, "s32": np.int32, "b32": np.uint32, "f32": np.float32,
    "u64": np.uint64, "s64": np.int64, "b64": np.uint64, "f64": np.float64,
    "p": np.bool_,
}  # fmt: skip
BANK = {"u8": "16", "s8": "16", "b8": "16", "u16": "16", "s16": "16", "b16": "16", "f16": "16", "bf16": "16",
        "u32": "32", "s32": "32", "b32": "32", "f32": "32", "u64": "64", "s64": "64", "b64": "64", "f64": "64",
        "p": "p", "pred": "p"}  # fmt: skip
WIDTH = {t: np.dtype(d).itemsize for t, d in DTYPES.items()}
