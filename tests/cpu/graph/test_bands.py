"""Bands against the dense mask: sound for random masks, sharp for the ready ones."""

from __future__ import annotations

import os

import pytest
import torch

from composattn.graph.bands import TileInterval, tile_intervals, tile_intervals_transposed
from composattn.graph.evaluate import Env, evaluate_all
from composattn.graph.expr import DType, Expr
from composattn.graph.picture import dense
from tests.cpu.graph.random_masks import RandomMask


def ends(
    intervals: tuple[TileInterval, ...],
    rows: int,
    columns: int,
    tile: int,
    batch: int,
    heads: int,
    mirrored: bool = False,
) -> torch.Tensor:
    """int64 (interval, 4, B, H, tile): the ends at every tile of `tile` rows."""
    first = torch.arange(0, rows, tile)
    index = {
        "b": torch.arange(batch).view(-1, 1, 1), "h": torch.arange(heads).view(-1, 1), "first": first,
        "last": (first + tile - 1).clamp(max=rows - 1), "q_len": torch.tensor(columns if mirrored else rows),
        "kv_len": torch.tensor(rows if mirrored else columns),
    }  # fmt: skip
    exprs = [e for i in intervals for e in (i.begin, i.end, i.full_begin, i.full_end)]
    assert all(e.dtype is DType.INT32 for e in exprs)
    values = [v.expand(batch, heads, len(first)) for v in evaluate_all(exprs, Env(index))]
    return torch.stack(values).unflatten(0, (-1, 4)).to(torch.int64)


def check(visible: torch.Tensor, found: torch.Tensor, tile: int) -> None:
    """Every visible kv of a tile is inside; every kv of a full range is visible from all rows; both ends ascend."""
    rows, columns = visible.shape[-2:]
    tiles = -(-rows // tile)
    padded = torch.nn.functional.pad(visible, (0, 0, 0, tiles * tile - rows))
    some = padded.unflatten(2, (tiles, tile)).any(3)
    hidden = torch.nn.functional.pad(~visible, (0, 0, 0, tiles * tile - rows)).unflatten(2, (tiles, tile)).any(3)
    kv = torch.arange(columns)
    begin, end, full_begin, full_end = found.unsqueeze(-1).unbind(1)
    inside = ((begin <= kv) & (kv < end)).any(0)
    assert not (some & ~inside).any(), "a visible position is not visited"
    full = ((full_begin <= kv) & (kv < full_end)).any(0)
    assert not (hidden & full).any(), "a hidden position is not tested"
    clamped = found[:, :2].clamp(0, columns)
    assert (clamped[1:] >= clamped[:-1]).all(), "the intervals do not ascend"


def both_ways(expr: Expr, q_len: int, kv_len: int, tile: tuple[int, int], batch: int, heads: int) -> None:
    visible = dense(expr, q_len, kv_len, batch, heads).expand(batch, heads, q_len, kv_len)
    check(visible, ends(tile_intervals(expr), q_len, kv_len, tile[0], batch, heads), tile[0])
    mirrored = ends(tile_intervals_transposed(expr), kv_len, q_len, tile[1], batch, heads, True)
    check(visible.mT, mirrored, tile[1])


@pytest.mark.parametrize("part", range(8))
def test_random_masks_are_never_cut_short(part: int) -> None:
    start = int(os.environ["COMPOSATTN_TEST_SEED"]) * 100_000 + part * 1000
    for seed in range(start, start + 250):
        mask = RandomMask(seed)
        try:
            both_ways(mask.expr, mask.q_len, mask.kv_len, mask.tile, mask.batch, mask.heads)
        except BaseException as error:
            raise AssertionError(f"RandomMask({seed}): {mask.expr}, {tile_intervals(mask.expr)}") from error
