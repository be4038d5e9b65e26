"""The forward kernel for Blackwell: which of its warps has which role."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...primitives.arithmetic import IN_PAIRS
from ...primitives.emit import Leaves
from ...primitives.emit_tiles import BandTiles, Shared
from ...primitives.kv_tiles import TileSequence
from ...primitives.pipelines import Slot, start_edges
from ...primitives.swizzled_tiles import swizzled
from ...primitives.values import Fixed, choose
from ..fused.kernels.forward import Forward, prefetch
from ..fused.kernels.forward_call import ForwardCall, ForwardWork
from ..fused.kernels.unit_memory.correction import Correction
from ..fused.kernels.unit_memory.multiply import Multiply
from ..fused.kernels.unit_memory.softmax_rows import Softmax
from ..fused.kernels.unit_memory.tile_copies import Store, TileLoad
from ..fused.planning.plan import ForwardPlan
from .block import BlackwellForwardBlock
from .tcgen05 import Lane, after_wait, allocate, fragment_shape, free, instruction, multiply
from .tiling import ROWS, STEP, BlackwellTiling

# Steps of Q Kᵀ whose descriptors the walk over keys may hold, of two query tiles. Of 12 steps, in 48 registers, 10
# moves were spilled; of 8, in a block that stays for several tiles, 26. Steps in a loop spill none.
HELD = 8


class BlackwellForwardProducts(Fixed):
    """S = Q Kᵀ and O += P V of one query tile, by one warp."""

    def __init__(self, block: BlackwellForwardBlock, memory: Int32, tile: int):
        self.tiling, self.block, self.memory, self.tile = block.tiling, block, memory, tile
        self.q, self.k, self.v = block.q_operands[tile], block.k_operand, block.v_operand
        self.output = memory + self.tiling.tensor_memory.outputs[tile].first

    def scores(self, place: Slot) -> Int32:
        return self.memory + place.index * self.tiling.tile_n

    @cute.jit
    def issue_scores(self, place: Slot, k_slot: Slot):
        """Starts the scores of a kv tile, which go to `place`, and says so to whoever waits for them."""
        target, q, k = self.scores(place), self.q.at(0), self.k.at(k_slot.index)
        words, steps = instruction(self.block.dtype, self.tiling.tile_n), self.q.steps
        held = self.tiling.query_tiles == 1 or (steps <= HELD and not self.tiling.persistent)
        few = steps if held else swizzled(self.tiling.d) // STEP
        after_wait()
        for run in cutlass.range(steps // few, unroll=1):
            first_q, first_k = q + run * self.q.step(few), k + run * self.k.step(few)
            with cute.arch.elect_one():
                for n in cutlass.range_constexpr(few):
                    onto = run > 0 if n == 0 else True
                    multiply(target, self.q.descriptor(first_q, n), self.k.descriptor(first_k, n), words, onto)
        self.block.scores.fill(place)

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


class BlackwellForward(Forward[BlackwellTiling]):
    """Roles: a softmax warpgroup for each query tile of 128 rows, one that corrects O, a warp each for products, loads
    and stores.

    Edges: see `BlackwellForwardBlock`. Timeline of the products for kv tiles 0, 1, ... of query tiles A and B:

        A K0ᵀ, B K0ᵀ | Pa V0, A K1ᵀ | Pb V0, B K1ᵀ | Pa V1, A K2ᵀ | ...

    where the softmax of one runs under the products of the other. One query tile A has two places for scores:

        A K0ᵀ | A K1ᵀ, Pa V0 | A K2ᵀ, Pa V1 | ...
    """

    rows = ROWS
    arithmetic = IN_PAIRS
    keeps_shared_base = False  # kept for all roles it went to the stack: 35 to 56 reloads of pages at D 192

    def __init__(self, plan: ForwardPlan[BlackwellTiling]):
        super().__init__(plan, fragment_shape(plan.tiling.tile_n))
        self.threads = plan.tiling.roles.threads
        bands = self.tiling.query_tiles > 1 and not plan.is_split and isinstance(self.visited, BandTiles)
        self.apart = bands and not self.visited.alike()  # each query tile visits kv tiles of its own

    def memory(self, block, thread) -> Lane:
        """The tensor memory of a thread. Who asks has it in a register, so each role asks."""
        return Lane(block.tensor_memory(), cute.arch.make_warp_uniform(thread // 32))

    def first_column(self, block) -> Int32:
        return block.tensor_memory()

    def products(self, block, memory, tile) -> BlackwellForwardProducts:
        return BlackwellForwardProducts(block, memory, tile)

    @cute.jit
    def roles(self, call):
        roles, columns = self.tiling.roles, self.tiling.tensor_memory.allocated
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block = BlackwellForwardBlock(self.tiling, self.dtype)
        prefetch(call, warp == roles.load)
        if warp == roles.matrix:
            allocate(block.columns, columns)
        start_edges(block.edges, warp)
        if warp < roles.correction:
            cute.arch.setmaxregister_increase(roles.softmax_registers)
            Softmax(self, call, block).run()
        elif warp < roles.matrix:
            cute.arch.setmaxregister_decrease(roles.correction_registers)
            Correction(self, call, block, roles.correction * 32).run()
        else:
            cute.arch.setmaxregister_decrease(roles.other_registers)
            if warp == roles.matrix:
                Multiply(self, call, block).run()
            elif warp == roles.load:
                TileLoad(self, call, block).run()
            elif warp == roles.store:
                Store(self, call, block).run()
        cute.arch.sync_threads()
        if warp == roles.matrix:
            free(block.tensor_memory(), columns)

    # --- which kv tiles, asked alike by all roles --------------------------------------------------------------

    def tiles_of_all(self, call: ForwardCall, work: ForwardWork) -> Shared:
        """The kv tiles that the query tiles of a work tile go over together, and each one's own."""
        if not self.apart:
            return Shared(self.visited.of(call.leaves(work, self.tiling.queries), work.m, work.part))
        count = range(self.tiling.query_tiles)
        leaves = [self.leaves_of(call, work, t) for t in count]
        return Shared(self.visited.of_all(leaves), [self.visited.of(each, work.m) for each in leaves])

    def tiles_of(self, call: ForwardCall, work: ForwardWork, t) -> TileSequence:
        """The kv tiles of query tile `t`."""
        if not self.apart:
            return self.tiles_of_all(call, work).all
        return self.visited.of(self.leaves_of(call, work, t), work.m)

    def leaves_of(self, call: ForwardCall, work: ForwardWork, t) -> Leaves:
        """For the bands of query tile `t`; one that begins beyond the last query sees no keys."""
        m = work.m * self.tiling.query_tiles + t
        leaves = call.leaves(dataclasses.replace(work, m=m), self.tiling.queries // self.tiling.query_tiles)
        return dataclasses.replace(leaves, kv_len=choose(leaves.first < leaves.q_len, leaves.kv_len, 0))
