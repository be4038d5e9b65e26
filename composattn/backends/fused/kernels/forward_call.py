"""What a generated forward kernel is called with: bulk copies of its operands, and its work in order."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ....primitives.cut_rows import bulk_copy
from ....primitives.emit import Leaves
from ....primitives.gqa_packing import HeadRows
from ....primitives.kv_source import copied_rows
from ....primitives.kv_tiles import WHOLE, KvPart
from ....primitives.seqlen import DenseSequence, Rows, Sequence, most_rows
from ....primitives.stream_k import Portion, StreamK
from ....primitives.strip_rows import in_copies, rows_of
from ....primitives.swizzled_tiles import tile_layout
from ....primitives.tile_scheduler import Sections, TileScheduler, WorkTile
from ....primitives.values import Fixed, permuted
from ..planning.arguments import ForwardArguments
from ..planning.plan import ForwardPlan


class ForwardOperands(NamedTuple):
    """For each tensor that lies in tiles, its TMA copy (None: there is none), or the tensor as that copy sees it."""

    q: Any
    k: Any
    v: Any
    out: Any


class Launched(NamedTuple):
    """What a kernel's host function finds out before it launches, in the order of the kernel's arguments."""

    tmas: ForwardOperands
    tensors: ForwardOperands
    order: TileScheduler
    queries: Rows
    keys: Rows
    splits: Any  # number of parts, None where kv is not split
    shares: StreamK | None

    def blocks(self, plan: ForwardPlan) -> Any:
        """How many there are."""
        blocks = _numbers(self.order, self.splits, self.shares)
        return cutlass.min(blocks, plan.target.sms * plan.tiling.blocks) if plan.tiling.persistent else blocks


def _numbers(order: TileScheduler, splits: Any, shares: Any) -> Any:
    """How many work tiles there are; each part of kv and each share is one of its own."""
    if shares is not None:
        return shares.numbers
    return order.tiles if splits is None else order.tiles * splits


class HostRows(NamedTuple):
    """On the host: where rows of queries and keys lie, and the tensors with a row and its columns as first modes."""

    queries: Any
    keys: Any
    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor


Operands = tuple[ForwardOperands, ForwardOperands]
"""Bulk copies of what comes and goes by such, and the tensors as these copies, or the kernel's threads, see them."""


def bulk_operands(
    plan: ForwardPlan,
    given: ForwardArguments,
    heads: HeadRows,
    rows: int,
    key_layout: Callable[[int, int], Any],
    host: HostRows,
) -> Operands:
    """Descriptors for bulk copies of `rows` query rows and of tiles of keys.

    `key_layout`: how a box of K or V lies in shared memory.
    """
    tiling, queries, keys = plan.tiling, host.queries, host.keys
    load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    box, wide = heads.box(rows), given.q.element_type.width // 8
    q_box, o_box = in_copies(queries, box, tiling.d), in_copies(queries, box, tiling.output_columns)
    tma_q, tQ = bulk_copy(load, host.q, tile_layout(rows, tiling.d, element_bytes=wide), q_box)
    (k_rows, k_columns), (v_rows, v_columns) = tiling.key_box, tiling.value_box
    k_box, v_box = (copied_rows(keys, k_rows), k_columns), (copied_rows(keys, v_rows), v_columns)
    tma_k, tK = bulk_copy(load, host.k, key_layout(*k_box), in_copies(keys, *k_box))
    tma_v, tV = bulk_copy(load, host.v, key_layout(*v_box), in_copies(keys, *v_box))
    tma_o = None
    if plan.direct_store:
        tO = plain_output(plan, given)
    else:
        in_segments = plan.has_segments  # of one head
        mO = queries.for_stores(given.out, rows) if in_segments else heads.view(queries.for_copies(given.out))
        tma_o, tO = bulk_copy(store, mO, tile_layout(rows, tiling.output_columns), o_box)
    return ForwardOperands(tma_q, tma_k, tma_v, tma_o), ForwardOperands(tQ, tK, tV, tO)


def plain_output(plan: ForwardPlan, given: ForwardArguments) -> cute.Tensor:
    """The output's rows as threads see them that store them from registers."""
    if plan.is_split or plan.layout.q == "dense":
        return given.out
    return permuted(given.out, 1, 0, 2)


def launched(
    plan: ForwardPlan, given: ForwardArguments, heads: HeadRows, operands: Callable[[HostRows], Operands]
) -> Launched:
    """On the host: how operands come and leave, and the order of the work."""
    tiling = plan.tiling
    queries, keys = rows_of(plan.layout, given.q, given.k, given.sequences)
    # a tile is the first two modes
    mK, mV = keys.for_copies(given.k), keys.for_copies(given.v)
    mQ = queries.for_loads(given.q)  # a row of Q has no say in what other rows get
    if plan.strips is None:
        entries, q_rows, kv_rows = given.q.shape[0], mQ.shape[0], most_rows(keys, given.k)
    else:
        entries, q_rows, kv_rows = given.q.shape[0] * plan.strips.count, queries.length, keys.length
    mQ = heads.view(mQ)
    tmas, tensors = operands(HostRows(queries, keys, mQ, mK, mV))
    splits = Int32(given.out.shape[0]) if plan.is_split else None
    row_bits = tiling.d * given.k.element_type.width + tiling.dv * given.v.element_type.width
    kv_bytes = Int64(kv_rows) * (row_bits // 8)
    sections = Sections(kv_bytes, tiling.l2, tiling.heads_together)
    heads_of = mQ.shape[2], mK.shape[2]
    order = TileScheduler.of(given.work, q_rows, tiling.queries, entries, *heads_of, sections)
    shares = None
    if given.left is not None:
        tiles_of_keys = Int32(cute.ceil_div(kv_rows, tiling.tile_n))
        shares = StreamK.of(order.tiles, tiles_of_keys, plan.most_shares, given.left, given.counter)
    return Launched(tmas, tensors, order, queries, keys, splits, shares)


@dataclasses.dataclass
class ForwardCall(Fixed):
    """What the kernel was called with."""

    tmas: ForwardOperands
    tensors: ForwardOperands
    lse: cute.Tensor | None
    max_scores: cute.Tensor | None
    order: TileScheduler
    scale: Float32
    captured: tuple
    scalars: tuple
    queries: Rows
    keys: Rows
    splits: Int32 | None  # number of parts
    counter: cute.Tensor | None  # from which blocks draw their tiles
    shares: StreamK | None

    @property
    def tiles(self) -> Int32:
        """Work tiles, each part of kv one of its own, each share one of its own."""
        return _numbers(self.order, self.splits, self.shares)

    def tile(self, number: Int32) -> WorkTile:
        return self.order.tile(number if self.splits is None else number % self.order.tiles)

    def work(self, number: Int32, i: Int32) -> "ForwardWork":
        """The work tile with this number, which exists; of a share its i-th one."""
        portion: Portion | None = None
        if self.shares is not None:
            number, portion = self.shares.tile(number, i)
        tile = self.tile(number)
        part = WHOLE if self.splits is None else KvPart(number // self.order.tiles, self.splits)
        queries, keys = self.queries.sequence(tile.b).within(tile.segment), self.keys.sequence(tile.b)
        if tile.segment is not None and isinstance(keys, DenseSequence):
            keys = dataclasses.replace(keys, origin=tile.segment.start)  # it sees none before
        return ForwardWork(tile.m, tile.b, tile.h, tile.kv_head, queries, keys, part, portion)

    def leaves(self, work, tile_queries: int) -> Leaves:
        q_len, kv_len = work.queries.length, work.keys.length
        first = work.queries.from_start(work.m * tile_queries)
        last = cutlass.min(first + tile_queries, work.queries.end) - 1
        read = self.scale, self.captured, self.scalars
        return Leaves(work.b, work.h, q_len, kv_len, *read, first=first, last=last)


@dataclasses.dataclass
class ForwardWork(Fixed):
    """Query tile `m` of head `h` of sequence `b`, where the rows of the sequence lie, and which part of its keys.

    Where a tile has rows of several heads, `h` counts in as many.
    """

    m: Int32
    b: Int32
    h: Int32
    kv_head: Int32
    queries: Sequence
    keys: Sequence
    part: KvPart
    portion: Portion | None  # of a tile that may be shared

    @property
    def some(self) -> KvPart | Portion:
        """Which of its tiles of keys."""
        return self.part if self.portion is None else self.portion
