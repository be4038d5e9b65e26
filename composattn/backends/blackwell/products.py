"""The products of the forward: S = Q Kᵀ and O += P V of a query tile, into tensor memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...primitives.pipelines import Slot
from ...primitives.swizzled_tiles import swizzled
from ...primitives.values import Fixed
from .block import BlackwellForwardBlock
from .tcgen05 import after_wait, instruction, multiply
from .tiling import STEP

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
