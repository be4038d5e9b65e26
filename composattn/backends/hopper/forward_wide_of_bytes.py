"""The Hopper forward for D or Dv above 256 whose K and V come as bytes."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8

from ...primitives.dequantise import Bytes, byte_layout
from ...primitives.pipelines import Copies, Edge, Warps
from ...primitives.values import choose, permuted
from ..fused.kernels.forward import Role
from .forward_wide import HopperForwardWide, HopperWideBlock, HopperWideProducts, Ring, WideLoad, ring_of
from .tiling import CONVERTERS, launched_registers
from .wgmma import WARPGROUP, ColumnParts
from .wide_tiling import GROUPS, SLICE, STAGE


class HopperForwardWideOfBytes(HopperForwardWide):
    """`HopperForwardWide` with six warps more that make 16-bit slices of bytes: 2, 4 and 6 for warpgroup 0.

    Each takes every third slice of its warpgroup, as slices are many and small. A ring of bytes has whole rounds of
    these warps, so that one of them sees all phases of a stage: copies end in any order, and a barrier says only
    whether a phase is odd.
    """

    copying = 2 + GROUPS * CONVERTERS
    threads = (GROUPS + 2) * WARPGROUP

    def block(self, call):
        return HopperWideByteBlock(self.tiling, self.dtype, self.key_types)

    def products(self, block, number):
        return NarrowProducts(self.tiling, block, number)

    def key_layout(self, rows, columns):
        return byte_layout(rows, columns)

    @cute.jit
    def copy(self, call, block, warp):
        if warp < GROUPS:
            WideLoad(self, call, block, warp).run()
        else:
            WideConvert(self, call, block, warp - GROUPS).run()


class NarrowProducts(HopperWideProducts):
    """Products of the output in parts of fewer columns, see `wgmma.part_columns`."""

    def __init__(self, tiling, block, number):
        super().__init__(tiling, block, number)
        values = permuted(block.of_group(block.sV, number), 1, 0, 2)
        self.parts = ColumnParts(block.dtype, values, launched_registers(GROUPS + 1, tiling.blocks))

    def issue_output(self, tOrO, i, slot, accumulate) -> None:
        self.parts.issue(tOrO, self.tOrP[None, None, None, i], slot, accumulate)


class HopperWideByteBlock(HopperWideBlock):
    """A block's shared memory with rings of bytes, one behind the other, behind all else."""

    def __init__(self, tiling, dtype, key_types):
        self.key_types, self.byte_stages = key_types, CONVERTERS * tiling.byte_rounds
        super().__init__(tiling, dtype)

    def filled(self, size):
        return Warps(1)

    def more_edges(self):
        sizes = [rows * columns for rows, columns in (self.tiling.key_box, self.tiling.value_box)]
        self.byte_kinds = [Edge(self.byte_stages, Copies(size), Warps(1)) for size in sizes]
        return GROUPS * self.byte_kinds[:1]

    def more_memory(self, smem):
        self.bytes_start = smem.allocate_array(Uint8, GROUPS * self.byte_stages * STAGE, byte_alignment=128)

    @property
    def copied_slices(self):
        tiling = self.tiling
        rings = (self.byte_stages, STAGE), (GROUPS, self.byte_stages * STAGE)
        found = []
        for kind, box in zip(self.key_types, (tiling.key_box, tiling.value_box), strict=True):
            outer = byte_layout(*box)
            for size, stride in rings:
                outer = cute.append(outer, cute.make_layout(size, stride=stride))
            found.append(cute.make_tensor(cute.recast_ptr(self.bytes_start, dtype=kind), outer))
        return tuple(found)

    def copied_ring(self, number) -> Ring:
        return ring_of(self.byte_kinds, self.rings[GROUPS], number)


class WideConvert(Role):
    """A warp that makes 16-bit slices of bytes: of warpgroup `number % 2` every third one."""

    def __init__(self, kernel, call, block, number):
        super().__init__(kernel, call, block)
        self.group, self.turn, self.lane = number % GROUPS, number // GROUPS, cute.arch.lane_idx()
        self.ring, self.bytes_ring = block.ring(self.group), block.copied_ring(self.group)
        boxes = self.tiling.key_box, self.tiling.value_box
        self.forms = [Bytes(of, kernel.dtype, *box) for of, box in zip(kernel.key_types, boxes, strict=True)]
        self.offsets = [form.lane_offsets(self.lane) for form in self.forms]

    def first_slots(self):
        return self.ring.first, self.bytes_ring.first, Int32(0)

    @cute.jit
    def visit(self, work, slots):
        tiles = self.kernel.kv_tiles(self.call, work)
        for _ in cutlass.range(tiles.count, unroll=1):
            slots = self.convert_slices(0, self.tiling.d // SLICE, slots)
            slots = self.convert_slices(1, self.tiling.tile_n // self.tiling.value_box[0], slots)
        return slots

    @cute.jit
    def convert_slices(self, which: cutlass.Constexpr, count: cutlass.Constexpr, slots):
        """Slices of K (0) or V (1) of a tile of keys, as many as are this warp's turn; gives the slots behind all."""
        slot, bytes_slot, turn = slots
        for _ in cutlass.range(count, unroll=1):
            if turn == self.turn:
                self.convert(which, slot, bytes_slot)
            turn = choose(turn == CONVERTERS - 1, 0, turn + 1)
            slot = slot.next()
            bytes_slot = bytes_slot.next()
        return slot, bytes_slot, turn

    @cute.jit
    def convert(self, which: cutlass.Constexpr, slot, bytes_slot):
        form, tiling, block = self.forms[which], self.tiling, self.block
        self.bytes_ring.wait(bytes_slot)
        self.ring.keys.wait_empty(slot)
        source = block.bytes_start.toint() + (self.group * block.byte_stages + bytes_slot.index) * STAGE
        target = block.sK.iterator.toint() + (self.group * tiling.stages + slot.index) * (2 * STAGE)
        form.convert(source, target, self.offsets[which], Int32(0), 1)
        cute.arch.fence_view_async_shared()  # products read what these wrote
        cute.arch.sync_warp()
        self.ring.keys.fill(slot, self.lane)
        self.bytes_ring.release(bytes_slot, self.lane)


__all__ = ["HopperForwardWideOfBytes"]
