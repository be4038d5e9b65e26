"""The forward kernel of warps that copy and compute: products are mma.sync, and `copies` says how tiles come."""

import cutlass
import cutlass.cute as cute

from ...primitives.arithmetic import IN_ORDER, ONE_BY_ONE, Arithmetic
from ...primitives.register_chunks import THREADS
from ...primitives.values import zero_of
from ..fused.kernels.forward import Forward
from ..fused.kernels.registers.group_rows import GroupRows, RowConsume
from ..fused.kernels.registers.output_rows import RowGroup
from ..fused.planning.plan import ForwardPlan
from .copies import copies_of
from .mma import WarpProducts, fragment_shape
from .tiling import WarpTiling


class WarpForward(Forward[WarpTiling]):
    """Every warp has rows of queries, and K and V are copied by all of a block, or by one, as no others do.

    Timeline of a block with one stage, for kv tiles 0, 1, 2, ...; what stands behind a | is on its way meanwhile:

        S0 = Q K0ᵀ, softmax 0 | V0    meet    O += P0 V0 | K1    meet    S1 = Q K1ᵀ, softmax 1 | V1    meet    ...

    With more stages these are as many tiles ahead. Where tiles come in bulk, the first warp waits for all in place of a
    meeting, and the others for a tile alone.
    """

    def __init__(self, plan: ForwardPlan[WarpTiling]):
        tiling = plan.tiling
        super().__init__(plan, fragment_shape(tiling.warp_rows, tiling.tile_n))
        self.threads, self.blocks = tiling.warps * 32, tiling.blocks
        self.rows = tiling.warp_rows * (THREADS // 32)  # of a group of threads
        self.copies = copies_of(plan)

    @property
    def arithmetic(self) -> Arithmetic:
        return IN_ORDER if self.plan.batch_invariant else ONE_BY_ONE

    def operands(self, given, host):
        return self.copies.operands(self, given, host)

    def products(self, block, number):
        return WarpProducts(self.tiling, block)

    @cute.jit
    def roles(self, call):
        block = self.copies.block(self.tiling, self.dtype)
        block.start(call)
        thread = cute.arch.thread_idx()[0]
        me = RowGroup(self, block, thread, self.mods.softmax_scale_log2(call.scale))
        Compute(self, call, me).run()


class Compute(RowConsume):
    """A group's rows of each work tile, whose K and V it copies with the others."""

    @cute.jit
    def visit(self, work, slots):
        me, call, kernel = self.me, self.call, self.kernel
        tiles = kernel.kv_tiles(call, work)
        leaves = call.leaves(work, self.tiling.queries)
        rows = Rows(me, kernel.mods, work, leaves, kernel.copies(self, work, tiles))
        if tiles.count > 0:
            slots = rows.take_all(tiles, slots)
        rows.finish(call)
        return slots


class Rows(GroupRows):
    """A group's rows of one work tile, which take one kv tile after the other."""

    def __init__(self, me, mods, work, leaves, copies):
        super().__init__(me, mods, work, leaves, None)
        self.copies = copies

    @cute.jit
    def take_all(self, tiles, slots):
        """In two loops at most, of tiles with a test and without: each is a copy of all that is done for a tile.

        A copy more takes 1.2 s of CPU to compile (D 128, causal). One for both, which branches to the test, was 2 to
        6 % slower (H200).
        """
        self.tiles, step = tiles.count, self.copies.begin(slots)
        whole = tiles.whole()
        ranges = whole.tile_ranges()
        if cutlass.const_expr(len(ranges) <= 2):
            for tile_range in ranges:
                step = self.take_range(tile_range, step)
        else:
            tested, free = whole.rounds()
            for n in cutlass.range(len(tested), unroll=1):
                step = self.take_range(tested[n], step)
                step = self.take_range(free[n], step)
        return self.copies.end(step, slots)

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
        zero = zero_of(step.number) if self.tiling.anew else 0
        tSrS = self.products.scores(step.stage, zero)
        probabilities = self.probabilities(tSrS, n, ahead, tested, seen, first=False)
        rounded = self.products.warp.left_of(probabilities)
        self.rescale_output()
        self.note_sums_if_doubled()
        self.copies.values_there(step)
        self.products.add_output(self.tOrO, rounded, step.stage, zero)
        self.copies.values_read(step)
