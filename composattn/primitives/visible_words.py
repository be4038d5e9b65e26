"""What a mask shows of rows, as bits in words: known before there are scores, so that both need no registers at once.

A test of 96 keys beside their scores spilled up to 303 registers: nothing orders what it computes, and it is all
computed first. Words are made one after the other, in a loop of their own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .emit import WORD, BoundMods, Evaluator, words_of_run
from .score_tile import ScoreTile
from .values import bits_before, choose, larger

BITS = 32  # columns of a word
TOGETHER = 16  # of which predicates are set at a time


def visible_words(mods: BoundMods, tile: ScoreTile) -> tuple[Int32, ...]:
    """For each 32 of the columns of a tile, in which each thread has one row of neighbours: bit c is of column c."""
    assert tile.rows == 1 and tile.columns % BITS == 0
    return _words(mods, tile, tuple(Int32(0) for _ in range(tile.columns // BITS)))


@cute.jit
def _words(mods: BoundMods, tile: ScoreTile, words):
    for n in cutlass.range(len(words), unroll=1):
        words = (*words[1:], _word(mods, tile, n * BITS))
    return words


def _word(mods: BoundMods, tile: ScoreTile, first: Int32) -> Int32:
    shape = dataclasses.replace(tile.shape, column_offsets=tile.shape.column_offsets[:BITS])
    part = dataclasses.replace(tile, shape=shape, first_kv=tile.first_kv + first)
    at = Evaluator(mods.mods, mods.leaves, part, mods.work)
    at.read_ahead(mods.mods.mask)
    word = bits_before(larger(mods.leaves.kv_len - part.first_kv, 0))
    if mods.mods.mask is None:
        return word
    shown = Int32(0)
    for c in range(BITS):
        shown = shown | choose(at.value(mods.mods.mask, 0, c), Int32(1 << c if c < BITS - 1 else -(1 << c)), Int32(0))
        at.forget_element()
    return word & shown


def hide(tile: ScoreTile, words: tuple[Int32, ...]) -> None:
    """-inf where the bit is not set, in place."""
    for c in range(tile.columns):
        bits = words[c // BITS] >> (c % BITS // TOGETHER * TOGETHER)
        tile.values[0, c] = choose(bits & (1 << c % TOGETHER) != 0, tile.values[0, c], -Float32.inf)


# --- of several rows ------------------------------------------------------------------------------------------


def rows_words(mods: BoundMods, tile: ScoreTile) -> tuple[Int32, ...]:
    """For each row, and each `WORD` of its columns: by the rows' limits where they hold, else by the mask.

    A branch decides, while no product runs: behind one, limits would be known later than scores.
    """
    words = tile.rows * len(range(0, tile.columns, WORD))
    return _rows_words(mods, tile, mods.limits_hold, tuple(Int32(0) for _ in range(words)))


@cute.jit
def _rows_words(mods: BoundMods, tile: ScoreTile, limits_hold: Boolean, words):
    if limits_hold:
        words = tuple(word for r in range(tile.rows) for _, word in words_of_run(tile.columns, *mods.run(tile, r)))
    else:
        words = rows_words_by_mask(mods, tile)
    return words


def rows_words_by_mask(mods: BoundMods, tile: ScoreTile) -> tuple[Int32, ...]:
    """For each row, and each `WORD` of its columns, which bits the mask shows, whatever the row's limits are."""
    at = Evaluator(mods.mods, mods.leaves, tile, mods.work)
    at.read_ahead(mods.mods.mask)
    end = tile.shape.columns_before(larger(mods.leaves.kv_len - tile.first_kv, 0))
    words: list[Any] = []
    assert mods.mods.mask is not None, "limits of rows are a mask's"
    for r in range(tile.rows):
        for first, inside in words_of_run(tile.columns, None, end):
            shown: Any = Int32(0)
            for c in range(first, min(first + WORD, tile.columns)):
                shown = shown | choose(at.value(mods.mods.mask, r, c), Int32(1 << (c - first)), Int32(0))
                at.forget_element()
            words.append(inside & shown)
    return tuple(words)


def hide_of_rows(tile: ScoreTile, words: tuple[Int32, ...]) -> None:
    """-inf where the bit of `rows_words` is not set, in place."""
    of_row = len(words) // tile.rows
    for r in range(tile.rows):
        for c in range(tile.columns):
            shown = words[r * of_row + c // WORD] & (1 << c % WORD) != 0
            tile.values[r, c] = choose(shown, tile.values[r, c], -Float32.inf)
