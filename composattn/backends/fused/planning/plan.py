"""What will be run for a call, decided on the host: problem + mods + target → one frozen, printable value."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

import torch

from ....analysis.bands import TileInterval, ends_of
from ....analysis.derived import Derived
from ....analysis.program import Program
from ....analysis.strips import Strips
from ....analysis.tile_lists import KeyLists, made_lists
from ....call.problem import ElementTypes, Layout, Problem
from ....errors import TooManyBlocks
from ....graph.content import content
from ....graph.expr import Capture, DType, Expr, index
from ....graph.expr import captures as captures_of
from ....primitives.interval_shape import IntervalShape
from ..rewrites import rewritten
from ..rewrites.invariant import refuse_order
from ..rewrites.posed import Posed
from ..rewrites.strips import chosen_forward
from ..tiles.architecture import architecture_of
from ..tiles.few_queries import splits
from ..tiles.segments import segments_of
from ..tiles.target import Target
from ..tiles.tiling import Chosen, ForwardTiling, Tiling
from ..tiles.traits import extent_of
from ..tiles.work import WorkTables, entries
from .order import Tiles

MOST_ACROSS = 65535  # blocks in the second and in the third dimension of a grid
MOST_BLOCKS = 2**31 - 1  # in the first one

SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

# why a kernel is the same whatever a field says
FOR_PEOPLE = {"why": "for people to read"}
TABLES = {"why": "tensors of a call; `has_order_table` says whether there are any"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(abc.ABC):
    """A kernel, named by content: plans with equal `key` are served by one compiled kernel.

    Lengths, batch, heads, strides and the scale's value are run-time. What a plan's fields say is compiled in, but for
    those that are not compared, which say why.
    """

    target: Target
    dtype: torch.dtype

    @property
    @abc.abstractmethod
    def step(self) -> str:
        """Which of its architecture's kernels it is."""

    @property
    def shared_memory(self) -> int:
        """Bytes a block may take; where no tiling says less or more, what any may have."""
        return 48 * 1024

    @property
    def named_cutlass(self) -> bool:
        """Whether the kernel's name has this word: NVIDIA's assembler then makes other machine code of the same PTX."""
        return True

    @functools.cached_property
    def key(self) -> str:
        """All that the plan says as text, see `graph.content`; said once, while captured tensors are there."""
        return f"{self.step}\n{content(self)}"

    @property
    def title(self) -> str:
        """What logs call it."""
        return self.step.replace("_", " ")

    @property
    def entry(self) -> str:
        """What profilers call its kernel, of what is compiled in alone: "composattn_forward_bf16_d128_dense_masked"."""
        return "_".join(["composattn", self.step, *self._form()])

    def _form(self) -> list[str]:
        """Words of its form, of letters and digits."""
        return [SHORT.get(self.dtype, str(self.dtype).removeprefix("torch."))]

    def __str__(self) -> str:
        return f"{self.step} on {self.target.backend} ({self.target.arch}), {self.dtype}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CombinePlan(Plan):
    """The kernel after a forward that was split over kv."""

    step = "combine"
    head_dim_v: int
    return_lse: bool
    in_one_row: bool  # whether its blocks lie in the first dimension of the grid alone


def words_of(program: Program | None) -> list[str]:
    """Which mods a kernel has."""
    if program is None:
        return []
    named = {"masked": program.mask, "scored": program.score, "sinks": program.sink, "dropout": program.keep}
    return [word for word, mod in named.items() if mod is not None]


STATISTICS = 4  # what a thread leaves of a row besides sums: the maximum, its sum, the largest score; 16 bytes
AnyTiling = TypeVar("AnyTiling", bound=Tiling)
AnyForwardTiling = TypeVar("AnyForwardTiling", bound=ForwardTiling)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiledPlan(Plan, Generic[AnyTiling]):
    """A kernel over tiles of queries and keys. `why`: what kind of call it is, and what says so that it is cut so.

    `has_order_table`: work tiles come in the order of a table.

    `has_segments`: tiles begin with the segments that the table says.
    """

    head_dim_v: int
    head_dim: int
    layout: Layout
    has_order_table: bool
    tiling: AnyTiling
    why: str = dataclasses.field(default="", compare=False, repr=False, metadata=FOR_PEOPLE)
    has_segments: bool = False

    @property
    def of_tiles(self) -> dict[str, Any]:
        """What each kernel over these tiles is compiled for."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(TiledPlan)}

    @property
    def metadata_numbers(self) -> int:
        """Numbers that the table has for each tile besides its segment."""
        return 0

    @property
    def step(self) -> str:
        return self.tiling.step

    @property
    def named_cutlass(self) -> bool:
        return self.tiling.named_cutlass

    @property
    def shared_memory(self) -> int:
        return self.tiling.shared_memory

    @property
    def title(self) -> str:
        wide = f"{super().title}, D {self.head_dim}"
        return wide if self.mods is None else f"{wide}, {self.mods.title}"

    def _form(self) -> list[str]:
        wide = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}_dv{self.head_dim_v}"
        lies = self.layout.q if self.layout.q == self.layout.kv else f"{self.layout.q}_{self.layout.kv}"
        return [*super()._form(), wide, lies, *words_of(self.mods)]

    @property
    def mods(self) -> Program | None:
        """The mods that are compiled in; None: none are."""
        return None

    def _text(self, rows: Mapping[str, str]) -> str:
        """For people to read: what each of the `rows` is about, and what it says."""
        head = f"{self.step} on {self.target.backend} ({self.target.arch}), {self._types()}, "
        memory = f"{self.shared_memory} bytes shared of {self.target.shared_memory}"
        rows = {**rows, "memory": memory, "class": self.why}
        said = [f"  {name:<10} {words}" for name, words in rows.items() if words]
        return "\n".join([f"{head}D {self.head_dim}, Dv {self.head_dim_v}", *said])

    def _types(self) -> str:
        return str(self.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardPlan(TiledPlan[AnyForwardTiling]):
    """A forward kernel. `splits`: the number of parts that kv is cut into; `is_split`: it is, and `combine` follows.

    `types`: element types of what it is called with, the output's as `dtype`; parts of a split are fp32.
    """

    types: ElementTypes
    return_lse: bool
    positive_scale: bool
    intervals: tuple[IntervalShape, ...]  # none where the tiles are listed
    captures: tuple[tuple[torch.dtype, int], ...]  # (dtype, rank) of each captured tensor
    scalars: tuple[DType, ...]  # what run-time numbers are
    program: Program = dataclasses.field(repr=False)
    lists: KeyLists | None = dataclasses.field(repr=False)  # of kv tiles; None: bands say which
    order: str = dataclasses.field(compare=False, metadata=FOR_PEOPLE)  # of the query tiles, and why
    work: WorkTables | None = dataclasses.field(compare=False, repr=False, metadata=TABLES)
    return_max_scores: bool = False
    is_split: bool = False
    batch_invariant: bool = False
    splits: int = dataclasses.field(default=1, compare=False, metadata={"why": "a size of the outputs of a call"})
    many_heads: bool = dataclasses.field(default=False, compare=False, metadata={"why": "`combine` has other blocks"})

    @property
    def mods(self) -> Program:
        return self.program

    @functools.cached_property
    def captured(self) -> tuple[Capture, ...]:
        """What the kernel reads, in the order in which it receives it: the mods' tensors, and lists of tiles."""
        return (*self.program.captures, *(() if self.lists is None else self.lists.captures))

    @functools.cached_property
    def derived(self) -> tuple[Derived, ...]:
        """What is derived and read; of tiles that are listed the kernel asks no bands."""
        return derived_among(self.program, ends_of(() if self.lists else self.program.intervals, self.program.limits))

    @property
    def strips(self) -> Strips | None:
        """How images are cut into the sequences of the call; None where it has no image."""
        return self.layout.strips

    @property
    def direct_store(self) -> bool:
        """Whether output rows are stored from registers: parts, packed heads, which leave a copy no mode to end with,
        and what the tiling says.
        """
        of_heads = self.layout.q == "packed" and self.tiling.packed_heads > 1
        return self.is_split or of_heads or self.tiling.output_direct

    @property
    def counts(self) -> bool:
        """Whether blocks say something to each other by such."""
        return self.tiling.scheduler.draws

    @property
    def counters(self) -> int:
        """Numbers that are zero before the kernel: one to draw tiles from, and a flag of each warp of a share."""
        return 1 + self.most_shares * (self.tiling.tile_m // 16) if self.tiling.scheduler.shares else 1

    @property
    def most_shares(self) -> int:
        """One for each block that runs at once."""
        return self.target.sms * self.tiling.blocks

    @property
    def left_numbers(self) -> int:
        """What shares leave in memory, fp32: sums of each row, and of its four lanes what each knows of it."""
        return self.most_shares * self.tiling.tile_m * (self.tiling.sum_columns + 4 * STATISTICS)

    @property
    def combine(self) -> CombinePlan:
        """The kernel that makes one output of those of the parts."""
        return CombinePlan(
            target=self.target,
            dtype=self.dtype,
            head_dim_v=self.head_dim_v,
            return_lse=self.return_lse,
            in_one_row=self.many_heads,
        )

    def __str__(self) -> str:
        t = self.tiling
        of_heads = f" of {t.packed_heads} heads" if t.packed_heads > 1 else ""
        together = (
            f"{t.heads_together} key/value heads" if t.heads_together else f"heads with {t.l2 >> 20} MiB of K and V"
        )
        rows = {
            "tiles": f"{t.queries} queries{of_heads} x {t.tile_n} keys, on chip D {t.d}, Dv {t.dv}",
            **t.describe(),
            "exp2": str(t.exponential),
            "rescale": str(t.threshold),
            "schedule": f"{t.scheduler.value}, {self.order}; {together} at a time",
            "mods": "none" if self.program.is_plain else f"score {self.program.score}, mask {self.program.mask}",
            "strips": "" if self.strips is None else self.strips.words,
            "kv tiles": self._kv_tiles(),
            "split": f"kv in {self.splits} parts, combined exactly" if self.is_split else "",
        }
        return self._text(rows)

    def _types(self) -> str:
        return str(self.types) if self.types.has_eight_bits else str(self.dtype)

    def _kv_tiles(self) -> str:
        if self.lists is None:
            return " + ".join(map(_interval_words, self.intervals))
        return f"by lists made on the device, as {self.lists.reason}; those to test first"


def plan_forward(
    problem: Problem, program: Program, target: Target, *, tiling: ForwardTiling | None = None, **asked: bool
) -> ForwardPlan:
    """The forward kernel for `problem` on `target`; `tiling` and what is `asked`: see `forward_of`.

    Raises: `UnsupportedDType`, `UnsupportedHeadDim`, `UnsupportedCapture`, `InvalidSchedule`, `UnknownLength` where
    lists of tiles would be too large for want of an upper bound of the sequences' lengths.
    """
    posed = rewritten(Posed(problem, program, target, tiling_is_given=tiling is not None)).posed
    return forward_of(posed, tiling=tiling, **asked)


def forward_of(
    posed: Posed,
    *,
    return_lse: bool = True,
    return_max_scores: bool = False,
    positive_scale: bool = True,
    tiling: ForwardTiling | None = None,
) -> ForwardPlan:
    """The forward kernel of a call that is rewritten; `tiling` overrides the architecture's choice.

    Raises: as `plan_forward`.
    """
    problem, program, target = posed.problem, posed.program, posed.target
    architecture_of(target).check(problem, program)
    tiling, why = chosen_forward(posed) if tiling is None else Chosen(tiling, "")
    tiling = _beside_sums(posed, tiling, asked=return_lse or return_max_scores)
    if tiling.most_rows < min(tiling.tile_m, problem.queries * tiling.slots):
        raise ValueError(f"{tiling.kernel} computes {tiling.most_rows} rows, of {problem.q_len} queries there are more")
    # rows of one axis say which tiles of a strip's keys are seen, with no lists
    strips = problem.layout.strips
    bounded = strips is not None and not strips.several_axes
    tile = tiling.queries, tiling.tile_n
    lists = None if bounded else made_lists(KeyLists, program.mask, extent_of(problem), tile)
    if lists is not None and problem.schedule.batch_invariant:
        refuse_order(f"tiles of this mask are listed, as {lists.reason}")
    read = (*program.captures, *(() if lists is None else lists.captures))
    heads = problem.q_heads // tiling.packed_heads
    order, work, in_segments = _ordered(posed, tiling, heads, lists)
    parts = splits(problem, tiling, target)
    check_blocks(problem, entries(problem, tiling.queries) * heads * parts)
    return ForwardPlan(
        target=target,
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        layout=problem.layout,
        types=problem.types,
        has_order_table=work is not None,
        has_segments=in_segments,
        tiling=tiling,
        why=why,
        return_lse=return_lse,
        positive_scale=positive_scale,
        intervals=tuple(interval_shape(i) for i in program.intervals) if lists is None else (),
        captures=tuple((c.tensor.dtype, c.tensor.ndim) for c in read),
        scalars=tuple(s.expr.dtype for s in program.scalars),
        program=program,
        lists=lists,
        order=order,
        work=work,
        return_max_scores=return_max_scores,
        is_split=parts > 1,
        batch_invariant=problem.schedule.batch_invariant,
        splits=parts,
        many_heads=problem.q_heads > MOST_ACROSS,
    )


def _beside_sums(posed: Posed, tiling: ForwardTiling, asked: bool) -> ForwardTiling:
    """The tiling, with other fields where sums of rows are asked for, as parts of keys have them too."""
    if tiling.beside_sums and (asked or splits(posed.problem, tiling, posed.target) > 1):
        return dataclasses.replace(tiling, **dict(tiling.beside_sums))
    return tiling


def _ordered(
    posed: Posed, tiling: ForwardTiling, heads: int, lists: KeyLists | None
) -> tuple[str, WorkTables | None, bool]:
    """The order of query tiles in words, the table that says it, if any, and whether they begin with segments."""
    problem, program = posed.problem, posed.program
    segments = segments_of(problem, program) if posed.segments and tiling.in_segments and lists is None else None
    visited = segments or (program.intervals if lists is None else None)
    tiles = Tiles(problem, visited, tiling.queries, tiling.tile_n, heads, posed.target.sms)
    return *tiles.ordered(), segments is not None


def check_blocks(problem: Problem, blocks: int) -> None:
    """Refuses, before compiling, more blocks than a launch takes."""
    if blocks > MOST_BLOCKS:
        raise TooManyBlocks(
            f"{problem.batch} sequences of {problem.q_len} queries and {problem.q_heads} heads are {blocks} blocks of "
            f"a kernel, a launch takes {MOST_BLOCKS}; call it for parts of the batch, one after the other"
        )


def derived_among(program: Program, ends: Iterable[Expr]) -> tuple[Derived, ...]:
    """What the mods and these ends of loops read that is derived."""
    read = captures_of(*(mod for mod in program.mods if mod is not None), *ends)
    return tuple([c for c in dict.fromkeys(read) if isinstance(c, Derived)])


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
