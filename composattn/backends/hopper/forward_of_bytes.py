"""The Hopper forward whose K and V come as bytes: who makes 16-bit tiles of them, before anybody multiplies."""

import abc

import cutlass
import cutlass.cute as cute
from cutlass import Float16

from ...primitives.dequantise import Bytes, byte_layout
from ...primitives.kv_source import kv_source
from ...primitives.pipelines import Copies, Edge, Warps
from ..fused.kernels.forward import KeyCopies, Role
from ..fused.kernels.registers.group_rows import RowLoad
from .forward import (
    BlockWithOnes,
    HopperForward,
    HopperForwardBlock,
    HopperForwardGuessing,
)
from .part_products import PartProducts
from .scaled_queries import ScaledProducts
from .tiling import OF_KEYS, OF_VALUES, ByteTiling
from .wgmma import WARPGROUP


class OfBytes(HopperForward):
    """What kernels of 16-bit K and V have more where these come as bytes: warps 1 to 7 make the stages that they read.

    Edges: bytes of K (`byte_stages`) from warp 0 to warps 4 to 7, of V to warps 1 to 3; k and v
    from these to the consumers, who see nothing of it. Timeline, for kv tiles 0, 1, 2, ...:

        warp 0      K0 K1 V0 K2 V1 K3 V2 ...
        4 to 7         K0 K1    K2    K3 ...
        1 to 3               V0    V1    V2 ...
        consumers         S0 | softmax 0 | S1, O += P0 V0 | ...
    """

    copying = 8
    tiling: ByteTiling

    def __init__(self, plan):
        super().__init__(plan)
        self.threads = (plan.tiling.warpgroups + 2) * WARPGROUP

    @property
    def multiplied(self):
        """The type of all that is multiplied."""
        return Float16 if self.tiling.scales_queries else self.dtype

    def key_layout(self, rows, columns):
        return byte_layout(rows, columns)

    def block(self, call):
        return ByteBlock(self, call)

    def products(self, block, number):
        if self.multiplied is self.dtype:
            return PartProducts(self.plan, block, number)
        return ScaledProducts(self.plan, block, number, self.fragment.rows, self.mods.changes_scores)

    @cute.jit
    def copy(self, call, block, warp):
        if warp == 0:
            ByteLoad(self, call, block).run()
        elif warp < 4:
            ConvertValues(self, call, block, warp - 1, OF_VALUES).run()
        else:
            ConvertKeys(self, call, block, warp - 4, OF_KEYS).run()


class HopperForwardOfBytes(OfBytes):
    """`HopperForward` of bytes."""


class HopperForwardGuessingOfBytes(OfBytes, HopperForwardGuessing):
    """`HopperForwardGuessing` of bytes, whose products are not parted: they have columns of ones."""

    products = HopperForwardGuessing.products

    def block(self, call):
        return ByteBlockWithOnes(self, call)


class ByteBlock(HopperForwardBlock):
    """A block's shared memory with rings of bytes, behind all else."""

    listeners = OF_KEYS + OF_VALUES

    def __init__(self, kernel, call):
        self.key_types, self.copied = kernel.key_types, kernel.dtype
        super().__init__(kernel.tiling, kernel.multiplied, kernel.out_dtype, call)

    def queries(self, group, slot):
        """(64, D) of a group, of the type that copies bring."""
        tile = super().queries(group, slot)
        return tile if self.copied is self.dtype else cute.recast_tensor(tile, self.copied)

    def filled(self, columns, warps):
        return Warps(warps)

    def more_edges(self):
        tiling = self.tiling
        copies = (Copies(rows * columns) for rows, columns in (tiling.key_box, tiling.value_box))
        return [Edge(tiling.byte_stages, each, Warps(n)) for each, n in zip(copies, (OF_KEYS, OF_VALUES), strict=True)]

    def more_memory(self, smem):
        tiling, (of_k, of_v) = self.tiling, self.key_types
        self.byte_keys, self.byte_values = self.edges[-2:]
        (keys, d), (_, dv), stages = tiling.key_box, tiling.value_box, tiling.byte_stages
        self.bK = smem.allocate_tensor(of_k, byte_layout(keys, d, stages), 128)  # (keys, columns, stage)
        self.bV = smem.allocate_tensor(of_v, byte_layout(keys, dv, stages), 128)


class ByteBlockWithOnes(ByteBlock, BlockWithOnes):
    """`ByteBlock` with columns of ones beside each V."""


class ByteLoad(RowLoad):
    """The copying warp: `RowLoad` with K and V into the rings of bytes."""

    def first_slots(self):
        return self.block.q_edge.first, self.block.byte_keys.first, self.block.byte_values.first

    def copies(self, work):
        block = self.block
        return ByteCopies(self, work, (block.byte_keys, block.byte_values), (block.bK, block.bV))


class ByteCopies(KeyCopies):
    """Copies of K and V, a stage of each for each part of a tile."""

    def __init__(self, role, work, edges, tiles):
        tmas, tensors, tiling = role.call.tmas, role.call.tensors, role.tiling
        self.k_edge, self.v_edge = edges
        self.parts: int = tiling.parts
        self.source = kv_source(work.keys, work.kv_head, tiling.tile_n)
        self.key_boxes = self.source.boxes(tmas.k, tensors.k, tiles[0], tiling.key_box)
        self.value_boxes = self.source.boxes(tmas.v, tensors.v, tiles[1], tiling.value_box)

    def start_keys(self, at, k_slot) -> None:
        self.start(self.key_boxes, self.k_edge, at, k_slot)

    def start_values(self, at, v_slot) -> None:
        self.start(self.value_boxes, self.v_edge, at, v_slot)

    def start(self, boxes, edge, at, slot) -> None:
        """All parts of a tile."""
        for part in range(self.parts):
            bar = edge.acquire(slot)
            boxes.start(at, part, 0, slot.index, bar)
            slot = slot.next()

    def behind(self, slot):
        return slot.after(self.parts)


class Convert(Role):
    """Warp `number` of those that make 16-bit tiles of bytes, of K or of V."""

    def __init__(self, kernel, call, block, number, warps):
        super().__init__(kernel, call, block)
        self.number, self.warps, self.lane = number, warps, cute.arch.lane_idx()
        self.source, self.target, self.bytes, self.numbers, columns, ones = self.rings()
        self.form = Bytes(self.bytes.element_type, kernel.multiplied, self.tiling.tile_n, columns, self.tiling.parts)
        self.offsets = self.form.lane_offsets(self.lane)
        self.stage = 2 * self.tiling.tile_n * (columns + ones)  # bytes of a tile of numbers

    @abc.abstractmethod
    def rings(self):
        """(edge of bytes, edge of numbers, tiles of bytes, tiles of numbers, their columns, more beside them)."""

    def first_slots(self):
        return self.source.first, self.target.first

    @cute.jit
    def visit(self, work, slots):
        slot, target_slot = slots
        tiles = self.kernel.kv_tiles(self.call, work)
        for _ in cutlass.range(tiles.count, unroll=1):
            slot = self.convert(slot, target_slot)
            target_slot = target_slot.next()
        return slot, target_slot

    @cute.jit
    def convert(self, slot, target_slot):
        """The next tile; gives the slot behind its bytes."""
        form = self.form
        self.target.wait_empty(target_slot)
        target = self.numbers.iterator.toint() + target_slot.index * self.stage
        for part in cutlass.range_constexpr(form.parts):
            self.source.wait(slot)
            source = self.bytes.iterator.toint() + slot.index * form.part_of_bytes
            first = form.first_strip(part, self.number, self.warps)
            form.convert(source, target + part * form.part_of_numbers, self.offsets, first, self.warps)
            cute.arch.sync_warp()
            self.source.release(slot, self.lane)
            slot = slot.next()
        cute.arch.fence_view_async_shared()  # products read what these wrote
        cute.arch.sync_warp()
        self.target.fill(target_slot, self.lane)
        return slot


class ConvertKeys(Convert):
    def rings(self):
        block = self.block
        return block.byte_keys, block.k_edge, block.bK, block.sK, self.tiling.d, 0


class ConvertValues(Convert):
    def rings(self):
        block = self.block
        return block.byte_values, block.v_edge, block.bV, block.sV, self.tiling.dv, self.tiling.ones


__all__ = ["HopperForwardGuessingOfBytes", "HopperForwardOfBytes"]
