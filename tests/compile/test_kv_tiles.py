"""Which kv tiles are visited, on plain integers: all visible ones once, untested only where all is visible."""

from __future__ import annotations

import itertools
import random

import pytest

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")

from composattn.primitives.emit_tiles import Shared
from composattn.primitives.interval_shape import IntervalShape
from composattn.primitives.kv_tiles import (
    WHOLE,
    KvPart,
    TileSequence,
    counted_from,
    intervals_around,
    listed_tiles,
    visit,
)
from composattn.primitives.q_tiles import ListedQueryRun, QueryRun


def visited(sequence: TileSequence) -> list[tuple[int, bool]]:
    """(tile, tested) in the order of the kernel."""
    tiles = [(sequence.first, True)] if sequence.count else []
    for run in sequence.runs:
        for tile_range in run.tile_ranges():
            assert tile_range.count >= 0
            tiles += [(tile_range.tile(i), tile_range.tested) for i in range(tile_range.count)]
        assert [run.tile(i) for i in range(run.count)] == [tile for tile, _ in tiles[len(tiles) - run.count :]]
    assert [
        (tile, sequence.tested(i, tile)) for i, tile in enumerate(map(sequence.tile, range(sequence.count)))
    ] == tiles
    if sequence.spans:
        assert in_rounds(sequence) == tiles[1:]
    return tiles


def in_rounds(sequence: TileSequence) -> list[tuple[int, bool]]:
    """Tiles in the order of kernels that alternate between tested and free tiles, each with whether it is tested."""
    tested, free = sequence.rounds()
    assert len(tested) == len(free)
    every = [tile_ranges[n] for n in range(len(tested)) for tile_ranges in (tested, free)]
    assert all(tile_range.tested == (i % 2 == 0) for i, tile_range in enumerate(every))
    return [(tile_range.tile(i), tile_range.tested) for tile_range in every for i in range(tile_range.count)]


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


def test_tiles_counted_from_the_first_key_seen_are_never_more_and_visit_the_same() -> None:
    rng = random.Random(1)
    fewer = 0
    for _ in range(5_000):
        tile_n, kv_len = rng.choice((4, 8)), rng.randint(0, 60)
        intervals, shapes = draw(rng, kv_len)
        seen = [n for begin, end, *_ in intervals for n in range(max(begin, 0), min(end, kv_len))]
        origin = min(seen, default=0)
        free = {n for *_, begin, end in intervals for n in range(max(begin, 0), min(end, kv_len))}
        tiles = visited(visit(counted_from(origin, intervals), shapes, kv_len - origin, tile_n))
        keys = [(origin + tile * tile_n + i, tested) for tile, tested in tiles for i in range(tile_n)]
        assert len({key for key, _ in keys}) == len(keys)
        assert set(seen) <= {key for key, _ in keys}
        assert all(tested or key in free for key, tested in keys)
        usual = visited(visit(intervals, shapes, kv_len, tile_n))
        if len(intervals) == 1:
            assert len(tiles) <= len(usual)
            fewer += len(tiles) < len(usual)
    assert fewer > 100


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


def test_query_tiles_that_go_over_tiles_together_find_their_own_in_their_order() -> None:
    rng = random.Random(3)
    others = 0
    for _ in range(5_000):
        tile_n, kv_len, count = rng.choice((4, 8)), rng.randint(0, 60), rng.randint(1, 3)
        drawn = [draw(rng, kv_len)[0] for _ in range(20)]
        alike = [intervals for intervals in drawn if len(intervals) == count][:3] or drawn[:1]
        shapes = tuple(IntervalShape() for _ in alike[0])
        own = [visit(intervals, shapes, kv_len, tile_n) for intervals in alike]
        all_tiles = visit(intervals_around(alike), shapes, kv_len, tile_n)
        order = [all_tiles.tile(i) for i in range(all_tiles.count)]
        for sequence in own:
            assert [tile for tile in order if sequence.has(tile)] == [tile for tile, _ in visited(sequence)]
        others += sum(not any(sequence.has(tile) for sequence in own) for tile in order)
    assert others  # between query tiles' own there may be tiles that none needs


def test_query_tiles_go_together_where_each_needs_every_tile_and_has_begun() -> None:
    rng = random.Random(4)
    together = 0
    for _ in range(5_000):
        tile_n, kv_len = rng.choice((4, 8)), rng.randint(0, 60)
        drawn = [draw(rng, kv_len)[0][:1] or [(0, 0, 0, 0)] for _ in range(2)]
        own = [visit(intervals, (IntervalShape(),), kv_len, tile_n) for intervals in drawn]
        shared = Shared(visit(intervals_around(drawn), (IntervalShape(),), kv_len, tile_n), own)
        start, stop = shared.together()
        order = [shared.all.tile(i) for i in range(shared.all.count)]
        needed = [all(sequence.has(tile) and tile != sequence.first for sequence in own) for tile in order]
        assert needed == [start <= i < stop for i in range(len(order))]
        together += stop - start
    assert together > 1000
    several = visit([(0, 8, 0, 0), (16, 24, 0, 0)], (IntervalShape(),) * 2, 24, 8)
    assert Shared(several, [several, several]).together() == (2, 2)


def test_an_empty_interval_visits_no_tile() -> None:
    for begin, end in ((5, 5), (13, 2), (60, 90), (-9, 0), (-9, -3)):
        sequence = visit([(begin, end, begin, end)], (IntervalShape(),), 60, 8)
        assert sequence.count == 0 and visited(sequence) == []


def test_parts_of_a_split_visit_together_what_the_whole_does() -> None:
    rng = random.Random(1)
    for _ in range(5_000):
        tile_n, kv_len, n = rng.choice((4, 8)), rng.randint(0, 60), rng.randint(1, 5)
        intervals, shapes = draw(rng, kv_len)
        whole = dict(visited(visit(intervals, shapes, kv_len, tile_n)))
        parts = [visited(visit(intervals, shapes, kv_len, tile_n, KvPart(s, n))) for s in range(n)]
        together = [tile for part in parts for tile, _ in part]
        assert sorted(together) == sorted(whole)
        for part in parts:  # the first tile of a part is tested, whatever the whole does with it
            assert all(tested == whole[tile] or tile == next(iter(whole)) for tile, tested in part[1:])
            assert [tile for tile, _ in part] == sorted((tile for tile, _ in part), reverse=True)


@pytest.mark.parametrize("n", [1, 3])
def test_a_list_visits_its_tested_tiles_first(n: int) -> None:
    rng = random.Random(2)
    for _ in range(5_000):
        partial, full = rng.randint(0, 5), rng.randint(0, 5)
        row = rng.sample(range(50), partial + full + rng.randint(0, 3)) or [0]
        splits = [WHOLE] if n == 1 else [KvPart(s, n) for s in range(n)]
        tiles = [visited(listed_tiles(row, partial, full, s)) for s in splits]
        together = [tile for part in tiles for tile, _ in part]
        assert sorted(together) == sorted(row[: partial + full])
        for part in tiles:
            tests = [tested for _, tested in part]
            assert tests == sorted(tests, reverse=True)
            assert {tile for tile, tested in part if not tested} <= set(row[partial : partial + full])
            assert {tile for tile, tested in part[1:] if tested} <= set(row[:partial])


def test_a_run_of_query_tiles_backwards_is_the_same_from_its_end() -> None:
    run = QueryRun(3, 4, 4, 6)
    back = QueryRun(3, 4, 4, 6, backwards=True)
    for a, b in ((run, back), (run.piece(1, 2), back.piece(1, 2))):
        tiles = [(a.tile(i), a.tested(i)) for i in range(a.count)]
        assert [(b.tile(i), b.tested(i)) for i in range(b.count)] == tiles[::-1]


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_run_may_test_everywhere(everywhere: bool) -> None:
    for run in (QueryRun(3, 4, 4, 6), ListedQueryRun([1, 6, 14], [0, 2, 5], 3, whole=7)):
        tested = [run.tested_where(everywhere).tested(i) for i in range(run.count)]
        assert tested == [everywhere or run.tested(i) for i in range(run.count)]


def test_a_list_of_query_tiles_says_which_to_test() -> None:
    run = ListedQueryRun([2 * 0 + 1, 2 * 3, 2 * 7], [0, 2, 5], 3, whole=7)
    assert [run.tile(i) for i in range(run.count)] == [0, 3, 7]
    assert [run.tested(i) for i in range(run.count)] == [True, False, True]  # tile 7 reaches beyond the last query
    assert [run.before(i) for i in range(run.count)] == [0, 2, 5]
