"""The forward kernel of warps that copy and compute: tiles come by cp.async, products are mma.sync."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.memory import SmemAllocator

from ...primitives.arithmetic import IN_ORDER, ONE_BY_ONE, Arithmetic
from ...primitives.register_chunks import THREADS
from ...primitives.row_copies import QuerySource, RowCopies, key_source
from ...primitives.swizzled_tiles import tile_layout
from ...primitives.values import Bundle, Fixed, choose, permuted
from ..fused.kernels.forward import Forward
from ..fused.kernels.forward_call import ForwardOperands, plain_output
from ..fused.kernels.registers.group_rows import GroupRows, RowConsume
from ..fused.kernels.registers.output_rows import RowGroup
from ..fused.planning.plan import ForwardPlan
from .mma import WarpProducts, fragment_shape
from .tiling import WarpTiling


class WarpForward(Forward[WarpTiling]):
    """Every warp has rows of queries, and all of a block copy K and V, as no other hardware does.

    Timeline of a block with one stage, for kv tiles 0, 1, 2, ...; what stands behind a | is on its way meanwhile:

        S0 = Q K0ᵀ, softmax 0 | V0    meet    O += P0 V0 | K1    meet    S1 = Q K1ᵀ, softmax 1 | V1    meet    ...

    Where all meet, each has waited for its own copies, so all of them are there; and all have read the stage into which
    the next copies go. With more stages these are as many tiles ahead.
    """

    def __init__(self, plan: ForwardPlan[WarpTiling]):
        tiling = plan.tiling
        super().__init__(plan, fragment_shape(tiling.warp_rows, tiling.tile_n))
        self.threads, self.blocks = tiling.warps * 32, tiling.blocks
        self.rows = tiling.warp_rows * (THREADS // 32)  # of a group of threads

    @property
    def arithmetic(self) -> Arithmetic:
        return IN_ORDER if self.plan.batch_invariant else ONE_BY_ONE

    def operands(self, given, host):
        layout = self.plan.layout
        q = given.q if layout.q == "dense" else permuted(given.q, 1, 0, 2)
        k, v = (permuted(t, 1, 0, 2) if layout.kv == "packed" else t for t in (given.k, given.v))
        return ForwardOperands(None, None, None, None), ForwardOperands(q, k, v, plain_output(self.plan, given))

    def products(self, block, number):
        return WarpProducts(self.tiling, block)

    @cute.jit
    def roles(self, call):
        block = WarpBlock(self.tiling, self.dtype)
        thread = cute.arch.thread_idx()[0]
        me = RowGroup(self, block, thread, self.mods.softmax_scale_log2(call.scale))
        Compute(self, call, me).run()


class WarpBlock(Fixed):
    """Shared memory of one block: where Q, K and V lie."""

    rings = ()

    def __init__(self, tiling, dtype):
        self.dtype = dtype
        smem = SmemAllocator()
        self.sQ = self.tiles(smem, tile_layout(tiling.tile_m, tiling.d))
        self.sK = self.tiles(smem, tile_layout(tiling.tile_n, tiling.d, tiling.stages))
        self.sV = self.tiles(smem, tile_layout(tiling.tile_n, tiling.dv, tiling.stages))

    def tiles(self, smem, layout) -> cute.Tensor:
        return smem.allocate_tensor(self.dtype, layout.outer, 1024, swizzle=layout.inner)


class Step(Bundle):
    """Which of a work tile's kv tiles it is, and the stage in which its K and V lie."""

    def __init__(self, stages: int, number: Any, stage: Any = 0) -> None:
        self.stages, self.number, self.stage = stages, number, stage
        self.parts = ("number", "stage") if stages > 1 else ("number",)

    @staticmethod
    def first(stages: int) -> "Step":
        return Step(stages, Int32(0), Int32(0) if stages > 1 else 0)

    def next(self) -> "Step":
        return self.after(1)

    def after(self, count: int) -> "Step":
        """The step `count` later, at most a lap of the stages."""
        if count % self.stages == 0:
            return Step(self.stages, self.number + count, self.stage)
        stage = self.stage + count
        return Step(self.stages, self.number + count, choose(stage >= self.stages, stage - self.stages, stage))


class BlockCopies(Fixed):
    """A work tile's Q, K and V on their way, by all threads of a block, in groups: K0 with Q, V0, K1, V1, ..."""

    def __init__(self, role, work, tiles):
        self.work, self.tiles, self.block = work, tiles, role.block
        self.tensors, self.tiling, self.plan = role.call.tensors, role.tiling, role.plan
        self.heads, self.threads = role.kernel.heads, role.kernel.threads

    def part(self, rows, columns, there) -> RowCopies:
        return RowCopies(cute.arch.thread_idx()[0], self.threads, rows, columns, there)

    def begin(self) -> None:
        """Q, and as many tiles as there are stages; of the last one K alone, see `keys_there`."""
        tiling, work, step = self.tiling, self.work, Step.first(self.tiling.stages)
        source = QuerySource(work.queries, self.tensors.q, self.heads, work.h, work.m * tiling.tile_m)
        self.part(tiling.tile_m, tiling.d, self.plan.head_dim).start(source, _address(self.block.sQ))
        for n in range(tiling.stages):
            self.start_keys(step)
            if n + 1 < tiling.stages:
                self.start_values(step)
                step = step.next()

    def keys_there(self, step) -> None:
        """Until K of a step is there, and all have multiplied V of the one before, whose stage takes another tile."""
        self.meet()
        self.start_values(step.after(self.tiling.stages - 1))

    def values_there(self, step) -> None:
        """Until V of a step is there, and all have multiplied its K, whose stage takes another tile."""
        self.meet()
        self.start_keys(step.after(self.tiling.stages))

    def meet(self) -> None:
        cute.arch.cp_async_wait_group(2 * (self.tiling.stages - 1))
        cute.arch.sync_threads()

    def start_keys(self, step) -> None:
        self.start(step, self.tensors.k, self.block.sK, self.tiling.d, self.plan.head_dim)

    def start_values(self, step) -> None:
        self.start(step, self.tensors.v, self.block.sV, self.tiling.dv, self.plan.head_dim_v)

    @cute.jit
    def start(self, step, tensor, shared, columns: cutlass.Constexpr[int], there: cutlass.Constexpr[int]):
        """A group of copies; an empty one behind the last tile."""
        if step.number < self.tiles.count:
            first = self.work.keys.from_start(self.tiles.tile(step.number) * self.tiling.tile_n)
            source = key_source(self.work.keys, tensor, self.work.kv_head, first)
            self.part(self.tiling.tile_n, columns, there).start(source, _address(shared[None, None, step.stage]))
        cute.arch.cp_async_commit_group()


def _address(shared: cute.Tensor) -> Any:
    return shared.iterator.toint()


class Compute(RowConsume):
    """A group's rows of each work tile, whose K and V it copies with the others."""

    @cute.jit
    def visit(self, work, slots):
        me, call, kernel = self.me, self.call, self.kernel
        tiles = kernel.kv_tiles(call, work)
        rows = Rows(me, kernel.mods, work, call.leaves(work, self.tiling.queries), BlockCopies(self, work, tiles))
        if tiles.count > 0:
            if const_expr(self.tiling.persistent):
                cute.arch.sync_threads()  # all have read the tile before
            rows.copies.begin()
            rows.take_all(tiles)
        rows.finish(call)
        return slots


class Rows(GroupRows):
    """A group's rows of one work tile, which take one kv tile after the other."""

    def __init__(self, me, mods, work, leaves, copies):
        super().__init__(me, mods, work, leaves, None)
        self.copies = copies

    @cute.jit
    def take_all(self, tiles):
        """In two loops at most, of tiles with a test and without: each is a copy of all that is done for a tile.

        A copy more takes 1.2 s of CPU to compile (D 128, causal). One for both, which branches to the test, was 2 to
        6 % slower (H200).
        """
        self.tiles, step = tiles.count, Step.first(self.tiling.stages)
        whole = tiles.whole()
        ranges = whole.tile_ranges()
        if const_expr(len(ranges) <= 2):
            for tile_range in ranges:
                step = self.take_range(tile_range, step)
        else:
            tested, free = whole.rounds()
            for n in cutlass.range(len(tested), unroll=1):
                step = self.take_range(tested[n], step)
                step = self.take_range(free[n], step)

    @cute.jit
    def take_range(self, tile_range, step):
        for i in cutlass.range(tile_range.count, unroll=1):
            self.take(tile_range.tile(i), tile_range.tested, step)
            step = step.next()
        return step

    def take(self, n, tested, step):
        """Scores of kv tile `n`, their probabilities, and what these add to the output."""
        seen = self.look(n) if tested else None
        ahead = self.mods.read_ahead(self.tile(None, n))
        self.copies.keys_there(step)
        self.products.get_queries()
        tSrS = self.products.scores(step.stage)
        probabilities = self.probabilities(tSrS, n, ahead, tested, seen, first=False)
        self.round(probabilities)
        self.rescale_output()
        self.note_sums_if_doubled()
        self.copies.values_there(step)
        self.products.add_output(self.tOrO, self.tOrP, step.stage)
