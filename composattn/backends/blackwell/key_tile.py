"""What a block of the Blackwell backward has: shared memory, and edges between its roles."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from ...primitives.barriers import Barriers
from ...primitives.pipelines import BoundEdge, Copies, Edge, Warps
from ...primitives.swizzled_tiles import tensor_of, tile_layout
from ...primitives.values import Fixed
from .backward_tiling import BlackwellBackwardTiling
from .roles import WARPGROUP
from .tcgen05 import Commits, Operand


class BlackwellLayouts(NamedTuple):
    """Layouts of tiles in shared memory: (rows, columns), then stages; tiles that stay have none."""

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
    def of(tiling: BlackwellBackwardTiling) -> "BlackwellLayouts":
        return BlackwellLayouts(*(tile_layout(*tiling.tiles[name]) for name in ("q", "do", "k", "v")))


class BlackwellBackwardBlock(Fixed):
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

    kv_edge: BoundEdge
    q_edge: BoundEdge
    do_edge: BoundEdge
    scores: BoundEdge
    probabilities: BoundEdge
    gradients: BoundEdge
    scores_done: BoundEdge
    dq: BoundEdge
    sums: BoundEdge
    room: BoundEdge
    turn_edge: BoundEdge | None
    adding = 1  # warps that add to dQ

    def __init__(self, tiling: BlackwellBackwardTiling, dtype, deterministic: bool):
        self.tiling, self.dtype = tiling, dtype
        smem = SmemAllocator()
        edges = self.made_edges()
        if deterministic:
            edges["turn_edge"] = Edge(1, Copies(0), Warps(self.adding))
        self.edges = Edge.allocate(smem, list(edges.values()))
        self.queue = self.turn_edge = None
        for name, edge in zip(edges, self.edges, strict=True):
            setattr(self, name, edge)
        barriers = Barriers()
        self.of_compute = barriers.one(tiling.groups * WARPGROUP * 32)
        self.of_dq = barriers.one(WARPGROUP * 32)
        self.columns = smem.allocate_array(Int32, 1)  # where tensor memory begins
        statistics = cute.make_layout((tiling.tile_m, tiling.row_stages))
        self.sLse, self.sDelta = [smem.allocate_tensor(Float32, statistics, 128) for _ in range(2)]
        self._tiles(smem)
        self.sums_of_dq = smem.allocate_array(Float32, tiling.dq_room, byte_alignment=1024) if tiling.dq_room else None
        self.lines = smem.allocate_array(Float32, tiling.distances) if tiling.distances else None

    def made_edges(self) -> dict[str, Edge]:
        """All but `turn_edge`."""
        tiling = self.tiling
        compute, out = Warps(tiling.groups * WARPGROUP), Warps(WARPGROUP)
        return {
            "kv_edge": Edge(1, Copies(self.bytes("k", "v")), Commits()),
            "q_edge": Edge(tiling.q_stages, Copies(self.bytes("q") + self.row_bytes), Commits()),
            "do_edge": Edge(tiling.do_stages, Copies(self.bytes("do")), Commits()),
            "scores": Edge(1, Commits(), None),
            "probabilities": Edge(1, compute, None),
            "gradients": Edge(1, Commits(), None),
            "scores_done": Edge(1, compute, None),
            "dq": Edge(len(tiling.columns.dq_parts), Commits(), out),
            "sums": Edge(1, Commits(), None),
            "room": Edge(1, Commits(), Commits()),
        }

    @property
    def rows_edge(self) -> BoundEdge:
        """With which LSE and D come."""
        return self.q_edge

    @property
    def row_bytes(self) -> int:
        """Bytes of LSE and D of a query tile."""
        return 2 * 4 * self.tiling.tile_m

    def bytes(self, *names: str) -> int:
        """Bytes of one stage of these tiles."""
        shapes = [self.tiling.tiles[name] for name in names]
        return sum(rows * columns for rows, columns, _ in shapes) * self.dtype.width // 8

    def _tiles(self, smem: SmemAllocator) -> None:
        """`shared`, and as what products take: `operands` summed over their columns, or their rows (`across`)."""
        self.shared, self.operands, self.across = {}, {}, {}
        places = {place: smem.allocate_array(self.dtype, numbers, byte_alignment=1024)
                  for place, numbers in self.tiling.places.items()}  # fmt: skip
        for name, (rows, columns, stages) in self.tiling.tiles.items():
            start = places[self.tiling.over.get(name, name)]
            self.shared[name] = tensor_of(start, tile_layout(rows, columns, stages), self.dtype)
            self.operands[name] = Operand(start.toint(), rows, columns)
            self.across[name] = Operand(start.toint(), rows, columns, by_rows=True)
        names = "k", "v", "q", "do", "ds"
        self.sK, self.sV, self.sQ, self.sdO, self.sdS = [self.shared.get(name) for name in names]

    def tensor_memory(self) -> Int32:
        """The address of the first column, once all threads have met after it was asked for."""
        return cute.make_tensor(self.columns, cute.make_layout(1))[0]
