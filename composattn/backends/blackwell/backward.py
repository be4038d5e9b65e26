"""The backward kernel for Blackwell: which of its warps has which role."""

from typing import Any

import cutlass.cute as cute
from cutlass import const_expr

from ...primitives.arithmetic import IN_PAIRS
from ...primitives.pipelines import Slot
from ..fused.kernels.backward import Backward
from ..fused.kernels.dq_semaphore import DqSemaphore
from ..fused.kernels.unit_memory.dq_rows import DqRows
from ..fused.kernels.unit_memory.key_rows import KeyRows
from ..fused.planning.plan_backward import BackwardPlan
from .backward_products import BlackwellBackwardProducts
from .backward_tiling import BlackwellBackwardTiling
from .key_tile import BlackwellBackwardBlock, BlackwellLayouts
from .tcgen05 import Lane, allocate, fragment_shape, free


class BlackwellBackward(Backward[BlackwellBackwardTiling]):
    """Roles: two warpgroups compute P and dS, one takes dQ out, a warp each multiplies, copies, and waits for turns.

    Scores are computed transposed: keys are lanes of tensor memory, so that P and dS are left operands there, and dV
    and dK stay in it.

        Sᵀ = K Qᵀ    dPᵀ = V dOᵀ    dV += Pᵀ dO    dK += dSᵀ Q    dQ = dS K

    Edges: see `BlackwellBackwardBlock`. Timeline: see `BlackwellBackwardProducts`.
    """

    products: Any = BlackwellBackwardProducts
    rows = KeyRows
    dq_rows = DqRows
    arithmetic = IN_PAIRS
    delta_with_q = True  # dO has one stage where shared memory is short, and leaves as soon as dV has it

    def __init__(self, plan: BackwardPlan[BlackwellBackwardTiling]):
        super().__init__(plan)
        self.threads = plan.tiling.roles.threads
        self.stored_rows = plan.tiling.block_keys

    def layouts(self):
        return BlackwellLayouts.of(self.tiling)

    def block(self, layouts, counter):
        return BlackwellBackwardBlock(self.tiling, self.dtype, self.plan.deterministic)

    def group(self, block, lane, thread) -> KeyRows:
        """One of those that compute."""
        # P and dS that are computed together fill registers: half of them at once
        rows = self.tiling.queries // (2 if self.mods.one_pass or self.tiling.in_halves else 1)
        return self.rows(self, block, lane, thread, fragment_shape(rows).transposed)

    @cute.jit
    def share_roles(self, call, block, warp):
        roles, columns, blocks = self.tiling.roles, self.tiling.columns.allocated, self.tiling.sharing
        if warp == roles.matrix:
            allocate(block.columns, columns, blocks)
        self.meet()
        thread = cute.arch.thread_idx()[0]
        # each role reads where tensor memory begins: one register of all roles was spilled, and fetched 30 times
        if warp < roles.dq:
            cute.arch.setmaxregister_increase(roles.compute_registers)
            self.compute(call, block, self.group(block, Lane(block.tensor_memory(), warp), thread))
        elif warp < roles.matrix:
            cute.arch.setmaxregister_decrease(roles.dq_registers)
            self.dq_rows(self, block, Lane(block.tensor_memory(), warp), thread - roles.dq * 32).run(call)
        else:
            cute.arch.setmaxregister_decrease(roles.other_registers)
            if warp == roles.matrix:
                self.multiply(call, block)
            elif warp == roles.load:
                self.produce(call, block)
            elif warp == roles.turns:
                if const_expr(self.plan.deterministic):
                    DqSemaphore(self).take(call, block)
            elif warp == roles.load_across:
                self.produce_across(call, block)
        self.meet()
        if warp == roles.matrix:
            free(block.tensor_memory(), columns, blocks)

    def produce_across(self, call, block) -> None:
        """What the warp that copies leaves to another one: nothing."""

    def meet(self) -> None:
        """All threads that share barriers and tensor memory."""
        cute.arch.sync_threads()

    def multiply(self, call, block) -> None:
        self.products(self, block, block.tensor_memory()).run(call)

    @cute.jit
    def compute(self, call, block, me):
        self.visit(call, block, me, (block.rows_edge.first, Slot.first(1)))
