"""64-bit integers of masks, to their ends: what is derived of a mask that overflows nowhere is what the mask says.

Random masks of values near the ends of int64, beyond 2^60 (hashes) and near positions are held to the mask itself, run
by torch on tensors of positions, where nothing of the graph takes part: tiles, bands and rows' limits, both ways.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from composattn.graph.bands import row_limits, tile_intervals, transposed
from composattn.graph.mask import Mask
from composattn.graph.picture import tiles_of
from tests.cpu.graph.test_bands import check, ends
from tests.cpu.graph.test_row_limits import run, run_of_columns

Mod = Callable[[Any, Any, Any, Any], Any]
MOST, LEAST = 2**63 - 1, -(2**63)
FAR = (
    MOST,
    MOST - 1,
    MOST - 7,
    LEAST,
    LEAST + 1,
    LEAST + 9,
    2**62,
    -(2**62),
    2**61 + 3,
    2**60,
    2**60 + 1,
    -(2**60) - 1,
    2**32,
    -(2**31),
)


class Int64Mask:
    """A random mask from a seed, as a function, its sizes, and what it captures.

    Values are drawn so that no arithmetic of the function itself leaves 64 bits: sums take values of at most half of
    them, and far values stand alone in comparisons, as limits and ids do.
    """

    def __init__(self, seed: int) -> None:
        r = self.random = random.Random(seed)
        self.q_len, self.kv_len = r.randint(1, 40), r.randint(1, 40)
        self.batch, self.heads = r.randint(1, 3), r.randint(1, 2)
        self.tile = r.choice([2, 4, 8, 16]), r.choice([2, 4, 8, 16])
        self.words: list[str] = []
        self.mod = self._joined(r.randint(0, 2))

    def _number(self) -> int:
        r = self.random
        kind = r.randrange(4)
        if kind == 0:
            return r.choice(FAR)
        if kind == 1:
            return r.randint(LEAST, MOST)
        return r.randint(-20, 40)

    def _half(self) -> int:
        """A number that may be added to another one and to positions."""
        r = self.random
        return r.choice(
            [r.randint(-(2**61), 2**61), 2**61, -(2**61), 2**60 + 1, r.randint(-20, 40), r.randint(-20, 40)]
        )

    def _table(self, number: Callable[[], int]) -> Mod:
        """A captured int64 tensor of some of (b, h, position), or a constant; of the row or of all."""
        r = self.random
        axes = r.choice(["", "b", "h", "q", "kv", "q", "kv", "bq", "bkv", "hq", "const"])
        if axes == "const":
            value = number()
            self.words.append(f"{value}")
            return lambda b, h, q, kv: value
        few = [number() for _ in range(r.randint(1, 4))]
        size = {"b": self.batch + r.randint(0, 2), "h": self.heads, "q": self.q_len, "kv": self.kv_len}
        names = {"": (), "bq": ("b", "q"), "bkv": ("b", "kv"), "hq": ("h", "q")}.get(axes, (axes,))
        shape = [size[n] for n in names]
        count = 1
        for n in shape:
            count *= n
        values = sorted(r.choices(few, k=count)) if r.random() < 0.4 else r.choices(few, k=count)
        table = torch.tensor(values, dtype=torch.int64).reshape(shape)
        self.words.append(f"{'·'.join(names)}:{few}")

        def read(b: Any, h: Any, q: Any, kv: Any) -> Any:
            at = {"b": b, "h": h, "q": q, "kv": kv}
            return table[tuple(at[n] for n in names)] if names else table

        return read

    def _position(self) -> Mod:
        """Arithmetic of positions, small."""
        r, n = self.random, self.random.choice([1, 2, 3, 8])
        options: dict[str, Mod] = {
            "q": lambda b, h, q, kv: q, "kv": lambda b, h, q, kv: kv, "q-kv": lambda b, h, q, kv: q - kv,
            "kv-q": lambda b, h, q, kv: kv - q, "|q-kv|": lambda b, h, q, kv: abs(q - kv),
            f"kv//{n}": lambda b, h, q, kv: kv // n, f"q//{n}": lambda b, h, q, kv: q // n,
            f"{n}kv": lambda b, h, q, kv: kv * n, f"kv-{n}q": lambda b, h, q, kv: kv - n * q,
        }  # fmt: skip
        name = r.choice([*options, "kv", "kv", "q-kv"])
        self.words.append(name)
        return options[name]

    def _value(self) -> Mod:
        """Far values alone, or sums that stay inside of 64 bits."""
        r = self.random
        kind = r.randrange(9)
        if kind < 3:
            return self._table(self._number)
        x = self._table(self._half)
        if kind == 3:
            y = self._position()
            return lambda b, h, q, kv: x(b, h, q, kv) + y(b, h, q, kv)
        if kind == 4:
            y = self._position()
            return lambda b, h, q, kv: y(b, h, q, kv) - x(b, h, q, kv)
        if kind == 5:
            y = self._table(self._half)
            self.words.append("difference")
            return lambda b, h, q, kv: x(b, h, q, kv) - y(b, h, q, kv)
        if kind == 6:
            n = r.choice([1, 3, 16, 2**40])
            self.words.append(f"// {n}")
            return lambda b, h, q, kv: x(b, h, q, kv) // n
        if kind == 7:
            n = r.choice([2, 5, 2**33])
            self.words.append(f"% {n}")
            return lambda b, h, q, kv: x(b, h, q, kv) % n
        y = self._table(self._number)
        most = r.random() < 0.5
        self.words.append("max" if most else "min")

        def either(*at: Any) -> Any:
            a, c = (v if not isinstance(v, int) else torch.tensor(v) for v in (x(*at), y(*at)))
            return (torch.maximum if most else torch.minimum)(a, c)

        return either

    def _comparison(self) -> Mod:
        r = self.random
        x = self._position() if r.random() < 0.6 else self._value()
        op = r.choice(["__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"])
        self.words.append(op)
        y = self._value()

        def compared(*at: Any) -> Any:
            a, c = x(*at), y(*at)
            if isinstance(a, int) and isinstance(c, int):
                a = at[3] * 0 + a
            elif isinstance(a, int):  # Python asks the other one
                return getattr(
                    c, {"__lt__": "__gt__", "__le__": "__ge__", "__gt__": "__lt__", "__ge__": "__le__"}.get(op, op)
                )(a)
            return getattr(a, op)(c)

        return compared

    def _joined(self, depth: int) -> Mod:
        if depth == 0:
            return self._comparison()
        kind = self.random.randrange(8)
        x, y = self._joined(depth - 1), self._joined(depth - 1)
        if kind < 4:
            return lambda *at: x(*at) & y(*at)
        if kind < 6:
            return lambda *at: x(*at) | y(*at)
        if kind == 6:
            return lambda *at: ~x(*at)
        z = self._comparison()
        return lambda *at: torch.where(z(*at), x(*at), y(*at))

    def visible(self) -> torch.Tensor:
        """(B, H, Sq, Skv), by the function on tensors of positions."""
        sizes = self.batch, self.heads, self.q_len, self.kv_len
        at = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
        return self.mod(*at).expand(sizes)


def hold(mask: Int64Mask) -> int:
    """Tiles, bands, limits and the dense picture against the function itself; how many tiles there were."""
    visible, expr = mask.visible(), Mask.of(mask.mod).expr
    sizes = mask.q_len, mask.kv_len, mask.batch, mask.heads
    assert torch.equal(Mask(expr).dense(*sizes).expand_as(visible), visible), "dense"
    exact = tiles_of(visible, mask.tile)
    found = Mask(expr).tiles(mask.q_len, mask.kv_len, mask.tile, mask.batch, mask.heads).expand_as(exact)
    assert ((found == 1) | (found == exact)).all(), f"tiles {found.tolist()}, are {exact.tolist()}"
    for seen, which, rows, columns, tile in (
        (visible, False, mask.q_len, mask.kv_len, mask.tile[0]),
        (visible.mT, True, mask.kv_len, mask.q_len, mask.tile[1]),
    ):
        intervals = transposed(expr)[0] if which else tile_intervals(expr)
        check(seen, ends(intervals, rows, columns, tile, mask.batch, mask.heads, which), tile)
    for limits, of in ((row_limits(expr), run), (transposed(expr)[1], run_of_columns)):
        if limits is not None:
            told, holds = of(limits, *sizes)
            assert torch.equal(told & holds, visible & holds), f"limits {limits}"
    return found.numel()


def hold_all(seeds: range) -> None:
    for seed in seeds:
        mask = Int64Mask(seed)
        try:
            hold(mask)
        except BaseException as error:
            raise AssertionError(f"Int64Mask({seed}), {mask.words}: {Mask.of(mask.mod).expr}: {error}") from error


@pytest.mark.parametrize("part", range(2))
def test_random_masks_at_the_ends_of_int64(part: int) -> None:
    start = int(os.environ["COMPOSATTN_TEST_SEED"]) * 100_000 + part * 200
    hold_all(range(start, start + 200))


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(20))
def test_many_random_masks_at_the_ends_of_int64(part: int) -> None:
    start = int(os.environ["COMPOSATTN_TEST_SEED"]) * 1_000_000 + part * 50_000
    hold_all(range(start, start + 2000))
