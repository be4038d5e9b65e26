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

import composattn as ca
from composattn import errors
from composattn.analysis.bands import row_limits, tile_intervals, transposed
from composattn.mods.mask import Mask
from tests.cpu.analysis.test_bands import check, ends
from tests.cpu.analysis.test_row_limits import run, run_of_columns
from tests.dense_tiles import tiles_of

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


LIMITS = torch.tensor([MOST, 50])
HASHES = torch.tensor([2**62 + 5, MOST, LEAST + 3])[torch.arange(90) // 15 % 3]
SPREAD = (torch.arange(90) * 0x5851F42D4C957F2D) ^ (torch.arange(90) << 52)
TIMES, NOW = torch.arange(90).expand(8, 90).contiguous(), torch.tensor([50, 100, 5])
UINT32 = torch.tensor([2**32 - 1, 5]).to(torch.uint32)
MASKS: dict[str, Mod] = {
    "no limit": lambda b, h, q, kv: kv <= LIMITS[b],
    "no limit by blocks": lambda b, h, q, kv: (kv // 16 <= LIMITS[b]) & (abs(q - kv) <= LIMITS[b]),
    "the largest constant": lambda b, h, q, kv: (kv <= MOST) & (q >= LEAST),
    "documents by their hashes": lambda b, h, q, kv: HASHES[q] == HASHES[kv],
    "rows sampled by a hash": lambda b, h, q, kv: (SPREAD[q] > -(2**61)) & (q >= kv),
    "tables for other numbers of sequences": lambda b, h, q, kv: TIMES[b + 0, kv] <= NOW[b + 0],
    "quotients of floats": lambda b, h, q, kv: (kv.float() % 0.5 <= 0.1) & (q // 0.5 > 7.0),
    "32 bits with no sign": lambda b, h, q, kv: UINT32[kv % 2] > 2**31,
}  # fmt: skip


TRUTHS: dict[str, Mod] = {"32 bits with no sign": lambda b, h, q, kv: kv % 2 == 0}  # torch compares no such tensors


@pytest.mark.parametrize("name", MASKS)
def test_known_masks_are_what_they_say_in_every_backend(name: str) -> None:
    mod, q = MASKS[name], torch.randn(2, 1, 90, 8, generator=torch.Generator().manual_seed(0))
    at = torch.meshgrid(*map(torch.arange, (2, 1, 90, 90)), indexing="ij")
    visible = TRUTHS.get(name, mod)(*at)
    tiles = Mask.of(mod).tiles(90, 90, (16, 16), 2).expand(2, 1, 6, 6)
    exact = tiles_of(visible, (16, 16))
    assert ((tiles == 1) | (tiles == exact)).all()
    score = (q @ q.mT / 8**0.5).masked_fill(~visible, -torch.inf)
    expected = score.softmax(-1).nan_to_num(0.0) @ q
    for backend in ("reference", "streaming"):
        assert torch.allclose(ca.attention(q, q, q, mask_mod=mod, backend=backend), expected, atol=1e-4), backend


def test_a_constant_beyond_fp32_is_infinite_there() -> None:
    q = torch.randn(1, 1, 30, 8, generator=torch.Generator().manual_seed(0))
    hidden = ca.attention(q, q, q, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -1e300))
    assert torch.allclose(hidden, ca.attention(q, q, q, mask_mod=ca.mods.causal()))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_what_mods_can_not_compute_with_is_refused(dtype: torch.dtype) -> None:
    table = torch.tensor([5, 6], dtype=dtype)
    mod = lambda b, h, q, kv: table[kv % 2] > 5  # noqa: E731
    if dtype is torch.int64:
        assert Mask.of(mod).dense(1, 2).tolist() == [[[[False, True]]]]
        return
    with pytest.raises(errors.TypeMismatch, match=r"view\(torch.int64\)"):
        Mask.of(mod)


@pytest.mark.parametrize(("first", "then"), [(4, 2**40), (4, -(2**31) - 1), (2**40, 2**70)])
def test_a_run_time_number_refuses_what_its_type_does_not_hold(first: int, then: int) -> None:
    number = ca.scalar(first)
    number.value = min(then, 2**31 - 1) if then > 0 else -(2**31)
    with pytest.raises(errors.UnsupportedCapture, match="bits"):
        number.value = then
    with pytest.raises(errors.UnsupportedCapture, match="64 bits"):
        ca.scalar(2**70)


def test_a_run_time_number_of_64_bits_is_kept_to_the_last_for_the_backward_of_compiled_code() -> None:
    reach = ca.scalar(2**62 + 1)
    attend = ca.Attention(mask_mod=lambda b, h, q, kv: (reach + kv) % 2 == 0)
    q = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (expected,) = torch.autograd.grad(attend(q, q, q).sum(), q)
    (found,) = torch.autograd.grad(torch.compile(attend, backend="aot_eager")(q, q, q).sum(), q)
    assert torch.allclose(found, expected)


@pytest.mark.parametrize("sizes", [{"q_len": 2**31}, {"kv_len": 2**29 + 1}, {"heads": 2**21}])
def test_sizes_that_masks_are_not_followed_to_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(errors.InvalidArgument, match=next(iter(sizes))):
        Mask.of(lambda b, h, q, kv: q >= kv).tiles(**{"q_len": 4, "kv_len": 4, **sizes})
    if "heads" not in sizes:
        q = torch.zeros(1, 1, 1, 8).expand(1, 1, sizes.get("q_len", 1), 8)
        k = torch.zeros(1, 1, 1, 8).expand(1, 1, sizes.get("kv_len", 1), 8)
        with pytest.raises(errors.InvalidLength, match="analysed up to"):
            ca.attention(q, k, k)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(20))
def test_many_random_masks_at_the_ends_of_int64(part: int) -> None:
    start = int(os.environ["COMPOSATTN_TEST_SEED"]) * 1_000_000 + part * 50_000
    hold_all(range(start, start + 2000))
