"""What a block of the forward kernel has: shared memory, edges between roles, columns of tensor memory."""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from ...primitives.pipelines import Copies, Edge, Slot, Warps
from ...primitives.swizzled_tiles import tensor_of, tile_layout
from ...primitives.values import Fixed
from .roles import WARPGROUP
from .tcgen05 import Commits, Operand
from .tiling import ROWS, BlackwellTiling


class BlackwellForwardBlock(Fixed):
    """Edges, from whom to whom, and what a stage of each says; a place is where a query tile's scores are:

        q         loads to products         Q of a query tile is there; the stores say that its room is free
        k, v      loads to products         K, V of a kv tile
        scores    products to softmax       the place has scores
        early     softmax and correction    the place has its first probabilities, and O may be added to
                  to products
        late      softmax to products       the place has all of them
        factors   softmax to correction     the place's: what O has to be multiplied by, a number a row
        sums      softmax to correction     what O is to be multiplied by at the end, a number a row
        outputs   products to correction    what was multiplied is in O
        staged    correction to stores      O is in shared memory, or in its tensor

    Scores go where probabilities were multiplied from: products run in the order in which they were issued. A place's
    factors are free again when it has scores: the correction had read them before it let O be added to.
    """

    def __init__(self, tiling: BlackwellTiling, dtype):
        self.tiling, self.dtype = tiling, dtype
        tiles, places = tiling.query_tiles, tiling.query_tiles * tiling.score_places
        group, wide = Warps(WARPGROUP), dtype.width // 8
        smem = SmemAllocator()
        edges = (
            Edge(tiles, Copies(ROWS * tiling.d * wide), Warps(1)),
            Edge(tiling.k_stages, Copies(tiling.tile_n * tiling.d * wide), Commits()),
            Edge(tiling.v_stages, Copies(tiling.tile_n * tiling.dv * wide), Commits()),
            Edge(places, Commits(), None),
            Edge(places, Warps(2 * WARPGROUP), None),
            Edge(places, group, None),
            Edge(places, group, None),
            Edge(tiles, group, group),
            Edge(tiles, Commits(), None),
            Edge(tiles, group, None),
        )
        self.edges = Edge.allocate(smem, edges)
        self.q, self.k, self.v, self.scores, self.early, self.late, *others = self.edges
        self.factors, self.sums, self.outputs, self.staged = others
        self.columns = smem.allocate_array(Int32, 1)  # where tensor memory begins
        self.row_factors = smem.allocate_array(Float32, ROWS * places)
        self.row_sums = smem.allocate_array(Float32, ROWS * tiles)
        # O's rows lie where Q's were: all products of them are done by then
        region = ROWS * tiling.region
        rows = smem.allocate_array(dtype, tiles * region, byte_alignment=1024)
        self.q_rows = [tensor_of(rows + t * region, tile_layout(ROWS, tiling.d), dtype) for t in range(tiles)]
        self.o_rows = [tensor_of(rows + t * region, tile_layout(ROWS, tiling.dv), dtype) for t in range(tiles)]
        self.o_start = [(rows + t * region).toint() for t in range(tiles)]
        k = smem.allocate_array(dtype, tiling.k_stages * tiling.tile_n * tiling.d, byte_alignment=1024)
        v = smem.allocate_array(dtype, tiling.v_stages * tiling.tile_n * tiling.dv, byte_alignment=1024)
        self.sK = tensor_of(k, tile_layout(tiling.tile_n, tiling.d, tiling.k_stages), dtype)
        self.sV = tensor_of(v, tile_layout(tiling.tile_n, tiling.dv, tiling.v_stages), dtype)
        self.q_operands = [Operand(start, ROWS, tiling.d) for start in self.o_start]
        self.k_operand = Operand(k.toint(), tiling.tile_n, tiling.d)
        self.v_start = v.toint()
        self.v_operand = Operand(self.v_start, tiling.tile_n, tiling.dv, by_rows=True)

    def tensor_memory(self) -> Int32:
        """The address of the first column, once all threads have met after it was asked for.

        Whoever wants it reads it: a number from one end of a kernel to the other has a register in every role.
        """
        return cute.make_tensor(self.columns, cute.make_layout(1))[0]

    def place(self, tile) -> Slot:
        """The first place of a query tile, of `scores`, `early`, `late` and `factors`."""
        return Slot(self.tiling.score_places, Int32(tile), Int32(0))
