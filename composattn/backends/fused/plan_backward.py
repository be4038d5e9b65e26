"""What will be run for a gradient, decided on the host: problem + mods + target → one frozen, printable value."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Hashable
from typing import Any, Literal

import torch

from ...analysis.bands import EVERYTHING, TileInterval, ends_of
from ...analysis.program import PLAIN, Program
from ...analysis.row_limits import RowLimits
from ...analysis.tile_lists import QueryLists, made_lists
from ...call.problem import DENSE, Layout, Problem
from ...call.schedule import Order
from ...graph.expr import Capture, DType, Expr, content_key, index
from ...graph.expr import captures as captures_of
from .cut import MANY, Cut, best_cut
from .plan import AT_ONCE, extent_of
from .target import Target
from .work import WorkTables, descends, entries, fixed_visits, work_tables

COUNTER = 32  # fp32 numbers before the statistics of rows: 128 bytes, of which the first four are a counter of tiles
Split = Literal["columns", "rows", "transposed"]


@dataclasses.dataclass(frozen=True)
class BackwardTiling:
    """How a backward kernel cuts the work; a backend chooses it (`backward_tiling`).

    A block owns `tile_n` keys, a warpgroup 64 of them with their dK and dV in registers (or, `shared_keys`, one has dV
    and one dK of all of them), and walks over queries in tiles of `tile_m`, Q in a ring of `q_stages`, dO in one of
    `do_stages`, dS in `ds_stages` buffers. `d` and `dv` are the head dimensions as stored on chip. `dq_split` says how
    the warpgroups share dQ of a tile: by columns, by rows, or transposed (rows of dQᵀ). `p_early`: P is computed
    while dPᵀ runs, and dS written before the product for dV starts; else P and dS are computed together (always where
    the derivative of a score looks at the score). `l2`: bytes of what the heads that are worked on together read and
    add to, unless `heads_together` says how many key/value heads those are; they have at least `section_tiles` tiles of
    keys. `in_pieces`: several blocks share some tiles, see `Cut`. `persistent`: a block stays for many tiles.
    `distances`: numbers in shared memory of their own through which sums of gradients by distance pass.
    """

    tile_m: int
    tile_n: int
    d: int
    dv: int
    q_stages: int
    do_stages: int
    ds_stages: int
    warpgroups: int
    dq_split: Split
    consumer_registers: int
    producer_registers: int
    p_early: bool
    l2: int
    section_tiles: int
    shared_keys: bool = False
    in_pieces: bool = False
    persistent: bool = False
    distances: int = 0
    heads_together: int | None = None

    @property
    def statistic_stride(self) -> int:
        """From a query tile's row statistics to the next one's, in fp32: tensor copies take addresses of 128 bytes."""
        return -(-self.tile_m // 32) * 32

    def shared_memory(self, element_bytes: int) -> int:
        """Bytes a block takes, barriers and alignment included."""
        stationary = self.tile_n * (self.d + self.dv)
        moving = self.tile_m * (self.q_stages * self.d + self.do_stages * self.dv)
        scores = self.ds_stages * self.tile_m * self.tile_n
        statistics = 4 * self.statistic_stride * (self.q_stages + self.do_stages)
        weights = 4 * self.tile_m * self.tile_n if self.shared_keys else 0
        if self.persistent:
            stationary *= 2
        return element_bytes * (stationary + moving + scores) + weights + 4 * self.distances + statistics + 2048


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """One kernel of a gradient, named by content: plans with equal `key` are served by one compiled kernel.

    `module` is the step: `backward_prepare` (row statistics, an empty dQ), `backward` or `backward_wide` (dK, dV, dQ
    summed in fp32), `backward_finish` (dQ scaled and rounded), `backward_gather` (dK and dV of several blocks).
    """

    backend: str
    module: str
    target: Target
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    tiling: BackwardTiling
    has_dlse: bool
    deterministic: bool  # dQ's parts are added in a fixed order
    captures: tuple[tuple[torch.dtype, int], ...]  # (dtype, rank) of each captured tensor
    scalars: tuple[DType, ...]  # what run-time numbers are
    layout: Layout
    listed: bool  # tiles come in the order of a table
    program_key: Hashable
    program: Program = dataclasses.field(compare=False, repr=False)
    intervals: tuple[TileInterval, ...] = dataclasses.field(compare=False, repr=False)
    limits: RowLimits | None = dataclasses.field(compare=False, repr=False)  # of the queries that see a key
    lists: QueryLists | None = dataclasses.field(compare=False, repr=False)  # of query tiles; None: intervals say which
    order: str = dataclasses.field(compare=False)  # of the tiles, and why, for people to read
    work: WorkTables | None = dataclasses.field(compare=False, repr=False)  # of `Sequences`, mirrored for tiles of keys
    cut: Cut | None = dataclasses.field(compare=False)  # None: no tile of keys is cut

    @property
    def key(self) -> str:
        """Content of the plan as text, the same in every process."""
        fields = [f for f in dataclasses.fields(self) if f.compare]
        return repr([(f.name, getattr(self, f.name)) for f in fields])

    @property
    def shared_memory(self) -> int:
        return self.tiling.shared_memory(self.dtype.itemsize)

    @functools.cached_property
    def captured(self) -> tuple[Capture, ...]:
        """What the mods and the loop bounds read, in the order in which the kernel receives it."""
        return _captured(self.program, ends_of(self.intervals, self.limits), self.lists)

    def __str__(self) -> str:
        t = self.tiling
        keys = "the same 64 keys" if t.shared_keys else "64 keys each"
        return "\n".join(
            [
                f"{self.module} on {self.backend} ({self.target.arch}), {self.dtype}, "
                f"D {self.head_dim}, Dv {self.head_dim_v}",
                f"  tiles      {t.tile_n} keys stay, {t.tile_m} queries pass, on chip D {t.d}, Dv {t.dv}, "
                f"stages Q {t.q_stages}, dO {t.do_stages}, dS {t.ds_stages}",
                f"  roles      1 copying warp, {t.warpgroups} warpgroups of {keys}; "
                f"registers {t.consumer_registers}/{t.producer_registers}",
                f"  schedule   {self._blocks()}, {self.order}",
                f"  dQ         summed in fp32 in memory, shared by {t.dq_split}",
                f"  memory     {self.shared_memory} bytes shared of {self.target.shared_memory}",
                *self._query_tiles(),
            ]
        )

    def _blocks(self) -> str:
        text = "blocks that stay take tiles of keys" if self.tiling.persistent else "one block a tile of keys"
        cut = self.cut
        return text if cut is None else f"{text}, of {cut.tiles} the last {cut.cut} in {cut.pieces} pieces"

    def _query_tiles(self) -> list[str]:
        if self.lists is None:
            return []
        return [f"  q tiles    by lists made on the device, as {self.lists.reason}"]


@dataclasses.dataclass(frozen=True)
class BackwardPlans:
    """The kernels of one gradient, in the order in which they run; `gather` where tiles of keys are cut."""

    prepare: BackwardPlan
    main: BackwardPlan
    finish: BackwardPlan
    gather: BackwardPlan | None = None

    def __str__(self) -> str:
        return str(self.main)


def plan_backward(
    problem: Problem,
    program: Program,
    target: Target,
    *,
    has_dlse: bool = False,
    deterministic: bool = False,
    tiling: BackwardTiling | None = None,
    intervals: tuple[TileInterval, ...] | None = None,
    cut: Cut | Literal["auto"] | None = "auto",
) -> BackwardPlans:
    """The backward kernels for `problem` on `target`; `tiling` overrides the backend's choice.

    `deterministic`: dQ is bitwise the same in every run, as dK and dV always are.
    `intervals`: which queries a tile of keys visits, by default derived from the mask.
    `cut`: which tiles of keys several blocks share, by default as keeps the multiprocessors busy.

    Raises: `UnsupportedDType`, `UnsupportedHeadDim`, `UnsupportedCapture`.
    """
    cutting = importlib.import_module(f"composattn.backends.{target.backend}.tiling")
    cutting.check(problem, program)
    tiles = importlib.import_module(f"composattn.backends.{target.backend}.backward_tiling")
    chosen = tiling or tiles.backward_tiling(problem, program, target, deterministic)
    of_keys, limits = program.of_keys
    lists = None
    if intervals is None:
        lists = made_lists(QueryLists, program.mask, extent_of(problem), (chosen.tile_m, chosen.tile_n))
        intervals = of_keys if lists is None else ()
    ends = ends_of(intervals, limits)
    if lists is not None or not problem.layout.is_dense:
        cut = None  # what a tile visits is known on the device alone
    elif cut == "auto":
        cut = _cut(problem, chosen, intervals, target)
    chosen = dataclasses.replace(chosen, in_pieces=cut is not None)
    order, keys = _order(problem, chosen, intervals, lists, deterministic, target)
    packed = problem.layout.q == "packed"
    sizes = (chosen.tile_m, chosen.tile_n)
    rows = work_tables(problem, EVERYTHING, *sizes, "in_order") if packed else None
    common: dict[str, Any] = {
        "backend": target.backend, "target": target, "dtype": problem.dtype, "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v, "tiling": chosen, "layout": problem.layout, "cut": cut,
    }  # fmt: skip
    bare: dict[str, Any] = {
        "deterministic": False, "captures": (), "scalars": (), "program_key": PLAIN.key, "program": PLAIN,
        "intervals": (), "limits": None, "lists": None, "listed": packed, "order": "in order", "work": rows,
    }  # fmt: skip
    main = BackwardPlan(
        module="backward_wide" if chosen.shared_keys else "backward",
        has_dlse=False,
        deterministic=deterministic,
        captures=tuple((c.tensor.dtype, c.tensor.ndim) for c in _captured(program, ends, lists)),
        scalars=tuple(s.expr.dtype for s in program.scalars),
        program_key=content_key(program.score, program.mask, *program.roots, *ends),
        program=program,
        intervals=intervals,
        limits=limits,
        lists=lists,
        listed=keys is not None,
        order=order,
        work=keys,
        **common,
    )
    return BackwardPlans(
        prepare=BackwardPlan(module="backward_prepare", has_dlse=has_dlse, **bare, **common),
        main=main,
        finish=BackwardPlan(module="backward_finish", has_dlse=False, **bare, **common),
        gather=BackwardPlan(module="backward_gather", has_dlse=False, **bare, **common) if cut else None,
    )


def _order(
    problem: Problem,
    tiling: BackwardTiling,
    intervals: tuple[TileInterval, ...],
    lists: QueryLists | None,
    deterministic: bool,
    target: Target,
) -> tuple[str, WorkTables | None]:
    """In which order tiles of keys run, in words, and the tables that say so, if any.

    The tables see keys as queries: theirs is the mirrored problem.
    """
    packed = problem.layout.kv == "packed"
    mirrored = _mirrored(problem)
    sizes = (tiling.tile_n, tiling.tile_m)
    if deterministic:
        # shortest first under a causal mask, and who waits for a turn waits for blocks that started before it
        words = "from the last keys to the first, as are the parts of dQ added"
        return words, work_tables(mirrored, EVERYTHING, *sizes, "in_order") if packed else None
    wanted = problem.schedule.order
    order: Order = "longest_first" if wanted == "auto" else wanted
    words = order.replace("_", " ")
    if order == "in_order" and not packed:
        return words, None
    ends = None if lists is not None else _exchanged(intervals)
    if order == "longest_first" and not packed and ends is not None and descends(mirrored, ends, *sizes):
        return f"{words}: the first keys first, as none are seen by fewer queries than those behind them", None
    if wanted == "auto" and entries(mirrored, tiling.tile_n) * problem.kv_heads <= target.sms:
        return AT_ONCE, work_tables(mirrored, ends, *sizes, "in_order")
    return f"{words}: by a table on the device", work_tables(mirrored, ends, *sizes, order)


def _mirrored(problem: Problem) -> Problem:
    """With queries and keys exchanged."""
    return dataclasses.replace(problem, q_len=problem.kv_len, kv_len=problem.q_len, layout=problem.layout.mirrored)


def _exchanged(intervals: tuple[TileInterval, ...]) -> tuple[TileInterval, ...]:
    """As the mirrored problem has them."""
    return tuple(i.mapped({index("q_len"): index("kv_len"), index("kv_len"): index("q_len")}) for i in intervals)


def _cut(problem: Problem, tiling: BackwardTiling, intervals: tuple[TileInterval, ...], target: Target) -> Cut | None:
    """Which tiles of keys are cut; none where they are many, or tensors decide what they visit."""
    if problem.batch * problem.kv_heads * -(-problem.kv_len // tiling.tile_n) > MANY * target.sms:
        return None
    visits = fixed_visits(_mirrored(problem), _exchanged(intervals), tiling.tile_n, tiling.tile_m)
    if visits is None:
        return None
    repeats = problem.kv_heads * (problem.batch if visits.shape[0] == 1 else 1)
    cut = best_cut((visits.flatten() * problem.group).tolist(), repeats, target.sms)
    return cut if cut.cut else None


def queries_of_a_key(problem: Problem, program: Program) -> float:
    """How many queries visit a tile of 128 keys, on average; as many as there are where tensors decide.

    Of packed sequences, if all were as long as their mean.
    """
    if not problem.layout.is_dense:
        q_len, kv_len = (-(-length // problem.batch) for length in (problem.q_len, problem.kv_len))
        problem = dataclasses.replace(problem, q_len=q_len, kv_len=kv_len, layout=DENSE)
    visits = fixed_visits(_mirrored(problem), _exchanged(program.of_keys[0]), 128, 1)
    return float(problem.q_len if visits is None else visits.float().mean())


def _captured(program: Program, ends: list[Expr], lists: QueryLists | None) -> tuple[Capture, ...]:
    listed = () if lists is None else lists.captures
    return tuple(dict.fromkeys((*program.captures, *captures_of(*ends), *listed)))


__all__ = ["COUNTER", "BackwardPlan", "BackwardPlans", "BackwardTiling", "plan_backward", "queries_of_a_key"]
