"""The backward's warp that multiplies: Sᵀ, dPᵀ, dV, dK and dQ of the query tiles that a tile of keys visits."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...primitives.pipelines import Slot
from ...primitives.swizzled_tiles import swizzled
from ...primitives.values import Bundle
from ..fused.kernels.unit_memory.key_products import KeyProducts
from .key_tile import BlackwellBackwardBlock
from .tcgen05 import Operand, after_wait, instruction, multiply
from .tensor_memory import GROUPS, Columns
from .tiling import STEP


class ProductSlots(Bundle):
    """Which Q and dO come next, and of which step the scores are."""

    parts = ("q", "do", "step")

    def __init__(self, q: Slot, do: Slot, step: Slot) -> None:
        self.q, self.do, self.step = q, do, step

    def next(self) -> "ProductSlots":
        return ProductSlots(self.q.next(), self.do.next(), self.step.next())


class Steps(KeyProducts):
    """How a warp issues a product: a few of its steps at a time, in a loop.

    Descriptors of all of them, held along the walk over query tiles, spilled 30 of 64 registers.
    """

    def __init__(self, kernel, block: BlackwellBackwardBlock, memory: Int32):
        super().__init__(kernel, block)
        self.memory, self.tiling = memory, kernel.tiling
        self.map = self.tiling.columns

    @cute.jit
    def issue(self, target, left: Operand, left_stage, right: Operand, right_stage, onto: cutlass.Constexpr = False):
        """Starts a product of two tiles in shared memory, which is added to what is there where it goes `onto` that."""
        a, b = left.at(left_stage), right.at(right_stage)
        few = swizzled(left.columns) // STEP
        for run in cutlass.range(left.steps // few, unroll=1):
            first_a, first_b = a + run * left.step(few), b + run * right.step(few)
            steps = [(left.descriptor(first_a, n), right.descriptor(first_b, n)) for n in range(few)]
            self.multiply(target, steps, self.words(target, right.by_rows, left.by_rows), onto or run > 0)

    @cute.jit
    def issue_onto(self, target, left, right: Operand, right_stage, groups: cutlass.Constexpr = (0, GROUPS)):
        """Starts a product of scores in tensor memory, of these groups, which is added to what is there."""
        a, b, apart = self.memory + left.first, right.at(right_stage), self.map.apart
        few = self.tiling.strip // STEP
        # queries of a group, and of those in between the other group's
        numbers = [n // few * few * GROUPS + n % few for n in range(self.tiling.queries // STEP)]
        for group in cutlass.range(groups[0], groups[1], unroll=1):
            # P and dS are over scores of the same thread
            first_a, first_b = a + group * apart, b + group * right.step(few)
            steps = [(first_a + i * (STEP // 2), right.descriptor(first_b, n)) for i, n in enumerate(numbers)]
            self.multiply(target, steps, self.words(target, right.by_rows), True)

    def words(self, target, by_rows: bool, left_by_rows: bool = False) -> int:
        """The instruction of a product into those columns."""
        return instruction(self.block.dtype, target.count, by_rows, left_by_rows)

    def multiply(self, target, steps, words: int, accumulate) -> None:
        """A few steps of a product; `accumulate`: the first one adds to what is there."""
        with cute.arch.elect_one():
            for n, (a, b) in enumerate(steps):
                multiply(self.memory + target.first, a, b, words, accumulate if n == 0 else True, self.tiling.sharing)


class BlackwellBackwardProducts(Steps):
    """Issued in this order for query tiles 0, 1, ..., where a product waits for what stands in brackets:

        S0 [Q] | dP0 [dO] | dV0 [P0] | S1 [Q] | dK0 [dS0] | dQ0 | dP1 [dO, dQ0 read] | dV1 [P1] | S2 ...

    P1 is computed under dK0 and dQ0, and dS1 under dV1 and S2. Where dQ has columns of its own, dQ1 waits until dQ0 has
    been read, not dP1.
    """

    def first_step(self) -> ProductSlots:
        return ProductSlots(self.block.q_edge.first, self.block.do_edge.first, Slot.first(1))

    def begin(self, at: ProductSlots) -> None:
        self.scores(at)
        self.gradients(at)
        self.add_dv(at)

    def go_on(self, at: ProductSlots, following: ProductSlots) -> None:
        self.scores(following)
        self.end(at)
        self.gradients(following)
        self.add_dv(following)

    def end(self, at: ProductSlots) -> None:
        """dK += dSᵀ Q, and dQ = dS K."""
        block = self.block
        block.scores_done.wait(at.step)
        after_wait()
        self.issue_onto(self.map.dk, self.map.gradients, block.across["q"], at.q.index)
        block.q_edge.release(at.q, None)
        if self.map.dq_is_apart:
            block.dq.wait_empty(at.step)
            after_wait()
        self.issue(self.map.dq, block.across["ds"], 0, block.across["k"], 0)
        block.dq.fill(at.step)

    def scores(self, at: ProductSlots) -> None:
        """S = Q Kᵀ, as `of_rows` has it."""
        block = self.block
        block.q_edge.wait(at.q)
        after_wait()
        self.of_rows(self.map.scores, "k", "q", at.q)
        block.scores.fill(at.step)

    def gradients(self, at: ProductSlots) -> None:
        """dP = dO Vᵀ, with keys as lanes."""
        block = self.block
        block.do_edge.wait(at.do)
        if not self.map.dq_is_apart:
            block.dq.wait_empty(at.step)
        after_wait()
        self.of_rows(self.map.gradients, "v", "do", at.do)
        block.gradients.fill(at.step)

    def of_rows(self, target: Columns, keys: str, queries: str, slot: Slot) -> None:
        """The product of a tile of keys with one of queries, transposed: keys are lanes."""
        self.issue(target, self.block.operands[keys], 0, self.block.operands[queries], slot.index)

    def add_dv(self, at: ProductSlots) -> None:
        """dV += Pᵀ dO."""
        block = self.block
        block.probabilities.wait(at.step)
        after_wait()
        self.issue_onto(self.map.dv, self.map.scores, block.across["do"], at.do.index)
        block.do_edge.release(at.do, None)
