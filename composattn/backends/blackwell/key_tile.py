"""What a block of the Blackwell backward has: shared memory, and edges between its roles."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from ...primitives.barriers import Barriers
from ...primitives.pipelines import Copies, Edge, Warps
from ...primitives.swizzled_tiles import tile_layout
from ...primitives.values import Fixed
from .backward_tiling import BlackwellBackwardTiling
from .roles import WARPGROUP
from .tcgen05 import Commits, Operand


class Layouts(NamedTuple):
    """Of tiles in shared memory: (rows, columns), then stages; kept tiles have none."""

    q: Any
    dout: Any
    k: Any
    v: Any

    @property
    def dk(self) -> Any:
        """It leaves from where K was."""
        return self.k

    @property
    def dv(self) -> Any:
        return self.v

    @staticmethod
    def of(tiling: BlackwellBackwardTiling) -> "Layouts":
        return Layouts(
            tile_layout(tiling.tile_m, tiling.d, tiling.q_stages),
            tile_layout(tiling.tile_m, tiling.dv, tiling.do_stages),
            tile_layout(tiling.tile_n, tiling.d),
            tile_layout(tiling.tile_n, tiling.dv),
        )


class Block(Fixed):
    """Edges, from whom to whom, and what a stage of each says:

        kv              loads to products       K and V of the tile of keys, never refilled
        q               loads to products       Q of a query tile, and LSE and D, read before its last product is issued
        do              loads to products       dO of a query tile
        scores          products to compute     Sᵀ is there
        probabilities   compute to products     Pᵀ is over it
        gradients       products to compute     dPᵀ is there
        scores_done     compute to products     dSᵀ is over it, and in shared memory
        dq              products to dQ          a part of dQ is there; empty: it has been read
        sums            products to compute     dV and dK are complete
        room            products to compute     P has been read from shared memory; empty: dS has. Of wide rows alone,
                                                whose P and dS are there one after the other
        turn            turns to dQ             this block may add to a tile of dQ; empty: it has

    Products are issued in an order in which each finds its operands, and room, by one wait: see `Products`.
    """

    def __init__(self, tiling: BlackwellBackwardTiling, layouts: Layouts, dtype, deterministic: bool):
        self.tiling, self.dtype = tiling, dtype
        wide, statistic = dtype.width // 8, 4 * tiling.tile_m
        compute, out = Warps(tiling.groups * WARPGROUP), Warps(WARPGROUP)
        edges = [
            Edge(1, Copies(tiling.tile_n * (tiling.d + tiling.dv) * wide), Commits()),
            Edge(tiling.q_stages, Copies(tiling.tile_m * tiling.d * wide + 2 * statistic), Commits()),
            Edge(tiling.do_stages, Copies(tiling.tile_m * tiling.dv * wide), Commits()),
            Edge(1, Commits(), None),
            Edge(1, compute, None),
            Edge(1, Commits(), None),
            Edge(1, compute, None),
            Edge(len(tiling.columns.dq_parts), Commits(), out),
            Edge(1, Commits(), None),
            Edge(1, Commits(), Commits()),
        ]
        if deterministic:
            edges.append(Edge(1, Copies(0), Warps(1)))
        smem = SmemAllocator()
        self.edges = Edge.allocate(smem, edges)
        self.kv_edge, self.q_edge, self.do_edge, self.scores, self.probabilities = self.edges[:5]
        self.gradients, self.scores_done, self.dq, self.sums, self.room = self.edges[5:10]
        self.turn_edge = self.edges[10] if deterministic else None
        self.queue = None
        barriers = Barriers()
        self.of_compute = barriers.one(tiling.groups * WARPGROUP * 32)
        self.of_dq = barriers.one(WARPGROUP * 32)
        self.columns = smem.allocate_array(Int32, 1)  # where tensor memory begins
        statistics = cute.make_layout((tiling.tile_m, tiling.q_stages))
        self.sLse, self.sDelta = [smem.allocate_tensor(Float32, statistics, 128) for _ in range(2)]
        self._tiles(smem, layouts)
        self.sums_of_dq = smem.allocate_array(Float32, 2 * tiling.tile_m * tiling.dq_part, byte_alignment=1024)
        self.lines = smem.allocate_array(Float32, tiling.distances) if tiling.distances else None

    def _tiles(self, smem: SmemAllocator, layouts: Layouts) -> None:
        tiling = self.tiling
        shapes = {
            "k": (tiling.tile_n, tiling.d, 1, layouts.k),
            "v": (tiling.tile_n, tiling.dv, 1, layouts.v),
            "q": (tiling.tile_m, tiling.d, tiling.q_stages, layouts.q),
            "do": (tiling.tile_m, tiling.dv, tiling.do_stages, layouts.dout),
            "ds": (*tiling.score_tile, 1, tile_layout(*tiling.score_tile)),
        }
        tensors, self.operands, self.across = {}, {}, {}
        for name, (rows, columns, stages, layout) in shapes.items():
            start = smem.allocate_array(self.dtype, rows * columns * stages, byte_alignment=1024)
            tensors[name] = cute.make_tensor(cute.recast_ptr(start, layout.inner, dtype=self.dtype), layout.outer)
            self.operands[name] = Operand(start.toint(), rows, columns)
            self.across[name] = Operand(start.toint(), rows, columns, by_rows=True)
        self.sK, self.sV, self.sQ, self.sdO, self.sdS = tensors.values()

    def tensor_memory(self) -> Int32:
        """The address of the first column, once all threads have met after it was asked for."""
        return cute.make_tensor(self.columns, cute.make_layout(1))[0]
