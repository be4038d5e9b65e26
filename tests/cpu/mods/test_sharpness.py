"""Kernels visit the tiles of a ready mask that have a visible pair, and no others."""

from __future__ import annotations

import inspect

import pytest
import torch

import composattn as ca
from composattn.analysis.bands import TileInterval, tile_intervals, transposed
from composattn.analysis.derived import refresh
from composattn.analysis.tile_lists import Extent, KeyLists, QueryLists, made_lists
from composattn.graph.evaluate import Env, evaluate_all
from composattn.graph.expr import captures
from composattn.mods import masks
from composattn.mods.mask import Mask
from tests.dense_tiles import tiles_of

S = 256
DRAW = torch.Generator().manual_seed(0)
IDS = torch.randint(0, 5, (S,), generator=DRAW).sort().values
APART = IDS[torch.randperm(S, generator=DRAW)]
MARKED = torch.rand(2, S, generator=DRAW) < 0.02
HEIGHTS = torch.rand(S, generator=DRAW).sort().values

MASKS = {
    "causal": [masks.causal(), masks.causal("bottom_right")],
    "sliding_window": [
        masks.sliding_window((10, 20)), masks.sliding_window(torch.tensor([3, 90])),
        masks.sliding_window((9, 5)) | masks.causal(),
    ],
    "prefix_lm": [masks.prefix_lm(70), masks.prefix_lm(torch.tensor([7, 70]))],
    "document": [
        masks.document(IDS), masks.document(APART), masks.document(IDS) & masks.causal(),
        masks.document(offsets=torch.tensor([0, 50, 120, S])),
    ],
    "block_diagonal": [masks.block_diagonal(24), masks.block_diagonal(24, 40)],
    "chunked": [masks.chunked(24, 2), masks.chunked(24) & masks.causal(), masks.chunked(30, None)],
    "dilated_window": [masks.dilated_window((20, 20), 4), masks.dilated_window((120, 120), 64)],
    "global_tokens": [
        masks.global_tokens(4), masks.global_tokens(torch.tensor([3, 100])), masks.global_tokens(MARKED[0]),
        masks.global_tokens(MARKED), masks.global_tokens(torch.tensor([3, 100]), "keys") | masks.sliding_window(20),
        masks.causal() & masks.sliding_window(40) | masks.global_tokens(4),
    ],
    "padding": [
        masks.padding(torch.tensor([5, 77]), torch.tensor([100, 7])),
        masks.padding(torch.rand(2, S, generator=DRAW) < 0.5),
    ],
    "neighborhood": [
        masks.neighborhood((S,), 7), masks.neighborhood((16, 16), 3), masks.neighborhood((8, 32), (3, 9), (1, 3)),
        masks.neighborhood((16, 16), 5, 2), masks.neighborhood((16, 16), 3, 1, (True, False)),
        masks.neighborhood((4, 8, 8), 3), masks.neighborhood((6, 42), (3, 5)),
    ],
    "shared_prefix": [masks.shared_prefix(torch.tensor([0, 40, 100, S]))],
    "float_captures": [ca.mask(lambda b, h, q, kv: HEIGHTS[q] - HEIGHTS[kv] < 0.1)],
}  # fmt: skip


def visited_by_queries(mask: Mask, extent: Extent, tile: tuple[int, int]) -> torch.Tensor:
    """bool (B, H, Tq, Tkv): which kv tiles the query tiles of a forward with this plan visit."""
    lists = made_lists(KeyLists, mask.expr, extent, tile)
    if lists is not None:
        counts, tiles = lists.of_call()
        return marked(tiles, counts.sum(0), extent)
    return in_bands(tile_intervals(mask.expr), extent, tile, ("q_len", "kv_len"))


def visited_by_keys(mask: Mask, extent: Extent, tile: tuple[int, int]) -> torch.Tensor:
    """bool (B, H, Tq, Tkv): which query tiles the kv tiles of a backward with this plan visit."""
    lists = made_lists(QueryLists, mask.expr, extent, tile)
    if lists is not None:
        counts, tiles, _ = lists.of_call()
        return marked(tiles // 2, counts, extent).mT
    return in_bands(transposed(mask.expr)[0], extent, tile, ("kv_len", "q_len")).mT


def marked(tiles: torch.Tensor, counts: torch.Tensor, extent: Extent) -> torch.Tensor:
    """bool (B, H, rows, tiles): the first `counts` of `tiles`."""
    size = tiles.shape[-1]
    places = torch.where(torch.arange(size) < counts[..., None], tiles, size).long()
    found = torch.zeros((*tiles.shape[:3], size + 1), dtype=torch.bool).scatter_(-1, places, True)
    return found[..., :-1].expand(extent.batch, extent.heads, -1, -1)


def in_bands(
    intervals: tuple[TileInterval, ...], extent: Extent, tile: tuple[int, int], order: tuple[str, str]
) -> torch.Tensor:
    """bool (B, H, stationary tiles, moving tiles); `order` names their lengths."""
    lengths = {"q_len": extent.q_len, "kv_len": extent.kv_len}
    sizes = dict(zip(lengths, tile, strict=True))
    rows, columns = (torch.arange(0, lengths[name], sizes[name]) for name in order)
    index = {
        "b": torch.arange(extent.batch).view(-1, 1, 1, 1), "h": torch.arange(extent.heads).view(-1, 1, 1),
        "first": rows.view(-1, 1), "last": (rows + sizes[order[0]] - 1).clamp(max=lengths[order[0]] - 1).view(-1, 1),
        **lengths,
    }  # fmt: skip
    found = torch.zeros((extent.batch, extent.heads, len(rows), len(columns)), dtype=torch.bool)
    for interval in intervals:
        refresh(captures(interval.begin, interval.end))
        begin, end = evaluate_all([interval.begin, interval.end], Env(index))
        stop = (columns + sizes[order[1]]).clamp(max=lengths[order[1]])
        found |= (begin < end) & (begin < stop) & (end > columns)
    return found


def test_every_ready_mask_is_among_them() -> None:
    public = {name for name, f in vars(masks).items() if getattr(f, "__module__", "") == masks.__name__}
    ready = {
        n for n in public if not n.startswith("_") and inspect.signature(getattr(masks, n)).return_annotation == "Mask"
    }
    assert ready <= set(MASKS) and len(ready) > 8


@pytest.mark.parametrize("lengths", [(S, S), (200, 250)], ids=["square", "ragged"])
@pytest.mark.parametrize("name", MASKS)
def test_visits_no_tile_without_a_visible_pair(name: str, lengths: tuple[int, int]) -> None:
    extent = Extent(*lengths, 2, 2, torch.device("cpu"))
    for mask in MASKS[name]:
        for tile in ((64, 48), (16, 16), (128, 128), (48, 32)):
            exact = tiles_of(mask.dense(*lengths, 2, 2), tile).expand(2, 2, -1, -1) > 0
            assert torch.equal(visited_by_queries(mask, extent, tile), exact), f"{mask}, tile {tile}"
            assert torch.equal(visited_by_keys(mask, extent, tile), exact), f"{mask}, tile {tile}, backward"
