"""The forward kernel for Hopper of q, k and v that are e4m3: products of 8 bits, V turned on its way."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...graph.expr import Dep
from ...primitives.emit import Evaluator
from ...primitives.emit_scales import RUNS_AT_MOST, KeptScales, KeyScales, RunScales, TileScales
from ...primitives.pipelines import Copies, Edge, Warps
from ...primitives.score_tile import ROW_PER_LANE, FragmentShape, ScoreTile
from ...primitives.swizzled_tiles import put_words, tile_layout
from ..fused.kernels.forward import KeyCopies
from ..fused.kernels.registers.group_rows import RowLoad
from .forward import HopperForwardApart, HopperForwardBlock, HopperForwardProducts
from .fp8_tiling import TURNING, Fp8Tiling
from .promoting_rows import PromotingRows
from .tiling import OF_VALUES, SUMS
from .turning import Lines, TurnValues
from .wgmma import ROWS, WARPGROUP, issue, product

ONES = 0x38383838  # four of them
ONE = FragmentShape((0,), (0,), ROW_PER_LANE)  # place of a tile of scores


class HopperForwardFp8(HopperForwardApart):
    """Roles: as `HopperForward`, and three warps beside the copying one that turn V (`TurnValues`).

    Edges: q, k; v as it was copied (`stages`), from copies to the turning warps; v turned (`stages`), from these to
    the consumers. Timeline of a consumer, with others' under it:

        S0 = Q K0ᵀ | softmax 0 | A = P0 V0 | O = O f + A | S1 = Q K1ᵀ | softmax 1 | ...
    """

    tiling: Fp8Tiling
    group_rows = PromotingRows
    folds_scales = True

    @property
    def passes(self):
        return self.tiling.passes_by

    def key_layout(self, rows, columns):
        return tile_layout(rows, columns, element_bytes=1)

    def block(self, call):
        return Fp8Block(self.tiling, self.dtype, self.out_dtype, call, self.mods)

    def products(self, block, number):
        # rounded; dropout leaves some out of the output alone
        asked: Any = not self.tiling.rounds_sums or self.plan.program.keep is not None
        # and where keys of a tile have several scales of V, small ones would be lost; or weights of their own
        asked = asked or (self.mods.scales.values is not None and self.mods.scales.keys != self.tiling.tile_n)
        asked = asked or (
            self.mods.values is not None and self.mods.scales.values is None and self.mods.values.deps & Dep.KV
        )
        return Fp8Products(self.tiling, block, number, not asked)

    @cute.jit
    def copy(self, call, block, warp):
        if warp == 0:
            Fp8Load(self, call, block).run()
        else:
            TurnValues(self, call, block, warp - 1).run()


class Fp8Load(RowLoad):
    """The copying warp: V to where it is turned."""

    def first_slots(self):
        return self.block.q_edge.first, self.block.k_edge.first, self.block.copied_v.first

    def copies(self, work):
        block = self.block
        kind = KeyCopies if block.kept_scales is None else KeyCopiesWithScales
        return kind(self, work, (block.k_edge, block.copied_v), (block.sK, block.sV))


class KeyCopiesWithScales(KeyCopies):
    """Copies of K, and beside each tile the scales of its keys, by all lanes, before the warp arrives."""

    def __init__(self, role, work, edges, tiles):
        super().__init__(role, work, edges, tiles)
        self.role, self.work, self.scales = role, work, role.block.kept_scales
        self.leaves = role.call.leaves(work, role.tiling.queries)
        self.scales.begin()

    def start_keys(self, at, k_slot):
        kernel, work, lane = self.role.kernel, self.work, cute.arch.lane_idx()
        first, head = at * self.role.tiling.tile_n, work.h * self.role.tiling.packed_heads

        def of_key(key):
            return Evaluator(kernel.mods, self.leaves, ScoreTile(ONE, None, work.b, head, Int32(0), first + key))

        found = self.scales.found(of_key, lane)
        self.k_edge.wait_empty(k_slot)
        self.scales.put(found, lane, k_slot)
        cute.arch.sync_warp()
        self.k_edge.fill(k_slot)
        self.keys.start(at, k_slot.index, self.k_edge.full + k_slot.index)


class Fp8Block(HopperForwardBlock):
    """A block's shared memory with each V twice: as it was copied, and turned."""

    listeners = TURNING

    def __init__(self, tiling, dtype, out_dtype, call, mods):
        self.mods = mods
        self.kept_scales: KeptScales | None = None
        super().__init__(tiling, dtype, out_dtype, call)

    def filled(self, columns, warps):
        return Warps(TURNING) if warps == OF_VALUES else super().filled(columns, warps)

    def more_edges(self):
        tiling = self.tiling
        return [Edge(tiling.stages, Copies(tiling.tile_n * tiling.dv), Warps(TURNING))]

    def more_memory(self, smem):
        self.copied_v = self.edges[-1]
        scales, tiling = self.mods.scales, self.tiling
        if scales.by_key:
            start = smem.allocate_array(Float32, tiling.numbers, byte_alignment=16)
            of_keys = scales, self.mods.score is not None, start, tiling.stages, tiling.tile_n
            self.kept_scales = KeyScales(*of_keys)

    def memory_of_numbers(self, smem):
        scales, bends, stages = self.mods.scales, self.mods.score is not None, self.tiling.stages
        if scales.keys == self.tiling.tile_n:
            start = smem.allocate_array(Float32, 4 * stages, byte_alignment=16)
            self.kept_scales = TileScales(scales, bends, start, stages)
        elif scales.keys and not scales.by_key:
            start = smem.allocate_array(Float32, 3 * RUNS_AT_MOST * stages, byte_alignment=16)
            count = self.tiling.tile_n // scales.keys
            self.kept_scales = RunScales(scales, bends, start, stages, count)

    def values(self, smem):
        tiling = self.tiling
        copied = tile_layout(tiling.tile_n, tiling.dv, tiling.stages, element_bytes=1)
        turned = tile_layout(tiling.dv + SUMS, tiling.tile_n, tiling.stages, element_bytes=1)
        self.sTurnedV = smem.allocate_tensor(self.dtype, turned.outer, 1024, swizzle=turned.inner)
        return smem.allocate_tensor(self.dtype, copied.outer, 1024, swizzle=copied.inner)

    @cute.jit
    def prepare(self, thread):
        """Rows of ones behind those of each turned V, by all consumers."""
        tiling, lines = self.tiling, Lines(self.tiling.dv + SUMS, self.tiling.tile_n)
        words = cute.make_rmem_tensor(4, Int32)
        words.fill(Int32(ONES))
        start, of_block = self.sTurnedV.iterator.toint() + tiling.dv * lines.wide, SUMS * lines.wide // 16
        count = tiling.stages * lines.size // lines.block * of_block
        for i in cutlass.range(thread, count, tiling.warpgroups * WARPGROUP, unroll=1):
            block, inside = i // of_block, i % of_block
            put_words(start + block * lines.block + inside * 16, words)
        cute.arch.fence_view_async_shared()
        self.of_consumers.meet()


class Fp8Products(HopperForwardProducts):
    """S = Q Kᵀ, and P V in pieces of its columns, each a sum of its own."""

    def __init__(self, tiling, block, number, adds_probabilities):
        self.q_stages, self.pieces, self.adds_probabilities = tiling.q_stages, tiling.pieces, adds_probabilities
        written = tiling.written
        self.qk = product(block.dtype, tiling.tile_n, written=written)
        self.resident_qk = product(block.dtype, tiling.tile_n, left_in_registers=True, written=written)
        self.pv = product(block.dtype, tiling.dv, left_in_registers=True)
        width = tiling.dv // tiling.pieces
        self.piece = product(block.dtype, width, left_in_registers=True, written=written)
        qk, piece = self.qk.get_slice(0), self.piece.get_slice(0)
        self.sQ = block.sQ[None, None, number, None]
        self.tSrQ = qk.make_fragment_A(qk.partition_A(self.sQ))
        self.tSrK = qk.make_fragment_B(qk.partition_B(block.sK))
        sTurnedV = cute.local_tile(block.sTurnedV, (tiling.dv, tiling.tile_n), (0, 0, None))
        self.tOrV = piece.make_fragment_B(piece.partition_B(sTurnedV))
        self.scores_shape = qk.partition_shape_C((ROWS, tiling.tile_n))
        self.probabilities_shape = self.pv.get_slice(0).partition_shape_A((ROWS, tiling.tile_n))
        self.output_shape = self.pv.get_slice(0).partition_shape_C((ROWS, tiling.dv))
        self.sums_shape = piece.partition_shape_C((ROWS, width))
        # the last piece with columns of ones; where it begins and how it lies is as without
        self.last = product(block.dtype, width + SUMS, left_in_registers=True, written=written)
        self.last_shape = self.last.get_slice(0).partition_shape_C((ROWS, width + SUMS))
        self.resident, self.steps = tiling.resident, cute.size(self.tSrQ, mode=[2])

    def issue_sums(self, tOrP, slot, piece: int) -> cute.Tensor:
        """Starts P V of one piece of the output's columns; gives the registers of its sums.

        Behind those of the last piece are sums of probabilities, where it adds these.
        """
        adds = self.adds_probabilities and piece == self.pieces - 1
        mma, shape = (self.last, self.last_shape) if adds else (self.piece, self.sums_shape)
        sums = cute.make_rmem_tensor(shape, Float32)
        columns = self.tOrV[None, piece, None, slot.index]  # (instruction, step), as of one block of columns
        one = cute.make_layout((1, 1), stride=(0, 0))
        layout = cute.append(one, cute.select(columns.layout, [1]), up_to_rank=3)
        issue(mma, sums, tOrP, cute.make_tensor(columns.iterator, layout), False)
        return sums
