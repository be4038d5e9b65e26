"""A call whose mask is of positions of an image (`analysis.strips`), as one whose sequences are strips of it.

Nothing is copied: the kernels' bulk copies read and write boxes of the image. What is planned is a batch of strips.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import torch

from ....analysis.intervals import Tiles
from ....analysis.program import Program
from ....analysis.strips import CutRow, Strips, all_strips, reads_image, rows_seen, tiles_seen
from ....analysis.tiles import EMPTY, kinds, useful_cuts
from ....call.problem import Problem, StripLayout
from ....graph.expr import Dep, Expr
from ..tiles.architecture import architecture_of
from ..tiles.few_queries import splits
from ..tiles.tiling import BackwardTiling, Chosen, ForwardTiling
from ..tiles.work import visits_now
from .image_costs import Tile, microseconds
from .posed import Found, Nothing, Posed, Rewritten
from .whole import has_more_than_mods, reads_lengths

LEAST = 128  # queries of a strip, as many as fill a tile
WIDEST = 256  # D and Dv whose tiles are copied whole


class Counted(NamedTuple):
    """A call, whole or in strips of an image: how many times 128 keys a query of the image computes scores with, on
    average, those beyond the image counted, and what it takes by the model.
    """

    posed: Posed
    visits: float
    microseconds: float

    @staticmethod
    def in_strips(posed: Posed, strips: Strips, tile: Tile) -> Counted:
        """A `posed` that is whole, in these, whose `tile` it is, or in strips whose keys begin some rows above."""
        problem, is_cut = posed.problem, bool(posed.problem.q_len % strips.columns)
        rows = -(-problem.q_len // strips.columns), -(-problem.kv_len // strips.columns)
        assert posed.program.mask is not None
        seen = rows_seen(posed.program.mask, strips.columns, rows, problem.q_heads)
        of_tile = tile.queries // strips.apart, tile.keys // strips.wide
        counts = tiles_seen(seen, of_tile, is_cut)
        if strips.is_whole and posed.direction == "backward":
            counts = counts[:1]  # gradients of the only strip's keys are the image's, which has no rows above it
        fewest, above = min((tiles, above) for above, tiles in enumerate(counts))
        visits = tile.keys / 128 * fewest
        cut = _placed(posed, dataclasses.replace(strips, above=above))
        of_image = strips.count * cut.problem.q_len / problem.q_len
        return Counted(cut, visits * of_image, microseconds(cut, visits, tile))

    @staticmethod
    def whole(posed: Posed, several_axes: bool) -> Counted:
        tile = _tiles(posed)[0]
        visits = _visited(posed.problem, posed.program, several_axes, tile[:2])
        return Counted(posed, visits, microseconds(posed, visits, tile))


def by_strips(posed: Posed) -> Found:
    """The call in the strips that take least time, where this is less than of the whole (`image_costs`).

    It stays whole where the mask reads tensors, numbers or the batch, a mod lengths, or positions by more than row and
    column.
    """
    problem, program = posed.problem, posed.program
    if program.mask is None or not problem.layout.is_dense or posed.tiling_is_given:
        return Nothing()
    refused = {strips: _not_served(posed, strips) for strips in all_strips(program.mask)}
    served = [strips for strips, why in refused.items() if not why]
    if not served:
        return Nothing(next(iter(refused.values()), ""))
    cut = _least(posed, served)
    if isinstance(cut, str):
        return Nothing(cut)
    whole = Counted.whole(posed, served[0].several_axes)
    if cut.microseconds > whole.microseconds:
        why = f"strips would take {cut.microseconds:.0f} us by the model in place of {whole.microseconds:.0f}"
        return Nothing(f"{why}, with {cut.visits:.3g} times 128 keys visited in place of {whole.visits:.3g}")
    strips = cut.posed.problem.layout.strips
    assert strips is not None
    return Rewritten(cut.posed, f"{strips.words}; {cut.visits:.3g} times 128 keys visited, not {whole.visits:.3g}")


def _least(posed: Posed, served: list[Strips]) -> Counted | str:
    """The call in those of these strips that take least time and have tiles; why none has where that is so."""
    tiles = {strips: _tiles_in_strips(_cut(posed, strips)) for strips in served}
    counted = [Counted.in_strips(posed, strips, own[0]) for strips, own in tiles.items() if not isinstance(own, str)]
    why = next((own for own in tiles.values() if isinstance(own, str)), "")
    for each in sorted(counted, key=lambda each: each.microseconds):
        # tiles are chosen by lengths, and these are others where keys begin above the image, and rows lie as tiles do
        own = _tiles_in_strips(each.posed)
        if not isinstance(own, str):
            return each
        why = own
    return why


def _not_served(posed: Posed, strips: Strips) -> str:
    """Why the call can't be of strips; empty where it can."""
    problem, program = posed.problem, posed.program
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
    return _without_rows(posed, strips)


def _without_rows(posed: Posed, strips: Strips) -> str:
    """Why images have no rows that strips could have; empty where they do."""
    problem = posed.problem
    for length in (problem.q_len, problem.kv_len):
        if length // strips.columns * strips.apart < LEAST:
            return f"{length} positions are not {LEAST // strips.apart} or more whole rows of {strips.columns} columns"
    lengths = problem.q_len, problem.kv_len
    if any(length % strips.columns for length in lengths) and problem.q_len != problem.kv_len:
        return f"{problem.q_len} queries and {problem.kv_len} keys end in rows of {strips.columns} columns that are cut"
    if problem.q_len % strips.columns and strips.is_whole and posed.direction == "backward":
        return "gradients of the only strip's keys leave as whole rows, and the last one is cut"
    return ""


def _placed(posed: Posed, strips: Strips) -> Posed:
    """The call in these strips, whose last row begins a tile if it is cut."""
    placed = _cut(posed, strips)
    if posed.problem.q_len % strips.columns:
        for _ in range(2):  # by the tiles of a strip without the row, and by those of one with it
            placed = _cut(posed, dataclasses.replace(strips, cut=_last_row(posed, strips, _tiles(placed))))
    return placed


def _last_row(posed: Posed, strips: Strips, tiles: list[Tile]) -> CutRow:
    """Where a strip's queries and keys have a last row that is cut, as tiles of either order begin with it."""
    at, columns = divmod(posed.problem.q_len, strips.columns)
    q_rows, kv_rows = math.lcm(*(t.queries for t in tiles)), math.lcm(*(t.keys for t in tiles))
    q_row, kv_row = [
        -(-rows * wide // tile) * tile // wide
        for rows, wide, tile in ((at, strips.apart, q_rows), (at + strips.above, strips.wide, kv_rows))
    ]
    return CutRow(at, columns, q_row, kv_row)


def _cut(posed: Posed, strips: Strips) -> Posed:
    """`batch` counts strips of each sequence, `b` in the mods likewise."""
    problem, program = posed.problem, posed.program
    assert program.mask is not None
    score = None if program.score is None else strips.of(program.score)
    of_each = dataclasses.replace(
        problem,
        batch=problem.batch * strips.count,
        q_len=strips.queries_of(problem.q_len),
        kv_len=strips.keys_of(problem.kv_len),
        layout=StripLayout(of=strips),
    )
    found = Program(score, strips.mask(program.mask))
    assert (found.captures, found.scalars) == (program.captures, program.scalars), "a call gives them in this order"
    return dataclasses.replace(posed, problem=of_each, program=found)


def _tiles_in_strips(posed: Posed) -> list[Tile] | str:
    """The tiles of a call in strips, as `_tiles`; why none have whole rows of a strip, or none begins with a cut last
    one, where that is so.
    """
    architecture, strips = architecture_of(posed.target), posed.problem.layout.strips
    assert strips is not None
    if not architecture.copies_boxes:
        return f"the copies of {architecture.name} bring no boxes of an image"
    if posed.direction == "backward":
        return _tiles_of_backward(_backward_tilings(posed), strips)
    tiling: ForwardTiling = chosen_forward(posed).tiling
    if tiling.queries % strips.apart or not tiling.tile_n:
        return "tiles of the forward have no whole rows of a strip"
    if tiling.packed_heads != 1 or splits(posed.problem, tiling, posed.target) != 1:
        return "tiles of a strip would have several heads, or parts of the keys"
    return _with_last_row([_forward_tile(tiling)], strips)


def _tiles_of_backward(tilings: list[BackwardTiling], strips: Strips) -> list[Tile] | str:
    if not all(t.sharing == 1 and t.tile_m % strips.apart == 0 and t.tile_n % strips.wide == 0 for t in tilings):
        return "tiles of the backward have no whole rows of a strip"
    if not all(strips.is_whole or _begins_a_copy(strips.before, t) for t in tilings):
        return f"keys begin {strips.before} columns before, which is no place where copies of such a D begin"
    return _with_last_row([_backward_tile(t) for t in tilings], strips)


def _begins_a_copy(row: int, tiling: BackwardTiling) -> bool:
    """Whether so many rows of dK and dV are whole 128 bytes of shared memory, with which copies begin.

    A row has 64 bytes and more, or 32 where D is no multiple of 64.
    """
    return row * (64 if tiling.d % 64 == tiling.dv % 64 == 0 else 32) % 128 == 0


def _with_last_row(tiles: list[Tile], strips: Strips) -> list[Tile] | str:
    """These, or why a last row that is cut begins none."""
    cut = strips.cut
    begins = cut is None or all(
        cut.q_row * strips.apart % tile.queries == cut.kv_row * strips.wide % tile.keys == 0 for tile in tiles
    )
    return tiles if begins else "tiles of strips with a last row that is cut do not begin with it"


def _tiles(posed: Posed) -> list[Tile]:
    """The call's tiles; of gradients also those in a fixed order, behind the others."""
    if posed.direction == "backward":
        return [_backward_tile(tiling) for tiling in _backward_tilings(posed)]
    return [_forward_tile(chosen_forward(posed).tiling)]


def _backward_tilings(posed: Posed) -> list[BackwardTiling]:
    """What a backward is cut into, with sums in any order and in a fixed one."""
    choose = architecture_of(posed.target).backward
    return [choose(posed.problem, posed.program, posed.target, in_order).tiling for in_order in (False, True)]


def chosen_forward(posed: Posed) -> Chosen:
    """What a forward is cut into; tiles of keys are whole rows where it is in strips."""
    chosen = architecture_of(posed.target).forward(posed.problem, posed.program, posed.target)
    strips = posed.problem.layout.strips
    if strips is None:
        return chosen
    whole = dataclasses.replace(chosen.tiling, tile_n=chosen.tiling.tile_n // strips.wide * strips.wide)
    return chosen._replace(tiling=whole)


def _backward_tile(tiling: BackwardTiling) -> Tile:
    return Tile(tiling.tile_m, tiling.tile_n)


def _forward_tile(tiling: ForwardTiling) -> Tile:
    return Tile(tiling.queries, tiling.tile_n, tiling.blocks)


def _visited(problem: Problem, program: Program, several_axes: bool, tile: tuple[int, int]) -> float:
    """How many times 128 keys a query of the whole image computes scores with, on average."""
    share = tile[1] / 128
    if several_axes:
        assert program.mask is not None
        heads = problem.q_heads if program.mask.deps & Dep.H else 1
        return share * _by_kinds(program.mask, problem.q_len, problem.kv_len, heads, tile)
    visits = visits_now(problem, program.intervals, *tile)
    assert visits is not None, "no tensors decide"
    return share * int(visits.sum()) / visits.numel()


@functools.lru_cache(maxsize=16)
def _by_kinds(mask: Expr, q_len: int, kv_len: int, heads: int, tile: tuple[int, int]) -> float:
    """Tiles of keys that a tile of queries visits, on average, where no bounds tell: asked once for both directions."""
    cuts = useful_cuts(mask, q_len, kv_len, tile)
    found = kinds(mask, Tiles(q_len, kv_len, tile, 1, heads, torch.device("cpu"), cuts=cuts)) != EMPTY
    return int(found.sum()) / (found.numel() // found.shape[-1])
