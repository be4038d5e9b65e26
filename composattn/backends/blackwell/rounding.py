"""Sums that the Blackwell backward has left in fp32 memory, rounded into dQ, dK and dV."""

from ..fused.kernels.backward_gather import RowGather
from ..fused.kernels.postprocess import RowPostprocess
from ..fused.kernels.rounding import LineSums, Sums
from .backward_tiling import BlackwellBackwardTiling, WideBackwardTiling
from .tcgen05 import tile_layout


class BlackwellPostprocess(RowPostprocess[BlackwellBackwardTiling]):
    tile_layout = staticmethod(tile_layout)


class BlackwellGather(RowGather[BlackwellBackwardTiling]):
    tile_layout = staticmethod(tile_layout)

    def sums(self, columns: int) -> Sums:
        wide = isinstance(self.tiling, WideBackwardTiling)
        return LineSums(self.rows, columns) if wide else super().sums(columns)
