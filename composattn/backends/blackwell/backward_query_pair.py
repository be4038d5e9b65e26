"""The backward kernel for Blackwell of rows over 192 wide by pairs of blocks: each has half of a tile's queries."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.tcgen05 import CtaGroup

from ...primitives.block_pair import PairCopies, PairWarps, rank
from ...primitives.cut_rows import partition
from ...primitives.dynamic_scheduler import DynamicScheduler
from ...primitives.emit_backward import BackwardMods
from ...primitives.pipelines import BoundEdge, Copies, Edge, Slot
from ...primitives.swizzled_tiles import tile_layout
from ...primitives.values import Bundle
from ..fused.kernels.unit_memory.query_pairs import AddedDqRows, QueryPairRows
from ..fused.planning.plan_backward import BackwardPlan
from .backward_pair import BlackwellBackwardPair
from .backward_products import Steps
from .backward_tiling import PIECE, QueryPairTiling
from .key_tile import BlackwellBackwardBlock, BlackwellLayouts
from .roles import WARPGROUP
from .tcgen05 import Operand, PairCommits, after_wait, fragment_shape, instruction
from .tensor_memory import Columns
from .tiling import ROWS, STEP

SUMMED = 256  # columns of D, of Dv, or queries, that a product with pieces sums over
PIECES = SUMMED // PIECE  # of a product
OF_TILE = 4 * PIECES  # of a query tile: S, dP, dVᵀ and dKᵀ


class QueryPairBlock(BlackwellBackwardBlock):
    """Edges, beside those of `BlackwellBackwardBlock`, as the products of both blocks are issued by the leader, and
    wait there:

        pieces          loads to products       Q and dO of a query tile, a piece at a time in the order of the products
        statistics      loads to compute        LSE and D of a query tile
        probabilities   compute to products     each block has P of half of the keys, from the queries of both
        scores_done     compute to products     likewise dS, which is over dP too
        dq              products to dQ          a part of dQ of its queries is there; empty: it has been read

    Who computes finds room for P and dS when there are scores: these are issued behind all products of the tile before.
    """

    tiling: QueryPairTiling
    pieces: BoundEdge
    statistics: BoundEdge
    adding = WARPGROUP

    def made_edges(self) -> dict[str, Edge]:
        tiling, commits = self.tiling, PairCommits()
        compute, out = PairWarps(tiling.groups * WARPGROUP), PairWarps(WARPGROUP)
        parts = len(tiling.columns.dq_parts)
        return {
            "kv_edge": Edge(1, PairCopies(self.bytes("k", "v", *("k_across",) * parts)), commits),
            "pieces": Edge(tiling.stages, PairCopies(self.bytes("pieces")), commits),
            "statistics": Edge(1, Copies(self.row_bytes), None),
            "scores": Edge(1, commits, None),
            "probabilities": Edge(1, compute, None),
            "gradients": Edge(1, commits, None),
            "scores_done": Edge(1, compute, None),
            "dq": Edge(parts, commits, out),
            "sums": Edge(1, commits, None),
        }

    @property
    def rows_edge(self) -> BoundEdge:
        return self.statistics

    def _tiles(self, smem) -> None:
        super()._tiles(smem)
        tiling, pieces = self.tiling, self.shared["pieces"]
        start = self.operands["pieces"].start
        self.across["pieces"] = Operand(start, *tiling.by_queries, by_rows=True)
        self.by_queries = cute.make_tensor(pieces.iterator, tile_layout(*tiling.by_queries, tiling.stages).outer)
        # of dK and dV: they leave from where K and V were
        self.results = [
            cute.make_tensor(self.shared[name].iterator, tile_layout(tiling.tile_n, width // 2).outer)
            for name, width in (("k", tiling.d), ("v", tiling.dv))
        ]


class QueryPairSlots(Bundle):
    """Which piece is the first one of a query tile, and of which step its scores are."""

    parts = ("piece", "step")

    def __init__(self, piece: Slot, step: Slot) -> None:
        self.piece, self.step = piece, step

    def next(self) -> "QueryPairSlots":
        return QueryPairSlots(self.piece.after(OF_TILE), self.step.next())


class QueryPairProducts(Steps):
    """Issued in this order for query tiles 0, 1, ..., where a product waits for what stands in brackets:

        S0 [Q] | dP0 [dO] | dV0 [P0] | dQ0a [dS0] | dK0 | dQ0b [dQ0a read] | dK0 | S1 [dQ0b read, Q] | dP1 ...

    P is computed under dP, dS under dV. dK comes in halves, under each of which a part of dQ is read from where the
    scores were.
    """

    block: QueryPairBlock

    def first_step(self) -> QueryPairSlots:
        return QueryPairSlots(self.block.pieces.first, Slot.first(1))

    def begin(self, at: QueryPairSlots) -> None:
        self.scores(at)

    def go_on(self, at: QueryPairSlots, following: QueryPairSlots) -> None:
        self.end(at)
        self.block.dq.wait_empty(at.step.next().at(len(self.map.dq_parts) - 1))
        self.scores(following)

    def end(self, at: QueryPairSlots) -> None:
        """All but the scores of a query tile."""
        block, parts = self.block, len(self.map.dq_parts)
        self.of_rows(self.map.gradients, "v", at.piece.after(PIECES))
        block.gradients.fill(at.step)
        block.probabilities.wait(at.step)
        self.add_across(self.map.dv, "p", at.piece.after(2 * PIECES), 0, PIECES)
        block.scores_done.wait(at.step)
        piece, each = at.piece.after(3 * PIECES), PIECES // parts
        for part in range(parts):
            if part:
                block.dq.wait_empty(at.step.next().at(part - 1))
            self.part_of_dq(at, part)
            self.add_across(self.map.dk, "ds", piece.after(part * each), part * each, each)

    def scores(self, at: QueryPairSlots) -> None:
        """S = Q Kᵀ."""
        self.of_rows(self.map.scores, "k", at.piece)
        self.block.scores.fill(at.step)

    def of_rows(self, target: Columns, keys: str, piece: Slot) -> None:
        """S, or dP = dO Vᵀ."""
        self.with_pieces(target, self.block.operands["pieces"], self.block.operands[keys], piece, 0, PIECES, False)

    def add_across(self, target: Columns, right: str, piece: Slot, first: int, count: int) -> None:
        """dVᵀ += dOᵀ P or dKᵀ += Qᵀ dS, of some of the queries."""
        self.with_pieces(target, self.block.across["pieces"], self.block.across[right], piece, first, count, True)

    @cute.jit
    def with_pieces(
        self,
        target: cutlass.Constexpr,
        left: Operand,
        right: Operand,
        piece: Slot,
        first: cutlass.Constexpr,
        count: cutlass.Constexpr,
        onto: cutlass.Constexpr,
    ):
        """Starts `count` pieces of a product from the `first`-th on, each when it is there."""
        edge, few = self.block.pieces, PIECE // STEP
        start = right.at(0)
        for n in cutlass.range(first, first + count, unroll=1):
            edge.wait(piece)
            after_wait()
            a, b = left.at(piece.index), start + n * right.step(few)
            steps = [(left.descriptor(a, i), right.descriptor(b, i)) for i in range(few)]
            self.multiply(target, steps, self.words(target, right.by_rows, left.by_rows), onto or n > 0)
            edge.release(piece, None)
            piece = piece.next()

    @cute.jit
    def part_of_dq(self, at, number: cutlass.Constexpr):
        """dQ = dS K, some columns."""
        block, part, right = self.block, self.map.dq_parts[number], self.block.across["k_across"]
        a, b, few = self.memory + self.map.gradients.first, right.at(number), self.tiling.keys // STEP
        after_wait()
        for group in cutlass.range(self.tiling.groups, unroll=1):
            first_a, first_b = a + group * self.map.apart, b + group * right.step(few)
            steps = [(first_a + n * (STEP // 2), right.descriptor(first_b, n)) for n in range(few)]
            self.multiply(part, steps, self.words(part, right.by_rows), group > 0)
        block.dq.fill(at.step.at(number))

    def words(self, target: Columns, by_rows: bool, left_by_rows: bool = False) -> int:
        return instruction(self.block.dtype, target.count, by_rows, left_by_rows, 2 * ROWS)


class BlackwellBackwardQueryPair(BlackwellBackwardPair):
    """`BlackwellBackwardWide` by two blocks, each with half of a tile's 256 queries and all its 128 keys:

        S = Q Kᵀ    dP = dO Vᵀ    dVᵀ += dOᵀ P    dKᵀ += Qᵀ dS    dQ = dS K

    Of dVᵀ and dKᵀ each has half of the columns, from the queries of both: so a block sends half of its P and dS, of the
    keys that the other one gives these products, to the other. Timeline: see `QueryPairProducts`.
    """

    products = QueryPairProducts
    rows = QueryPairRows
    dq_rows = AddedDqRows
    stored_across = 2
    tiling: QueryPairTiling

    def __init__(self, plan: BackwardPlan[Any]):
        super().__init__(plan)
        self.stored_rows = plan.tiling.tile_n
        # limits are of the queries that a key sees: one query of a thread is tested as fast by the mask itself
        self.mods = BackwardMods(plan.program, plan.intervals, None, plan.captured, self.arithmetic)

    def layouts(self):
        tiling = self.tiling
        result = [tile_layout(tiling.tile_n, width // 2) for width in (tiling.d, tiling.dv)]
        return BlackwellLayouts(tile_layout(*tiling.by_columns), tile_layout(*tiling.by_queries), *result)

    def block(self, layouts, counter):
        return QueryPairBlock(self.tiling, self.dtype, self.plan.deterministic)

    def group(self, block, lane, thread) -> QueryPairRows:
        keys = self.tiling.keys // (2 if self.mods.one_pass or self.tiling.in_halves else 1)
        return self.rows(self, block, lane, thread, fragment_shape(keys))

    # --- copies -----------------------------------------------------------------------------------------------

    def loads(self, mQ, mdO, mK, mV, layouts, queries, keys) -> list:
        tiling = self.tiling
        keys = [(mK, (tiling.block_keys, tiling.d)), (mV, (tiling.block_keys, tiling.dv))]
        return [self.of_box(*each) for each in ((mQ, tiling.by_columns), (mdO, tiling.by_columns), *keys)]

    def loads_across(self, mQ, mdO, mK) -> list:
        tiling = self.tiling
        keys = mK, (tiling.tile_n, PIECE)
        return [self.of_box(*each) for each in ((mQ, tiling.by_queries), (mdO, tiling.by_queries), keys)]

    def of_box(self, tensor, box: tuple[int, int]):
        """A copy that may complete on the leader's barrier."""
        load = cpasync.CopyBulkTensorTileG2SOp(CtaGroup.TWO)
        return cpasync.make_tiled_tma_atom(load, tensor, tile_layout(*box), box)

    @cute.jit
    def produce(self, call, block):
        first = Slot.first(1), block.statistics.first, block.pieces.first
        self.walk(call, block, lambda *work: self.produce_tile(block, *work), DynamicScheduler.hear, first)

    @cute.jit
    def produce_tile(self, block, call, work, slots):
        kv_slot, row_slot, slot = slots
        self.produce_keys(block, call, work, kv_slot)
        # for the statistics and the empty sum of dQ: consumers add to it once they have seen statistics
        cute.arch.griddepcontrol_wait()
        begin, stop = self.members(call, work)
        for member in cutlass.range(begin, stop, unroll=1):
            head = work.kv_head * call.group + member
            rows = self.row_tiles(block, call, work, head)
            moving = self.moving_pieces(block, call, work, head)
            for run in self.query_tiles(call, work, head):
                for i in cutlass.range(run.count, unroll=1):
                    m = run.tile(i)
                    slot = self.produce_pieces(block, moving[0], m, slot, False)
                    # free: room for the last of Q comes from a product that dS of the tile before was there for
                    row_slot = self.copy_rows(block, call, rows, work.padded.first + m, row_slot)
                    slot = self.produce_pieces(block, moving[1], m, slot, False)
                    slot = self.produce_pieces(block, moving[2], m, slot, True)
                    slot = self.produce_pieces(block, moving[3], m, slot, True)
        return kv_slot.next(), row_slot, slot

    def moving_pieces(self, block, call, work, head) -> list[tuple]:
        """(copy, shared memory, tiles) of Q and dO by columns, of dO and Q by queries: the order of the products."""
        tmas, tensors, columns, queries = call.tmas, call.tensors, self.tiling.by_columns, self.tiling.by_queries
        found = (
            (tmas.q, tensors.q, block.shared["pieces"], columns),
            (tmas.dout, tensors.dout, block.shared["pieces"], columns),
            (tmas.across[1], tensors.across[1], block.by_queries, queries),
            (tmas.across[0], tensors.across[0], block.by_queries, queries),
        )
        return [(tma, *self.sides(there, tma, tensor, work.queries, head, box)) for tma, tensor, there, box in found]

    def produce_keys(self, block, call, work, slot: Slot) -> None:
        """K and V of this block's keys, and of all keys the columns of K that parts of dQ want from it."""
        tiling, tmas, tensors, of = self.tiling, call.tmas, call.tensors, (work.keys, work.kv_head)
        bar = block.kv_edge.acquire(slot)
        for name, tma, tensor, width in (("k", tmas.k, tensors.k, tiling.d), ("v", tmas.v, tensors.v, tiling.dv)):
            target, source = self.sides(block.shared[name], tma, tensor, *of, (tiling.block_keys, width))
            cute.copy(tma, source[None, 2 * work.n + rank(), 0], target, tma_bar_ptr=bar)
        tma = tmas.across[2]
        target, source = self.sides(block.shared["k_across"], tma, tensors.across[2], *of, (tiling.tile_n, PIECE))
        for part in range(len(tiling.columns.dq_parts)):
            cute.copy(tma, source[None, work.n, 2 * part + rank()], target[None, part], tma_bar_ptr=bar)

    def sides(self, shared, tma, tensor, sequence, head, box):
        """(shared memory, the tensor's tiles by their rows and columns) of copies of a box."""
        return partition(tma, shared, sequence.tiles(tensor, head, box, None))

    @cute.jit
    def produce_pieces(self, block, moving, m, slot, by_queries: cutlass.Constexpr):
        """A query tile's pieces for one product: its columns of this block's queries, or its queries."""
        tma, target, source = moving
        for n in cutlass.range(PIECES, unroll=1):
            bar = block.pieces.acquire(slot)
            row, column = (m * PIECES + n, rank()) if by_queries else (2 * m + rank(), Int32(n))
            cute.copy(tma, source[None, row, column], target[None, slot.index], tma_bar_ptr=bar)
            slot = slot.next()
        return slot
