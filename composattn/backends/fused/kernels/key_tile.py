"""A tile of keys in a backward: which one it is, and what all warps that hold its scores do in the same way."""

import abc
import copy
import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ....primitives.emit_backward import BackwardMods
from ....primitives.padded_tiles import PaddedTiles
from ....primitives.pieces import Piece
from ....primitives.register_chunks import add_part
from ....primitives.score_tile import FragmentShape, ScoreTile
from ....primitives.seqlen import Sequence
from ....primitives.values import Fixed, move
from ..tiles.tiling import BackwardTiling


@dataclasses.dataclass
class KeyTile(Fixed):
    """A block's work: the `n`-th of the `count` tiles of keys of sequence `b`, for the query heads of one `kv_head`.

    Where `queries` and `keys` are a segment, it is the `n`-th there.
    `backwards`: from the last query tile that sees it to the first.
    """

    n: Int32
    count: Int32
    b: Int32
    kv_head: Int32
    queries: Sequence
    keys: Sequence
    padded: PaddedTiles
    piece: Piece | None
    backwards: Boolean | bool = False

    def is_cut(self, tile_n: int) -> Boolean:
        """Whether keys end within it, of `tile_n`, so that all pairs need a test."""
        return (self.n + 1) * tile_n > self.keys.rows


class KeyGroup(Fixed, abc.ABC):
    """A group of warps that has scores of a tile's keys: where they lie, dQ's way out, how a tile ends.

    Its `thread` of `THREADS` has them in registers as `shape` says, (query, key).
    """

    tiling: BackwardTiling
    block: Any
    shape: FragmentShape
    number: Any  # of the group in its block
    thread: Any
    lane: Int32
    apart: int  # keys between the first ones of neighbouring groups
    row: Int32  # of this thread's first score in a tile

    def begin(self, work: KeyTile) -> None:
        """Another tile of keys."""
        self.work = work
        self.first_kv = self.first_key(work.keys.from_start(work.n * self.tiling.tile_n + self.number * self.apart))

    def first_key(self, first):
        """This thread's first key, of those of the group from `first` on: warps have keys of their own."""
        return first + (self.thread // 32) * self.shape.warp_columns + self.shape.lane_column(self.lane)

    def wait_for_keys(self, kv_slot) -> None:
        """Until K and V are there."""
        self.block.kv_edge.wait(kv_slot)

    def release_keys(self, kv_slot) -> None:
        """K and V have been read."""
        self.block.kv_edge.release(kv_slot, self.lane)

    def begin_head(self, mods: BackwardMods, head, leaves) -> None:
        self.head = head
        self.mods = mods.at(self.tile(None, Int32(0)), leaves)

    def starts(self, slots: tuple) -> tuple:
        """What the first step takes, which has these slots."""
        return slots

    def begin_run(self, call, run, carried: tuple) -> tuple:
        """Before the first step of a `run` of query tiles, which takes what is returned."""
        return carried

    def tested(self, run, i, is_cut):
        """Whether the `i`-th tile of a run needs a test, as all do where the tile of keys is cut."""
        return is_cut | run.tested(i)

    def following(self, call, m, carried: tuple) -> tuple:
        """What the step after the one of query tile `m` takes, which took what is `carried`."""
        return tuple(slot.next() for slot in carried)

    def end(self, carried: tuple) -> tuple:
        """After the last query tile of a tile of keys; `carried` to the step that would follow."""
        return carried

    def tile(self, scores, m) -> ScoreTile:
        first_q = self.work.queries.from_start(m * self.tiling.tile_m + self.row)
        return ScoreTile(self.shape, scores, self.work.b, self.head, first_q, self.first_kv)

    def statistics(self, shared: cute.Tensor, stage) -> "RowStatistic":
        """This thread's rows of a statistic."""
        return RowStatistic(shared[None, stage].iterator + self.row, self.shape, together=2)

    def add_dq(self, call, m, tQrdQ: cute.Tensor, turn_slot) -> None:
        """A part of dQ to memory, in this block's turn where the order is fixed."""
        edge = self.block.turn_edge
        if const_expr(edge is not None):
            edge.wait(turn_slot)
        add_part(self.dq_sum(call, m), tQrdQ, self.dq_place(), self.thread)
        if const_expr(edge is not None):
            cute.arch.sync_warp()
            edge.release(turn_slot, self.lane)

    def dq_sum(self, call, m) -> cute.Tensor:
        """Where dQ of a tile is summed."""
        padded = self.work.padded
        return call.dq_accum[padded.b, self.head, padded.first + m, None]

    def dq_place(self):
        """Which part of dQ it has, of parts as large as its own."""
        return self.number

    def finish(self, call) -> None:
        """dK and dV to memory: rounded, through shared memory, or as the sums of a piece."""
        self.scale_sums(call)
        if const_expr(call.pieces is None):
            self.write_keys(call)
        else:
            _whole_or_piece(self, call, self.work.piece.is_whole)

    def scale_sums(self, call) -> None:
        """The factor that is left for the end."""

    @abc.abstractmethod
    def write_keys(self, call) -> None:
        """This group's sums to their tensors."""

    @abc.abstractmethod
    def leave_piece(self, call) -> None:
        """This group's sums to those of a piece."""


@cute.jit
def _whole_or_piece(me: cutlass.Constexpr, call: cutlass.Constexpr, is_whole: Boolean):
    if is_whole:
        me.write_keys(call)
    else:
        me.leave_piece(call)


class RowStatistic(Fixed):
    """A number per query row, `together` of them per access, when first asked for: registers are scarce."""

    def __init__(self, start: cute.Pointer, shape: FragmentShape, together: int):
        self.start = cute.make_ptr(Float32, start.toint(), cute.AddressSpace.smem, assumed_align=4 * together)
        self.shape, self.together = shape, together
        self.found: dict[int, list[Float32]] = {}

    def afresh(self) -> "RowStatistic":
        """This statistic with nothing read yet."""
        again = copy.copy(self)
        again.found = {}
        return again

    def read_ahead(self, rows: int | None = None) -> "RowStatistic":
        """This statistic with all or the first `rows` rows read now, so that they are there when a product is."""
        for r in range(0, self.shape.rows if rows is None else rows, self.together):
            self[r]
        return self

    def __getitem__(self, r: int) -> Float32:
        first = r - r % self.together
        if first not in self.found:
            values = cute.make_rmem_tensor(self.together, Float32)
            place = self.start + self.shape.row_offsets[first]
            move(cute.make_tensor(place, cute.make_layout(self.together)), values)
            self.found[first] = [values[i] for i in range(self.together)]
        return self.found[first][r - first]
