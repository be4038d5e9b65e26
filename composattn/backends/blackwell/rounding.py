"""Sums that the Blackwell backward has left in fp32 memory, rounded into dQ, dK and dV."""

from ...primitives.swizzled_tiles import tile_layout
from ..fused.kernels.backward_gather import RowGather
from ..fused.kernels.postprocess import RowPostprocess
from ..fused.kernels.rounding import LineSums, Sums
from .backward_tiling import BlackwellBackwardTiling, WideBackwardTiling


class BlackwellPostprocess(RowPostprocess[BlackwellBackwardTiling]):
    tile_layout = staticmethod(tile_layout)


class BlackwellGather(RowGather[BlackwellBackwardTiling]):
    tile_layout = staticmethod(tile_layout)

    def sums(self, columns: int) -> Sums:
        wide = isinstance(self.tiling, WideBackwardTiling)
        return LineSums(self.rows, columns) if wide else super().sums(columns)
