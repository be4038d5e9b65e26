"""The forward kernel except for its tensor core: host function, work tiles, and how its roles walk over them."""

import abc
from typing import Any, Generic

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import cpasync

from ....primitives.arithmetic import ONE_BY_ONE, Arithmetic
from ....primitives.cut_rows import descriptors
from ....primitives.emit import Mods
from ....primitives.emit_tiles import kv_tiles_of
from ....primitives.gqa_packing import HeadRows
from ....primitives.kv_source import kv_source
from ....primitives.kv_tiles import TileSequence
from ....primitives.pipelines import BoundEdge
from ....primitives.score_tile import FragmentShape
from ....primitives.swizzled_tiles import tile_layout
from ....primitives.values import Fixed
from ..planning.arguments import ForwardArguments
from ..planning.plan import AnyForwardTiling, ForwardPlan
from ..tiles.architecture import Kernel
from .forward_call import ForwardCall, ForwardWork, HostRows, Operands, bulk_operands, launched


class Forward(Kernel, Generic[AnyForwardTiling]):
    """A block owns a tile of queries, in groups of `rows` of them, and walks over keys.

    Where the plan splits kv, a block has one part of a query tile's keys, and the output of each part is written apart,
    in fp32: o (splits, B, Hq, Sq, Dv), or packed (splits, Hq, total, Dv), lse and max_scores likewise; `combine` makes
    one of them.
    """

    arguments = ForwardArguments
    rows: int  # of queries that one copy brings, as one product takes them
    threads: int  # of a block
    blocks = 1  # on an SM at once
    folds_scales = False  # whether scales of keys are the softmax's too, as those of heads are, see `Mods`
    keeps_shared_base = True  # in a register from one end of the kernel to the other, not a constant where it is used
    dtype: Any  # of q
    out_dtype: Any  # of output rows in shared memory, of which parts of a split have none
    key_types: tuple[Any, Any]  # of k and v

    def __init__(self, plan: ForwardPlan[AnyForwardTiling], fragment: FragmentShape):
        """`fragment`: how scores lie in a thread's registers."""
        self.plan, self.tiling = plan, plan.tiling
        self.heads = HeadRows(plan.tiling.packed_heads, plan.tiling.slots)
        self.fragment = self.heads.fragment(fragment)
        folds = plan.tiling.tile_n if self.folds_scales else 0
        of_rows = self.fragment.of_one_head, plan.captured, self.arithmetic, folds
        self.mods = Mods(plan.program, plan.positive_scale, *of_rows)
        self.visited = kv_tiles_of(self.mods, plan.lists, plan.intervals, self.tiling.tile_n)

    def __repr__(self):
        return "forward"  # whichever of them it is

    @property
    def arithmetic(self) -> Arithmetic:
        return ONE_BY_ONE

    def key_layout(self, rows: int, columns: int) -> Any:
        """How a box of K or V lies in shared memory where it comes in."""
        return tile_layout(rows, columns)

    def operands(self, given: ForwardArguments, host: HostRows) -> Operands:
        """How tiles come to shared memory and leave it."""
        return bulk_operands(self.plan, given, self.heads, self.rows, self.key_layout, host)

    @abc.abstractmethod
    def roles(self, call: ForwardCall) -> None:
        """What the warps of a block do."""

    @cute.jit
    def __call__(self, stream, *arguments):
        given = self.arguments(*arguments)
        self.dtype, self.key_types = given.q.element_type, (given.k.element_type, given.v.element_type)
        self.out_dtype = self.dtype if self.plan.is_split else given.out.element_type
        found = launched(self.plan, given, self.heads, lambda host: self.operands(given, host))
        made = found.tensors, given.lse, given.max_scores, found.order
        read = given.scale, given.captured, given.scalars, found.queries, found.keys
        dealt = found.splits, given.counter, found.shares
        self.kernel(found.tmas, (*made, *read, *dealt)).launch(
            grid=(found.blocks(self.plan), 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.blocks,
            # said where there are several, else the kernel language asks the driver, which compiling must not need
            preferred_smem_carveout=None if self.blocks == 1 else 100,
            hint_smem_base_uniform=self.keeps_shared_base,
        )

    @cute.kernel
    def kernel(self, tmas, work):
        call = ForwardCall(tmas, *work)
        if const_expr(call.order.table is None or self.tiling.persistent):
            self.roles(call)
        else:
            if call.tile(cute.arch.block_idx()[0]).exists:
                self.roles(call)

    def kv_tiles(self, call: ForwardCall, work: ForwardWork) -> TileSequence:
        """The kv tiles of a work tile; all roles ask alike."""
        counted = (work.keys.origin,) if self.plan.has_segments else ()
        return self.visited.of(call.leaves(work, self.tiling.queries), work.m, work.some, *counted)


@cute.jit
def prefetch(call: cutlass.Constexpr[ForwardCall], condition):
    """The descriptors of the bulk copies, by the warp where the condition holds."""
    if condition:
        for tma in descriptors(call.tmas):
            cpasync.prefetch_descriptor(tma)


class Role(Fixed, abc.ABC):
    """Some warps of a block, which do the same for each of its work tiles: `visit`, which carries slots along."""

    def __init__(self, kernel: Any, call: ForwardCall, block: Any):
        self.kernel, self.call, self.block = kernel, call, block
        self.plan, self.tiling = kernel.plan, kernel.tiling

    def first_slots(self) -> tuple[Any, ...]:
        """Where rings and counts are before the first work tile."""
        return tuple(edge.first for edge in self.block.rings)

    @abc.abstractmethod
    def visit(self, work: ForwardWork, slots: tuple[Any, ...]) -> tuple[Any, ...]:
        """One work tile; gives where rings and counts are behind it."""

    def work(self, number, i=0) -> ForwardWork:
        return self.call.work(number, i)

    @cute.jit
    def visit_all(self, number, slots):
        """The work tile with this number, or those of a share."""
        if const_expr(self.call.shares is not None):
            for i in cutlass.range(self.call.shares.tiles(number), unroll=1):
                slots = self.visit(self.work(number, i), slots)
        else:
            if self.call.tile(number).exists:
                slots = self.visit(self.work(number), slots)
        return slots

    @cute.jit
    def run(self):
        slots = self.first_slots()
        number = cute.arch.block_idx()[0]
        if const_expr(not self.tiling.persistent):
            self.visit(self.work(number), slots)
        elif const_expr(self.tiling.scheduler.draws):
            self.draw_tiles(number, slots)
        else:
            while number < self.call.tiles:
                slots = self.visit_all(number, slots)
                number += cute.arch.grid_dim()[0]

    @cute.jit
    def draw_tiles(self, number, slots):
        """The block's own tile, then those whose numbers the copying warp draws and tells."""
        queue, lane = self.block.queue, cute.arch.lane_idx()
        turn = queue.edge.first
        while number < self.call.tiles:
            slots = self.visit_all(number, slots)
            number = queue.hear(turn, lane)
            turn = turn.next()


class KeyCopies(Fixed):
    """K and V of a work tile on their way into rings of shared memory; products want V one tile behind K."""

    def __init__(
        self, role: Role, work: ForwardWork, edges: tuple[BoundEdge, BoundEdge], tiles: tuple[cute.Tensor, cute.Tensor]
    ):
        tmas, tensors, tiling = role.call.tmas, role.call.tensors, role.tiling
        self.k_edge, self.v_edge = edges
        self.source = kv_source(work.keys, work.kv_head, tiling.tile_n)
        self.keys = self.source.part(tmas.k, tensors.k, tiles[0], tiling.d)
        self.values = self.source.part(tmas.v, tensors.v, tiles[1], tiling.dv)

    def start_keys(self, at, k_slot) -> None:
        bar = self.k_edge.acquire(k_slot)
        self.keys.start(at, k_slot.index, bar)

    def start_values(self, at, v_slot) -> None:
        bar = self.v_edge.acquire(v_slot)
        self.values.start(at, v_slot.index, bar)

    def follow(self, at, before, k_slot, v_slot):
        """K of a tile and V of the one before it; gives where their rings are behind them."""
        self.start_keys(at, k_slot)
        k_slot = self.behind(k_slot)
        self.start_values(before, v_slot)
        return k_slot, self.behind(v_slot)

    def behind(self, slot):
        """The slot behind a tile's."""
        return slot.next()
