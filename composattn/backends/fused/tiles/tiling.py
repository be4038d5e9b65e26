"""How a generated kernel cuts the work: what all architectures' tilings have. Each adds numbers of its own."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from ....call.problem import Problem
from ....primitives.exponential_units import HARDWARE, ExponentialUnits
from ....primitives.rescale_threshold import BY_LOG2_ALONE, RescaleThreshold
from .scheduler import Scheduler
from .target import Target

AnyTiling = TypeVar("AnyTiling", bound="Tiling")
RESERVED = 1024  # bytes of shared memory that each block takes beside its own
SAID = {"kernel", "tile_m", "tile_n", "d", "dv", "heads_together", "packed_heads", "exponential", "scheduler",
        "threshold", "persistent"}  # fmt: skip


def slots(heads: int) -> int:
    """Rows of a tile that one query of so many packed heads takes: one for each head, and padding."""
    return 1 << (heads - 1).bit_length()


def whole_pages(problem: Problem, most: int) -> int:
    """Keys of a tile up to so many; of paged ones whole pages, or a part of one: pages are powers of two."""
    return 1 << most.bit_length() - 1 if problem.layout.kv == "paged" else most


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling(abc.ABC):
    """Tiles of `tile_m` query rows and `tile_n` keys.

    `kernel` is the one of the architecture's kernels that is cut so. `d` and `dv` are the head dimensions as stored on
    chip, padded with zeros. `heads_together`: how many key/value heads are worked on together; None: as many as read
    (and add to) no more bytes than `l2`. `named_cutlass`: see `Plan`.
    """

    l2: ClassVar[int]
    of: ClassVar[str] = ""  # of what else than 16-bit numbers its kernel is, behind the name
    blocks = 1  # that an SM holds at once

    kernel: str
    tile_m: int
    tile_n: int
    d: int
    dv: int
    heads_together: int | None = None
    named_cutlass: bool = True

    @property
    def step(self) -> str:
        """The name by which its architecture knows the kernel."""
        return self.kernel + self.of

    @property
    def in_segments(self) -> bool:
        """Whether tiles of its kernel can begin with segments of rows that see only each other, if there are such."""
        return False

    @property
    @abc.abstractmethod
    def shared_memory(self) -> int:
        """Bytes a block takes, barriers and alignment included."""

    def fits(self, target: Target) -> bool:
        """Whether an SM has room for its blocks, and what each reserves."""
        return self.blocks * (self.shared_memory + RESERVED) <= target.shared_memory + RESERVED

    def describe(self) -> dict[str, str]:
        """For people to read, by what it is about: fields that no plan has words for, but those that are as usual."""
        own = {f.name: f.default for f in dataclasses.fields(self) if f.name not in SAID}
        unusual = (f"{name} {value}" for name, value in vars(self).items() if own.get(name, value) != value)
        return {"form": ", ".join(unusual)}


class Chosen(NamedTuple):
    """A call's tiling, and its class and what says so, for people to read."""

    tiling: Any
    words: str


def fitting(tilings: Iterable[AnyTiling], target: Target) -> AnyTiling:
    """The first that fits."""
    return next(tiling for tiling in tilings if tiling.fits(target))


def filled(made: Callable[..., AnyTiling], name: str, counts: Iterable[int], target: Target) -> AnyTiling:
    """The first that fits of those `made` with so many of what the field of this name counts."""
    return fitting((made(**{name: count}) for count in counts), target)


def query_tiles(problem: Problem, heads: int, rows: int) -> int:
    """How many tiles of so many rows a call has; `heads` of a key/value head share them."""
    return -(-problem.queries * slots(heads) // rows) * (problem.q_heads // heads) * problem.batch


def key_tiles(problem: Problem, columns: int) -> int:
    """How many tiles of so many keys a sequence has."""
    return -(-problem.keys // columns)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardTiling(Tiling):
    """A block owns `tile_m` query rows and walks over keys.

    `packed_heads`: query heads of one key/value head that share the rows of a tile (see `primitives.gqa_packing`).
    `exponential`: which columns of a thread take their exponentials from multiply-adds. `threshold`: how far a row's
    maximum may be below its largest score, so that the output is not rescaled.
    """

    parts: ClassVar[int] = 1  # stages that bring a tile of K, or of V
    byte_stages: ClassVar[int] = 0  # of K and V that come as 8-bit numbers beside 16-bit queries
    spared: ClassVar[int] = 0  # columns of V in shared memory that the output has no room for there
    scales_queries: ClassVar[bool] = False  # of bf16, which are made fp16, and all that is multiplied is
    beside_sums: ClassVar[tuple[tuple[str, Any], ...]] = ()  # fields where sums of rows are asked for, as LSE is

    kernel: str = "forward"
    packed_heads: int = 1
    exponential: ExponentialUnits = HARDWARE
    blocks: int = 1
    scheduler: Scheduler = Scheduler.ONE_TILE
    threshold: RescaleThreshold = BY_LOG2_ALONE

    @property
    def slots(self) -> int:
        """Rows of a tile that one query takes."""
        return slots(self.packed_heads)

    @property
    def persistent(self) -> bool:
        """Whether a block stays for many work tiles."""
        return self.scheduler is not Scheduler.ONE_TILE

    @property
    def output_direct(self) -> bool:
        """Whether rows of the output are stored from registers, not through shared memory, which has no room."""
        return False

    @property
    def offset(self) -> float:
        """Probabilities are 2 to this power as large until rows end: as fp16 holds where maxima lag."""
        return 15.0 - math.ceil(self.threshold.most) if self.scales_queries else 0.0

    @property
    def most_rows(self) -> int:
        """How many rows of a tile may be queries' heads."""
        return self.tile_m

    @property
    def reads_far_ahead(self) -> bool:
        """Whether more than the next tile of keys is on its way to a block."""
        return True

    @property
    def queries(self) -> int:
        """Queries whose rows fill a tile."""
        return self.tile_m // self.slots

    @property
    def key_box(self) -> tuple[int, int]:
        """Rows and columns of K in one stage of shared memory."""
        return self.tile_n // self.parts, self.d

    @property
    def value_box(self) -> tuple[int, int]:
        """Rows and columns of V in one stage of shared memory."""
        return self.tile_n // self.parts, self.dv

    @property
    def sum_columns(self) -> int:
        """Columns of the output as it is summed."""
        return self.dv

    @property
    def output_columns(self) -> int:
        """Columns of the output that one copy takes."""
        return self.dv - self.spared


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardTiling(Tiling):
    """A block owns `tile_n` keys and walks over queries.

    `persistent`: a block stays for many work tiles.
    `dq_begins`: a sum of dQ is cleared by the kernel "before", or "beside" the first tiles by a warp of each block; or
    nobody clears it, as the first one there writes where others add: in a fixed order whose "turn" comes first, in any
    order who makes the first "claim". A head's "only" tile of keys adds to no sum: it has all of dQ.
    `heads_at_last`: in a fixed order the last section has so many heads (0: as many as the others), and goes from first
    keys and last queries on, so that long tiles follow short ones, nobody waiting longer; None: as the others go.
    `heads_a_piece`: every tile of keys is cut in pieces of so many query heads of its group, so that those which run
    together are at few heads; 0: it is not.
    """

    kernel: str = "backward"
    persistent: bool = False
    sharing: ClassVar[int] = 1  # blocks that share a tile of keys, and run together
    dq_begins: Literal["before", "beside", "turn", "claim", "only"] = "before"
    heads_at_last: int | None = None
    heads_a_piece: int = 0

    @property
    def clears(self) -> bool:
        """Whether a warp of each block clears dQ."""
        return self.dq_begins == "beside"

    @property
    def k_stages(self) -> int:
        """Places for K in shared memory."""
        return 1

    @property
    def first_writes(self) -> bool:
        """Whether the first one that has a part of dQ writes it."""
        return self.dq_begins in ("turn", "claim", "only")

    @property
    def finishes_dq(self) -> bool:
        """Whether dQ is written as it is returned: no postprocess follows."""
        return self.dq_begins == "only"

    @property
    def claimed_parts(self) -> int:
        """Parts of a tile of dQ that are claimed, each a group's; 0: none is."""
        return 2 * (self.dq_begins == "claim")

    @property
    def ends_backwards(self) -> bool:
        """Whether the last section goes the other way."""
        return self.heads_at_last is not None

    def flags(self, tiles: Any) -> Any:
        """Numbers in device memory that say what is done to dQ of a head, of so many tiles."""
        return int(self.clears) + self.claimed_parts * tiles

    @property
    def block_keys(self) -> int:
        """Keys of a tile that one block has."""
        return self.tile_n // self.sharing
