"""Sums that the Blackwell backward has left in fp32 memory, rounded into dQ, dK and dV."""

from ..fused.kernels.backward_gather import RowGather
from ..fused.kernels.postprocess import RowPostprocess
from .backward_tiling import BlackwellBackwardTiling
from .tcgen05 import tile_layout


class BlackwellPostprocess(RowPostprocess[BlackwellBackwardTiling]):
    tile_layout = staticmethod(tile_layout)


class BlackwellGather(RowGather[BlackwellBackwardTiling]):
    tile_layout = staticmethod(tile_layout)
