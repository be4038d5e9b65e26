"""A tile of keys in the backward kernels: the shared memory of its block, and what all its consumers do alike."""

import abc
import dataclasses
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from ...primitives.barriers import Barriers
from ...primitives.emit_backward import BackwardMods
from ...primitives.padded_tiles import PaddedTiles
from ...primitives.pieces import Piece
from ...primitives.pipelines import Copies, Edge, Warps
from ...primitives.score_tile import ScoreTile
from ...primitives.seqlen import Sequence
from ...primitives.tile_queue import TileQueue
from ...primitives.values import Fixed, permuted
from .backward_tiling import HopperBackwardTiling
from .dq import key_columns
from .wgmma import (
    ROWS,
    WARPGROUP,
    Warpgroup,
    add_part,
    fragment_shape,
    product,
    row_column_view,
    tile_layout,
    warps_of,
)


@dataclasses.dataclass
class KeyTile(Fixed):
    """A block's work: the `n`-th of the `count` tiles of keys of sequence `b`, for the query heads of one `kv_head`."""

    n: Int32
    count: Int32
    b: Int32
    kv_head: Int32
    queries: Sequence
    keys: Sequence
    padded: PaddedTiles
    piece: Piece | None


class Layouts(NamedTuple):
    """Of tiles in shared memory: (rows, columns), then stages, or warpgroups; kept tiles have neither."""

    q: Any
    dout: Any
    k: Any
    v: Any
    ds: Any  # (queries, keys, stage), keys contiguous
    dk: Any  # on its way out, apart from K where a block stays for many tiles
    dv: Any

    @staticmethod
    def of(tiling: HopperBackwardTiling, dtype) -> "Layouts":
        k = tile_layout(dtype, tiling.tile_n, tiling.d, slice_columns=key_columns(tiling))
        v = tile_layout(dtype, tiling.tile_n, tiling.dv)
        # what a warpgroup writes of transposed scores are whole swizzles, else they are rows
        scores = tiling.tile_n // tiling.warpgroups if tiling.transposed else None
        leaving = k, v
        if tiling.persistent:
            dk, dv = (tile_layout(dtype, ROWS, width, tiling.warpgroups) for width in (tiling.d, tiling.dv))
            leaving = dk, dv
        return Layouts(
            tile_layout(dtype, tiling.tile_m, tiling.d, tiling.q_stages),
            tile_layout(dtype, tiling.tile_m, tiling.dv, tiling.do_stages),
            k,
            v,
            tile_layout(dtype, tiling.tile_m, tiling.tile_n, tiling.ds_stages, scores),
            *leaving,
        )


class Block(Fixed):
    """Shared memory of one block, and the edges between the roles."""

    def __init__(
        self, tiling: HopperBackwardTiling, layouts: Layouts, dtype, deterministic: bool, counter: cute.Tensor
    ):
        self.dtype = dtype
        wide = dtype.width // 8
        consumers = warps_of(tiling.warpgroups)
        statistic = 4 * tiling.tile_m
        edges = [
            Edge(1, Copies(tiling.tile_n * (tiling.d + tiling.dv) * wide), consumers),
            Edge(tiling.q_stages, Copies(tiling.tile_m * tiling.d * wide + statistic), consumers),
            Edge(tiling.do_stages, Copies(tiling.tile_m * tiling.dv * wide + statistic), consumers),
        ]
        if deterministic:  # full: this block may add to dQ; empty: it has
            edges.append(Edge(1, Copies(0), consumers))
        if tiling.persistent:  # numbers of the tiles that follow, for all warps but the copying one
            edges.append(Edge(2, Warps(1), Warps(consumers.count + deterministic)))
        smem = SmemAllocator()
        self.edges = Edge.allocate(smem, edges)
        self.kv_edge, self.q_edge, self.do_edge = self.edges[:3]
        self.turn_edge = self.edges[3] if deterministic else None
        self.queue = None
        if tiling.persistent:
            self.queue = TileQueue(self.edges[-1], smem.allocate_array(Int32, edges[-1].stages), counter)
        barriers = Barriers()
        self.of_consumers = barriers.one(tiling.warpgroups * WARPGROUP)
        self.of_weights = barriers.one(tiling.warpgroups * WARPGROUP) if tiling.shared_keys else None
        self.of_probabilities = barriers.one(tiling.warpgroups * WARPGROUP) if tiling.transposed else None
        self.of_warpgroup = barriers.row(tiling.warpgroups, WARPGROUP)

        def row_statistics(stages):
            layout = cute.make_layout((tiling.tile_m, stages), stride=(1, tiling.statistic_stride))
            return smem.allocate_tensor(Float32, layout, 128)

        self.sLse, self.sDelta = row_statistics(tiling.q_stages), row_statistics(tiling.do_stages)

        def tiles(layout):
            return smem.allocate_tensor(dtype, layout.outer, 1024, swizzle=layout.inner)

        self.sK, self.sV = tiles(layouts.k), tiles(layouts.v)
        self.sQ, self.sdO = tiles(layouts.q), tiles(layouts.dout)
        self.sdS = tiles(layouts.ds)
        self.sP = tiles(layouts.ds) if tiling.transposed else None
        # dK and dV on their way out (keys of a warpgroup, columns, warpgroup): the next K and V come in meanwhile
        self.sdK = self.sdV = None
        if tiling.persistent:
            self.sdK, self.sdV = tiles(layouts.dk), tiles(layouts.dv)
        self.sLines = None
        if tiling.distances:
            self.sLines = smem.allocate_array(Float32, tiling.distances, byte_alignment=128)
        # between warpgroups that share all keys: weights of dP - D in dS, in the order of registers
        self.sW = None
        if tiling.shared_keys:
            self.sW = smem.allocate_array(Float32, tiling.tile_m * tiling.tile_n, byte_alignment=128)


class KeyWarpgroup(Warpgroup, abc.ABC):
    """What the consumers of all backward kernels share: where their scores lie, dQ's way out, how a tile ends.

    Scores are (query, key) above the seam, in the registers of a product with keys as rows, unless `columns` says how
    many keys are columns.
    """

    apart = ROWS  # keys between the first ones of neighbouring warpgroups
    row: Int32  # of this thread's first score in a tile

    def __init__(self, tiling: HopperBackwardTiling, block: Block, number, thread, columns: int | None = None):
        super().__init__(block, number, thread)
        self.tiling = tiling
        width = columns or tiling.tile_m
        self.mma_s = product(block.dtype, width)
        self.scores_shape = self.mma_s.get_slice(0).partition_shape_C((ROWS, width))
        self.shape = fragment_shape(width) if columns else fragment_shape(width).transposed

    def begin(self, work: KeyTile) -> None:
        """Another tile of keys."""
        self.work = work
        self.first_kv = self.first_key(work.n * self.tiling.tile_n + self.warpgroup * self.apart)

    def first_key(self, first):
        """This thread's first key, of those of the warpgroup from `first` on: warps have keys of their own."""
        return first + (self.thread // 32) * self.shape.warp_columns + self.shape.lane_column(self.lane)

    def begin_head(self, mods: BackwardMods, head, leaves) -> None:
        self.head = head
        self.mods = mods.at(self.tile(None, Int32(0)), leaves)

    def tile(self, scores, m) -> ScoreTile:
        first_q = m * self.tiling.tile_m + self.row
        return ScoreTile(self.shape, scores, self.work.b, self.head, first_q, self.first_kv)

    def statistics(self, shared: cute.Tensor, stage) -> "RowStatistic":
        """This thread's rows of a statistic."""
        return RowStatistic(shared[None, stage].iterator + self.row)

    def add_dq(self, call, m, tQrdQ: cute.Tensor, turn_slot) -> None:
        """A part of dQ to memory, in this block's turn where the order is fixed."""
        edge = self.block.turn_edge
        if const_expr(edge is not None):
            edge.wait(turn_slot)
        padded = self.work.padded
        target = call.dq_accum[padded.b, self.head, padded.first + m, None]
        add_part(target, tQrdQ, self.first_dq(cute.size(tQrdQ)), self.thread)
        if const_expr(edge is not None):
            cute.arch.sync_warp()
            edge.release(turn_slot, self.lane)

    def first_dq(self, count: int):
        """Which number of dQ its part begins with, of `count` numbers a thread."""
        return self.warpgroup * (count * WARPGROUP)

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
        """This warpgroup's sums to their tensors."""

    @abc.abstractmethod
    def leave_piece(self, call) -> None:
        """This warpgroup's sums to those of a piece."""


@cute.jit
def _whole_or_piece(me: cutlass.Constexpr, call: cutlass.Constexpr, is_whole: Boolean):
    if is_whole:
        me.write_keys(call)
    else:
        me.leave_piece(call)


class RowStatistic(Fixed):
    """A number a query row, two rows an access of shared memory when first asked for: registers are scarce."""

    def __init__(self, start: cute.Pointer):
        self.start = cute.make_ptr(Float32, start.toint(), cute.AddressSpace.smem, assumed_align=8)
        self.pairs: dict = {}

    def __getitem__(self, r: int) -> Float32:
        pair = r // 2
        if pair not in self.pairs:
            values = cute.make_rmem_tensor(2, Float32)
            cute.autovec_copy(cute.make_tensor(self.start + 8 * pair, cute.make_layout(2)), values)
            self.pairs[pair] = values
        return self.pairs[pair][r % 2]


def queries_first(accumulator: cute.Tensor) -> cute.Tensor:
    """The registers of a transposed score product as (query, key)."""
    return permuted(row_column_view(accumulator), 1, 0)
