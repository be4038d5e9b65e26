"""Draws the stages of a call for docs/how_it_works.md, from the objects that a call goes through.

Run it from the repository: `python docs/make_stages.py`. A test compares the pictures with what this makes. The graph,
its classes, the tiles and the order are those of the functions below. `compile`, `launch` and `backward` are sketches.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import composattn as ca
from composattn.analysis.drawing import GREEN, HIDDEN, INK, ORANGE, PALE, PAPER, RED, SEEN, TESTED, WHOLE, Drawing
from composattn.graph.expr import Expr, Rate, walk
from composattn.mods import causal

PICTURES = Path(__file__).with_name("plots") / "stages"
SIZE, TILE = 1024, 64
COLOURS = {
    Rate.CONSTANT: PAPER,
    Rate.HEAD: ORANGE,
    Rate.ROW: GREEN,
    Rate.COLUMN: TESTED,
    Rate.ELEMENT: RED,
}
SIGNS = {"sub": "−", "mul": "×", "add": "+", "ge": "≥", "lt": "<", "and": "and", "or": "or"}

slopes = torch.tensor([0.5, 0.25])


def fade(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return score - slopes[h] * (q_idx - kv_idx)


def recent_or_first(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return (q_idx >= kv_idx) & ((q_idx - kv_idx < 128) | (kv_idx < 16))


class Boxes(Drawing):
    """A drawing with rounded boxes."""

    def box(self, x: float, y: float, w: float, h: float, lines: Iterable[str], fill: str = PAPER) -> None:
        """A rounded box with centred lines of text, the first of them bold."""
        lines = list(lines)
        self.rect(x, y, w, h, fill, edge=PALE, round=6)
        top = y + h / 2 - 8 * (len(lines) - 1) + 4
        for n, words in enumerate(lines):
            self.text(x + w / 2, top + 16 * n, words, anchor="middle", bold=n == 0, size=12 if n == 0 else 11)


def label(node: Expr) -> str:
    if node.op == "read":
        return "slopes[ ]"
    return SIGNS.get(node.op) or str(node.attr if node.op in ("index", "const") else node.op)


def graph(drawn: Drawing, root: Expr, left: float, top: float) -> None:
    """Nodes by depth from left to right, each with a line to what it is made of."""
    nodes = sorted(walk(root), key=lambda node: node.op == "score")  # last, so that its line crosses no box
    columns: dict[int, list[Expr]] = {}
    for node in nodes:
        columns.setdefault(node.depth, []).append(node)
    at: dict[Expr, tuple[float, float]] = {}
    for depth, column in columns.items():
        for n, node in enumerate(column):
            at[node] = (left + 105 * depth, top + 44 * n + 10 * depth)
    for node in nodes:
        for argument in node.args:
            (x, y), (to_x, to_y) = at[argument], at[node]
            drawn.line([(x + 76, y + 14), (to_x, to_y + 14)], arrow=True)
    for node, (x, y) in at.items():
        drawn.rect(x, y, 76, 28, COLOURS[node.rate], edge=PALE, round=6)
        drawn.text(x + 38, y + 18, label(node), anchor="middle", mono=True)


def trace() -> str:
    drawn = Drawing(720, 300, "A score mod becomes a graph")
    for n, line in enumerate(
        ("def fade(score, b, h, q_idx, kv_idx):", "    return score - slopes[h] * (q_idx - kv_idx)")
    ):
        drawn.text(20, 32 + 18 * n, line, mono=True)
    graph(drawn, ca.score(fade).expr, 90, 80)
    for n, (rate, colour) in enumerate(COLOURS.items()):
        drawn.rect(20 + 138 * n, 270, 12, 12, colour, edge=PALE)
        drawn.text(38 + 138 * n, 280, {Rate.HEAD: "once per head", Rate.ROW: "once per row", Rate.COLUMN:
                   "once per column"}.get(rate, rate.value), size=11)  # fmt: skip
    return drawn.svg()


def tile_kinds() -> torch.Tensor:
    return ca.mask(recent_or_first).tiles(SIZE, SIZE, (TILE, TILE))[0, 0]


def analyse() -> str:
    """The kinds of tiles, and beside them the loop of each row of tiles."""
    drawn = Drawing(720, 360, "A mask becomes bounds of loops")
    kinds, cell = tile_kinds(), 17
    count = len(kinds)
    drawn.text(20, 26, "what each tile is", bold=True)
    drawn.rect(20, 40, count * cell, count * cell, HIDDEN)
    for kind, fill in ((1, TESTED), (2, WHOLE)):
        drawn.cells(20, 40, cell, kinds == kind, fill)
    for n in range(count + 1):
        drawn.line([(20, 40 + n * cell), (20 + count * cell, 40 + n * cell)], edge=PAPER)
        drawn.line([(20 + n * cell, 40), (20 + n * cell, 40 + count * cell)], edge=PAPER)
    drawn.text(370, 26, "what the loop of a row of tiles visits", bold=True)
    for row, kinds_of_row in enumerate(kinds.tolist()):
        x = 370.0
        for tile, kind in enumerate(kinds_of_row):
            if kind:
                drawn.rect(x, 41 + row * cell, 38, cell - 3, TESTED if kind == 1 else WHOLE, round=3)
                drawn.text(x + 19, 53 + row * cell, f"kv {tile}", anchor="middle", size=9)
                x += 41
    visited = int((kinds > 0).sum())
    for n, (fill, words) in enumerate(((HIDDEN, "skipped"), (TESTED, "each pair is tested"), (WHOLE, "no test"))):
        drawn.rect(20 + 150 * n, 331, 12, 12, fill, edge=PALE)
        drawn.text(38 + 150 * n, 341, words, size=11)
    drawn.text(700, 341, f"{visited} of {kinds.numel()} tiles are visited", size=11, anchor="end")
    return drawn.svg()


def schedule(costs: Sequence[int], workers: int) -> list[tuple[int, int, int]]:
    """(worker, start, tile) when each tile in turn goes to whom is free first."""
    free = [(0, worker) for worker in range(workers)]
    placed = []
    for tile, cost in enumerate(costs):
        start, worker = heapq.heappop(free)
        placed.append((worker, start, tile))
        heapq.heappush(free, (start + cost, worker))
    return placed


def plan() -> str:
    """Rows of tiles of a causal mask on four SMs, in their order and longest first."""
    drawn = Drawing(720, 300, "The order of the work")
    length = 14 * TILE
    costs = (causal().tiles(length, length, (TILE, TILE))[0, 0] > 0).sum(1).tolist()
    workers, unit = 4, 17.0
    for panel, (words, order) in enumerate((("in their order", costs), ("longest first", sorted(costs)[::-1]))):
        top = 24 + 136 * panel
        placed = schedule(order, workers)
        end = max(start + order[tile] for _, start, tile in placed)
        drawn.text(20, top, f"{words}: done after {end} tiles", bold=True)
        for worker in range(workers):
            drawn.text(20, top + 26 + 24 * worker, f"SM {worker}", size=11)
        for worker, start, tile in placed:
            x, width = 70 + start * unit, order[tile] * unit
            drawn.rect(x, top + 12 + 24 * worker, width - 2, 20, TESTED, edge=SEEN, round=3)
            drawn.text(x + width / 2 - 1, top + 26 + 24 * worker, str(order[tile]), anchor="middle", size=10)
        drawn.line([(70 + end * unit, top + 6), (70 + end * unit, top + 110)], edge=INK)
    return drawn.svg()


def compile_() -> str:
    drawn = Boxes(720, 250, "What is kept under which name")
    drawn.box(20, 95, 110, 50, ["your function"])
    drawn.box(180, 30, 150, 60, ["form, a text", "which operations,", "which types"], GREEN)
    drawn.box(180, 150, 150, 60, ["tensors and scalars", "that it reads"], ORANGE)
    drawn.box(390, 30, 130, 60, ["plan", "tiling, bounds,", "order"], TESTED)
    drawn.box(580, 30, 120, 60, ["kernel", "in memory", "and on disk"], TESTED)
    drawn.box(580, 150, 120, 60, ["launch", "arguments by", "name"], PAPER)
    for points in (
        [(130, 112), (155, 112), (155, 60), (180, 60)],
        [(130, 128), (155, 128), (155, 180), (180, 180)],
        [(330, 60), (390, 60)],
        [(520, 60), (580, 60)],
        [(640, 90), (640, 150)],
        [(330, 180), (580, 180)],
    ):
        drawn.line(points, arrow=True)
    drawn.text(360, 20, "the same form: all of this is found again", size=11, fill=PALE)
    drawn.text(350, 200, "other contents: read at each call,", size=11, fill=PALE)
    drawn.text(350, 216, "nothing is compiled", size=11, fill=PALE)
    return drawn.svg()


def launch() -> str:
    """A sketch of the forward's warpgroups on Hopper over time."""
    drawn = Boxes(720, 250, "Who does what in a block")
    rows = ("loads", "tile of queries 1", "tile of queries 2")
    for n, words in enumerate(rows):
        drawn.text(20, 62 + 60 * n, words, size=12, bold=True)
    for n in range(5):
        for m, name in enumerate(("K", "V")):
            drawn.rect(150 + 110 * n + 52 * m, 44, 48, 26, ORANGE, edge=PALE, round=4)
            drawn.text(174 + 110 * n + 52 * m, 61, f"{name} {n}", anchor="middle", size=11)
    for group in range(2):
        y, x0 = 104 + 60 * group, 205 + 55 * group
        for n in range(4):
            x = x0 + 110 * n
            drawn.rect(x, y, 52, 26, TESTED, edge=SEEN, round=4)
            drawn.text(x + 26, y + 17, "products", anchor="middle", size=10)
            drawn.rect(x + 55, y, 52, 26, GREEN, edge=PALE, round=4)
            drawn.text(x + 81, y + 17, "softmax", anchor="middle", size=10)
    drawn.line([(150, 215), (700, 215)], arrow=True)
    drawn.text(700, 232, "time", anchor="end", size=11, fill=PALE)
    drawn.text(150, 232, "While one multiplies, the other runs your functions, the mask and exp.", size=11, fill=PALE)
    return drawn.svg()


def backward() -> str:
    drawn = Boxes(720, 300, "The backward computes the scores again")
    drawn.box(20, 30, 120, 46, ["Q, K"], PAPER)
    drawn.box(190, 30, 150, 46, ["score mod, mask", "the same graph"], GREEN)
    drawn.box(390, 30, 120, 46, ["P = exp(S − lse)"], TESTED)
    drawn.box(560, 30, 140, 46, ["dV += Pᵀ dO"], PAPER)
    drawn.box(20, 130, 120, 46, ["dO, V"], PAPER)
    drawn.box(190, 130, 150, 46, ["dP = dO Vᵀ"], TESTED)
    drawn.box(390, 130, 120, 46, ["dS = P (dP − D)"], TESTED)
    drawn.box(560, 120, 140, 66, ["derivative", "of the score mod,", "from the graph"], GREEN)
    drawn.box(300, 230, 180, 46, ["dQ += dS K", "dK += dSᵀ Q"], PAPER)
    drawn.box(520, 230, 180, 46, ["sums of captured tensors", "in fixed point"], ORANGE)
    for points in (
        [(140, 53), (190, 53)], [(340, 53), (390, 53)], [(510, 53), (560, 53)], [(140, 153), (190, 153)],
        [(340, 153), (390, 153)], [(450, 76), (450, 130)], [(510, 153), (560, 153)], [(600, 186), (440, 230)],
        [(640, 186), (630, 230)],
    ):  # fmt: skip
        drawn.line(points, arrow=True)
    return drawn.svg()


STAGES = {"trace": trace, "analyse": analyse, "plan": plan, "compile": compile_, "launch": launch, "backward": backward}


def pictures() -> dict[Path, str]:
    return {PICTURES / f"{name}.svg": draw() for name, draw in STAGES.items()}


if __name__ == "__main__":
    PICTURES.mkdir(parents=True, exist_ok=True)
    for path, text in pictures().items():
        path.write_text(text)
    print(f"{PICTURES}: {len(STAGES)} pictures")
