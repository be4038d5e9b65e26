"""A call whose mask is of positions of an image (`analysis.strips`), as one whose sequences are strips of it.

Nothing is copied: the kernels' bulk copies read and write boxes of the image. What is planned is a batch of strips.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from ....analysis.intervals import Tiles
from ....analysis.program import Program
from ....analysis.strips import WIDTHS, Strips, reads_image, strips_of
from ....analysis.tiles import EMPTY, kinds, useful_cuts
from ....call.problem import Problem, StripLayout
from ....graph.expr import Dep, Expr
from ..tiles.architecture import architecture_of
from ..tiles.few_queries import splits
from ..tiles.tiling import ForwardTiling
from ..tiles.work import visits_now
from .posed import Found, Nothing, Posed, Rewritten
from .whole import has_more_than_mods, reads_lengths

LEAST = 128  # queries of a strip, as many as fill a tile
WIDEST = 256  # D and Dv whose tiles are copied whole
# Scores that strips compute for each of the whole image, at most. A forward's are tested by words, and took
# 0.68 of the time of one of the whole (128 x 128 by 7 x 7 and by 13 x 13, H200); a backward's are tested pair by pair,
# and the gradients of keys have to be added
FEWER = {"forward": 1.0, "backward": 0.75}
# Scores of strips of 8 columns for each of those of 16, at most, where they are taken: a tile of theirs has
# twice as many rows of keys to test. Nobody timed them
NARROW = 0.9


def by_strips(posed: Posed) -> Found:
    """The call in strips of the width that visits fewest tiles, where these are fewer than of the whole.

    It stays whole where the mask reads tensors, numbers or the batch, a mod lengths, or positions by more than row and
    column.
    """
    problem, program = posed.problem, posed.program
    if program.mask is None or not problem.layout.is_dense or posed.tiling_is_given:
        return Nothing()
    there = filter(None, (strips_of(program.mask, apart) for apart in WIDTHS))
    refused = {strips: _not_served(problem, program, strips) for strips in there}
    served = [strips for strips, why in refused.items() if not why]
    if not served:
        return Nothing(next(iter(refused.values()), ""))
    cuts = [_cut(posed, strips) for strips in served]
    visits = [visited(each.problem, each.program, of, _tile(each)) for each, of in zip(cuts, served, strict=True)]
    best = len(served) - 1 if visits[-1] <= NARROW * visits[0] else 0
    cut, found, strips = visits[best], cuts[best], served[best]
    whole = visited(problem, program, strips, _tile(posed))
    if cut > FEWER[posed.direction] * whole:
        return Nothing(f"strips would visit {cut:.3g} times 128 keys in place of {whole:.3g}, which is no gain")
    why = _without_a_tiling(found)
    if why:
        return Nothing(why)
    return Rewritten(found, f"{strips.words}; {cut:.3g} times 128 keys visited, not {whole:.3g}")


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
        if length % strips.columns or length // strips.columns * strips.apart < LEAST:
            return f"{length} positions are not {LEAST // strips.apart} or more whole rows of {strips.columns} columns"
    return ""


def _cut(posed: Posed, strips: Strips) -> Posed:
    """`batch` counts strips of each sequence, `b` in the mods likewise."""
    problem, program = posed.problem, posed.program
    assert program.mask is not None
    score = None if program.score is None else strips.of(program.score)
    of_each = dataclasses.replace(
        problem,
        batch=problem.batch * strips.count,
        q_len=problem.q_len // strips.columns * strips.apart,
        kv_len=problem.kv_len // strips.columns * strips.wide,
        layout=StripLayout(of=strips),
    )
    found = Program(score, strips.mask(program.mask))
    assert (found.captures, found.scalars) == (program.captures, program.scalars), "a call gives them in this order"
    return dataclasses.replace(posed, problem=of_each, program=found)


def _without_a_tiling(posed: Posed) -> str:
    """Why no tiles have whole rows of a strip; empty where some do."""
    problem, program, target = posed.problem, posed.program, posed.target
    architecture, strips = architecture_of(target), problem.layout.strips
    assert strips is not None
    if not architecture.copies_boxes:
        return f"the copies of {architecture.name} bring no boxes of an image"
    if posed.direction == "backward":
        tilings = [architecture.backward_tiling(problem, program, target, in_order) for in_order in (False, True)]
        whole = all(t.sharing == 1 and t.tile_m % strips.apart == 0 and t.tile_n % strips.wide == 0 for t in tilings)
        return "" if whole else "tiles of the backward have no whole rows of a strip"
    tiling = of_whole_rows(architecture.forward_tiling(problem, program, target), strips)
    if tiling.packed_heads == 1 and splits(problem, tiling, target) == 1:
        return ""
    return "tiles of a strip would have several heads, or parts of the keys"


def of_whole_rows(tiling: ForwardTiling, strips: Strips) -> ForwardTiling:
    """A tiling whose tiles of keys are whole rows of a strip."""
    return dataclasses.replace(tiling, tile_n=tiling.tile_n // strips.wide * strips.wide)


def _tile(posed: Posed) -> tuple[int, int]:
    """Queries and keys of a tile of the call, as far as a fixed order of gradients does not change it."""
    problem, program, target = posed.problem, posed.program, posed.target
    if posed.direction == "backward":
        backward = architecture_of(target).backward_tiling(problem, program, target, False)
        return backward.tile_m, backward.tile_n
    forward = architecture_of(target).forward_tiling(problem, program, target)
    strips = problem.layout.strips
    return forward.queries, (forward if strips is None else of_whole_rows(forward, strips)).tile_n


def visited(problem: Problem, program: Program, strips: Strips, tile: tuple[int, int] = (128, 128)) -> float:
    """How many times 128 keys a query computes scores with, on average; in strips also those of what lies beyond the
    image.
    """
    batch, share = 1, tile[1] / 128
    if problem.layout.strips is not None:
        batch, share = strips.count, share * strips.count * strips.apart / strips.columns
    if strips.several_axes:
        assert program.mask is not None
        heads = problem.q_heads if program.mask.deps & Dep.H else 1
        return share * _by_kinds(program.mask, problem.q_len, problem.kv_len, batch, heads, tile)
    visits = visits_now(problem, program.intervals, *tile)
    assert visits is not None, "no tensors decide"
    return share * int(visits.sum()) / visits.numel()


@functools.lru_cache(maxsize=16)
def _by_kinds(mask: Expr, q_len: int, kv_len: int, batch: int, heads: int, tile: tuple[int, int]) -> float:
    """Tiles of keys that a tile of queries visits, on average, where no bounds tell: asked once for both directions."""
    cuts = useful_cuts(mask, q_len, kv_len, tile)
    found = kinds(mask, Tiles(q_len, kv_len, tile, batch, heads, torch.device("cpu"), cuts=cuts)) != EMPTY
    return int(found.sum()) / (found.numel() // found.shape[-1])


@dataclasses.dataclass(frozen=True)
class KeyParts:
    """Gradients of keys by strips: of each its queries' part, which `kernels.around.strip_join` adds."""

    strips: Strips

    def of_queries(self, batch: int, length: int) -> tuple[int, int]:
        """How many strips there are of images of this `length`, and how many queries each has."""
        return batch * self.strips.count, length // self.strips.columns * self.strips.apart

    def memory(self, keys: torch.Tensor) -> torch.Tensor:
        """(B * count, H, rows * wide, D) for parts of the gradient of keys (B, H, S, D)."""
        batch, heads, length, width = keys.shape
        strips = self.strips
        return keys.new_empty(batch * strips.count, heads, length // strips.columns * strips.wide, width)
