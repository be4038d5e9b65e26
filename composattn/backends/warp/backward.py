"""The backward kernel of warps that copy and compute: a block keeps a tile of keys and walks over queries."""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from ...primitives.diagonals import Diagonals
from ...primitives.register_numbers import add_numbers, store_numbers
from ...primitives.row_copies import BYTES, RowCopies, copy_line, key_source
from ...primitives.turns import say, wait_for
from ...primitives.values import narrow, opaque, permuted
from ..fused.kernels.backward import Backward, BackwardOperands
from ..fused.kernels.dq_semaphore import DqSemaphore
from ..fused.kernels.key_tile import KeyGroup
from ..fused.planning.plan_backward import BackwardPlan
from .key_tile import BackwardProducts, WarpBackwardBlock
from .mma import fragment_shape
from .rounding import PartRows
from .steps import Step
from .tiling import WarpBackwardTiling

LINE = BYTES // 4  # fp32 numbers of a copy


class WarpBackward(Backward[WarpBackwardTiling]):
    """Scores are computed transposed, so that P and dS of a warp's keys can be left operands in its registers:

        Sᵀ = K Qᵀ    dPᵀ = V dOᵀ    dV += Pᵀ dO    dK += dSᵀ Q    dQ = dS K

    Only dQ needs the keys of all warps: dS goes through shared memory. Where dK and dV of 16 keys do not fit into a
    warp's registers, it has a part of their columns, and P goes that way too. Timeline of a block for query tile i:

        meet    Sᵀ, dPᵀ, P, dS, dV, dK | Q, dO of i + 1    meet    dQ to memory

    At the first meeting Q and dO of the tile are there; at the second one dS. With one stage the next copies start
    behind that, once all have read Q and dO. Where a warp has scores of the keys of its sums, dV and dK of its own
    queries come before the second meeting, from registers. Columns of K and V may be in registers from the first
    meeting on (`held`): what a step reads of shared memory is what it takes most time for.
    """

    keeps_shared_base = False

    def __init__(self, plan: BackwardPlan[WarpBackwardTiling]):
        super().__init__(plan)
        self.threads, self.blocks = plan.tiling.threads, plan.tiling.blocks

    def layouts(self):
        return None

    def operands(self, given, host, layouts, statistics):
        layout = self.plan.layout
        q, dout = (t if layout.q == "dense" else permuted(t, 1, 0, 2) for t in (given.q, given.dout))
        rest = (given.k, given.v, given.dk, given.dv)
        k, v, dk, dv = (t if layout.kv == "dense" else permuted(t, 1, 0, 2) for t in rest)
        return BackwardOperands._make([*[None] * 7, (), None]), BackwardOperands(q, dout, k, v, statistics, dk, dv, ())

    def begun(self, tmas, layouts, counter, warp):
        return self.block(layouts, counter)

    def block(self, layouts, counter):
        return WarpBackwardBlock(self.tiling, self.dtype)

    @cute.jit
    def share_roles(self, call, block, warp):
        me = KeyWarp(self, call, block, warp)
        slots = Nowhere(), Step.first(self.tiling.stages)
        self.walk(call, block, lambda *work: self.visit_tile(block, me, *work), None, slots)


class Nowhere:
    """In place of a ring that nobody walks along."""

    def next(self) -> "Nowhere":
        return self


class KeyWarp(KeyGroup):
    """One warp: scores (key, query) of some of a tile's pairs, its parts of dK and dV, tKrdK and tVrdV, and of dQ."""

    tiling: WarpBackwardTiling
    apart = 0
    number = 0

    def __init__(self, kernel: WarpBackward, call: Any, block: WarpBackwardBlock, warp: Int32) -> None:
        self.kernel, self.call, self.plan, self.tiling, self.block = kernel, call, kernel.plan, kernel.tiling, block
        tiling = self.tiling
        self.thread, self.lane, self.warp = cute.arch.thread_idx()[0], cute.arch.lane_idx(), warp
        self.products = BackwardProducts(tiling, block, warp)
        self.shape = fragment_shape(tiling.score_keys, tiling.score_queries).transposed
        self.row = self.products.first_query + self.shape.lane_row(self.lane)
        self.key = self.products.first_key + self.shape.lane_column(self.lane)
        self.tKrdK, self.tVrdV = (
            self.products.of_sums.sums(columns // tiling.sums.across) for columns in (tiling.d, tiling.dv)
        )
        self.diagonals = None
        if tiling.distances:
            self.diagonals = Diagonals(self.shape, block.sLines, tiling.distances, warp, tiling.warps)

    def first_key(self, first):
        return first + self.key

    # --- copies --------------------------------------------------------------------------------------------

    def begin(self, work) -> None:
        super().begin(work)
        first, tensors, plan = work.keys.from_start(work.n * self.tiling.tile_n), self.call.tensors, self.plan
        for name, tensor, columns, there in (
            ("k", tensors.k, self.tiling.d, plan.head_dim), ("v", tensors.v, self.tiling.dv, plan.head_dim_v),
        ):  # fmt: skip
            source = key_source(work.keys, tensor, work.kv_head, first)
            self.copies(self.tiling.tile_n, columns, there).start(source, self.block.start + self.block.behind[name])

    def copies(self, rows: int, columns: int, there: int) -> RowCopies:
        return RowCopies(self.thread, self.tiling.threads, rows, columns, there)

    def wait_for_keys(self, kv_slot) -> None:
        """Nothing: with the first query tile they are there."""

    def begin_run(self, call, run, carried):
        """The copies of its first tile start: whatever was in their stage, all have read.

        Who holds keys has them then: those of a tile's first run come with its first queries.
        """
        step = carried[0].anew()
        self.run = run.tested_where(self.work.is_cut(self.tiling.tile_n))
        _start_if(step.number < run.count, self, step.number, step.stage)
        if self.tiling.held:
            self.meet()
            self.products.hold_keys()
        return (step,)

    def tested(self, run, i, is_cut):
        return self.run.tested(i)

    def start_next(self, step) -> None:
        """Starts the copies of the tile behind this one."""
        after = step.next()
        _start_if(after.number < self.run.count, self, after.number, after.stage)

    def start(self, number, stage) -> None:
        """Starts this thread's part of the copies of a run's query tile of this number, with its statistics."""
        work, tiling, tensors, block = self.work, self.tiling, self.call.tensors, self.block
        m = opaque(self.run.tile(number))
        first = work.queries.from_start(m * tiling.tile_m)
        for name, tensor, columns, there in (
            ("q", tensors.q, tiling.d, self.plan.head_dim), ("do", tensors.dout, tiling.dv, self.plan.head_dim_v),
        ):  # fmt: skip
            source = key_source(work.queries, tensor, self.head, first)
            place = block.start + (block.behind[name] + stage * (2 * tiling.tile_m * columns))
            self.copies(tiling.tile_m, columns, there).start(source, place)
        thread = opaque(self.thread)
        numbers = LINE * (thread % (tiling.tile_m // LINE))
        kind, padded = thread // (tiling.tile_m // LINE), (work.padded.first + m) * tiling.tile_m
        source = tensors.rows[kind, work.padded.b, self.head, None].iterator + (padded + numbers)
        place = (kind * tiling.stages + stage) * tiling.tile_m + numbers
        _copy_if(kind < 2, block.sRows.iterator.toint() + place * 4, source)

    def meet(self) -> None:
        """All of the block, once what each has copied is there."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    # --- a query tile --------------------------------------------------------------------------------------

    def following(self, call, m, carried):
        return (carried[0].next(),)

    def step(self, call, m, tested, step):
        """One query tile: its part of dQ to memory, its parts of dK and dV to registers."""
        tiling, products, mods, block, stage = self.tiling, self.products, self.mods, self.block, step.stage
        m = opaque(m)
        self.meet()
        if tiling.stages > 1:
            self.start_next(step)
        lse, delta = (self.statistics(shared, stage) for shared in (block.sLse, block.sDelta))
        at = mods.evaluator(self.tile(None, m))
        mods.read_ahead(at)
        tSrS = products.scores(stage)
        at.tile.values = self.queries_first(tSrS)
        if const_expr(mods.backward.one_pass):
            tSrdP = products.gradients(stage)
            gradients = self.queries_first(tSrdP)
            mods.drop(at, gradients)
            mods.both(at, lse, gradients, delta, tested)
        else:
            mods.probabilities(at, lse, tested)
            tSrdP = products.gradients(stage)
            gradients = self.queries_first(tSrdP)
            mods.drop(at, gradients)
            mods.score_gradients(at, gradients, delta)
        mods.drop(at, at.tile.values)
        tVrP, tKrdS = (products.of_scores.rounded(tiling.score_queries) for _ in range(2))
        narrow(tVrP, tSrS)
        narrow(tKrdS, tSrdP)
        add_sums = mods.sum_captured(at, gradients, self.diagonals)
        products.put(tKrdS, "ds")
        if not tiling.keeps_weights:
            products.put(tVrP, "p")
        sums = self.tVrdV, self.tKrdK
        if products.keeps_own:
            products.add_own(sums, (tVrP, tKrdS), stage)
        cute.arch.sync_threads()
        products.add_others(sums, stage)
        if tiling.stages == 1:
            if not tiling.keeps_weights:
                cute.arch.sync_threads()
            self.start_next(step)
        add_sums()
        self.add_part(call, m, step.number)

    def queries_first(self, sums: cute.Tensor) -> cute.Tensor:
        """The registers of a score product as (query, key)."""
        return permuted(self.products.of_scores.rows_of(sums), 1, 0)

    def add_part(self, call, m, number) -> None:
        """This warp's part of dQ to memory, in its turn where the order is fixed."""
        products, tiling = self.products, self.tiling
        start = self.dq_sum(call, m).iterator + self.thread
        turn = None
        if self.plan.deterministic:
            turn = self.kernel.turn(call, self.work, self.head, m)
            before = DqSemaphore(self.kernel).before(call, self.work, self.head, self.run, number, self.lane)
        held = products.dq_held() if tiling.dq_pieces > 1 else None

        def add(piece: Any) -> None:
            tQrdQ = products.dq(held, piece)
            if turn is not None:
                wait_for(turn, before * tiling.warps)
                cute.arch.sync_warp()
            add_numbers(start + piece * (cute.size(tQrdQ) * tiling.threads), tQrdQ, tiling.threads)

        _for_each(add, products.dq_pieces, held is not None)
        if turn is not None:
            cute.arch.sync_warp()
            say(turn, self.lane == 0)

    # --- the end of a tile of keys ---------------------------------------------------------------------------

    def scale_sums(self, call) -> None:
        for i in range(cute.size(self.tKrdK)):
            self.tKrdK[i] = self.tKrdK[i] * call.scale

    def write_keys(self, call) -> None:
        tensors, plan, work = call.tensors, self.plan, self.work
        rows = PartRows(self.tiling.sums, self.block.dtype, opaque(self.warp))
        if plan.layout.q == "packed" or plan.lists is not None:
            # found anew: to keep it in registers spilled 4 to 14 more (D 64, sm_80); of other calls it is constants
            work = self.kernel.work_tile(call, opaque(self.kernel.first_number()))
        for sums, tensor, there in ((self.tKrdK, tensors.dk, plan.head_dim), (self.tVrdV, tensors.dv, plan.head_dim_v)):
            rows.store(sums, work.keys.head(tensor, work.kv_head), work.keys, work.n * self.tiling.tile_n, there)

    def leave_piece(self, call) -> None:
        for target, registers in zip(call.pieces.sums, (self.tKrdK, self.tVrdV), strict=True):
            store_numbers(target[self.work.piece.slot, None].iterator + self.thread, registers, self.tiling.threads)
        call.pieces.note(self.work, self.tiling.tile_n, self.thread == 0)


@cute.jit
def _for_each(do: cutlass.Constexpr[Callable], count: cutlass.Constexpr[int], by_loop: cutlass.Constexpr[bool]):
    if const_expr(by_loop):
        for i in cutlass.range(count, unroll=1):
            do(i)
    else:
        for i in cutlass.range_constexpr(count):
            do(i)


@cute.jit
def _start_if(condition: Boolean, me: cutlass.Constexpr, number: Int32, stage: Any):
    """A group of copies; an empty one where there is nothing to copy."""
    if condition:
        me.start(number, stage)
    cute.arch.cp_async_commit_group()


@cute.jit
def _copy_if(condition: Boolean, target: Int32, source: cute.Pointer):
    if condition:
        copy_line(target, source, Int32(BYTES))
