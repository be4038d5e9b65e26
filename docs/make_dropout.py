"""Draws docs/plots/dropout.svg: which pairs dropout keeps, and how independent they are along each index.

Run it from the repository: `python docs/make_dropout.py`. A test compares the picture with what this makes.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from composattn.analysis.drawing import PALE, SEEN, Drawing
from composattn.graph.philox import ONE, kept

PICTURE = Path(__file__).with_name("plots") / "dropout.svg"
SIZES = (8, 16, 128, 128)  # b, h, q, kv
LAGS = range(1, 33)
SIDE, TOP = 192, 40


def bits(p: float) -> torch.Tensor:
    """(B, H, Sq, Skv): which pairs are kept with seed 0."""
    b, h, q, kv = (torch.arange(n).view([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate(SIZES))
    return kept(torch.tensor(0), b, h, q, kv, torch.tensor(round(p * ONE)))


def correlations(found: torch.Tensor, dim: int) -> list[float]:
    """Correlations of pairs so far apart in one index, in standard deviations."""
    signs = 2.0 * found.double() - 1.0
    size = found.shape[dim]
    values = []
    for lag in LAGS:
        if lag < size:
            product = signs.narrow(dim, lag, size - lag) * signs.narrow(dim, 0, size - lag)
            values.append(float(product.mean()) * math.sqrt(product.numel()))
    return values


def picture() -> str:
    """The picture as text."""
    drawing = Drawing(2 * SIDE + 60 + 4 * 150 + 30, SIDE + TOP + 40, "Pairs that dropout keeps, and their correlations")
    for n, p in enumerate((0.1, 0.5)):
        x = 20 + n * (SIDE + 20)
        drawing.text(x, TOP - 14, f"p = {p}: 64 queries x 64 keys", bold=True)
        drawing.rect(x, TOP, SIDE, SIDE, "#eef0f2")
        drawing.cells(x, TOP, SIDE / 64, bits(p)[0, 0, :64, :64], SEEN)
    found, middle = bits(0.5), TOP + SIDE / 2
    for dim, name in enumerate(("b", "h", "q", "kv")):
        x = 2 * SIDE + 70 + dim * 150
        drawing.text(x, TOP - 14, f"along {name}", bold=True)
        for deviations in (-3, 0, 3):
            y = middle - deviations * 20
            drawing.line([(x, y), (x + 130, y)])
            drawing.text(x - 4, y + 4, f"{deviations}σ" if deviations else "0", size=10, fill=PALE, anchor="end")
        for i, value in enumerate(correlations(found, dim)):
            y = middle - 20 * value
            drawing.rect(x + 4 * i, min(y, middle), 3, abs(y - middle), SEEN)
        drawing.text(x, TOP + SIDE + 16, "lags 1, 2, ...", size=10, fill=PALE)
    return drawing.svg()


if __name__ == "__main__":
    PICTURE.write_text(picture())
    print(f"wrote {PICTURE}")
