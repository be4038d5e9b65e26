"""Masks on the positions of an image: the strips of it that are found, and what the mask is in each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

import composattn as ca
from composattn.analysis.program import Program
from composattn.analysis.residues import terms
from composattn.analysis.strips import (
    CutRow,
    Strips,
    all_strips,
    by_rows,
    in_columns,
    reads_image,
    rows_seen,
    strips_of,
    tiles_seen,
)
from composattn.backends.fused.tiles.work import visits_now
from composattn.call.problem import Problem
from composattn.graph.expr import Expr
from composattn.mods import causal, neighborhood
from composattn.mods.mask import Mask

ROWS, COLUMNS = 9, 48


def on_image(kernel: Any, **how: Any) -> Mask:
    return neighborhood((ROWS, COLUMNS), kernel, **how)


def written_out(b: Any, h: Any, q: Any, kv: Any) -> Any:
    near = (q // COLUMNS - kv // COLUMNS).abs() <= 2
    return near & (q % COLUMNS - kv % COLUMNS < 6) & (kv % COLUMNS - q % COLUMNS < 4)


FOUND: dict[str, tuple[Strips, Callable[..., Any]]] = {
    "a neighbourhood": (Strips(48, 8), on_image(7)),
    "a wide one": (Strips(48, 8), on_image((3, 17))),
    "with gaps between rows": (Strips(48, 8), on_image((3, 5), dilation=(2, 1))),
    "with gaps between columns": (Strips(48, 8), on_image((3, 5), dilation=(1, 3))),
    "causal along rows": (Strips(48, 8, beyond=True), on_image((3, 5), is_causal=(False, True))),
    "causal along columns": (Strips(48, 8), on_image((3, 5), is_causal=(True, False))),
    "distances": (Strips(48, 8, beyond=True), written_out),
    "no whole number of strips": (Strips(40, 8), neighborhood((9, 40), 5)),
    "no whole number of strips, causal along rows": (
        Strips(41, 8, beyond=True),
        neighborhood((9, 41), (3, 5), is_causal=(False, True)),
    ),
    "three axes": (Strips(48, 8, several_axes=True), neighborhood((3, 3, 48), (1, 3, 3))),
    "three axes of gaps": (Strips(48, 8, several_axes=True), neighborhood((3, 3, 48), (3, 1, 3), dilation=(1, 1, 2))),
    "rows by head": (Strips(48, 8), lambda b, h, q, kv: on_image(3)(b, h, q, kv) & (kv // COLUMNS >= h)),
}
WHOLE: dict[str, Callable[..., Any]] = {
    "a sequence": causal(),
    "columns too far apart": on_image((3, 19)),
    "all columns": lambda b, h, q, kv: q // 48 == kv // 48,
    "less than a strip": neighborhood((9, 15), 3),
    "two images": on_image(3) & neighborhood((12, 36), 3),
    "one of two": on_image(3) | causal(),
    "rows and columns at once": lambda b, h, q, kv: (q // 48 - kv // 48).abs() + (q % 48 - kv % 48).abs() < 4,
    "positions too": on_image(3) & causal(),
    "columns by head": lambda b, h, q, kv: on_image(3)(b, h, q, kv) & (q % 48 - kv % 48 < h),
    # keys of the second strip would begin in front of the image too, where copies must not
    "columns farther than a strip": lambda b, h, q, kv: (q // 48 == kv // 48) & ((q % 48 - kv % 48 - 18).abs() < 3),
    "three axes, wide along rows": neighborhood((3, 3, 48), (1, 1, 19)),
}


def graph(mask: Callable[..., Any]) -> Expr:
    found = ca.Attention(mask_mod=mask).program.mask
    assert found is not None
    return found


NARROW: dict[str, tuple[Strips | None, Callable[..., Any]]] = {
    "a neighbourhood": (Strips(48, 4, apart=8), on_image(7)),
    "no whole number of strips": (Strips(41, 4, apart=8), neighborhood((9, 41), 5)),
    "too wide": (None, on_image((3, 11))),
}


@pytest.mark.parametrize("name", NARROW)
def test_strips_of_8_columns_are_found_where_their_queries_see_16(name: str) -> None:
    wanted, mask = NARROW[name]
    assert strips_of(graph(mask), 8) == wanted
    if wanted is not None:
        _is_that_of_the_image(wanted, graph(mask))


@pytest.mark.parametrize("name", FOUND)
def test_a_mask_in_strips_is_that_of_the_image(name: str) -> None:
    wanted, mask = FOUND[name]
    whole = graph(mask)
    strips = strips_of(whole)
    assert strips == wanted
    assert reads_image(whole, strips.columns)
    _is_that_of_the_image(strips, whole)


def _is_that_of_the_image(strips: Strips, whole: Expr) -> None:
    columns, last = strips.columns, strips.cut
    length = ROWS * columns if last is None else last.at * columns + last.columns
    of_image = Mask(whole).dense(length, length, 1, 3)[0]
    of_strips = Mask(strips.mask(whole)).dense(strips.queries_of(length), strips.keys_of(length), 2 * strips.count, 3)
    q, kv = torch.arange(strips.queries_of(length)), torch.arange(strips.keys_of(length))
    for b, in_strip in enumerate(of_strips):
        first = b % strips.count * strips.apart
        row, column = q // strips.apart, q % strips.apart + first
        row = row if last is None else _in_image(row, last.q_row, last.at)
        there = (row >= 0) & (column < columns) & (row * columns + column < length)
        queries = (row * columns + column)[there]
        row, column = kv // strips.wide - strips.above, kv % strips.wide + first - strips.before
        row = row if last is None else _in_image(row, last.kv_row - strips.above, last.at)
        inside = (column >= 0) & (column < columns) & (row >= 0) & (row * columns + column < length)
        keys = (row * columns + column)[inside]
        in_strip = in_strip[:, there]
        assert not in_strip[..., ~inside].any()
        assert torch.equal(in_strip[..., inside], of_image[:, queries][..., keys])
        others = torch.ones(length, dtype=torch.bool).index_fill(0, keys, False)
        assert not of_image[:, queries][..., others].any()


def _in_image(row: torch.Tensor, last: int, at: int) -> torch.Tensor:
    """The row of the image that a row of a strip is, of which the `last` one is the one `at`; -1: none."""
    return torch.where(row < at, row, torch.where(row == last, at, -1))


@pytest.mark.parametrize("above", [1, 3])
@pytest.mark.parametrize("name", FOUND)
def test_keys_may_begin_above_the_image(name: str, above: int) -> None:
    wanted, mask = FOUND[name]
    _is_that_of_the_image(dataclasses.replace(wanted, above=above), graph(mask))


@pytest.mark.parametrize(("columns", "kernel"), [(32, (3, 19)), (16, 5), (8, (3, 7))])
def test_a_narrow_image_may_be_one_strip_whose_keys_are_no_others(columns: int, kernel: Any) -> None:
    whole = graph(neighborhood((ROWS, columns), kernel))
    found = max(all_strips(whole), key=lambda strips: strips.apart)
    assert (found.count, found.wide, found.before, found.is_whole) == (1, columns, 0, True)
    _is_that_of_the_image(found, whole)
    _is_that_of_the_image(dataclasses.replace(found, above=2), whole)


@pytest.mark.parametrize("above", [0, 1, 2])
@pytest.mark.parametrize("name", ["a neighbourhood", "with gaps between rows", "three axes", "rows by head"])
def test_tiles_that_rows_see_are_those_of_the_mask(name: str, above: int) -> None:
    strips, mask = FOUND[name]
    strips = dataclasses.replace(strips, above=above)
    seen = rows_seen(graph(mask), strips.columns, (ROWS, ROWS), 3)
    tile = 2 * strips.apart, 3 * strips.wide
    shape = strips.queries_of(ROWS * strips.columns), strips.keys_of(ROWS * strips.columns)
    of_strips = Mask(strips.mask(graph(mask))).dense(*shape, strips.count, 3).flatten(0, 1).any(0)
    padded = pad(of_strips, (0, -shape[1] % tile[1], 0, -shape[0] % tile[0]))
    visited = padded.unflatten(1, (-1, tile[1])).any(2).unflatten(0, (-1, tile[0])).any(1)
    assert tiles_seen(seen, (2, 3))[above] == pytest.approx(int(visited.sum()) / len(visited))


@pytest.mark.parametrize("name", WHOLE)
def test_no_strips_are_found_where_queries_see_more_than_their_keys(name: str) -> None:
    assert strips_of(graph(WHOLE[name])) is None


def test_terms_are_of_columns_or_of_rows() -> None:
    whole = graph(on_image((3, 5), is_causal=(False, True)))
    strips = strips_of(whole)
    assert strips is not None
    found = [in_columns(term, strips.wide) for term in terms(strips.mask(whole))]
    assert sorted(found) == [False, False, True, True, True, True]
    of_queries = [in_columns(term, strips.apart, "q") for term in terms(strips.mask(whole))]
    assert sorted(of_queries) == [False, False, False, False, True, True]  # inside of the image keys alone are


def test_scores_may_read_rows_and_columns_alone() -> None:
    assert reads_image(graph(lambda b, h, q, kv: q // 48 - kv % 48 > h), 48)
    assert not reads_image(graph(lambda b, h, q, kv: q // 48 - kv > h), 48)
    assert not reads_image(graph(lambda b, h, q, kv: q // 24 > kv // 24), 48)


@pytest.mark.parametrize(("size", "kernel"), [((9, 48), (5, 3)), ((3, 3, 48), 3), ((9, 40), (3, 5))])
def test_rows_see_what_their_queries_see(size: tuple[int, ...], kernel: Any) -> None:
    columns, length = size[-1], ROWS * size[-1]
    whole = graph(neighborhood(size, kernel))
    seen = rows_seen(whole, columns, (ROWS, ROWS), 3)
    dense = Mask(whole).dense(length, length)[0, 0]
    assert torch.equal(seen, dense.unflatten(0, (ROWS, -1)).unflatten(2, (ROWS, -1)).any(3).any(1))


def cut(columns: int, above: int = 0) -> CutRow:
    """The last of `ROWS` rows, of so many columns; two rows of queries before it, and one of keys, are not there."""
    return CutRow(ROWS - 1, columns, ROWS + 1, ROWS + above)


@pytest.mark.parametrize("columns", [1, 15, 16, 31, 39])
@pytest.mark.parametrize("above", [0, 2])
@pytest.mark.parametrize("name", FOUND)
def test_a_last_row_that_is_cut_is_in_the_strips(name: str, above: int, columns: int) -> None:
    wanted, mask = FOUND[name]
    _is_that_of_the_image(dataclasses.replace(wanted, above=above, cut=cut(columns, above)), graph(mask))


def test_keys_of_a_cut_row_are_told_by_other_columns() -> None:
    strips = Strips(48, 3, above=1, cut=cut(20, 1))
    found = [found for term in terms(strips.mask(graph(on_image(7)))) if (found := by_rows(term, strips.wide))]
    ((rows, *columns),) = found
    assert not in_columns(rows, strips.wide) and all(in_columns(of, strips.wide) for of in columns)
    assert not any(by_rows(term, strips.apart, "q") for term in terms(strips.mask(graph(on_image(7)))))


def test_a_cut_row_is_a_second_run_of_keys_for_queries_that_see_it() -> None:
    kept = Strips(96, 6, above=2, cut=CutRow(85, 32, 88, 88)).mask(graph(neighborhood((86, 96), 13)))
    assert len(Program(None, kept).intervals) == 2
    problem = Problem(6, 1, 1, 89 * 16, 89 * 32, 64, 64, torch.bfloat16, torch.device("cpu"))
    visits = visits_now(problem, Program(None, kept).intervals, 128, 128)
    assert visits is not None and visits[0].tolist() == [4, *8 * [5], 6, 5, 5]


@pytest.mark.parametrize("above", [0, 1, 2])
@pytest.mark.parametrize("name", ["a neighbourhood", "with gaps between rows", "rows by head"])
def test_tiles_of_a_cut_image_begin_with_its_last_row(name: str, above: int) -> None:
    wanted, mask = FOUND[name]
    q_row, kv_row = [-(-rows // tile) * tile for rows, tile in ((ROWS - 1, 2), (ROWS - 1 + above, 3))]
    strips = dataclasses.replace(wanted, above=above, cut=CutRow(ROWS - 1, 30, q_row, kv_row))
    seen = rows_seen(graph(mask), strips.columns, (ROWS, ROWS), 3)
    of_strips = Mask(strips.mask(graph(mask))).dense(strips.queries_of(0), strips.keys_of(0), strips.count, 3)
    of_strips = of_strips.flatten(0, 1).any(0)
    tile = 2 * strips.apart, 3 * strips.wide
    padded = pad(of_strips, (0, -of_strips.shape[1] % tile[1], 0, -of_strips.shape[0] % tile[0]))
    visited = padded.unflatten(1, (-1, tile[1])).any(2).unflatten(0, (-1, tile[0])).any(1)
    assert tiles_seen(seen, (2, 3), cut=True)[above] == pytest.approx(int(visited.sum()) / len(visited))
