"""The forward kernel but for its matrix unit: its host function, its work tiles, and what comes in for them."""

import abc
from collections.abc import Callable
from typing import Any, Generic

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from ....primitives.emit import Mods
from ....primitives.emit_tiles import kv_tiles_of
from ....primitives.gqa_packing import HeadRows
from ....primitives.kv_source import kv_source, partition
from ....primitives.kv_tiles import TileSequence
from ....primitives.pipelines import start_edges
from ....primitives.score_tile import FragmentShape
from ..arguments import ForwardArguments
from ..plan import AnyForwardTiling, ForwardPlan
from .forward_call import Call, Operands, launched


class Forward(abc.ABC, Generic[AnyForwardTiling]):
    """A block owns a tile of queries, in groups of `rows` of them, and walks over keys.

    One warp copies: Q once per work tile, K and V a tile of keys at a time. Edges of its block: q (1 stage), k and v.
    What the other warps do is the architecture's (`share_roles`); all walk over the same work tiles (`walk`) and ask
    alike for their keys (`kv_tiles`).

    Where the plan splits kv, a block has one part of a query tile's keys, and the output of each part is written apart,
    in fp32: o (splits, B, Hq, Sq, Dv), or packed (splits, Hq, total, Dv), lse and max_scores likewise; `combine` makes
    one of them.
    """

    rows: int  # of a tile of queries that a group of warps has
    threads: int  # of a block

    def __init__(self, plan: ForwardPlan[AnyForwardTiling], fragment: FragmentShape):
        """`fragment`: how the scores of a group of warps lie in a thread's registers."""
        self.plan, self.tiling = plan, plan.tiling
        self.groups = plan.tiling.tile_m // self.rows
        self.heads = HeadRows(plan.tiling.heads, plan.tiling.slots)
        self.fragment = self.heads.fragment(fragment)
        self.mods = Mods(plan.program, plan.positive_scale, self.fragment.of_one_head, plan.captured)
        self.visited = kv_tiles_of(self.mods, plan.lists, plan.intervals, self.tiling.tile_n)

    def __repr__(self):
        return "forward"  # becomes part of the kernel's name

    @abc.abstractmethod
    def tile_layout(self, rows: int, columns: int) -> Any:
        """Of a tile in shared memory."""

    @abc.abstractmethod
    def layouts(self) -> Operands:
        """Of shared memory: a group's rows of Q, the stages of K and of V, a group's rows of the output."""

    @abc.abstractmethod
    def block(self, layouts: Operands) -> Any:
        """Shared memory and edges of a block."""

    @abc.abstractmethod
    def share_roles(self, call: Call, block: Any, warp: Int32) -> None:
        """What each warp of a block does; one of them `produce`s."""

    @cute.jit
    def __call__(self, stream, *arguments):
        given = ForwardArguments(*arguments)
        self.dtype = given.q.element_type
        layouts = self.layouts()
        found = launched(self.plan, given, self.heads, self.rows, self.tile_layout)
        self.kernel(
            found.tmas,
            found.tensors,
            given.lse,
            given.max_scores,
            layouts,
            found.order,
            given.scale,
            given.captured,
            given.scalars,
            found.queries,
            found.keys,
            found.splits,
        ).launch(
            grid=(found.blocks(self.plan), 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, tmas, tensors, lse, max_scores, layouts, order, scale, captured, scalars, queries, keys, splits):
        call = Call(tmas, tensors, lse, max_scores, order, scale, captured, scalars, queries, keys, splits)
        if const_expr(order.table is None or self.tiling.persistent):
            self.work(call, layouts)
        else:
            if call.tile(cute.arch.block_idx()[0]).exists:
                self.work(call, layouts)

    @cute.jit
    def work(self, call, layouts):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for tma in call.tmas:
                if const_expr(tma is not None):
                    cpasync.prefetch_descriptor(tma)
        block = self.block(layouts)
        start_edges(block.edges, warp)
        self.share_roles(call, block, warp)

    @cute.jit
    def walk(self, call, do: cutlass.Constexpr[Callable], slots):
        """The work tiles of this block, each by `do(call, work, slots)`, which returns the slots it came to."""
        number = cute.arch.block_idx()[0]
        if const_expr(self.tiling.persistent):
            while number < call.tiles:
                if call.tile(number).exists:
                    slots = do(call, call.work(number), slots)
                number += cute.arch.grid_dim()[0]
        else:
            do(call, call.work(number), slots)

    def kv_tiles(self, call, work) -> TileSequence:
        """The kv tiles of a work tile; all roles ask alike."""
        return self.visited.of(call.leaves(work, self.tiling.queries), work.m, work.part)

    @cute.jit
    def produce(self, call, block):
        """The copying warp."""
        edges = block.q_edge, block.k_edge, block.v_edge
        self.walk(call, lambda *work: self.produce_tile(block, *work), tuple(edge.first for edge in edges))

    @cute.jit
    def produce_tile(self, block, call, work, slots):
        tiling = self.tiling
        q_slot, k_slot, v_slot = slots
        tiles = self.kv_tiles(call, work)
        tmas, tensors = call.tmas, call.tensors
        gQ = work.queries.tiles(tensors.q, work.h, (self.heads.box(self.rows), tiling.d))
        source = kv_source(work.keys, work.kv_head, tiling.tile_n)
        keys = source.part(tmas.k, tensors.k, block.sK, tiling.d)
        values = source.part(tmas.v, tensors.v, block.sV, tiling.dv)
        if tiles.count > 0:
            before = source.locate(tiles.first)  # V follows K one tile behind, as consumers want it
            bar = block.k_edge.acquire(k_slot)
            keys.start(before, k_slot.index, bar)
            bar = block.q_edge.acquire(q_slot)
            for w in cutlass.range_constexpr(self.groups):
                tQsQ, tQgQ = partition(tmas.q, block.sQ[None, None, w], gQ)
                cute.copy(tmas.q, tQgQ[None, work.m * self.groups + w], tQsQ, tma_bar_ptr=bar)
            q_slot = q_slot.next()
            k_slot = k_slot.next()
            for run in tiles.runs:
                for i in cutlass.range(run.count, unroll=1):
                    at = source.locate(run.tile(i))
                    bar = block.k_edge.acquire(k_slot)
                    keys.start(at, k_slot.index, bar)
                    k_slot = k_slot.next()
                    bar = block.v_edge.acquire(v_slot)
                    values.start(before, v_slot.index, bar)
                    v_slot = v_slot.next()
                    before = at
            bar = block.v_edge.acquire(v_slot)
            values.start(before, v_slot.index, bar)
            v_slot = v_slot.next()
        return q_slot, k_slot, v_slot
