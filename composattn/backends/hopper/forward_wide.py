"""The forward kernel for Hopper where D or Dv is above 256: two warpgroups share the rows of a block."""

from operator import add

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.memory import SmemAllocator

from ...primitives.barriers import Barriers
from ...primitives.branches import store_if, when
from ...primitives.cut_rows import load, partition
from ...primitives.kv_source import kv_source
from ...primitives.online_softmax import largest_scores
from ...primitives.pipelines import BoundEdge, Copies, Edge
from ...primitives.swizzled_tiles import tensor_of, tile_layout
from ...primitives.values import Fixed, choose, narrowed, permuted
from ..fused.kernels.forward import Role
from ..fused.kernels.registers.output_rows import OutputRows, RowGroup
from ..fused.planning.plan import ForwardPlan
from .forward import WarpgroupForward
from .wgmma import MN, ROWS, WARPGROUP, WarpgroupProducts, fragment_shape, issue, product, put, warps_of
from .wide_tiling import GROUPS, SLICE, STAGE, WideTiling


class HopperForwardWide(WarpgroupForward[WideTiling]):
    """Roles: warps 0 and 1 copy (one thread each) for warpgroups 0 and 1, warp 0 also Q; both have the same 64 rows.

    Edges: q (1 stage), and a ring of slices for each warpgroup. Of a kv tile these are K of its half of the keys, by
    columns, then V of all keys in its half of the columns, by keys. Timeline of warpgroup w, for each kv tile:

        Sw = Q Kwᵀ | maxima, meet, the other's maxima | softmax, Pw to shared memory, meet | Ow += [P0 P1] Vw

    Nothing lies under the softmax, as loads limit 64 rows: what was tried gained 0 to 5 %
    (benchmarks/log/2026-11.md#wide-forward-4).
    """

    threads = (GROUPS + 1) * WARPGROUP

    def __init__(self, plan: ForwardPlan[WideTiling]):
        super().__init__(plan, fragment_shape(plan.tiling.tile_n // GROUPS))

    def block(self, call):
        return HopperWideBlock(self.tiling, self.dtype, self.out_dtype)

    def products(self, block, number):
        return HopperWideProducts(self.tiling, block, number)

    def consumer(self, block, thread, scale_log2):
        return WideConsumer(self, block, thread, scale_log2)

    def rows_of(self, me, work, leaves):
        """Those of a work tile."""
        return SharedRows(me, self.mods, work, leaves)

    @cute.jit
    def copy(self, call, block, warp):
        if warp < GROUPS:
            WideLoad(self, call, block, warp).run()

    @cute.jit
    def consume(self, call, block, thread, scale_log2):
        WideConsume(self, call, self.consumer(block, thread, scale_log2)).run()


class WideLoad(Role):
    """The copying warp of warpgroup `number`."""

    def __init__(self, kernel, call, block, number):
        super().__init__(kernel, call, block)
        self.number, self.ring = number, block.ring(number)

    def first_slots(self):
        return self.block.q_edge.first, self.ring.first

    @cute.jit
    def visit(self, work, slots):
        q_slot, slot = slots
        tiling, block, call = self.tiling, self.block, self.call
        if self.number == 0:
            gQ = work.queries.tiles(call.tensors.q, work.h, (self.kernel.heads.box(ROWS), tiling.d))
            bar = block.q_edge.acquire(q_slot)
            tQsQ, tQgQ = partition(call.tmas.q, block.copied_queries, gQ)
            load(call.tmas.q, tQgQ, work.m, tQsQ, bar)
        tiles = self.kernel.kv_tiles(call, work)
        source = kv_source(work.keys, work.kv_head, tiling.tile_n)
        sK, sV = (block.of_group(slices, self.number) for slices in (block.sK, block.sV))
        keys = source.boxes(call.tmas.k, call.tensors.k, sK, tiling.key_box)
        values = source.boxes(call.tmas.v, call.tensors.v, sV, tiling.value_box)
        if tiles.count > 0:
            slot = self.copy(source.locate(tiles.first), keys, values, slot)
            for run in tiles.runs:
                for i in cutlass.range(run.count, unroll=1):
                    slot = self.copy(source.locate(run.tile(i)), keys, values, slot)
        return q_slot.next(), slot

    def copy(self, at, keys, values, slot):
        """The slices of a kv tile; gives where the ring is behind them."""
        for j in range(self.tiling.d // SLICE):
            bar = self.ring.keys.acquire(slot)
            keys.start(at, self.number, j, slot.index, bar)
            slot = slot.next()
        for i in range(self.tiling.tile_n // self.tiling.value_box[0]):
            bar = self.ring.values.acquire(slot)
            values.start(at, i, self.number, slot.index, bar)
            slot = slot.next()
        return slot


class Ring(Fixed):
    """The ring of a warpgroup, as its copying warp fills it with slices of K and with those of V."""

    def __init__(self, keys: BoundEdge, values: BoundEdge):
        self.keys, self.values, self.first = keys, values, keys.first
        self.wait, self.release = keys.wait, keys.release


class HopperWideBlock(Fixed):
    """Shared memory of one block: where Q (later O), the slices and P lie, and the edges between the roles."""

    def __init__(self, tiling, dtype, out_dtype):
        self.tiling, self.dtype = tiling, dtype
        wide = dtype.width // 8
        sizes = [rows * columns for rows, columns in (tiling.key_box, tiling.value_box)]
        self.kinds = [Edge(tiling.stages, Copies(self.number_bytes * size), warps_of(1)) for size in sizes]
        smem = SmemAllocator()
        edges = (Edge(1, Copies(wide * ROWS * tiling.d), warps_of(GROUPS)), *(GROUPS * [self.kinds[0]]))
        self.edges = Edge.allocate(smem, edges)
        self.q_edge, *self.rings = self.edges
        barriers = Barriers()
        self.of_groups = barriers.row(GROUPS, WARPGROUP)
        self.of_consumers = barriers.one(GROUPS * WARPGROUP)
        start = smem.allocate_array(dtype, ROWS * max(tiling.d, tiling.dv), byte_alignment=1024)
        self.sQ = tensor_of(start, tile_layout(ROWS, tiling.d), dtype)
        columns = tiling.output_columns
        self.sO = tensor_of(start, tile_layout(ROWS, columns), out_dtype, (GROUPS, ROWS * columns))
        self.sK, self.sV = self.slices(smem)
        layout = tile_layout(ROWS, tiling.tile_n)
        self.sP = smem.allocate_tensor(dtype, layout.outer, 1024, swizzle=layout.inner)
        # a number of each row and warpgroup
        self.sRows = smem.allocate_tensor(Float32, cute.make_layout((ROWS, GROUPS)), 128)
        self.more_memory(smem)

    @property
    def copied_queries(self) -> cute.Tensor:
        """Q as copies bring it."""
        return self.sQ

    @property
    def number_bytes(self) -> int:
        """How many bytes a number of K and V has in shared memory."""
        return self.dtype.width // 8

    def slices(self, smem):
        """The rings as slices of K and of V."""
        tiling, dtype = self.tiling, self.dtype
        start = smem.allocate_array(dtype, GROUPS * tiling.stages * STAGE, byte_alignment=1024)
        return tuple(self.ring_at(start, tile_layout(*box), dtype) for box in (tiling.key_box, tiling.value_box))

    def ring_at(self, start, layout, dtype) -> cute.Tensor:
        """(rows, columns, stage, warpgroup) of slices that lie so."""
        stages = self.tiling.stages
        return tensor_of(start, layout, dtype, (stages, STAGE), (GROUPS, stages * STAGE))

    def more_memory(self, smem):
        """What lies behind all else."""

    def of_group(self, slices: cute.Tensor, number) -> cute.Tensor:
        """(keys, columns, stage) of a warpgroup's ring."""
        return slices[None, None, None, number]

    def ring(self, number) -> Ring:
        """That of a warpgroup: rings lie behind each other."""
        start = self.rings[0].full + number * self.kinds[0].barriers
        return Ring(*(BoundEdge(kind, start) for kind in self.kinds))


class HopperWideProducts(WarpgroupProducts):
    """S = Q Kᵀ and O += P V of one warpgroup, slice by slice: issued, not waited for."""

    def __init__(self, tiling, block, number):
        keys, columns = tiling.key_box[0], tiling.output_columns
        self.qk, self.pv = product(block.dtype, keys), product(block.dtype, columns, right=MN)
        # descriptors are the same for all threads of a warpgroup: thread 0's view serves
        qk, pv = self.qk.get_slice(0), self.pv.get_slice(0)
        sQ = cute.local_tile(block.sQ, (ROWS, SLICE), (0, None))
        sP = cute.local_tile(block.sP, (ROWS, tiling.value_box[0]), (0, None))
        sK, sV = (block.of_group(slices, number) for slices in (block.sK, block.sV))
        self.tSrQ = qk.make_fragment_A(qk.partition_A(sQ))
        self.tSrK = qk.make_fragment_B(qk.partition_B(sK))
        self.tOrP = pv.make_fragment_A(pv.partition_A(sP))
        self.tOrV = pv.make_fragment_B(pv.partition_B(permuted(sV, 1, 0, 2)))
        self.scores_shape = qk.partition_shape_C((ROWS, keys))
        self.output_shape = pv.partition_shape_C((ROWS, columns))
        self.ring = block.ring(number)

    def probabilities(self) -> None:
        """They lie in shared memory."""

    def issue_scores(self, tSrS, j, slot) -> None:
        issue(self.qk, tSrS, self.tSrQ[None, None, None, j], self.tSrK[None, None, None, slot.index], j > 0)

    def issue_output(self, tOrO, i, slot, accumulate) -> None:
        issue(self.pv, tOrO, self.tOrP[None, None, None, i], self.tOrV[None, None, None, slot.index], accumulate)


class WideConsumer(RowGroup):
    """A warpgroup with a ring of its own, and half of each tile's keys."""

    def __init__(self, kernel, block, thread, scale_log2):
        super().__init__(kernel, block, thread, scale_log2)
        self.ring = self.products.ring

    def first_column(self):
        return self.number * self.tiling.key_box[0]

    @cute.jit
    def clear_values(self, first, stop: cutlass.Constexpr[int], slot):
        """Rows from `first` on of a slice of V to zeros: a page holds anything there, and 0 * NaN is NaN."""
        if first < stop:
            sV = self.slice_of_values(slot)
            for row in cutlass.range(cutlass.max(first, 0), stop, unroll=1):
                for column in cutlass.range(self.thread, self.tiling.output_columns, WARPGROUP, unroll=1):
                    sV[row, column] = sV.element_type(0)
            cute.arch.fence_view_async_shared()
            self.sync_group()

    def slice_of_values(self, slot) -> cute.Tensor:
        """(keys, columns) of a slice of V, whose zeros are those of the tensor's type."""
        return self.block.of_group(self.block.sV, self.number)[None, None, slot.index]

    def prepare_queries(self):
        """What consumers do with Q before they multiply by it."""


class WideConsume(Role):
    """A warpgroup's part of each work tile: `me`."""

    def __init__(self, kernel, call, me):
        super().__init__(kernel, call, me.block)
        self.me = me

    def first_slots(self):
        return self.block.q_edge.first, self.me.ring.first

    @cute.jit
    def visit(self, work, slots):
        q_slot, slot = slots
        me, call, kernel = self.me, self.call, self.kernel
        tiles = kernel.kv_tiles(call, work)
        rows = kernel.rows_of(me, work, call.leaves(work, self.tiling.queries))
        me.block.q_edge.wait(q_slot)
        me.prepare_queries()
        if tiles.count > 0:
            slot = rows.first_step(tiles, slot)
            for tile_range in tiles.tile_ranges():
                for i in cutlass.range(tile_range.count, unroll=1):
                    slot = rows.step(tile_range.tile(i), tile_range.tested, slot)
        else:
            rows.sums.fill(0.0)
        rows.finish(call)
        # O lay where Q is: the next one may come once it has left
        me.drain_stores()
        me.block.q_edge.release(q_slot, me.lane)
        return q_slot.next(), slot


class SharedRows(OutputRows[WideTiling]):
    """The rows of one work tile, of which this warpgroup has half of the scores' and of the output's columns."""

    def __init__(self, me: WideConsumer, mods, work, leaves):
        super().__init__(me, mods, work, leaves, work.m * ROWS + me.row)
        self.beside = me.number
        self.sums = self.tOrO
        # rows of the tile, which are not queries where heads are packed
        self.tile_rows = [me.row + r for r in fragment_shape(8).row_offsets]

    def first_step(self, tiles, slot):
        """The first one of these kv tiles, which are all that the rows see."""
        self.tiles, n = tiles.count, tiles.first
        seen = self.look(n)
        tSrS, ahead, slot = self.scores(n, slot)
        self.probabilities(tSrS, n, ahead, True, seen, first=True)
        return self.add_output(slot, n)

    def step(self, n, tested, slot):
        seen = self.look(n) if tested else None
        tSrS, ahead, slot = self.scores(n, slot)
        self.probabilities(tSrS, n, ahead, tested, seen, first=False)
        return self.add_output(slot)

    def scores(self, n, slot):
        """Scores of kv tile `n`, what was read ahead for them, and where the ring is behind its K."""
        ahead = self.mods.read_ahead(self.tile(None, n))
        tSrS = cute.make_rmem_tensor(self.products.scores_shape, Float32)
        count = self.tiling.d // SLICE
        slot = self.over_slices(count, slot, lambda j, at: self.products.issue_scores(tSrS, j, at))
        return tSrS, ahead, slot

    def add_output(self, slot, first=None):
        """O += P V; `first`: the kv tile, if it is the first one, which may reach beyond the last key."""
        size = self.tiling.value_box[0]

        def add_slice(i, at):
            if first is not None and self.me.plan.layout.kv == "paged":
                before = first * self.tiling.tile_n + i * size
                self.me.clear_values(self.work.keys.length - before, size, at)
            # the first product of all reads no sums: zeros would be put into its registers behind the fence
            self.products.issue_output(self.tOrO, i, at, first is None or i > 0)

        return self.over_slices(self.tiling.tile_n // size, slot, add_slice)

    def over_slices(self, count, slot, issue_slice):
        """A product of `count` slices, each freed once the next one is issued; gives where the ring is behind them."""
        ring, before = self.me.ring, None
        for i in range(count):
            ring.wait(slot)
            issue_slice(i, slot)
            if before is not None:
                self.products.wait(1)
                ring.release(before, self.me.lane)
            before, slot = slot, slot.next()
        self.products.wait(0)
        ring.release(before, self.me.lane)
        return slot

    def probabilities(self, tSrS, n, ahead, tested, seen, first):
        """Scores of kv tile `n` to probabilities, rounded and in shared memory, where both warpgroups have met."""
        tile = self.tile(self.products.remembered(tSrS), n)
        self.mods.apply_score(tile, ahead)
        if tested:
            self.hide(tile, seen)
        for r, maximum in enumerate(self.maxima(tile, first)):
            factor = self.softmax.raise_to(r, maximum, first)
            if factor is not None:
                self.rescale[r] = factor
            self.softmax.exponentials(tile, r, range(tile.columns))
            self.softmax.add(tile, r, factor)
        self.count_tile(first)
        self.mods.drop(tile)
        self.mods.weigh(tile, ahead, bool(tested))
        sP = cute.local_tile(self.block.sP, (ROWS, tile.columns * 4), (0, self.me.number))
        put(self.products.qk, narrowed(tSrS, self.block.dtype), sP, self.me.thread)
        cute.arch.fence_view_async_shared()
        if not first:
            self.rescale_output()
        self.me.sync_consumers()

    def maxima(self, tile, first):
        """Each row's from now on: the larger one of those that both warpgroups would take, by sums of their halves."""
        take = self.softmax.maximum_with
        return self.largest_of_both([take(r, largest_scores(tile, r), first) for r in range(tile.rows)])

    def largest_of_both(self, mine):
        """The larger ones of this warpgroup's numbers, one of each row, and the other's."""
        return [cute.arch.fmax(x, y) for x, y in zip(mine, self.others(mine), strict=True)]

    def others(self, numbers):
        """The other warpgroup's, for one of each row; all of a row's lanes have it."""
        sRows, me = self.block.sRows, self.me
        first = me.shape.first_in_row(me.lane)
        for row, number in zip(self.tile_rows, numbers, strict=True):
            store_if(first, sRows, (row, me.number), number)
        me.sync_consumers()
        return [sRows[row, 1 - me.number] for row in self.tile_rows]

    def row_tile(self):
        return self.work.m

    def finish(self, call):
        """Stores the results of all of a row's keys, each statistic by one of the warpgroups that know it."""
        me, total, highest = self.me, self.softmax.total, self.softmax.highest
        if highest is not None:
            for r, largest in enumerate(self.largest_of_both([highest[r] for r in range(me.shape.rows)])):
                highest[r] = largest
            me.sync_consumers()  # these have been read
        mine = [me.shape.along_row(add, total[r]) for r in range(me.shape.rows)]
        first = me.shape.first_in_row(me.lane)
        for r, other in enumerate(self.others(mine)):
            total[r] = choose(first, mine[r] + other, Float32(0.0))
        row_lse = self.store(call)
        me.sync_consumers()  # the next tile's numbers of rows come once these have been read
        when(me.number == 0, lambda: self.store_statistics(call, self.softmax, row_lse, me.lane))


__all__ = ["HopperForwardWide"]
