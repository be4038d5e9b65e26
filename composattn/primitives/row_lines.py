"""Rows of a product of a warp to memory, rounded to 16 bits: lines of 8 columns, 16 bytes a lane."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, vector

from .branches import when
from .lanes import transposed_words
from .values import narrow_words

LINES = 4  # lanes that have a row
BYTES = 16  # of a line


def store_lines(
    rows: cute.Tensor,
    row: Int32,
    values: cute.Tensor,
    lane: Int32,
    lines: Any,
    inside: Boolean,
    first: Any = 0,
    apart: int = 1,
) -> None:
    """Stores a thread's pairs of the columns of a row, of which its four lanes get every fourth line.

    They are the `first` 16 columns of the row, from 0, and those every `apart` x 16 behind them. `lines`: how many the
    row has.
    """
    kind = rows.element_type
    words = list(narrow_words(values, cute.size(values), kind))
    for i in range(-(-len(words) // LINES)):
        held = words[LINES * i : LINES * (i + 1)]
        number = _line(i, lane, first, apart)
        there = inside & (number < lines)
        if len(held) < LINES:
            there = there & (lane % LINES < len(held))
        line = transposed_words(held + [Int32(0)] * (LINES - len(held)), lane)
        target = rows[row, None].iterator + number * (BYTES * 8 // kind.width)
        when(there, functools.partial(_store, line, target))


def _store(line: Sequence[Int32], target: cute.Pointer) -> None:
    """By one operation: `cute.autovec_copy` asks in 46 what lies side by side."""
    words = vector.from_elements(ir.VectorType.get([LINES], Int32.mlir_type), [word.ir_value() for word in line])
    llvm.store(words, target.to_llvm_ptr(), alignment=BYTES)


def _line(i: int, lane: Any, first: Any, apart: int) -> Any:
    """The line that a lane has of the `i`-th four."""
    of_four = lane % LINES
    if apart == 1:
        return LINES * i + of_four
    return (first + (2 * i + of_four // 2) * apart) * 2 + of_four % 2
