"""The backward kernel for Blackwell: which of its warps has which role."""

import cutlass.cute as cute
from cutlass import const_expr

from ...primitives.pipelines import Slot
from ..fused.kernels.backward import Backward
from ..fused.kernels.dq_rows import DqRows
from ..fused.kernels.dq_semaphore import DqSemaphore
from ..fused.kernels.key_rows import KeyRows
from ..fused.plan_backward import BackwardPlan
from .backward_products import Products
from .backward_tiling import BlackwellBackwardTiling
from .key_tile import Block, Layouts
from .tcgen05 import Lane, allocate, fragment_shape, free


class BlackwellBackward(Backward[BlackwellBackwardTiling]):
    """Roles: two warpgroups compute P and dS, one takes dQ out, a warp each multiplies, copies, and waits for turns.

    Scores are computed transposed: keys are lanes of tensor memory, so that P and dS are left operands there, and dV
    and dK stay in it.

        Sᵀ = K Qᵀ    dPᵀ = V dOᵀ    dV += Pᵀ dO    dK += dSᵀ Q    dQ = dS K

    Edges: see `Block`. Timeline: see `Products`.
    """

    delta_with_q = True  # dO has one stage where shared memory is short, and leaves as soon as dV has it

    def __init__(self, plan: BackwardPlan[BlackwellBackwardTiling]):
        super().__init__(plan)
        self.threads = plan.tiling.roles.threads
        self.stored_rows = plan.tiling.tile_n

    def layouts(self):
        return Layouts.of(self.tiling)

    def block(self, layouts, counter):
        return Block(self.tiling, layouts, self.dtype, self.plan.deterministic)

    @cute.jit
    def share_roles(self, call, block, warp):
        roles, columns = self.tiling.roles, self.tiling.columns.allocated
        if warp == roles.matrix:
            allocate(block.columns, columns)
        cute.arch.sync_threads()
        memory, thread = block.tensor_memory(), cute.arch.thread_idx()[0]
        lane = Lane(memory, warp)
        if warp < roles.dq:
            cute.arch.setmaxregister_increase(roles.compute_registers)
            # P and dS that are computed together fill registers: half of them at once
            rows = self.tiling.queries // (2 if self.mods.one_pass else 1)
            self.compute(call, block, KeyRows(self, block, lane, thread, fragment_shape(rows).transposed))
        elif warp < roles.matrix:
            cute.arch.setmaxregister_decrease(roles.dq_registers)
            DqRows(self, block, lane, thread - roles.dq * 32).run(call)
        else:
            cute.arch.setmaxregister_decrease(roles.other_registers)
            if warp == roles.matrix:
                Products(self, block, memory).run(call)
            elif warp == roles.load:
                self.produce(call, block)
            elif warp == roles.turns:  # noqa: SIM102  the plan's is known when compiling
                if const_expr(self.plan.deterministic):
                    DqSemaphore(self).take(call, block)
        cute.arch.sync_threads()
        if warp == roles.matrix:
            free(memory, columns)

    @cute.jit
    def compute(self, call, block, me):
        self.visit(call, block, me, (block.q_edge.first, Slot.first(1)))
