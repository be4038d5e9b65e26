"""The product dQ = dS K, to which each warpgroup of the backward adds a part: who has which (`dq_split`)."""

import cutlass.cute as cute
from cutlass import BFloat16, Float32

from ...primitives.values import Fixed, permuted
from .backward_tiling import HopperBackwardTiling
from .wgmma import MN, K, issue, product, put


def dq_columns(tiling: HopperBackwardTiling) -> int:
    """How many columns of dQ a warpgroup computes, or all where it shares rows: whole swizzles of K, as it is read."""
    return tiling.d // tiling.dq_parts if tiling.dq_split == "columns" else tiling.d


def dq_product(tiling: HopperBackwardTiling, dtype) -> tuple[cute.TiledMma, tuple[int, int]]:
    """The product of one warpgroup, and the shape of its part (dQᵀ = Kᵀ dSᵀ where transposed)."""
    if tiling.dq_split == "transposed":
        part = (tiling.d // tiling.warpgroups, tiling.tile_m)
        return product(dtype, part[1], left=MN, right=K, written=tiling.written), part
    rows, columns = (1, tiling.dq_parts) if tiling.dq_split == "columns" else (tiling.warpgroups, 1)
    part = (tiling.tile_m // rows, tiling.d // columns)
    return product(dtype, part[1], left=K, right=MN, written=tiling.written), part


def dq_part(tiling: HopperBackwardTiling, whole: cute.Tensor, warpgroup_index, part: tuple[int, int]) -> cute.Tensor:
    """A warpgroup's part of a (tile_m, d) tensor, transposed like its product."""
    if tiling.dq_split == "transposed":
        return cute.local_tile(permuted(whole, 1, 0), part, (warpgroup_index, 0))
    place = (0, warpgroup_index) if tiling.dq_split == "columns" else (warpgroup_index, 0)
    return cute.local_tile(whole, part, place)


def dq_box(tiling: HopperBackwardTiling) -> tuple[int, int]:
    """Rows and columns of a warpgroup's part in a (tile_m, d) tensor."""
    part = dq_product(tiling, BFloat16)[1]
    return (part[1], part[0]) if tiling.dq_split == "transposed" else part


class DqPart(Fixed):
    """A warpgroup's part of the product, its operands in the shared memory of `block`."""

    def __init__(self, tiling: HopperBackwardTiling, block, warpgroup_index):
        self.mma, part = dq_product(tiling, block.dtype)
        dq = self.mma.get_slice(0)
        stages = (None,) * (cute.rank(block.sK) - 2)
        sKt = permuted(block.sK, 1, 0, *range(2, cute.rank(block.sK)))  # (d, keys), then stages
        if tiling.dq_split == "transposed":
            assert tiling.k_stages == 1, "a left operand of one stage"
            a = cute.local_tile(sKt, (part[0], tiling.tile_n), (warpgroup_index, 0))
            b = cute.local_tile(block.sdS, (part[1], tiling.tile_n), (0, 0, None))
        elif tiling.dq_split == "columns":
            a = block.sdS
            b = cute.local_tile(sKt, (part[1], tiling.tile_n), (warpgroup_index, 0, *stages))
        else:
            a = cute.local_tile(block.sdS, (part[0], tiling.tile_n), (warpgroup_index, 0, None))
            b = sKt
        self.tQra, self.tQrb = dq.make_fragment_A(dq.partition_A(a)), dq.make_fragment_B(dq.partition_B(b))
        self.shape = dq.partition_shape_C(part)
        self.has_stages = bool(stages)
        self.transposed = tiling.dq_split == "transposed"
        self.count = cute.size(self.shape)  # of a thread's numbers

    def put(self, rounded: cute.Tensor, shared: cute.Tensor, thread) -> None:
        """What the product gave, rounded, to the part's tile in shared memory."""
        put(self.mma, rounded, permuted(shared, 1, 0) if self.transposed else shared, thread, self.transposed)

    def registers(self) -> cute.Tensor:
        """A thread's registers for the product."""
        return cute.make_rmem_tensor(self.shape, Float32)

    def issue(self, stage, tQrdQ: cute.Tensor | None = None, k_stage=None) -> cute.Tensor:
        """Registers that the product of a stage of dS, and of K where it has several, is on its way to."""
        tQrdQ = self.registers() if tQrdQ is None else tQrdQ
        at = (None, None, None, stage)
        a, b = (self.tQra, self.tQrb[at]) if self.transposed else (self.tQra[at], self.tQrb)
        if self.has_stages:
            b = b[None, None, None, k_stage]
        issue(self.mma, tQrdQ, a, b, False)
        return tQrdQ
