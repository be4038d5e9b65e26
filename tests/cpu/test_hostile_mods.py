"""Mods as users write them at their worst, run by torch on tensors of positions, where nothing of the graph takes part.

Signs of quotients and remainders, shifts, bools in arithmetic, the ends of int64, NaN, infinities, zeros with a sign,
indices from the end: attention and tiles of each are held to plain softmax in fp64 over what torch says.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import composattn as ca
from tests.hostile_mods import BATCH, HEADS, LENGTH, Mod, attended, hold_chosen, visible

TILE = 16
DRAWN = torch.Generator().manual_seed(0)


def picked(*values: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (LENGTH,), generator=DRAWN)]


INTS, FLAGS = picked(0, 1, 2, 3, 4), picked(0, 1).bool()
NUMBERS, TABLE = torch.randn(LENGTH, generator=DRAWN), torch.randn(HEADS, LENGTH, generator=DRAWN)
PAIRS, ROWS = torch.randn(LENGTH, LENGTH, generator=DRAWN), torch.randn(LENGTH, 3, generator=DRAWN)
FAR = picked(2**63 - 1, -(2**63), 0, -1, 1, 2**62, -(2**62), 2**53 + 1)
ODD = picked(math.inf, -math.inf, math.nan, -0.0, 0.0, 1e-45, 3e38, -3e38)
HIDING = picked(0.0, -math.inf)
BELOW, ZERO = torch.tensor(-3), torch.tensor(0)
STAMPS = 1.7e9 + 0.25 * torch.arange(LENGTH, dtype=torch.float64)

MASKS: dict[str, Mod] = {
    "remainder of a difference": lambda b, h, i, j: (i - j) % 7 < 3,
    "remainder by a negative": lambda b, h, i, j: (i - j) % -7 < -3,
    "remainder by a captured negative": lambda b, h, i, j: (i - j) % BELOW < -1,
    "quotient by a negative": lambda b, h, i, j: (i - j) // -7 >= (j - i) // 5,
    "fmod": lambda b, h, i, j: torch.fmod(i - j, 5) == -2,
    "division to zero": lambda b, h, i, j: torch.div(i - j, -3, rounding_mode="trunc") > 4,
    "a guarded division": lambda b, h, i, j: i // ZERO.clamp(min=1) >= j,
    "shift of a negative": lambda b, h, i, j: (i - j) >> 3 == -2,
    "shift by an index": lambda b, h, i, j: ((1 << (j % 8)) & (i + 1)) > 0,
    "shift of captured bits": lambda b, h, i, j: ((INTS[i] >> (j % 3)) & 1) == 1,
    "bits": lambda b, h, i, j: ((~i & j) == j) | ((i ^ j) & 5 == 4),
    "bools added": lambda b, h, i, j: (FLAGS[i] + FLAGS[j]) & (i >= j),
    "bools multiplied": lambda b, h, i, j: (FLAGS[i] * FLAGS[j]) | (i == j),
    "bools counted": lambda b, h, i, j: FLAGS[i].int() + FLAGS[j].int() + (i > j) == 2,
    "bools compared": lambda b, h, i, j: (FLAGS[i] > FLAGS[j]) ^ (FLAGS[i] == FLAGS[j]) ^ (i >= j),
    "bools and numbers": lambda b, h, i, j: (1 - 2 * FLAGS[i] + (i > j) >= 0) & (FLAGS[j] > 0.5),
    "a sum of bools": lambda b, h, i, j: sum([i >= j, j >= 3, FLAGS[i]]) >= 2,
    "logic of integers": lambda b, h, i, j: torch.logical_not(INTS[i]) | torch.logical_and(INTS[j], i > j),
    "far differences": lambda b, h, i, j: FAR[i] - FAR[j] > 0,
    "far and equal": lambda b, h, i, j: (FAR[i] == FAR[j]) | (FAR[i] > 2**62),
    "far and next": lambda b, h, i, j: FAR[i] + 1 > FAR[j],
    "far magnitudes": lambda b, h, i, j: (FAR[i].abs() >= FAR[j]) & (-FAR[i] <= FAR[j]),
    "far quotients": lambda b, h, i, j: (FAR[i] // 3 > j) | (FAR[j] % -7 >= -(j % 7)),
    "far shifts": lambda b, h, i, j: (FAR[i] << 1 >= FAR[j]) & (FAR[i] >> 31 >= FAR[j] >> 31),
    "far casts": lambda b, h, i, j: (FAR[i].int() >= FAR[j].to(torch.int16)) | (FAR[i].to(torch.uint8) > 3),
    "far extremes": lambda b, h, i, j: torch.maximum(FAR[i], j) <= torch.maximum(FAR[j], i),
    "far clamps": lambda b, h, i, j: FAR[i].clamp(0, 50) >= j,
    "both ends": lambda b, h, i, j: (FAR[i] >= 2**63 - 1) | (FAR[j] <= -(2**63)),
    "no number compared": lambda b, h, i, j: ODD[i] >= ODD[j],
    "no number compared, not": lambda b, h, i, j: ~(ODD[i] < ODD[j]),
    "no number is not itself": lambda b, h, i, j: (ODD[j] != ODD[j]) | (ODD[i] == ODD[j]),
    "no number as a bool": lambda b, h, i, j: ODD[j].bool() & (i >= j),
    "the sign of a zero": lambda b, h, i, j: 1.0 / ODD[j] > 0,
    "the sign of no number": lambda b, h, i, j: torch.sign(ODD[j]) >= 0,
    "extremes of no number": lambda b, h, i, j: (torch.maximum(ODD[i], ODD[j]) > 0) | (ODD[j].clamp(-1, 1) > 0),
    "infinite differences": lambda b, h, i, j: ODD[i] - ODD[j] >= 0,
    "infinite limits": lambda b, h, i, j: (ODD[i] <= j) | ~(ODD[i] > j),
    "the root of a negative": lambda b, h, i, j: ~((i - j).float().sqrt() > 3),
    "powers of a negative": lambda b, h, i, j: ((i - j).float() ** 0.5 > 3) | ((i - j).float() ** 3.0 < -90),
    "whole logarithms": lambda b, h, i, j: (torch.log2((i - j).abs().float()) % 1.0 == 0) | (i == j),
    "whole powers": lambda b, h, i, j: ((i - j) ** 3 < 50) & ((i - j) ** 0 == 1) & (2 ** (j % 8) > i),
    "tenths": lambda b, h, i, j: (j % 0.1 < 0.05) | (j // 0.1 % 2 == 0) | (i == j),
    "blocks by true division": lambda b, h, i, j: (i / 41).int() == (j / 41).int(),
    "half to even": lambda b, h, i, j: torch.round((i - j) / 2) % 2 == 0,
    "from the end": lambda b, h, i, j: INTS[-1 - i] == INTS[-j - 1],
    "before the beginning": lambda b, h, i, j: NUMBERS[i - j] > 0,
    "a read of a read": lambda b, h, i, j: INTS[INTS[i]] == INTS[INTS[j]],
    "a table of pairs": lambda b, h, i, j: (PAIRS[i, j] > 0) & (TABLE[h, i] > TABLE[h, j]),
    "times in fp64": lambda b, h, i, j: (STAMPS[i] >= STAMPS[j]) & (STAMPS[i] - STAMPS[j] < 3.0),
    "many blocks": lambda b, h, i, j: functools.reduce(operator.or_, [(i // 9 == n) & (j // 9 == n) for n in range(9)]),
    "products of positions": lambda b, h, i, j: (i * j % 17 < 9) & (i * i + j * j < 5000),
    "beyond 32 bits": lambda b, h, i, j: (i + 2**31 > j + 2**31) & (i * 2**40 > j * 2**40 - 1),
    "nothing": lambda b, h, i, j: j < 0,
    "one head of one sequence": lambda b, h, i, j: (h == 1) & (b == 1),
    "every other row": lambda b, h, i, j: i % 2 == 0,
}
SCORES: dict[str, Mod] = {
    "a remainder": lambda s, b, h, i, j: s % 0.7,
    "fmod": lambda s, b, h, i, j: torch.fmod(s, TABLE[h, j].abs() + 0.5),
    "a power by a table": lambda s, b, h, i, j: (s * s + 1) ** TABLE[h, j],
    "nothing to the power of nothing": lambda s, b, h, i, j: s * 0.0 ** (i - j).abs(),
    "clamped by tensors": lambda s, b, h, i, j: torch.clamp(s, min=-NUMBERS[j].abs(), max=NUMBERS[i].abs()),
    "clamped the wrong way round": lambda s, b, h, i, j: s.clamp(1, -1),
    "a tie": lambda s, b, h, i, j: torch.maximum(s, s * 1.0),
    "hidden by a table": lambda s, b, h, i, j: s + HIDING[j],
    "rows hidden by a table": lambda s, b, h, i, j: s + HIDING[i],
    "bools as factors": lambda s, b, h, i, j: s * FLAGS[j] + (i >= j) * s,
    "nested choices": lambda s, b, h, i, j: torch.where(s > 0, torch.where(NUMBERS[j] > 0, s * 2, -s), s * s),
    "activations": lambda s, b, h, i, j: F.gelu(s) - F.softplus(s, beta=0.5, threshold=3.0) + F.elu(s),
    "from the end": lambda s, b, h, i, j: s + NUMBERS[i - j] * TABLE[h, -1 - j],
    "a pair and its mirror": lambda s, b, h, i, j: s * PAIRS[j, i] + PAIRS[i, j] - PAIRS[j, i],
    "a distance of vectors": lambda s, b, h, i, j: s - (ROWS[i] - ROWS[j]).pow(2).sum(-1).sqrt(),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_see_what_torch_says(name: str, generator: torch.Generator) -> None:
    mask = MASKS[name]
    x = [torch.randn(BATCH, HEADS, LENGTH, 8, generator=generator) for _ in range(3)]
    found = ca.attention(*x, mask_mod=mask, return_lse=True)
    for mine, exact in zip(found, attended(*(t.double() for t in x), None, mask), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-5)


TENTHS = torch.tensor([0.1, 0.2, 0.3, 0.7])[torch.arange(LENGTH) // 20]
ROUNDED: dict[str, Mod] = {
    "at most a tenth": lambda b, h, i, j: TENTHS[j] <= 0.1,
    "equal to a tenth": lambda b, h, i, j: TENTHS[j] == 0.1,
    "three times": lambda b, h, i, j: TENTHS[j] * 3 <= 0.3,
    "a tenth of a position": lambda b, h, i, j: (j * 0.1 == 0.7) | (j * 0.1 <= 0.3),
    "beyond whole numbers": lambda b, h, i, j: j + 2**24 <= (i + 2**24) * 1.0,
    "roots": lambda b, h, i, j: torch.sqrt(j * 1.0) * torch.sqrt(j * 1.0) == j,
}


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_round_as_torch_does_whatever_q_has(name: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    mask = ROUNDED[name]
    x = [torch.randn(BATCH, HEADS, LENGTH, 8, generator=generator).to(dtype).requires_grad_() for _ in range(3)]
    exact = attended(*(t.double() for t in x), None, mask)
    for backend in ("streaming", "reference"):
        found = ca.attention(*x, mask_mod=mask, return_lse=True, backend=backend)
        gradients = zip(
            *(torch.autograd.grad(out.sum(), x, retain_graph=True) for out in (found[0], exact[0])), strict=True
        )
        for mine, wanted in (*zip(found, exact, strict=True), *gradients):
            torch.testing.assert_close(mine.double(), wanted.double(), rtol=1e-4, atol=1e-5)
        # a score mod that decides by it, and reads where it says
        mods = {"score_mod": lambda s, b, h, i, j: torch.where(mask(b, h, i, j), s, s * NUMBERS[(j * 0.1).int()])}
        mine, _ = ca.attention(*x, **mods, return_lse=True, backend=backend)
        wanted, _ = attended(*(t.double() for t in x), mods["score_mod"], lambda b, h, i, j: i >= 0)
        torch.testing.assert_close(mine.double(), wanted, rtol=1e-4, atol=1e-5)
    weights = ca.attention_weights(*x[:2], range(LENGTH), mask_mod=mask)
    torch.testing.assert_close(weights.bool(), visible(mask))


@pytest.mark.parametrize("name", MASKS)
def test_their_tiles_are_never_wrong(name: str) -> None:
    mask = MASKS[name]
    blocks = visible(mask).unflatten(3, (-1, TILE)).unflatten(2, (-1, TILE))
    kinds = ca.Mask.of(mask).tiles(LENGTH, LENGTH, (TILE, TILE), batch=BATCH, heads=HEADS)
    assert not ((kinds == 0) & blocks.any(5).any(3)).any() and not ((kinds == 2) & ~blocks.all(5).all(3)).any()


@pytest.mark.parametrize("name", SCORES)
def test_scores_and_gradients_are_those_of_torch(name: str, generator: torch.Generator) -> None:
    wide = {"generator": generator, "dtype": torch.float64}
    x = [torch.randn(BATCH, HEADS, LENGTH, 8, **wide).requires_grad_() for _ in range(3)]
    weights = torch.randn(BATCH, HEADS, LENGTH, 8, **wide)
    results = []
    for out, lse in (
        ca.attention(*x, score_mod=SCORES[name], mask_mod=lambda b, h, i, j: i >= j - 5, return_lse=True),
        attended(*x, SCORES[name], lambda b, h, i, j: i >= j - 5),
    ):
        lse = torch.where(lse > -math.inf, lse, 0.0)
        results.append([out, lse, *torch.autograd.grad((out * weights).sum() + lse.double().sin().sum(), x)])
    for mine, exact in zip(*results, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-6)


def test_tables_read_where_the_score_says_get_their_gradients(generator: torch.Generator) -> None:
    for backend in ("streaming", "reference"):
        hold_chosen(backend, generator, torch.float64)


class Doubled(torch.Tensor):
    """Numbers that read as twice what they are."""

    def __getitem__(self, item: Any) -> Any:
        return 2 * super().__getitem__(item)


@pytest.mark.parametrize("backend", ["streaming", "reference"])
def test_what_a_class_does_where_it_is_read_is_done_once(backend: str) -> None:
    x = torch.randn(1, HEADS, LENGTH, 8, dtype=torch.float64)
    twice = TABLE.as_subclass(Doubled)
    out = ca.attention(x, x, x, score_mod=lambda s, b, h, i, j: s + twice[h, j], backend=backend)
    assert torch.equal(out, ca.attention(x, x, x, score_mod=lambda s, b, h, i, j: s + 2 * TABLE[h, j], backend=backend))
