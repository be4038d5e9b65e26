"""Which kv tiles are visited, on plain integers: all visible ones once, untested only where all is visible."""

from __future__ import annotations

import itertools
import random

import pytest

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")

from composattn.primitives.interval_shape import IntervalShape
from composattn.primitives.kv_tiles import TileSequence, visit


def visited(sequence: TileSequence) -> list[tuple[int, bool]]:
    """(tile, tested) in the order of the kernel."""
    tiles = [(sequence.first, True)] if sequence.count else []
    for run in sequence.runs:
        for segment in run.segments():
            assert segment.count >= 0
            tiles += [(segment.first - i, segment.tested) for i in range(segment.count)]
    return tiles


def draw(rng: random.Random, kv_len: int) -> tuple[list[tuple[int, int, int, int]], tuple[IntervalShape, ...]]:
    """Ascending intervals, empty and overlapping ones included, with what a plan may know of them."""
    count = rng.randint(1, 3)
    begins = sorted(rng.randint(-10, 80) for _ in range(count))
    ends = sorted(rng.randint(-10, 80) for _ in range(count))
    intervals, shapes = [], []
    for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        full_begin, full_end = begin + rng.randint(0, 6), end - rng.randint(0, 6)
        left = right = True
        full = rng.random() < 0.8
        if i == 0 and rng.random() < 0.3:
            begin = full_begin = min(begin, 0)
            left = False
        if i == count - 1 and rng.random() < 0.3:
            end = full_end = kv_len
            right = False
        intervals.append((begin, end, full_begin, full_end))
        shapes.append(IntervalShape(left, full, right))
    if any(a[1] > b[1] for a, b in itertools.pairwise(intervals)):
        return draw(rng, kv_len)
    return intervals, tuple(shapes)


def test_visits_what_is_visible_once_and_tests_what_is_partly_hidden() -> None:
    rng = random.Random(0)
    untested = 0
    for _ in range(20_000):
        tile_n, kv_len = rng.choice((4, 8)), rng.randint(0, 60)
        intervals, shapes = draw(rng, kv_len)
        sequence = visit(intervals, shapes, kv_len, tile_n)
        tiles = visited(sequence)
        order = [tile for tile, _ in tiles]
        assert len(order) == sequence.count
        assert order == sorted(set(order), reverse=True)
        within = range(kv_len)
        seen = {x for b, e, _, _ in intervals for x in range(b, e) if x in within}
        full = {x for _, _, b, e in intervals for x in range(b, e) if x in within}
        assert {x // tile_n for x in seen} <= set(order)
        for tile, tested in tiles:
            assert 0 <= tile * tile_n < kv_len
            if not tested:
                untested += 1
                assert full.issuperset(range(tile * tile_n, (tile + 1) * tile_n))
    assert untested > 1000
