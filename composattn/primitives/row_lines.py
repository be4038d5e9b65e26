"""Rows of a product of a warp to memory, rounded to 16 bits: lines of 8 columns, 16 bytes a lane."""

from __future__ import annotations

import functools
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from .branches import when
from .lanes import transposed_words
from .values import narrowed

LINES = 4  # lanes that have a row


@cute.jit
def store_lines(
    rows, row: Int32, values, lane: Int32, lines: Any, inside: Boolean, first: Any = 0, apart: cutlass.Constexpr = 1
):
    """Stores a thread's pairs of the columns of a row, of which its four lanes get every fourth line.

    They are the `first` 16 columns of the row, from 0, and those every `apart` x 16 behind them. `lines`: how many the
    row has.
    """
    words = cute.recast_tensor(narrowed(values, rows.element_type), Int32)
    count = cute.size(words)
    for i in cutlass.range_constexpr(-(-count // LINES)):
        four = [words[n] if n < count else Int32(0) for n in range(LINES * i, LINES * (i + 1))]
        line = cute.make_rmem_tensor(LINES, Int32)
        for j, word in enumerate(transposed_words(four, lane)):
            line[j] = word
        number = _line(i, lane, first, apart)
        there = inside & (number < lines)
        if cutlass.const_expr(LINES * (i + 1) > count):
            there = there & (lane % LINES < count - LINES * i)
        source, target = cute.recast_tensor(line, rows.element_type), cute.local_tile(rows[row, None], (8,), (number,))
        when(there, functools.partial(cute.autovec_copy, source, target))


def _line(i: int, lane: Any, first: Any, apart: int) -> Any:
    """The line that a lane has of the `i`-th four."""
    of_four = lane % LINES
    if apart == 1:
        return LINES * i + of_four
    return (first + (2 * i + of_four // 2) * apart) * 2 + of_four % 2
