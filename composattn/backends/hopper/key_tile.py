"""What the backward kernels for Hopper have in shared memory, and how scores lie in their warpgroups' registers."""

import dataclasses
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from ...primitives.barriers import Barriers
from ...primitives.dynamic_scheduler import DynamicScheduler
from ...primitives.pipelines import Copies, Edge, Slot, Warps
from ...primitives.swizzled_tiles import tile_layout
from ...primitives.values import Fixed, permuted
from ..fused.kernels.key_tile import KeyGroup
from ..fused.kernels.registers.dq_sender import AHEAD
from ..fused.kernels.registers.groups import ThreadGroup
from .backward_tiling import HopperBackwardTiling
from .dq import dq_box, dq_columns
from .wgmma import ROWS, WARPGROUP, fragment_shape, product, row_column_view, warps_of


class HopperLayouts(NamedTuple):
    """Layouts of tiles in shared memory: (rows, columns), then stages or warpgroups; tiles that stay have neither, but
    for K that has several stages.
    """

    q: Any
    dout: Any
    k: Any
    v: Any
    ds: Any  # (queries, keys, stage), keys contiguous
    dk: Any  # on its way out, apart from K where a block stays for many tiles
    dv: Any

    @staticmethod
    def of(tiling: HopperBackwardTiling) -> "HopperLayouts":
        stages = tiling.k_stages if tiling.k_stages > 1 else None
        k = tile_layout(tiling.tile_n, tiling.d, stages, together=dq_columns(tiling))
        v = tile_layout(tiling.tile_n, tiling.dv)
        leaving = k, v
        if tiling.persistent and not tiling.shared_keys:
            dk, dv = (tile_layout(ROWS, width, tiling.warpgroups) for width in (tiling.d, tiling.dv))
            leaving = dk, dv
        ds = tile_layout(tiling.tile_m, tiling.tile_n, tiling.ds_stages)
        return HopperLayouts(
            tile_layout(tiling.tile_m, tiling.d, tiling.q_stages),
            tile_layout(tiling.tile_m, tiling.dv, tiling.do_stages),
            k,
            v,
            ds,
            *leaving,
        )


def key_edges(tiling: HopperBackwardTiling, wide: int, consumers: Warps) -> dict[str, Edge]:
    """What K and V of `wide` bytes a number come by: one edge, or two where K has several stages."""
    keys, values = (tiling.tile_n * columns * wide for columns in (tiling.d, tiling.dv))
    if tiling.k_stages == 1:
        return {"kv": Edge(1, Copies(keys + values), consumers)}
    # dK leaves through the place of K, which the warps that send it free
    of_keys = Edge(tiling.k_stages, Copies(keys), Warps(tiling.warpgroups))
    return {"kv": of_keys, "v": Edge(1, Copies(values), consumers)}


class HopperBackwardBlock(Fixed):
    """Shared memory of one block, and the edges between the roles."""

    scheduler = DynamicScheduler

    def __init__(
        self,
        tiling: HopperBackwardTiling,
        layouts: HopperLayouts,
        dtype,
        deterministic: bool,
        counter: cute.Tensor,
        waits: bool = False,
    ):
        """`waits`: tiles do for others', in any order too."""
        self.dtype, self.parts, self.in_order = dtype, tiling.warpgroups, deterministic
        edges, smem = self.made_edges(tiling), SmemAllocator()
        bound = dict(zip(edges, Edge.allocate(smem, list(edges.values())), strict=True))
        self.edges = list(bound.values())
        self.kv_edge, self.q_edge, self.do_edge = self.edges[:3]
        self.turn_edge, self.ds_edge, self.dq_edge = (bound.get(name) for name in ("turn", "ds", "dq"))
        self.v_edge = bound.get("v")
        self.bound = bound
        self.queue = None
        if tiling.persistent:
            numbers = smem.allocate_array(Int32, edges["queue"].stages)
            self.queue = self.scheduler(bound["queue"], numbers, counter, draws_first=deterministic or waits)
        # of each turn, whether it is the first at its query tile
        self.firsts = smem.allocate_array(Int32, edges["turn"].stages) if tiling.dq_begins == "turn" else None
        barriers = Barriers()
        self.of_consumers = barriers.one((tiling.warpgroups + tiling.dq_apart) * WARPGROUP)
        self.of_weights = barriers.one(tiling.warpgroups * WARPGROUP) if tiling.shared_keys else None
        self.of_groups = barriers.row(tiling.warpgroups, WARPGROUP)

        def row_statistics(stages):
            layout = cute.make_layout((tiling.tile_m, stages), stride=(1, tiling.statistic_stride))
            return smem.allocate_tensor(Float32, layout, 128)

        self.sLse = row_statistics(tiling.q_stages)
        self.sDelta = row_statistics(tiling.q_stages if tiling.shared_keys else tiling.do_stages)

        tiles = self.tiles
        self.sK, self.sV = tiles(layouts.k), tiles(layouts.v)
        self.sQ, self.sdO = tiles(layouts.q), tiles(layouts.dout)
        self.sdS = tiles(layouts.ds)
        # dK and dV on their way out (keys of a warpgroup, columns, warpgroup): the next K and V come in meanwhile
        self.sdK = self.sdV = None
        if tiling.results_apart:
            self.sdK, self.sdV = tiles(layouts.dk), tiles(layouts.dv)
        # dQ on its way out, in the order of registers, a warpgroup's part after the other's
        self.sdQ = None
        if tiling.dq_in_bulk:
            numbers = tiling.tile_m * tiling.d  # a buffer for each warpgroup
            room = smem.allocate_array(Float32, numbers, byte_alignment=1024)
            self.sdQ = cute.make_tensor(room, cute.make_layout(numbers))
            self.part = numbers // self.parts
            self.results = [cute.select(layout, [0, 1]) for layout in (layouts.dk, layouts.dv)]
            self.finished = tile_layout(*dq_box(tiling))
        self.sLines = None
        if tiling.distances:
            self.sLines = smem.allocate_array(Float32, tiling.distances, byte_alignment=128)
        # between warpgroups that share all keys: weights of dP - D in dS, in the order of registers
        self.sW = None
        if tiling.shared_keys:
            self.sW = smem.allocate_array(Float32, tiling.tile_m * tiling.tile_n, byte_alignment=128)

    def made_edges(self, tiling: HopperBackwardTiling) -> dict[str, Edge]:
        """All edges, by their names."""
        wide, statistic = self.dtype.width // 8, 4 * tiling.tile_m
        consumers = warps_of(tiling.warpgroups)
        # D comes with Q where dO leaves before a dS is made of both, and fenced (`HopperBackwardWide`)
        of_q, of_do = (2, 0) if tiling.shared_keys else (1, 1)
        of_keys = key_edges(tiling, wide, consumers)
        edges = {
            "kv": of_keys.pop("kv"),
            "q": Edge(tiling.q_stages, Copies(tiling.tile_m * tiling.d * wide + of_q * statistic), consumers),
            "do": Edge(tiling.do_stages, Copies(tiling.tile_m * tiling.dv * wide + of_do * statistic), consumers),
        } | of_keys
        if self.in_order:
            edges["turn"] = self.turns(tiling)
        if tiling.dq_later:
            edges["ds"] = Edge(tiling.ds_stages, consumers, consumers)
        if tiling.dq_in_bulk:  # a stage for each warpgroup's part
            edges["dq"] = Edge(tiling.warpgroups, warps_of(1), Warps(1))
        walking = consumers.count + self.in_order + tiling.dq_in_bulk * tiling.warpgroups
        if tiling.persistent:  # numbers of the tiles that follow, for all warps but the copying one
            edges["queue"] = Edge(2, Warps(1), Warps(walking))
        edges |= self.more_edges()
        return {name: dataclasses.replace(edge, tries_first=tiling.tries_first) for name, edge in edges.items()}

    def tiles(self, layout) -> cute.Tensor:
        return SmemAllocator().allocate_tensor(self.dtype, layout.outer, 1024, swizzle=layout.inner)

    def more_edges(self) -> dict[str, Edge]:
        return {}

    def value_slot(self, kv_slot: Slot) -> Slot:
        """The slot of V where K has two: every tile is one lap of the only stage."""
        return Slot(1, Int32(0), kv_slot.index)

    def is_first(self, turn_slot) -> Int32 | None:
        """Whether this turn is the first at its query tile, where that matters: not 0."""
        if self.firsts is None:
            return None
        return cute.arch.make_warp_uniform(cute.make_tensor(self.firsts + turn_slot.index, cute.make_layout(1))[0])

    def turns(self, tiling: HopperBackwardTiling) -> Edge:
        """Full: this block may add to dQ; empty: it has, or (in bulk) those who add have heard."""
        if tiling.dq_in_bulk:
            return Edge(AHEAD, Copies(0), Warps(tiling.warpgroups))
        return Edge(1, Copies(0), warps_of(tiling.warpgroups))

    def result_over_dq(self, which: int, number) -> cute.Tensor:
        """dK (0) or dV of a warpgroup's keys, in the place of its part of dQ."""
        layout = self.results[which]
        room = self.part * Float32.width
        assert cute.cosize(layout.outer) * self.dtype.width <= room, "a result larger than a part of dQ"
        return self._over((self.sdQ.iterator + number * self.part).toint(), layout)

    def finished_over_dq(self, number) -> cute.Tensor:
        """A warpgroup's part of dQ, rounded, in the place of its sums."""
        return self._over((self.sdQ.iterator + number * self.part).toint(), self.finished)

    def dk_over_keys(self, number, kv_slot: Slot) -> cute.Tensor:
        """dK of a warpgroup's keys, in the place of as many of that stage's keys."""
        layout = self.results[0]
        size = cute.cosize(layout.outer) * self.dtype.width // 8
        start = self.sK.iterator.toint() + (kv_slot.index * self.parts + number) * size
        return self._over(start, layout)

    def _over(self, place, layout: Any) -> cute.Tensor:
        start = cute.make_ptr(self.dtype, place, cute.AddressSpace.smem, assumed_align=1024)
        return cute.make_tensor(cute.recast_ptr(start, swizzle_=layout.inner), layout.outer)


class KeyWarpgroup(ThreadGroup, KeyGroup):
    """What the consumers of all backward kernels share: how their scores lie, of a product with keys as rows."""

    tiling: HopperBackwardTiling
    apart = ROWS

    def __init__(self, tiling: HopperBackwardTiling, block: HopperBackwardBlock, number, thread):
        super().__init__(block, number, thread)
        self.tiling = tiling
        self.mma_s = product(block.dtype, tiling.tile_m, written=tiling.written)
        self.scores_shape = self.mma_s.get_slice(0).partition_shape_C((ROWS, tiling.tile_m))
        self.shape = fragment_shape(tiling.tile_m).transposed


def queries_first(accumulator: cute.Tensor) -> cute.Tensor:
    """The registers of a transposed score product as (query, key)."""
    return permuted(row_column_view(accumulator), 1, 0)
