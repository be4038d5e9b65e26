"""Masks, score mods and divisions among ranks as SVG: what the analysis says of tiles, and what each pair is."""

from __future__ import annotations

import colorsys
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from .drawing import HIDDEN, INK, PALE, PAPER, SEEN, TESTED, WHOLE, Drawing

SIDE, EDGE = 256, 10  # pixels of a picture's pairs, and of the paper around them
DARKEST, PALEST = (24, 60, 90), (222, 235, 242)
LEVELS = 12  # colours between them


def of_mask(visible: torch.Tensor, kinds: torch.Tensor, tile: tuple[int, int], title: str) -> str:
    """A mask's pairs, bool (Sq, Skv), in its tiles, (Tq, Tkv): 0 skipped (grey), 1 tested (blue), 2 whole (green).

    Rows are queries, the cells that they see are dark where tiles are tested.
    """
    rows, columns = visible.shape
    cell = SIDE / max(rows, columns, 1)
    drawn = Drawing(columns * cell + 2 * EDGE, rows * cell + 2 * EDGE, title)
    drawn.rect(EDGE, EDGE, columns * cell, rows * cell, HIDDEN)
    pairs = (kinds.repeat_interleave(tile[0], 0)[:rows].repeat_interleave(tile[1], 1)[:, :columns] == n for n in (1, 2))
    tested, whole = pairs
    for shown, fill in ((tested, TESTED), (visible, SEEN), (whole, WHOLE)):
        drawn.cells(EDGE, EDGE, cell, shown, fill)
    for row in range(0, rows + tile[0], tile[0]):
        at = EDGE + min(row, rows) * cell
        drawn.line([(EDGE, at), (EDGE + columns * cell, at)], edge=PAPER, width=0.8)
    for column in range(0, columns + tile[1], tile[1]):
        at = EDGE + min(column, columns) * cell
        drawn.line([(at, EDGE), (at, EDGE + rows * cell)], edge=PAPER, width=0.8)
    return drawn.svg()


def of_ranks(seen: torch.Tensor, owner: torch.Tensor, ranks: int) -> str:
    """Tiles that see each other, bool (Tq, Tkv), in the colour of the rank that computes them: `owner` (Tq,)."""
    rows, columns = seen.shape
    cell = SIDE / max(rows, columns)
    drawn = Drawing(columns * cell + 2 * EDGE, rows * cell + 2 * EDGE, f"{ranks} ranks, one colour each")
    drawn.rect(EDGE, EDGE, columns * cell, rows * cell, HIDDEN)
    for rank in range(ranks):
        colour = (round(255 * part) for part in colorsys.hsv_to_rgb(rank / ranks, 0.6, 0.8))
        drawn.cells(EDGE, EDGE, cell, seen & (owner == rank)[:, None], "#" + "".join(f"{c:02x}" for c in colour))
    return drawn.svg()


def of_changes(added: torch.Tensor, visible: torch.Tensor, title: str) -> str:
    """What a score mod adds to a score of 0, (S, S), at the pairs that are visible; dark is most.

    Grey where nothing finite is added.
    """
    cell = SIDE / added.shape[0]
    visible = visible & added.isfinite()
    low, high = added[visible].aminmax() if visible.any() else (added.new_zeros(()),) * 2
    level = ((added - low) / (high - low).clamp_min(1e-30) * (LEVELS - 1)).round()
    drawn = Drawing(SIDE + 2 * EDGE, SIDE + 2 * EDGE, title)
    drawn.rect(EDGE, EDGE, SIDE, SIDE, HIDDEN)
    for n in range(LEVELS):
        part = n / (LEVELS - 1)
        mixed = (round(pale + (dark - pale) * part) for pale, dark in zip(PALEST, DARKEST, strict=True))
        drawn.cells(EDGE, EDGE, cell, visible & (level == n), "#" + "".join(f"{c:02x}" for c in mixed))
    return drawn.svg()


def of_curve(changed: Callable[[torch.Tensor], Any], title: str, reach: float = 90.0) -> str:
    """A score mod that depends on the score alone, from -reach to reach."""
    drawn = Drawing(SIDE + 2 * EDGE, SIDE + 2 * EDGE, title)
    xs = torch.linspace(-reach, reach, 121, device="cpu")
    ys = changed(xs).tolist()

    def at(x: float, y: float) -> tuple[float, float]:
        return (round(EDGE + SIDE * (x / reach + 1) / 2, 1), round(EDGE + SIDE * (1 - y / reach) / 2, 1))

    drawn.line([at(-reach, 0), at(reach, 0)])
    drawn.line([at(0, -reach), at(0, reach)])
    drawn.line([at(-reach, -reach), at(reach, reach)], edge=HIDDEN, width=2)
    for known, points in itertools.groupby(zip(xs.tolist(), ys, strict=True), lambda point: point[1] == point[1]):
        if known:  # no line where the result is NaN
            drawn.line([at(x, max(-reach, min(reach, y))) for x, y in points], edge=SEEN, width=2.5)
    drawn.text(*at(reach * 0.98, -reach * 0.08), f"score {reach:g}", anchor="end", fill=PALE)
    drawn.text(*at(reach * 0.04, reach * 0.38), f"{max((y for y in ys if y == y), default=math.nan):.1f}", fill=INK)
    return drawn.svg()
