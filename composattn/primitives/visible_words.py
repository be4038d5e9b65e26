"""What a mask shows of a row, as bits in words: known before there are scores, so that both need no registers at once.

A test of 96 keys beside their scores spilled up to 303 registers: nothing orders what it computes, and it is all
computed first. Words are made one after the other, in a loop of their own.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .emit import BoundMods, Evaluator
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
