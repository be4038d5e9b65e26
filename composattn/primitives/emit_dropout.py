"""Which weights dropout keeps, from a tile's coordinates alone; pairs of a thread that share a Philox call share it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32, Uint64

from ..graph.expr import Expr
from ..graph.philox import HALF_BIT, KV_BIT, MULTIPLIERS, ONE, Q_BIT, ROUNDS, WEYL
from .score_tile import FragmentShape
from .values import choose

Place = tuple[int, int]


def drop(at: Any, keep: Expr, values: Any, factor: float = 1.0) -> None:
    """`values[r, c]` of the tile of the evaluator `at` times `factor` where they are kept, else 0, in place."""
    for places, kept in _kept(at, keep):
        for (r, c), stays in zip(places, kept, strict=True):
            value = values[r, c] if factor == 1.0 else values[r, c] * factor
            values[r, c] = choose(stays, value, Float32(0.0))


def copied(values: cute.Tensor) -> cute.Tensor:
    """A copy of `values` in registers of its own."""
    copy = cute.make_rmem_tensor(values.layout, Float32)
    for i in range(cute.size(values)):
        copy[i] = values[i]
    return copy


def _kept(at: Any, keep: Expr) -> Iterator[tuple[list[Place], list[Any]]]:
    """All places of the tile, those together that share a call, each with whether it is kept."""
    seed, b, h, _, _, least = keep.args
    tile = at.tile
    shape: FragmentShape = tile.shape
    number = Int64(at.value(seed))
    key = Uint32(number & 0xFFFFFFFF), Uint32((number >> 32) & 0xFFFFFFFF)
    rows = _Bits(shape.row_offsets, () if shape.packed else shape.row_moves, shape, (Q_BIT,), not shape.packed)
    columns = _Bits(shape.column_offsets, shape.column_moves, shape, (KV_BIT, HALF_BIT), True)
    groups: dict[Any, list[Place]] = {}
    for r in range(tile.rows):
        for c in range(tile.columns):
            head = 0 if shape.of_one_head else shape.head_offsets[r]
            groups.setdefault((rows.shared(r), columns.shared(c), head), []).append((r, c))
    for places in groups.values():
        r, c = places[0]
        kv, q = Uint32(tile.kv_index(c)), Uint32(tile.q_index(r))
        counter = (
            kv & Uint32(0xFFFFFFFF ^ (1 << KV_BIT | 1 << HALF_BIT)),
            q & Uint32(0xFFFFFFFF ^ 1 << Q_BIT),
            Uint32(at.value(h, r, c)),
            Uint32(at.value(b, r, c)),
        )
        words = _philox(counter, key)
        found = []
        for r, c in places:
            by_q, by_kv = rows.bit(r, Q_BIT, tile.q_index), columns.bit(c, KV_BIT, tile.kv_index)
            lower, upper = _choose(by_kv, words[1], words[0]), _choose(by_kv, words[3], words[2])
            word = _choose(by_q, upper, lower)
            half = columns.bit(c, HALF_BIT, tile.kv_index)
            bits = _choose(half, word >> Uint32(16), word & Uint32(ONE - 1))
            found.append(bits >= Uint32(int(least.attr)))
        yield places, found


class _Bits:
    """What is known of bits of positions when compiling: those that neither lanes nor where a tile begins decide."""

    def __init__(
        self, offsets: tuple[int, ...], moves: tuple[int, ...], shape: FragmentShape, bits: tuple[int, ...], known: bool
    ) -> None:
        in_blocks = known and shape.block % (2 << max(bits)) == 0
        self.offsets = offsets
        self.known = [bit for bit in bits if in_blocks and not any(move >> bit & 1 for move in moves)]
        self.mask = sum(1 << bit for bit in self.known)

    def shared(self, i: int) -> int:
        """A number that positions have in common which differ in these bits alone."""
        return self.offsets[i] & ~self.mask

    def bit(self, i: int, bit: int, position: Any) -> Any:
        """0 or 1, or a kernel value, of the `i`-th position."""
        if bit in self.known:
            return self.offsets[i] >> bit & 1
        return (Uint32(position(i)) >> Uint32(bit)) & Uint32(1)


def _choose(bit: Any, one: Uint32, zero: Uint32) -> Uint32:
    if isinstance(bit, int):
        return one if bit else zero
    return Uint32(choose(bit != Uint32(0), one, zero))


def _philox(counter: tuple[Any, ...], key: tuple[Uint32, Uint32]) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        left, right = (Uint64(c) * Uint64(m) for c, m in zip((c0, c2), MULTIPLIERS, strict=True))
        c0, c1 = Uint32(right >> Uint64(32)) ^ c1 ^ k0, Uint32(right)
        c2, c3 = Uint32(left >> Uint64(32)) ^ c3 ^ k1, Uint32(left)
        k0, k1 = k0 + Uint32(WEYL[0]), k1 + Uint32(WEYL[1])
    return c0, c1, c2, c3
