"""What the streaming backend computes in one step: some heads of one sequence, its query tiles and what these see.

Kv tiles begin at the first key that the intervals of a query tile name (`analysis.bands`), not at a multiple: a window
of 256 keys is one kv tile of 128 queries. Many keys that all rows see lie in tiles of their own, which nothing tests;
of the others the mask is computed, and only columns where it shows something are kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from ..analysis.bands import TileInterval
from ..analysis.program import Program
from ..graph.evaluate import Env, evaluate_all
from ..graph.expr import Expr
from .layouts import SequenceRows


@dataclass(frozen=True)
class TileSizes:
    """Queries and keys of a tile at most, and scores of one step over all its heads."""

    queries: int
    keys: int
    scores: int


# On a CPU a step's scores are about what its caches hold, on a GPU enough to fill it.
CPU = TileSizes(queries=128, keys=512, scores=1 << 19)
TILE_SIZES = {"cpu": CPU, "cuda": TileSizes(queries=512, keys=512, scores=1 << 24)}


def sizes_on(device: torch.device) -> TileSizes:
    return TILE_SIZES.get(device.type, TILE_SIZES["cuda"])


@dataclass(frozen=True)
class Tile:
    """Rows and columns of one tile; `full` where every pair is visible, so that nothing is tested."""

    rows: slice
    columns: slice
    full: bool


@dataclass(frozen=True)
class BoundMask:
    """What decides which pairs are visible: the program, and its tensors and run-time numbers in this call."""

    program: Program
    tensors: Mapping[int, torch.Tensor]
    scalars: Mapping[int, float | int]


def steps(parts: list[SequenceRows], mask: BoundMask, q: torch.Tensor, k: torch.Tensor) -> Iterator[TileStep]:
    """The sequences cut into groups of heads whose tiles are not too large together.

    q (B, Hkv, group, Sq, D), k (B, Hkv, Skv, D).
    """
    batch, kv_heads, group = q.shape[:3]
    sizes = sizes_on(q.device)
    for part in parts:
        q_len, kv_len = (s.stop - s.start for s in (part.queries, part.keys))
        tile = min(sizes.queries, q_len) * min(sizes.keys, kv_len) * group
        at_once = max(1, sizes.scores // max(1, tile))
        heads = min(kv_heads, at_once)
        batches = max(1, min(batch, at_once // kv_heads))
        for b in range(0, batch, batches):
            for h in range(0, kv_heads, heads):
                at = slice(b, min(b + batches, batch)), slice(h, min(h + heads, kv_heads))
                yield TileStep(mask, part, *at, q, k)


class TileStep:
    """Heads of one sequence (or of all of a dense call), their tiles, and the values of mods on them."""

    def __init__(
        self, mask: BoundMask, part: SequenceRows, batches: slice, kv_heads: slice, q: torch.Tensor, k: torch.Tensor
    ) -> None:
        self.mask, self.part, self.heads = mask, part, (batches, kv_heads)
        self.q, self.k = self.queries(q), self.keys(k)
        self.shape = tuple(self.q.shape[:3])
        self.q_len, self.kv_len = self.q.shape[3], self.k.shape[2]
        group = self.shape[2]
        self.index = {
            "b": self.arange(slice(part.b + batches.start, part.b + batches.stop), -1, 1, 1, 1, 1),
            "h": self.arange(slice(kv_heads.start * group, kv_heads.stop * group), 1, -1, group, 1, 1),
            "q_len": self.arange(slice(self.q_len, self.q_len + 1), 1),
            "kv_len": self.arange(slice(self.kv_len, self.kv_len + 1), 1),
        }
        sizes, heads = sizes_on(q.device), max(1, math.prod(self.shape))
        rows = max(min(16, sizes.queries), sizes.scores // (heads * sizes.keys))
        self.q_tile = max(1, min(rows, sizes.queries, self.q_len))
        # few queries, as in decode, take more keys at once
        columns = min(sizes.scores // (heads * self.q_tile), sizes.keys * sizes.queries // self.q_tile)
        self.kv_tile = max(1, min(max(columns, min(64, sizes.keys)), self.kv_len))

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """The step's of (B, kv head, group, rows, ...)."""
        return x[self.heads][:, :, :, self.part.queries]

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """The step's of (B, kv head, columns, ...)."""
        return x[self.heads][:, :, self.part.keys]

    @cached_property
    def query_tiles(self) -> list[slice]:
        return [slice(r, min(r + self.q_tile, self.q_len)) for r in range(0, self.q_len, self.q_tile)]

    def arange(self, positions: slice, *shape: int) -> torch.Tensor:
        return torch.arange(positions.start, positions.stop, device=self.q.device).view(shape)

    def evaluate(self, exprs: list[Expr], tile: Tile, score: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Values of graphs on a tile, broadcastable to its scores (b, kv head, group, rows, columns)."""
        index = {
            **self.index,
            "q": self.arange(tile.rows, 1, 1, 1, -1, 1),
            "kv": self.arange(tile.columns, 1, 1, 1, 1, -1),
        }
        return evaluate_all(exprs, self.env(index, score))

    @cached_property
    def of_rows(self) -> Env:
        """For what heads and sequences alone decide, broadcastable to (b, kv head, group, rows)."""
        return self.env({name: self.index[name].squeeze(-1) for name in ("b", "h")})

    def env(self, index: dict[str, torch.Tensor], score: torch.Tensor | None = None) -> Env:
        kind, device, tensors = self.q.dtype, self.q.device, self.mask.tensors
        deciding = tensors if kind is torch.float64 else None
        return Env(index, score, kind, device, tensors, scalars=self.mask.scalars, deciding=deciding)

    def seen_from(self, rows: slice) -> Iterator[tuple[Tile, torch.Tensor | None]]:
        """Tiles with a visible pair, in ascending order, with what is visible of them; None: all."""
        mask = self.mask.program.mask
        for columns, full in self.candidates[rows.start // self.q_tile]:
            tile = Tile(rows, columns, full)
            if full or mask is None:
                yield tile, None
                continue
            visible = self.evaluate([mask], tile)[0]
            visible = visible if visible.ndim else visible.unsqueeze(0)  # what no position decides has no axis of keys
            if bool(visible.all()):
                yield Tile(rows, columns, True), None
                continue
            for seen in self.seen_columns(visible, columns):
                if visible.shape[-1] == 1:
                    yield Tile(rows, seen, False), visible
                else:
                    here = slice(seen.start - columns.start, seen.stop - columns.start)
                    yield Tile(rows, seen, False), visible[..., here]

    def seen_columns(self, visible: torch.Tensor, columns: slice) -> Iterator[slice]:
        """Runs of columns where something is visible, in quarters of a tile."""
        if visible.shape[-1] == 1:
            if bool(visible.any()):
                yield columns
            return
        width = max(1, self.kv_tile // 4)
        by_column = visible.flatten(0, -2).any(0)
        blocks = torch.nn.functional.pad(by_column, (0, -by_column.numel() % width)).view(-1, width).any(1)
        at = columns.start
        for seen, run in itertools.groupby(blocks.tolist()):
            stop = min(at + width * len(list(run)), columns.stop)
            if seen:
                yield slice(at, stop)
            at = stop

    @cached_property
    def candidates(self) -> list[list[tuple[slice, bool]]]:
        """For every query tile the columns of the kv tiles that its intervals touch, and which need no test."""
        if self.mask.program.mask is None:
            return [self.tiles([(0, self.kv_len, 0, self.kv_len)])] * len(self.query_tiles)
        spans = [self.span(interval) for interval in self.mask.program.intervals]
        return [self.tiles([span[i] for span in spans]) for i in range(len(self.query_tiles))]

    def tiles(self, spans: list[tuple[int, int, int, int]]) -> list[tuple[slice, bool]]:
        """Kv tiles that cover these (begin, end, full begin, full end) once; whether all of a tile is full."""
        found: list[tuple[slice, bool]] = []
        at = 0
        for begin, end, _, _ in sorted(spans):
            at = max(at, begin, 0)
            while at < min(end, self.kv_len):
                stop = self.end_of_tile(at, min(end, self.kv_len), spans)
                found.append((slice(at, stop), any(b <= at and stop <= e for _, _, b, e in spans)))
                at = stop
        return found

    def end_of_tile(self, at: int, end: int, spans: list[tuple[int, int, int, int]]) -> int:
        """Where the tile from `at` ends: at an end of full columns too, where these are many and not near its own end.

        A tile more costs about what testing half a tile of keys does.
        """
        end, least = min(at + self.kv_tile, end), max(1, self.kv_tile // 8)
        edges = [edge for _, _, *full in spans if full[1] - full[0] >= self.kv_tile // 2 for edge in full]
        return min([edge for edge in edges if at + least <= edge <= end - least], default=end)

    def span(self, interval: TileInterval) -> list[tuple[int, int, int, int]]:
        """Ends of an interval for every query tile: begin and end cover every head, full ends hold for every head."""
        first = torch.tensor([r.start for r in self.query_tiles], device=self.q.device).view(1, 1, 1, -1, 1)
        last = torch.tensor([r.stop - 1 for r in self.query_tiles], device=self.q.device).view(1, 1, 1, -1, 1)
        env = self.env({**self.index, "first": first, "last": last})
        ends = evaluate_all([interval.begin, interval.end, interval.full_begin, interval.full_end], env)
        shape = (*self.shape, len(self.query_tiles), 1)
        begin, end, full_begin, full_end = (e.expand(shape).transpose(3, 0).flatten(1) for e in ends)
        nothing = begin >= end
        columns = (
            begin.masked_fill(nothing, self.kv_len).amin(1), end.masked_fill(nothing, 0).amax(1),
            full_begin.amax(1), full_end.amin(1),
        )  # fmt: skip
        return list(zip(*(c.tolist() for c in columns), strict=True))
