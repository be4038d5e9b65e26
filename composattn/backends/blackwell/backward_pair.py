"""The backward kernel for Blackwell by pairs of blocks: each has half of a tile's keys, and of all second operands."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.tcgen05 import CtaGroup

from ...primitives.block_pair import LEADER, PairCopies, PairWarps, meet, rank
from ...primitives.cut_rows import partition
from ...primitives.dynamic_scheduler import DynamicScheduler
from ...primitives.pipelines import BoundEdge, Copies, Edge, Slot
from ...primitives.swizzled_tiles import tile_layout
from ..fused.kernels.unit_memory.pair_rows import Moving, PairDqRows, PairRows
from .backward import BlackwellBackward
from .backward_products import Steps
from .key_tile import BlackwellBackwardBlock
from .roles import WARPGROUP
from .tcgen05 import PairCommits, after_wait, instruction
from .tiling import ROWS


class BlackwellPairBlock(BlackwellBackwardBlock):
    """Edges, beside those of `BlackwellBackwardBlock`, as the products of both blocks are issued by the leader, and
    wait there:

        q, do           loads to products       half of the rows of Q, of dO, in each block
        q_across        loads to products       all rows, half of the columns
        do_across
        statistics      loads to compute        LSE and D of a query tile
        scores_done     compute to products     dSᵀ is in tensor memory
        exchanged       compute to products     each block has dSᵀ of its half of the queries, from the keys of both
        dq              products to dQ          dQ of its half is there; to compute: dSᵀ has been read

    Who computes waits for dQ of the tile before, which read dS where the next one goes.
    """

    q_across: BoundEdge
    do_across: BoundEdge
    statistics: BoundEdge
    exchanged: BoundEdge

    def made_edges(self) -> dict[str, Edge]:
        compute, out = PairWarps(self.tiling.groups * WARPGROUP), PairWarps(WARPGROUP)
        commits = PairCommits()
        return {
            "kv_edge": Edge(1, PairCopies(self.bytes("k", "v", "k_across")), commits),
            "q_edge": Edge(1, PairCopies(self.bytes("q")), commits),
            "do_edge": Edge(1, PairCopies(self.bytes("do")), commits),
            "q_across": Edge(1, PairCopies(self.bytes("q_across")), commits),
            "do_across": Edge(1, PairCopies(self.bytes("do_across")), commits),
            "statistics": Edge(self.tiling.row_stages, Copies(self.row_bytes), None),
            "scores": Edge(1, commits, None),
            "probabilities": Edge(1, compute, None),
            "gradients": Edge(1, commits, None),
            "scores_done": Edge(1, compute, None),
            "exchanged": Edge(1, compute, None),
            "dq": Edge(1, commits, out),
            "sums": Edge(1, commits, None),
        }

    @property
    def rows_edge(self) -> BoundEdge:
        return self.statistics

    @property
    def moved(self) -> dict[str, BoundEdge]:
        """With which edges tiles of Q and dO come."""
        return {"q": self.q_edge, "do": self.do_edge, "do_across": self.do_across, "q_across": self.q_across}

    def wait_for_room(self, name: str, slot: Slot) -> None:
        """Until one of them may come."""
        self.moved[name].wait_empty(slot)


class PairProducts(Steps):
    """Issued in this order for query tiles 0, 1, ..., where a product waits for what stands in brackets:

        S0 [Q] | dP0 [dO] | dV0 [P0] | S1 [Q] | dK0 [dS0] | dP1 [dO] | dQ0 [P1, dS0 exchanged] | dV1 | S2 [dQ0 read] ...

    P1 is computed under dK0 and dP1, dS1 under dQ0, dV1 and S2; dS0 is exchanged under dK0 and dP1. dQ0 comes where
    the scores were that P1 was made of.
    """

    block: BlackwellPairBlock

    def begin(self, at: Slot) -> None:
        self.scores(at)
        self.gradients(at)
        self.block.probabilities.wait(at)
        self.add_dv(at)

    def go_on(self, at: Slot, following: Slot) -> None:
        self.block.dq.wait_empty(at)
        self.scores(following)
        self.add_dk(at)
        self.gradients(following)
        self.block.probabilities.wait(following)
        self.product_dq(at)
        self.add_dv(following)

    def end(self, at: Slot) -> None:
        self.add_dk(at)
        self.block.dq.wait_empty(at)
        self.product_dq(at)

    def scores(self, at: Slot) -> None:
        """Sᵀ = K Qᵀ."""
        self.of_rows(at, self.map.scores, "k", "q", self.block.q_edge)
        self.block.scores.fill(at)

    def gradients(self, at: Slot) -> None:
        """dPᵀ = V dOᵀ."""
        self.of_rows(at, self.map.gradients, "v", "do", self.block.do_edge)
        self.block.gradients.fill(at)

    def of_rows(self, at: Slot, target, left: str, right: str, edge: BoundEdge) -> None:
        """A product with rows that are used once."""
        edge.wait(at)
        after_wait()
        self.issue(target, self.block.operands[left], 0, self.block.operands[right], 0)
        edge.release(at, None)

    def add_dv(self, at: Slot) -> None:
        """dV += Pᵀ dO."""
        self.onto(at, self.map.dv, self.map.scores, "do_across", self.block.do_across)

    def add_dk(self, at: Slot) -> None:
        """dK += dSᵀ Q."""
        self.block.scores_done.wait(at)
        self.onto(at, self.map.dk, self.map.left_gradients, "q_across", self.block.q_across)

    def onto(self, at: Slot, target, left, right: str, edge: BoundEdge) -> None:
        """A product of what the threads have left."""
        edge.wait(at)
        after_wait()
        self.issue_onto(target, left, self.block.across[right], 0)
        edge.release(at, None)

    def product_dq(self, at: Slot) -> None:
        """dQ = dS K: each block has its half of the queries, from the keys of both."""
        block = self.block
        block.exchanged.wait(at)
        after_wait()
        self.issue(self.map.dq, block.across["ds"], 0, block.across["k_across"], 0)
        block.dq.fill(at)

    def words(self, target, by_rows: bool, left_by_rows: bool = False) -> int:
        # of dQ a block has 64 rows, whose columns lie in two halves of the lanes
        rows, columns = (ROWS, 2 * target.count) if target == self.map.dq else (2 * ROWS, target.count)
        return instruction(self.block.dtype, columns, by_rows, left_by_rows, rows)


class BlackwellBackwardPair(BlackwellBackward):
    """`BlackwellBackward` of 256 keys by two blocks: each product takes half of its second operand from each block.

    dQ of a query tile wants the keys of both. So they exchange half of dS, and each computes half of the rows of dQ.
    """

    products: Any = PairProducts
    rows: Any = PairRows
    dq_rows = PairDqRows
    moved: tuple[str, ...] = ("q", "do", "do_across", "q_across")  # by the warp that has K and V copied too
    meet = staticmethod(meet)

    def block(self, layouts, counter):
        return BlackwellPairBlock(self.tiling, self.dtype, self.plan.deterministic)

    @cute.jit
    def multiply(self, call, block):
        if rank() == LEADER:
            self.products(self, block, block.tensor_memory()).run(call)

    # --- copies -----------------------------------------------------------------------------------------------

    def loads(self, mQ, mdO, mK, mV, layouts, queries, keys) -> list:
        return [self.paired(tensor, name) for tensor, name in ((mQ, "q"), (mdO, "do"), (mK, "k"), (mV, "v"))]

    def loads_across(self, mQ, mdO, mK) -> list:
        return [self.paired(tensor, f"{name}_across") for tensor, name in ((mQ, "q"), (mdO, "do"), (mK, "k"))]

    def paired(self, tensor, name: str):
        """A copy that may complete on the leader's barrier."""
        rows, columns, _ = self.tiling.tiles[name]
        load = cpasync.CopyBulkTensorTileG2SOp(CtaGroup.TWO)
        return cpasync.make_tiled_tma_atom(load, tensor, tile_layout(rows, columns), (rows, columns))

    def moving(self, block, call, name, sequence, head) -> Moving:
        """Tiles of `name`: this block's rows, or its columns."""
        rows, columns, _ = self.tiling.tiles[name]
        tma, tensor = [self.of(operands, name) for operands in (call.tmas, call.tensors)]
        if name.endswith("_across"):
            first, each = 0, 1
            tensor = cute.domain_offset((0, rank() * columns, *(0,) * (cute.rank(tensor) - 2)), tensor)
        else:
            first, each = rank(), 2
        target, source = partition(tma, block.shared[name], sequence.tiles(tensor, head, (rows, columns)))
        return Moving(block, name, tma, target, source, first, each)

    @staticmethod
    def of(operands, name: str):
        """The copy of tiles of `name`, or the tensor."""
        across = dict(zip(("q_across", "do_across", "k_across"), operands.across, strict=True))
        return (across | {"q": operands.q, "do": operands.dout, "k": operands.k, "v": operands.v})[name]

    @cute.jit
    def produce(self, call, block):
        first = Slot.first(1), block.statistics.first, Slot.first(1)
        self.walk(call, block, lambda *work: self.produce_tile(block, *work), DynamicScheduler.hear, first)

    @cute.jit
    def produce_tile(self, block, call, work, slots):
        kv_slot, row_slot, slot = slots
        bar = block.kv_edge.acquire(kv_slot)
        for name in ("k", "v", "k_across"):
            self.moving(block, call, name, work.keys, work.kv_head).copy(work.n, bar)
        # for the statistics and the empty sum of dQ: consumers add to it once they have seen statistics
        cute.arch.griddepcontrol_wait()
        begin, stop = self.members(call, work)
        for member in cutlass.range(begin, stop, unroll=1):
            head = work.kv_head * call.group + member
            rows = self.row_tiles(block, call, work, head)
            moving = tuple(self.moving(block, call, name, work.queries, head) for name in self.moved)
            for run in self.query_tiles(call, work, head):
                for i in cutlass.range(run.count, unroll=1):
                    m = run.tile(i)
                    # free: the step before has waited for dK of the one before it, which waits for who reads these
                    row_slot = self.copy_rows(block, call, rows, work.padded.first + m, row_slot)
                    for each in moving:
                        each.start(m, slot)
                    slot = slot.next()
        return kv_slot.next(), row_slot, slot

    def row_tiles(self, block, call, work, head) -> list[tuple]:
        """(shared memory, tiles) of LSE and of D."""
        rows, length = call.tensors.rows, self.tiling.tile_m
        return [
            partition(call.tmas.rows, shared, cute.local_tile(statistic, (length,), (None,)), modes=1)
            for shared, statistic in (
                (block.sLse, rows[None, head, work.padded.b, 0]),
                (block.sDelta, rows[None, head, work.padded.b, 1]),
            )
        ]

    def copy_rows(self, block, call, rows, number, slot) -> Slot:
        """LSE and D of a query tile into a free stage; the next one."""
        block.statistics.fill(slot)
        for target, source in rows:
            bar = block.statistics.full + slot.index
            cute.copy(call.tmas.rows, source[None, number], target[None, slot.index], tma_bar_ptr=bar)
        return slot.next()
