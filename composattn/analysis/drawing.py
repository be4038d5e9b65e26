"""Pictures as SVG text, of mods and of pages: equal objects give equal bytes, so that tests can compare them.

A picture has a light and a dark form, of which the reader's browser takes one (`prefers-color-scheme`).
"""

from __future__ import annotations

import html
import itertools
import os
from collections.abc import Iterator, Sequence

import torch

from ..errors import InvalidArgument

INK, PALE = "#1f2933", "#6b7785"
PAPER, HIDDEN = "#ffffff", "#eef0f2"
TESTED, SEEN, WHOLE = "#cfe3ee", "#31688e", "#35b779"
GREEN, ORANGE, RED = "#bfe6d2", "#f2dcb3", "#f6d5d5"
DARK = {
    INK: "#e4e7eb", PALE: "#9aa5b1", PAPER: "#1e2129", HIDDEN: "#2b2f38", TESTED: "#2d4f63", SEEN: "#8cc4e8",
    WHOLE: "#2a9d68", GREEN: "#2c5a45", ORANGE: "#6b5426", RED: "#74414a",
}  # fmt: skip
"""What each colour is on dark paper."""


class Drawing:
    """An SVG of a given size, in pixels, on paper of its own."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def rect(self, x: float, y: float, w: float, h: float, fill: str, *, edge: str = "none", round: float = 0) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{round:g}" fill="{fill}" stroke="{edge}"/>'
        )

    def text(
        self, x: float, y: float, words: str, *, size: float = 12, fill: str = INK, anchor: str = "start",
        mono: bool = False, bold: bool = False,
    ) -> None:  # fmt: skip
        style = ' font-family="monospace" xml:space="preserve"' if mono else ""
        style += ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}" text-anchor="{anchor}"{style}>'
            f"{html.escape(words)}</text>"
        )

    def line(self, points: Sequence[tuple[float, float]], *, edge: str = PALE, width: float = 1.2, arrow: bool = False
             ) -> None:  # fmt: skip
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        head = ' marker-end="url(#head)"' if arrow else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{edge}" stroke-width="{width:g}"{head}/>')

    def cells(self, x: float, y: float, size: float, shown: torch.Tensor, fill: str) -> None:
        """The true cells of a matrix (rows, columns), each `size` wide, as one path of runs."""
        runs = (
            f"M{x + start * size:g} {y + row * size:g}h{(end - start) * size:g}v{rows * size:g}H{x + start * size:g}z"
            for row, rows, start, end in runs_of(shown)
        )
        path = "".join(runs)
        if path:
            self.parts.append(f'<path d="{path}" fill="{fill}"/>')

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" font-family="sans-serif" role="img" class="composattn">'
        )
        arrow = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{PALE}"/></marker></defs>'
        )
        paper = f'<rect width="{self.width:g}" height="{self.height:g}" rx="6" fill="{PAPER}"/>'
        title = f"<title>{html.escape(self.title)}</title>"
        return "\n".join([head, title, _STYLE, arrow, paper, *self.parts, "</svg>\n"])


# attributes are weaker than any rule; the class keeps the rules inside of pictures, where these stand in a page
_RULES = "".join(
    f'.composattn [{of}="{light}"]{{{of}:{dark}}}' for light, dark in DARK.items() for of in ("fill", "stroke")
)
_STYLE = f"<style>@media (prefers-color-scheme: dark){{{_RULES}}}</style>"


def runs_of(shown: torch.Tensor) -> Iterator[tuple[int, int, int, int]]:
    """(row, rows, first, end) of each run of true values in a matrix; rows that are alike are one, so many high."""
    number = 0
    for row, alike in itertools.groupby(shown.tolist()):
        rows, start = len(list(alike)), None
        for column, value in enumerate([*row, False]):
            if value and start is None:
                start = column
            elif not value and start is not None:
                yield number, rows, start, column
                start = None
        number += rows


def save(path: str | os.PathLike[str], svg: str) -> None:
    """Writes a picture. Raises: `InvalidArgument` for a file of another kind."""
    if not os.fspath(path).endswith(".svg"):
        raise InvalidArgument(f"pictures are SVG, and {os.fspath(path)!r} is not named so; name it mask.svg")
    with open(path, "w") as file:
        file.write(svg)
