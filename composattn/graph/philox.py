"""Random bits that a pair of query and key has of itself: Philox-4x32 with 7 rounds, keyed by a seed.

The counter is (kv, q, h, b), the key the 64 bits of the seed, so bits depend on no tiling, order or backend. Its four
words serve eight pairs, 16 bits each: those that differ in bits 0 and 3 of kv and bit 3 of q, which a thread of the
tensor cores' fragments has together. Seven rounds are the fewest that pass all tests of BigCrush.

Source: Salmon, Moraes, Dror, Shaw 2011, Parallel random numbers: as easy as 1, 2, 3 (section 4, table 2).
"""

from __future__ import annotations

from typing import Any

import torch

ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
Q_BIT, KV_BIT, HALF_BIT = 3, 3, 0  # of q and kv, that choose the word; of kv, that chooses its half
ONE = 1 << 16  # values that 16 bits have
_LOW = 0xFFFFFFFF

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any], rounds: int = ROUNDS) -> Words:
    """Four words of 32 bits in int64 tensors that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        left, right = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # 64 bits, whatever their sign
        c0, c1 = ((right >> 32) & _LOW) ^ c1 ^ k0, right & _LOW
        c2, c3 = ((left >> 32) & _LOW) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return c0, c1, c2, c3


def factor_of(keep: Any) -> float:
    """What kept weights are multiplied by, so that their mean stays; `keep` is an operation "kept"."""
    return ONE / (ONE - int(keep.args[-1].attr))


def kept(seed: Any, b: Any, h: Any, q: Any, kv: Any, least: Any) -> torch.Tensor:
    """Whether pairs are kept, int64 tensors that broadcast: where their 16 bits are `least` or more."""
    counter = (kv & ~(1 << KV_BIT | 1 << HALF_BIT), q & ~(1 << Q_BIT), h, b)
    words = philox(counter, (seed & _LOW, (seed >> 32) & _LOW))
    by_kv = (kv >> KV_BIT) & 1 != 0
    upper = torch.where(by_kv, words[3], words[2])
    word = torch.where((q >> Q_BIT) & 1 != 0, upper, torch.where(by_kv, words[1], words[0]))
    return (word >> 16 * ((kv >> HALF_BIT) & 1)) & (ONE - 1) >= least
