"""What will be run for a call, decided on the host: problem + mods + target → one frozen, printable value."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Hashable
from typing import Any, ClassVar

import torch

from ...analysis.bands import TileInterval
from ...analysis.program import Program
from ...analysis.tile_lists import Extent, KeyLists, made_lists
from ...call.problem import Layout, Problem
from ...call.schedule import Order
from ...graph.expr import Capture, DType, index
from ...primitives.exponential_units import HARDWARE, ExponentialUnits
from ...primitives.interval_shape import IntervalShape
from .target import Target
from .work import WorkTables, ascends, entries, work_tables


def slots(heads: int) -> int:
    """Rows of a tile that one query of so many packed heads takes: one for each head, and padding."""
    return 1 << (heads - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a forward kernel cuts the work; a backend chooses it (`forward_tiling`).

    A block owns `tile_m` query rows and walks over kv in tiles of `tile_n`, K and V each in a ring of `stages`.
    `d` and `dv` are the head dimensions as stored on chip, padded with zeros. `pingpong`: warpgroups take turns
    at the matrix unit. `rescale_early`: the output is rescaled while scores are computed, not after it was
    accumulated. `slack`: by how much, in log2 units, a row's maximum may rise before the output is rescaled.
    `l2`: bytes of K and V of the heads that are worked on together, unless `heads_together` says how many key/value
    heads they are. `persistent`: one block a multiprocessor,
    each walking over many work tiles. `separate_o`: the output has shared memory of its own instead of Q's.
    `heads`: query heads of one key/value head that share the rows of a tile (see `primitives.gqa_packing`).
    `exponential`: which columns of a thread take their exponentials from multiply-adds.
    """

    tile_m: int
    tile_n: int
    d: int
    dv: int
    stages: int
    warpgroups: int
    consumer_registers: int
    producer_registers: int
    pingpong: bool
    rescale_early: bool
    slack: float
    l2: int
    heads_together: int | None = None
    persistent: bool = False
    separate_o: bool = False
    heads: int = 1
    exponential: ExponentialUnits = HARDWARE

    @property
    def slots(self) -> int:
        """Rows of a tile that one query takes."""
        return slots(self.heads)

    @property
    def queries(self) -> int:
        """Queries whose rows fill a tile."""
        return self.tile_m // self.slots

    def shared_memory(self, element_bytes: int) -> int:
        """Bytes a block takes, barriers and alignment included."""
        rows = self.d + self.dv if self.separate_o else max(self.d, self.dv)
        return element_bytes * (self.tile_m * rows + self.stages * self.tile_n * (self.d + self.dv)) + 1024


@dataclasses.dataclass(frozen=True)
class ForwardPlan:
    """A forward kernel, named by content: plans with equal `key` are served by one compiled kernel.

    Lengths, batch, heads, strides and the scale's value are run-time; what stands here is compiled in, but for
    `splits`, the number of parts that kv is cut into. `is_split`: it is cut, and `combine` follows.
    """

    module: ClassVar[str] = "forward"  # of the backend's folder

    backend: str
    target: Target
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    layout: Layout
    listed: bool  # query tiles come in the order of a table
    tiling: Tiling
    return_lse: bool
    positive_scale: bool
    intervals: tuple[IntervalShape, ...]  # none where the tiles are listed
    captures: tuple[tuple[torch.dtype, int], ...]  # (dtype, rank) of each captured tensor
    scalars: tuple[DType, ...]  # what run-time numbers are
    program_key: Hashable
    program: Program = dataclasses.field(compare=False, repr=False)
    lists: KeyLists | None = dataclasses.field(compare=False, repr=False)  # of kv tiles; None: bands say which
    order: str = dataclasses.field(compare=False)  # of the query tiles, and why, for people to read
    work: WorkTables | None = dataclasses.field(compare=False, repr=False)
    return_max_scores: bool = False
    is_split: bool = False
    splits: int = dataclasses.field(default=1, compare=False)

    @functools.cached_property
    def captured(self) -> tuple[Capture, ...]:
        """What the kernel reads, in the order in which it receives it: the mods' tensors, and lists of tiles."""
        return (*self.program.captures, *(() if self.lists is None else self.lists.captures))

    @property
    def stores_rows(self) -> bool:
        """Whether output rows are stored one by one: parts, or packed heads, which leave a copy no mode to end with."""
        return self.is_split or (self.layout.q == "packed" and self.tiling.heads > 1)

    @property
    def key(self) -> str:
        """Content of the plan as text, the same in every process."""
        return _content(self)

    @property
    def shared_memory(self) -> int:
        return self.tiling.shared_memory(self.dtype.itemsize)

    @property
    def combine(self) -> CombinePlan:
        """The kernel that makes one output of those of the parts."""
        return CombinePlan(self.backend, self.target, self.dtype, self.head_dim_v, self.return_lse)

    def __str__(self) -> str:
        t = self.tiling
        of_heads = f" of {t.heads} heads" if t.heads > 1 else ""
        mods = "none" if self.program.is_plain else f"score {self.program.score}, mask {self.program.mask}"
        return "\n".join(
            [
                f"forward on {self.backend} ({self.target.arch}), {self.dtype}, "
                f"D {self.head_dim}, Dv {self.head_dim_v}",
                f"  tiles      {t.queries} queries{of_heads} x {t.tile_n} keys, "
                f"on chip D {t.d}, Dv {t.dv}, {t.stages} stages",
                f"  roles      1 copying warp, {t.warpgroups} warpgroups of {t.tile_m // t.warpgroups} rows; "
                f"registers {t.consumer_registers}/{t.producer_registers}",
                f"  schedule   {'persistent' if t.persistent else 'one block a tile'}, {self.order}; "
                f"{self._section()} at a time",
                f"  overlap    {'ping-pong' if t.pingpong else 'warpgroups at will'}, "
                f"rescale {'under the next scores' if t.rescale_early else 'after the product'} "
                f"when a maximum rose by 2^{t.slack:g}",
                *([f"  exp2       {t.exponential}"] if t.exponential.polynomial else []),
                f"  memory     {self.shared_memory} bytes shared of {self.target.shared_memory}",
                f"  mods       {mods}",
                f"  kv tiles   {self._kv_tiles()}",
                *([f"  split      kv in {self.splits} parts, combined exactly"] if self.is_split else []),
            ]
        )

    def _section(self) -> str:
        asked = self.tiling.heads_together
        return f"{asked} key/value heads" if asked else f"heads with {self.tiling.l2 >> 20} MiB of K and V"

    def _kv_tiles(self) -> str:
        if self.lists is None:
            return " + ".join(map(_interval_words, self.intervals))
        return f"by lists made on the device, as {self.lists.reason}; those to test first"


@dataclasses.dataclass(frozen=True)
class CombinePlan:
    """The kernel after a forward that was split over kv, named by content as a `ForwardPlan` is."""

    module: ClassVar[str] = "combine"  # of the backend's folder
    shared_memory: ClassVar[int] = 48 * 1024  # what any block may have; it takes 4 KiB

    backend: str
    target: Target
    dtype: torch.dtype
    head_dim_v: int
    return_lse: bool

    @property
    def key(self) -> str:
        """Content of the plan as text, the same in every process."""
        return f"{self.module} {_content(self)}"


def _content(plan: ForwardPlan | CombinePlan) -> str:
    fields = [f for f in dataclasses.fields(plan) if f.compare]
    return repr([(f.name, getattr(plan, f.name)) for f in fields])


def plan_forward(
    problem: Problem,
    program: Program,
    target: Target,
    *,
    return_lse: bool = True,
    return_max_scores: bool = False,
    positive_scale: bool = True,
    tiling: Tiling | None = None,
) -> ForwardPlan:
    """The forward kernel for `problem` on `target`; `tiling` overrides the backend's choice.

    Raises: `UnsupportedDType`, `UnsupportedHeadDim`, `UnsupportedCapture`.
    """
    backend = importlib.import_module(f"composattn.backends.{target.backend}.tiling")
    backend.check(problem, program)
    tiling = tiling or backend.forward_tiling(problem, program, target)
    lists = key_lists(problem, program, (tiling.queries, tiling.tile_n))
    read = (*program.captures, *(() if lists is None else lists.captures))
    order, work = _order(problem, program, tiling, lists, target)
    splits = backend.splits(problem, tiling, target)
    return ForwardPlan(
        backend=target.backend,
        target=target,
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        layout=problem.layout,
        listed=work is not None,
        tiling=tiling,
        return_lse=return_lse,
        positive_scale=positive_scale,
        intervals=tuple(interval_shape(i) for i in program.intervals) if lists is None else (),
        captures=tuple((c.tensor.dtype, c.tensor.ndim) for c in read),
        scalars=tuple(s.expr.dtype for s in program.scalars),
        program_key=program.key,
        program=program,
        lists=lists,
        order=order,
        work=work,
        return_max_scores=return_max_scores,
        is_split=splits > 1,
        splits=splits,
    )


def key_lists(problem: Problem, program: Program, tile: tuple[int, int]) -> KeyLists | None:
    """Lists of the kv tiles of each query tile, where they leave out more than the mask's bands do.

    Raises: `UnknownLength` where they would be too large for want of an upper bound of the sequences' lengths.
    """
    return made_lists(KeyLists, program.mask, extent_of(problem), tile)


def extent_of(problem: Problem) -> Extent:
    """What lists of tiles are made for: the longest sequence there can be, all rows where nothing else is said."""
    p, layout = problem, problem.layout
    q_len = p.q_len if layout.max_q_len is None or layout.q == "dense" else min(p.q_len, layout.max_q_len)
    kv_len = p.kv_len if layout.max_kv_len is None or layout.kv != "packed" else min(p.kv_len, layout.max_kv_len)
    unbounded = (layout.q == "packed" and layout.max_q_len is None) or (layout.kv == "packed" and not layout.max_kv_len)
    return Extent(max(1, q_len), max(1, kv_len), p.batch, p.q_heads, p.device, not layout.is_dense, unbounded)


AT_ONCE = "in order, as all tiles run at once"


def _order(
    problem: Problem, program: Program, tiling: Tiling, lists: KeyLists | None, target: Target
) -> tuple[str, WorkTables | None]:
    """In which order query tiles run, in words, and the tables that say so, if any."""
    wanted = problem.schedule.order
    order: Order = "longest_first" if wanted == "auto" else wanted
    words = order.replace("_", " ")
    intervals = program.intervals if lists is None else None
    sizes = (tiling.queries, tiling.tile_n)
    heads = problem.q_heads // tiling.heads
    if problem.layout.q == "packed":
        why = "sequences differ in length"
    elif intervals is None:
        why = "lists say what each visits"
    else:
        later_is_longer = ascends(problem, intervals, *sizes)
        if order == "longest_first" and later_is_longer:
            return f"{words}: the last query tile of a head first, as none visits less than those before it", None
        why = "the mask leaves later query tiles less" if later_is_longer is False else "the mask reads what it leaves"
    if wanted == "auto" and entries(problem, tiling.queries) * heads <= target.sms:
        return AT_ONCE, work_tables(problem, intervals, *sizes, "in_order")
    made = f"{words}: by a table on the device" + (f", as {why}" if wanted == "auto" else ", as asked for")
    return made, work_tables(problem, intervals, *sizes, order)


def interval_shape(interval: TileInterval) -> IntervalShape:
    """Which kinds of tiles the interval can have, from its ends alone."""
    starts, ends = (interval.begin, interval.full_begin), (interval.end, interval.full_end)
    from_zero = all(e.is_const and e.attr <= 0 for e in starts)
    # the tile that reaches beyond kv_len comes first and is tested anyway
    to_the_end = all(e is index("kv_len") for e in ends)
    return IntervalShape(left=not from_zero, full=not interval.never_full, right=not to_the_end)


def _interval_words(shape: IntervalShape) -> str:
    if not shape.full:
        return "all tested"
    tested = [side for side, there in (("left", shape.left), ("right", shape.right)) if there]
    return f"untested inside, tested at the {' and '.join(tested)} end" if tested else "untested"


__all__: list[Any] = ["CombinePlan", "ForwardPlan", "Tiling", "interval_shape", "plan_forward"]
