"""What will be run for a gradient, decided on the host: problem + mods + target → one frozen, printable value."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from ....analysis.bands import EVERYTHING, TileInterval, ends_of, exchanged
from ....analysis.derived import Derived
from ....analysis.program import Program
from ....analysis.row_limits import RowLimits
from ....analysis.tile_lists import QueryLists, made_lists
from ....call.problem import Problem
from ....graph.expr import Capture, DType, Expr
from ....graph.expr import captures as captures_of
from ....primitives.segment_entry import metadata_numbers
from ..rewrites import rewritten
from ..rewrites.posed import Posed
from ..tiles.architecture import architecture_of
from ..tiles.segments import Segments, segments_of
from ..tiles.target import Target
from ..tiles.tiling import BackwardTiling, Chosen
from ..tiles.traits import extent_of
from ..tiles.work import WorkTables, entries, fixed_visits, segment_tables, work_tables
from .cut import MANY, Cut, best_cut, cut_in_order
from .order import Tiles
from .plan import FOR_PEOPLE, MOST_ACROSS, TABLES, TiledPlan, check_blocks, derived_among

COUNTER = 32  # fp32 numbers before the statistics of rows: 128 bytes, of which the first four are a counter of tiles
AnyTiling = TypeVar("AnyTiling", bound=BackwardTiling)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardPlan(TiledPlan[AnyTiling]):
    """The kernel that computes dK and dV, and sums dQ in fp32."""

    deterministic: bool  # dQ's parts are added in a fixed order
    captures: tuple[tuple[torch.dtype, int], ...]  # (dtype, rank) of each captured tensor
    scalars: tuple[DType, ...]  # what run-time numbers are
    program: Program = dataclasses.field(repr=False)
    intervals: tuple[TileInterval, ...] = dataclasses.field(repr=False)
    limits: RowLimits | None = dataclasses.field(repr=False)  # of the queries that see a key
    lists: QueryLists | None = dataclasses.field(repr=False)  # of query tiles; None: intervals say which
    order: str = dataclasses.field(compare=False, metadata=FOR_PEOPLE)  # of the tiles, and why
    # of `Sequences`, mirrored for tiles of keys
    work: WorkTables | None = dataclasses.field(compare=False, repr=False, metadata=TABLES)
    # captured numbers that the table says of tiles that begin with segments, and their bounds, which no kernel computes
    # then, see `primitives.emit_metadata`; None: it says nothing
    metadata: tuple[Expr, ...] | None = dataclasses.field(repr=False)
    # None: no tile of keys is cut
    cut: Cut | None = dataclasses.field(compare=False, metadata={"why": "numbers of a call; `in_pieces` says whether"})
    in_pieces: bool  # several blocks share some tiles of keys

    @property
    def mods(self) -> Program:
        return self.program

    @functools.cached_property
    def captured(self) -> tuple[Capture, ...]:
        """What the mods and the loop bounds read, in the order in which the kernel receives it."""
        return _captured(self.program, ends_of(self.intervals, self.limits), self.lists)

    @functools.cached_property
    def derived(self) -> tuple[Derived, ...]:
        """What is derived and read; the forward's bands are not."""
        return derived_among(self.program, ends_of(self.intervals, self.limits))

    @property
    def metadata_numbers(self) -> int:
        return 0 if self.metadata is None else metadata_numbers(len(self.metadata))

    def __str__(self) -> str:
        t, by_two = self.tiling, ", by two blocks" * (self.tiling.sharing == 2)
        rows = {
            "tiles": f"{t.tile_n} keys stay, {t.tile_m} queries pass{by_two}, on chip D {t.d}, Dv {t.dv}",
            **t.describe(),
            "schedule": f"{self._blocks()}, {self.order}",
            "q tiles": f"by lists made on the device, as {self.lists.reason}" if self.lists else "",
        }
        return self._text(rows)

    def _blocks(self) -> str:
        blocks = "one block" if self.tiling.sharing == 1 else f"{self.tiling.sharing} blocks"
        text = "blocks that stay take tiles of keys" if self.tiling.persistent else f"{blocks} per tile of keys"
        cut = self.cut
        return text if cut is None else f"{text}, {cut}"


class SinkForm(NamedTuple):
    """Sinks of which a gradient is wanted; `by_sequence`: each sequence has its own."""

    dtype: torch.dtype
    by_sequence: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreprocessPlan(TiledPlan[AnyTiling]):
    """The preprocess: statistics of query rows, an empty dQ, and flags that say nothing where strips share keys."""

    step = "preprocess"
    has_dlse: bool
    sinks: SinkForm | None
    in_one_row: bool  # whether its blocks lie in the first dimension of the grid alone
    work: WorkTables | None = dataclasses.field(compare=False, repr=False, metadata=TABLES)  # of query tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class PostprocessPlan(TiledPlan[AnyTiling]):
    """The postprocess, which scales and rounds dQ."""

    step = "postprocess"
    sinks: SinkForm | None
    in_one_row: bool  # as of `PreprocessPlan`


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherPlan(TiledPlan[AnyTiling]):
    """The gather, which adds up dK and dV of tiles of keys that several blocks share."""

    step = "backward_gather"


@dataclasses.dataclass(frozen=True)
class BackwardPlans:
    """The kernels of one gradient, in the order in which they run.

    No `postprocess` where `main` finishes dQ; `gather` where tiles of keys are cut.
    """

    preprocess: PreprocessPlan
    main: BackwardPlan
    postprocess: PostprocessPlan | None
    gather: GatherPlan | None = None

    def __str__(self) -> str:
        return str(self.main)


def plan_backward(
    problem: Problem, program: Program, target: Target, *, tiling: BackwardTiling | None = None, **asked: Any
) -> BackwardPlans:
    """The backward kernels for `problem` on `target`; `tiling` and what is `asked`: see `backward_of`.

    Raises: `UnsupportedDType`, `UnsupportedHeadDim`, `UnsupportedCapture`, `GradientUnsupported`.
    """
    posed = rewritten(Posed(problem, program, target, "backward", tiling_is_given=tiling is not None)).posed
    return backward_of(posed, tiling=tiling, **asked)


def backward_of(
    posed: Posed,
    *,
    has_dlse: bool = False,
    deterministic: bool = False,
    sinks: SinkForm | None = None,
    tiling: BackwardTiling | None = None,
    cut: Cut | Literal["auto"] | None = "auto",
) -> BackwardPlans:
    """The backward kernels of a call that is rewritten; `tiling` overrides the architecture's choice.

    `deterministic`: dQ is bitwise the same in every run, as dK and dV always are.
    `sinks`: those that get a gradient.
    `cut`: which tiles of keys several blocks share, by default as keeps the SMs busy.

    Raises: `UnsupportedDType`, `UnsupportedHeadDim`, `UnsupportedCapture`, `GradientUnsupported`.
    """
    problem, program, target = posed.problem, posed.program, posed.target
    architecture = architecture_of(target)
    architecture.check(problem, program)
    architecture.check_gradient(problem)
    program = program.without_sink
    chosen, why = Chosen(tiling, "") if tiling else architecture.backward(problem, program, target, deterministic)
    chosen = _finishing(problem, chosen, sinks)
    visited, limits = program.of_keys
    lists = made_lists(QueryLists, program.mask, extent_of(problem), (chosen.tile_m, chosen.tile_n))
    intervals = visited if lists is None else ()
    ends = ends_of(intervals, limits)
    at_once = target.sms // chosen.sharing
    segments = _segments(posed, chosen, sinks) if lists is None and cut in (None, "auto") else None
    on_host = lists is None and segments is None and problem.layout.is_dense
    cut, chosen = _pieces(problem, chosen, cut, intervals if on_host else None, at_once, deterministic)
    of_keys = segments or (exchanged(intervals) if lists is None else None)
    strips = problem.layout.sharing
    tiles = Tiles(
        problem.mirrored, of_keys, chosen.tile_n, chosen.tile_m, problem.kv_heads, at_once, True, deterministic, strips
    )
    order, keys = tiles.ordered()
    rows, metadata = _order_of_rows(problem, chosen, segments), None
    if segments is not None:
        metadata, intervals, ends = segments.reads, (), ends_of((), limits)
    check_blocks(problem, entries(problem, chosen.tile_m) * problem.q_heads * chosen.sharing)
    pieces = 1 if cut is None else cut.pieces
    check_blocks(problem, entries(problem.mirrored, chosen.tile_n) * problem.kv_heads * chosen.sharing * pieces)
    main = BackwardPlan(
        target=target,
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        layout=problem.layout,
        has_order_table=keys is not None,
        has_segments=segments is not None,
        tiling=chosen,
        why=why,
        deterministic=deterministic,
        captures=tuple((c.tensor.dtype, c.tensor.ndim) for c in _captured(program, ends, lists)),
        scalars=tuple(s.expr.dtype for s in program.scalars),
        program=program,
        intervals=intervals,
        limits=limits,
        lists=lists,
        order=order,
        work=keys,
        metadata=metadata,
        cut=cut,
        in_pieces=cut is not None,
    )
    in_one_row = max(problem.q_heads, problem.batch) > MOST_ACROSS
    of_rows = {**main.of_tiles, "has_order_table": rows is not None, "sinks": sinks, "in_one_row": in_one_row}
    return BackwardPlans(
        PreprocessPlan(**of_rows, has_dlse=has_dlse, work=rows),
        main,
        _postprocess(chosen, of_rows),
        None if cut is None else GatherPlan(**main.of_tiles),
    )


def _postprocess(tiling: BackwardTiling, of_rows: dict[str, Any]) -> PostprocessPlan | None:
    """What finishes dQ, where the main kernel leaves sums."""
    return None if tiling.finishes_dq else PostprocessPlan(**of_rows)


def _finishing(problem: Problem, tiling: AnyTiling, sinks: SinkForm | None) -> AnyTiling:
    """The tiling, which claims dQ where it would write all of it and a head has several tiles of keys.

    And where the postprocess adds up gradients of sinks.
    """
    several = problem.kv_len > tiling.tile_n or not problem.layout.is_dense or problem.layout.strips is not None
    if tiling.finishes_dq and (several or sinks is not None):
        return dataclasses.replace(tiling, dq_begins="claim")
    return tiling


def _order_of_rows(problem: Problem, tiling: BackwardTiling, segments: Segments | None) -> WorkTables | None:
    """The order of query tiles, in which kernels around the main one have them; None: as they lie."""
    if segments is not None:
        return segment_tables(problem, tiling.tile_m, "in_order", segments, of_keys=False)
    packed = problem.layout.q == "packed"
    return work_tables(problem, EVERYTHING, tiling.tile_m, tiling.tile_n, "in_order") if packed else None


def _segments(posed: Posed, tiling: BackwardTiling, sinks: SinkForm | None) -> Segments | None:
    """Segments of documents by ids, with which tiles begin.

    Shares of gradients of sinks by sequence have no place where blocks come by a table.
    """
    served = posed.segments and tiling.in_segments and not (sinks is not None and sinks.by_sequence)
    return segments_of(posed.problem, posed.program.without_sink) if served else None


def _pieces(
    problem: Problem,
    tiling: AnyTiling,
    cut: Cut | Literal["auto"] | None,
    intervals: tuple[TileInterval, ...] | None,
    at_once: int,
    deterministic: bool,
) -> tuple[Cut | None, AnyTiling]:
    """Which tiles of keys are cut, by query heads or along the queries; `cut`: what is asked for.

    `intervals` None: the device alone knows what a tile visits. Those of strips are not cut.
    """
    if problem.layout.strips is not None:
        return None, dataclasses.replace(tiling, heads_a_piece=0)
    if 0 < tiling.heads_a_piece < problem.group:
        if cut == "auto" or not problem.layout.is_dense:
            cut = Cut(None, 0, -(-problem.group // tiling.heads_a_piece))
        return cut, tiling
    tiling = dataclasses.replace(tiling, heads_a_piece=0)
    if intervals is None:
        return None, tiling
    return _cut(problem, tiling, intervals, at_once, deterministic) if cut == "auto" else (cut, tiling)


def _cut(
    problem: Problem, tiling: AnyTiling, intervals: tuple[TileInterval, ...], at_once: int, deterministic: bool
) -> tuple[Cut | None, AnyTiling]:
    """Which tiles of keys are cut, where so many run `at_once`; none where they are many, or tensors decide.

    Of many those that are left over of whole rounds, if all their pieces run at once. Where the last section goes
    backwards sections are cut too.
    """
    tiles = problem.batch * problem.kv_heads * -(-problem.kv_len // tiling.tile_n)
    few_are_left = 0 < tiles % at_once <= at_once // 2 and not deterministic
    if tiles > MANY * at_once and not few_are_left:
        return None, tiling
    visits = fixed_visits(problem.mirrored, exchanged(intervals), tiling.tile_n, tiling.tile_m)
    if visits is None:
        return None, tiling
    repeats = problem.kv_heads * (problem.batch if visits.shape[0] == 1 else 1)
    if tiling.ends_backwards and bool((visits == visits[0]).all()):
        heads = problem.kv_heads * problem.batch
        cut, together = cut_in_order(visits[0].tolist(), heads, problem.group, at_once, tiling.heads_together)
        if together < heads:
            return cut if cut.cut else None, dataclasses.replace(tiling, heads_together=together)
        tiling = dataclasses.replace(tiling, heads_at_last=None)  # nothing runs before it
    # D 64, 320 tiles of 1,280 queries: time 0.93, 720 of 1,100 0.98; tiles of many lengths gain nothing
    in_64s = max(1, tiling.tile_m // 64) if visits.unique().numel() == 1 else 1
    cut = best_cut((visits.flatten() * problem.group * in_64s).tolist(), repeats, at_once)
    return cut if cut.cut else None, tiling


def _captured(program: Program, ends: list[Expr], lists: QueryLists | None) -> tuple[Capture, ...]:
    listed = () if lists is None else lists.captures
    return tuple(dict.fromkeys((*program.captures, *captures_of(*ends), *listed)))
