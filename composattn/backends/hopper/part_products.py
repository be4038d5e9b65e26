"""Products beside warps that make 16-bit numbers of bytes: these leave ptxas fewer registers for one instruction."""

from __future__ import annotations

from typing import Any

from ...primitives.values import permuted
from ..fused.planning.plan import ForwardPlan
from .forward import HopperForwardProducts
from .tiling import ByteTiling, launched_registers
from .wgmma import ColumnParts


class PartProducts(HopperForwardProducts):
    """Products of the output in parts of fewer columns, see `wgmma.part_columns`."""

    def __init__(self, plan: ForwardPlan[ByteTiling], block: Any, number: Any) -> None:
        super().__init__(plan, block, number)
        tiling = plan.tiling
        registers = launched_registers(tiling.warpgroups + 1, tiling.blocks)
        how: Any = {"left_in_registers": True, "written": tiling.written}
        self.parts = ColumnParts(block.dtype, permuted(block.sV, 1, 0, 2), registers, **how)

    def columns_of(self, plan: ForwardPlan[ByteTiling]) -> int:
        return plan.tiling.dv

    def issue_output(self, tOrO: Any, tOrP: Any, slot: Any) -> None:
        self.parts.issue(tOrO, tOrP, slot, True)
