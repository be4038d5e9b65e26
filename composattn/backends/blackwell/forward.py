"""The forward kernel for Blackwell: its roles, and those of them that load, multiply and store."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from ...primitives.emit import Mods
from ...primitives.emit_tiles import kv_tiles_of
from ...primitives.gqa_packing import HeadRows
from ...primitives.kv_source import kv_source, partition
from ...primitives.kv_tiles import TileSequence
from ...primitives.pipelines import Slot, start_edges
from ...primitives.values import Fixed
from ..fused.arguments import ForwardArguments
from ..fused.fake import fake_arguments
from ..fused.kernels.forward_call import Call, launched
from ..fused.plan import ForwardPlan
from .block import Block, Tile
from .correction import Correction
from .softmax import SoftmaxRow
from .tcgen05 import after_wait, allocate, fragment_shape, free, instruction, multiply, tile_layout
from .tiling import ROWS, STEP, BlackwellTiling


class BlackwellForward:
    """Roles: a softmax warpgroup for each query tile of 128 rows, one that corrects O, a warp each for products, loads
    and stores.

    Edges: see `Block`. Timeline of the products for kv tiles 0, 1, ... of query tiles A and B:

        A K0ᵀ, B K0ᵀ | Pa V0, A K1ᵀ | Pb V0, B K1ᵀ | Pa V1, A K2ᵀ | ...

    where the softmax of one runs under the products of the other. One query tile A has two places for scores:

        A K0ᵀ | A K1ᵀ, Pa V0 | A K2ᵀ, Pa V1 | ...

    What parts of kv leave, where the plan splits it, see `composattn.backends.fused.arguments`.
    """

    def __init__(self, plan: ForwardPlan[BlackwellTiling]):
        self.plan, self.tiling = plan, plan.tiling
        self.heads = HeadRows(plan.tiling.heads, plan.tiling.slots)
        self.fragment = self.heads.fragment(fragment_shape(plan.tiling.tile_n))
        self.mods = Mods(plan.program, plan.positive_scale, self.fragment.of_one_head, plan.captured)
        self.visited = kv_tiles_of(self.mods, plan.lists, plan.intervals, self.tiling.tile_n)

    def __repr__(self):
        return "forward"  # becomes part of the kernel's name

    @cute.jit
    def __call__(self, stream, *arguments):
        given = ForwardArguments(*arguments)
        self.dtype = given.q.element_type
        found = launched(self.plan, given, self.heads, ROWS, tile_layout)
        self.kernel(
            found.tmas,
            found.tensors,
            given.lse,
            given.max_scores,
            found.order,
            given.scale,
            given.captured,
            given.scalars,
            found.queries,
            found.keys,
            found.splits,
        ).launch(
            grid=(found.blocks(self.plan), 1, 1),
            block=(self.tiling.roles.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, tmas, tensors, lse, max_scores, order, scale, captured, scalars, queries, keys, splits):
        call = Call(tmas, tensors, lse, max_scores, order, scale, captured, scalars, queries, keys, splits)
        if const_expr(order.table is None):
            self.roles(call)
        else:
            if call.tile(cute.arch.block_idx()[0]).exists:
                self.roles(call)

    @cute.jit
    def roles(self, call):
        roles, columns = self.tiling.roles, self.tiling.tensor_memory.allocated
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block = Block(self.tiling, self.dtype)
        if warp == roles.load:
            for tma in call.tmas:
                if const_expr(tma is not None):
                    cpasync.prefetch_descriptor(tma)
        if warp == roles.matrix:
            allocate(block.columns, columns)
        start_edges(block.edges, warp)
        memory = block.tensor_memory()
        work = call.work(cute.arch.block_idx()[0])
        if warp < roles.correction:
            cute.arch.setmaxregister_increase(roles.softmax_registers)
            self.softmax(call, work, block, memory)
        elif warp < roles.matrix:
            self.lower(roles.correction_registers)
            self.correct(call, work, block, memory)
        else:
            self.lower(roles.other_registers)
            if warp == roles.matrix:
                self.multiply(call, work, block, memory)
            elif warp == roles.load:
                self.load(call, work, block)
            elif warp == roles.store:
                self.store(call, work, block)
        cute.arch.sync_threads()
        if warp == roles.matrix:
            free(memory, columns)

    @staticmethod
    def lower(registers: int) -> None:
        cute.arch.setmaxregister_decrease(registers)

    def kv_tiles(self, call, work) -> TileSequence:
        """The kv tiles of a work tile; all roles ask alike."""
        return self.visited.of(call.leaves(work, self.tiling.queries), work.m, work.part)

    # --- softmax and correction ------------------------------------------------------------------------------

    @cute.jit
    def softmax(self, call, work, block, memory):
        thread = cute.arch.thread_idx()[0]
        tile = cute.arch.make_warp_uniform(thread // ROWS)
        me = Tile(block, memory, tile, thread % ROWS)
        leaves = call.leaves(work, self.tiling.queries)
        row = SoftmaxRow(self, me, work, leaves, self.mods.softmax_scale_log2(call.scale))
        factor = Slot(1, Int32(tile), Int32(0))
        _, factor = row.visit(self.kv_tiles(call, work), block.place(tile), factor)
        row.finish(call, factor)

    @cute.jit
    def correct(self, call, work, block, memory):
        thread = cute.arch.thread_idx()[0] - self.tiling.roles.correction * 32
        tiles = self.kv_tiles(call, work)
        count = self.tiling.query_tiles
        mine = [Correction(self, Tile(block, memory, t, thread), work) for t in range(count)]
        places = tuple(block.place(t) for t in range(count))
        factors = tuple(Slot(1, Int32(t), Int32(0)) for t in range(count))
        added = Slot.first(1)
        if tiles.count > 0:
            places = tuple(mine[t].begin(places[t]) for t in range(count))
            for _ in cutlass.range(tiles.count - 1, unroll=1):
                for t in cutlass.range_constexpr(count):
                    mine[t].rescale(places[t], factors[t], added)
                places = tuple(place.next() for place in places)
                factors = tuple(factor.next() for factor in factors)
                if const_expr(self.tiling.score_places > 1):
                    added = added.next()
        for t in cutlass.range_constexpr(count):
            mine[t].finish(call, tiles.count > 0, factors[t], Slot(1, Int32(t), added.phase))

    # --- one warp each ---------------------------------------------------------------------------------------

    @cute.jit
    def load(self, call, work, block):
        tiling, tmas, tensors = self.tiling, call.tmas, call.tensors
        tiles = self.kv_tiles(call, work)
        gQ = work.queries.tiles(tensors.q, work.h, (self.heads.box(ROWS), tiling.d))
        source = kv_source(work.keys, work.kv_head, tiling.tile_n)
        keys = source.part(tmas.k, tensors.k, block.sK, tiling.d)
        values = source.part(tmas.v, tensors.v, block.sV, tiling.dv)
        k_slot, v_slot = Slot.first(tiling.k_stages), Slot.first(tiling.v_stages)
        if tiles.count > 0:
            before = source.locate(tiles.first)  # V follows K one tile behind, as products want it
            for t in cutlass.range_constexpr(tiling.query_tiles):
                block.q.fill(Slot(1, Int32(t), Int32(0)))
                tQsQ, tQgQ = partition(tmas.q, block.q_rows[t], gQ)
                number = work.m * tiling.query_tiles + t
                cute.copy(tmas.q, tQgQ[None, number], tQsQ, tma_bar_ptr=block.q.full + t)
                if const_expr(t == 0):
                    keys.start(before, k_slot.index, block.k.acquire(k_slot))
                    k_slot = k_slot.next()
            for run in tiles.runs:
                for i in cutlass.range(run.count, unroll=1):
                    at = source.locate(run.tile(i))
                    keys.start(at, k_slot.index, block.k.acquire(k_slot))
                    k_slot = k_slot.next()
                    values.start(before, v_slot.index, block.v.acquire(v_slot))
                    v_slot = v_slot.next()
                    before = at
            values.start(before, v_slot.index, block.v.acquire(v_slot))

    @cute.jit
    def multiply(self, call, work, block, memory):
        tiling = self.tiling
        tiles = self.kv_tiles(call, work)
        products = [Products(tiling, block, memory, t) for t in range(tiling.query_tiles)]
        k_slot, v_slot = Slot.first(tiling.k_stages), Slot.first(tiling.v_stages)
        ahead = tuple(block.place(p.tile) for p in products)  # where scores go next
        ready = ahead  # where probabilities come next
        if tiles.count > 0:
            block.k.wait(k_slot)
            for p in products:
                block.q.wait(Slot(1, Int32(p.tile), Int32(0)))
                p.issue_scores(ahead[p.tile], k_slot)
            block.k.release(k_slot, None)
            k_slot = k_slot.next()
            ahead = tuple(place.next() for place in ahead)
            more = Int32(0)
            for run in tiles.runs:
                for _ in cutlass.range(run.count, unroll=1):
                    if const_expr(tiling.score_places > 1):
                        products[0].next_scores(ahead[0], k_slot)
                        block.k.release(k_slot, None)
                    block.v.wait(v_slot)
                    for p in products:
                        p.issue_output(ready[p.tile], v_slot, more > 0)
                        if const_expr(tiling.score_places > 1):
                            block.outputs.fill(Slot.first(1))
                        else:
                            p.next_scores(ahead[p.tile], k_slot)
                    block.v.release(v_slot, None)
                    if const_expr(tiling.score_places == 1):
                        block.k.release(k_slot, None)
                    k_slot, v_slot, more = k_slot.next(), v_slot.next(), Int32(1)
                    ahead = tuple(place.next() for place in ahead)
                    ready = tuple(place.next() for place in ready)
            block.v.wait(v_slot)
            for p in products:
                p.issue_output(ready[p.tile], v_slot, more > 0)
                block.outputs.fill(Slot(1, Int32(p.tile), Int32(0)))

    @cute.jit
    def store(self, call, work, block):
        if const_expr(not self.plan.direct_store):
            gO = work.queries.tiles(call.tensors.out, work.h, (self.heads.box(ROWS), self.tiling.dv))
            for t in cutlass.range_constexpr(self.tiling.query_tiles):
                block.staged.wait(Slot(1, Int32(t), Int32(0)))
                source, target = partition(call.tmas.out, block.o_rows[t], gO)
                cute.copy(call.tmas.out, source, target[None, work.m * self.tiling.query_tiles + t])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)


class Products(Fixed):
    """S = Q Kᵀ and O += P V of one query tile."""

    def __init__(self, tiling: BlackwellTiling, block: Block, memory: Int32, tile: int):
        self.tiling, self.block, self.memory, self.tile = tiling, block, memory, tile
        self.q, self.k, self.v = block.q_operands[tile], block.k_operand, block.v_operand
        self.output = memory + tiling.tensor_memory.outputs[tile].first

    def scores(self, place: Slot) -> Int32:
        return self.memory + place.index * self.tiling.tile_n

    def issue_scores(self, place: Slot, k_slot: Slot) -> None:
        """Starts the scores of a kv tile, which go to `place`, and says so to whoever waits for them."""
        target, q, k = self.scores(place), self.q.at(0), self.k.at(k_slot.index)
        words = instruction(self.block.dtype, self.tiling.tile_n)
        after_wait()
        with cute.arch.elect_one():
            for step in range(self.q.steps):
                multiply(target, self.q.descriptor(q, step), self.k.descriptor(k, step), words, step > 0)
        self.block.scores.fill(place)

    def next_scores(self, place: Slot, k_slot: Slot) -> None:
        self.block.k.wait(k_slot)
        self.issue_scores(place, k_slot)

    def issue_output(self, place: Slot, v_slot: Slot, accumulate: Boolean) -> None:
        """Starts O += P V, with the first keys when their probabilities are there, then with the others."""
        tiling = self.tiling
        v, p = self.v.at(v_slot.index), self.scores(place)
        words = instruction(self.block.dtype, tiling.dv, by_rows=True)
        parts = (self.block.early, 0, tiling.early_keys), (self.block.late, tiling.early_keys, tiling.tile_n)
        for edge, first, last in parts:
            edge.wait(place)
            after_wait()
            with cute.arch.elect_one():
                for step in range(first // STEP, last // STEP):
                    onto = accumulate if step == 0 else True
                    multiply(self.output, p + step * (STEP // 2), self.v.descriptor(v, step), words, onto)


def kernel(plan: ForwardPlan[BlackwellTiling]) -> tuple:
    """(function to compile, arguments to compile it with)."""
    return BlackwellForward(plan), fake_arguments(ForwardArguments.of(plan))
