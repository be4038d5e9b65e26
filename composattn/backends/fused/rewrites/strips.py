"""A call whose mask is of positions of an image (`analysis.strips`), as one whose sequences are strips of it.

Nothing is copied: the kernels' bulk copies read and write boxes of the image. What is planned is a batch of strips.
"""

from __future__ import annotations

import dataclasses

import torch

from ....analysis.intervals import Tiles
from ....analysis.program import Program
from ....analysis.strips import KEYS, QUERIES, Strips, reads_image, strips_of
from ....analysis.tiles import EMPTY, kinds, useful_cuts
from ....call.problem import Problem, StripLayout
from ....call.strides import ordered
from ....graph.expr import Dep
from ..tiles.architecture import architecture_of
from ..tiles.few_queries import splits
from ..tiles.tiling import ForwardTiling
from ..tiles.work import visits_now
from .posed import Found, Nothing, Posed, Rewritten
from .whole import has_more_than_mods, reads_lengths

LEAST = 8  # rows of an image, so that a strip's queries fill a tile
WIDEST = 256  # D and Dv whose tiles are copied whole
# Tiles of 128 x 128 that strips visit for each of the whole image, at most: each is copied in boxes and tested
FEWER = 0.75


def by_strips(posed: Posed) -> Found:
    """The call in strips where that visits fewer tiles.

    It stays whole where the mask reads tensors, numbers or the batch, a mod lengths, or positions by more than row and
    column.
    """
    problem, program = posed.problem, posed.program
    if program.mask is None or not problem.layout.is_dense or posed.tiling_is_given:
        return Nothing()
    strips = strips_of(program.mask)
    if strips is None:
        return Nothing()
    why = _not_served(problem, program, strips)
    if why:
        return Nothing(why)
    found = _cut(posed, strips)
    whole, cut = [visited(each.problem, each.program, strips) for each in (posed, found)]
    if cut > FEWER * whole:
        return Nothing(f"strips would visit {cut:.3g} tiles of keys in place of {whole:.3g}, which is no gain")
    why = _without_a_tiling(found)
    return (
        Nothing(why) if why else Rewritten(found, f"{strips.words}; {cut:.3g} tiles of keys visited, not {whole:.3g}")
    )


def _not_served(problem: Problem, program: Program, strips: Strips) -> str:
    """Why the call can't be of strips; empty where it can."""
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > WIDEST:
        return f"D or Dv is {widest}, of more than {WIDEST} tiles are not copied whole"
    if problem.schedule.batch_invariant or problem.schedule.split_kv not in ("auto", 1):
        return "the schedule asks for an order of keys, or for parts of them"
    why = has_more_than_mods(program) or reads_lengths(program)
    if why:
        return why
    assert program.mask is not None
    if program.mask.deps & (Dep.B | Dep.RUNTIME):
        return "the mask reads tensors, numbers, lengths or the batch, so that the host knows no tiles"
    mods = [graph for graph in (program.mask, program.score) if graph is not None]
    if not all(reads_image(graph, strips.columns) for graph in mods):
        return f"a mod knows positions by more than row and column of an image of {strips.columns} columns"
    for length in (problem.q_len, problem.kv_len):
        if length % strips.columns or length // strips.columns < LEAST:
            return f"{length} positions are not {LEAST} or more whole rows of {strips.columns} columns"
    return ""


def _cut(posed: Posed, strips: Strips) -> Posed:
    """`batch` counts strips of each sequence, `b` in the mods likewise."""
    problem, program = posed.problem, posed.program
    assert program.mask is not None
    score = None if program.score is None else strips.of(program.score)
    of_each = dataclasses.replace(
        problem,
        batch=problem.batch * strips.count,
        q_len=problem.q_len // strips.columns * QUERIES,
        kv_len=problem.kv_len // strips.columns * KEYS,
        layout=StripLayout(of=strips),
    )
    found = Program(score, strips.mask(program.mask))
    assert (found.captures, found.scalars) == (program.captures, program.scalars), "a call gives them in this order"
    return dataclasses.replace(posed, problem=of_each, program=found)


def _without_a_tiling(posed: Posed) -> str:
    """Why no tiles have whole rows of a strip; empty where some do."""
    problem, program, target = posed.problem, posed.program, posed.target
    architecture = architecture_of(target)
    if posed.direction == "backward":
        tilings = [architecture.backward_tiling(problem, program, target, in_order) for in_order in (False, True)]
        whole = all(t.sharing == 1 and t.tile_m % QUERIES == 0 and t.tile_n % KEYS == 0 for t in tilings)
        return "" if whole else "tiles of the backward have no whole rows of a strip"
    tiling = of_whole_rows(architecture.forward_tiling(problem, program, target))
    if tiling.packed_heads == 1 and splits(problem, tiling, target) == 1:
        return ""
    return "tiles of a strip would have several heads, or parts of the keys"


def of_whole_rows(tiling: ForwardTiling) -> ForwardTiling:
    """With tiles of keys that are whole rows of a strip."""
    return dataclasses.replace(tiling, tile_n=tiling.tile_n // KEYS * KEYS)


def visited(problem: Problem, program: Program, strips: Strips) -> float:
    """Tiles of 128 keys that one of 128 queries visits, on average; in strips also what lies beyond the image."""
    batch, share = 1, 1.0
    if problem.layout.strips is not None:
        batch, share = strips.count, strips.count * QUERIES / strips.columns
    if not strips.several_axes:
        visits = visits_now(problem, program.intervals, 128, 128)
        assert visits is not None, "no tensors decide"
        return int(visits.sum()) / visits.numel() * share
    assert program.mask is not None
    heads = problem.q_heads if program.mask.deps & Dep.H else 1
    cuts = useful_cuts(program.mask, problem.q_len, problem.kv_len, (128, 128))
    grid = Tiles(problem.q_len, problem.kv_len, (128, 128), batch, heads, torch.device("cpu"), cuts=cuts)
    found = kinds(program.mask, grid) != EMPTY
    return int(found.sum()) / (found.numel() // found.shape[-1]) * share


@dataclasses.dataclass(frozen=True)
class KeyParts:
    """Gradients of keys by strips: of each its queries' part, to be added where strips overlap.

    Any column of the image is in two strips at most, as their keys are twice as wide as they are apart.
    """

    strips: Strips

    def of_queries(self, batch: int, length: int) -> tuple[int, int]:
        """How many strips there are of images of this `length`, and how many queries each has."""
        return batch * self.strips.count, length // self.strips.columns * QUERIES

    def memory(self, keys: torch.Tensor) -> torch.Tensor:
        """(B * count, H, rows * KEYS, D) for parts of the gradient of keys (B, H, S, D)."""
        batch, heads, length, width = keys.shape
        strips = self.strips
        return keys.new_empty(batch * strips.count, heads, length // strips.columns * KEYS, width)

    def joined(self, parts: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """(B, H, S, D) of such memory, in the order of `keys`: sums of two parts, rounded once."""
        count, columns = self.strips.count, self.strips.columns
        whole = ordered(keys, keys.shape[-1])
        image = whole.unflatten(2, (-1, columns))
        # (B, H, rows, count, 2, QUERIES, D): columns in blocks, of which each strip has two
        blocks = parts.unflatten(2, (-1, 2, QUERIES)).unflatten(0, (-1, count)).permute(0, 2, 3, 1, 4, 5, 6)
        first, second = blocks.unbind(4)
        # block j of both begins so many columns `before` 16 j; between them lie whole blocks that two strips have
        begin, end = max(1, -(-self.strips.before // QUERIES)), min(count, (columns + self.strips.before) // QUERIES)
        for j in (*range(begin), *range(end, count + 1)):
            start = j * QUERIES - self.strips.before
            inside = slice(max(0, -start), max(0, min(QUERIES, columns - start)))
            if inside.start >= inside.stop:
                continue
            place = image[:, :, :, start + inside.start : start + inside.stop]
            halves = [half for half in ((first, j), (second, j - 1)) if 0 <= half[1] < count]
            found = [half[:, :, :, n, inside] for half, n in halves]
            torch.add(*found, out=place) if len(found) == 2 else place.copy_(found[0])
        if begin < end:
            start = begin * QUERIES - self.strips.before
            place = image[:, :, :, start : start + (end - begin) * QUERIES].unflatten(3, (-1, QUERIES))
            torch.add(first[:, :, :, begin:end], second[:, :, :, begin - 1 : end - 1], out=place)
        image[:, :, :, (count + 1) * QUERIES - self.strips.before :] = 0  # which nobody sees
        return whole
