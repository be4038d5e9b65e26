"""mma.sync: 16-row matrix multiplies of a warp, with all operands in registers.

Facts: PTX ISA, "Warp Level Matrix Instructions: mma" (fragments of m16n8k16).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from composattn.emulator.findings import CollectiveMismatch, UnknownInstruction
from composattn.emulator.opcodes.operands import decode
from composattn.emulator.opcodes.registry import Handler, effect, source, target
from composattn.emulator.ptx import Instr, Vec

Array = np.ndarray[Any, Any]
KINDS = ("bf16", "f16")


@effect(*(f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32" for kind in KINDS))
def multiply(instr: Instr, program: Any) -> Handler:
    """Lane l has rows l // 4 and 8 more, and pairs of columns from 2 (l % 4) on."""
    kind = instr.parts[-2]
    if not all(isinstance(operand, Vec) for operand in instr.args):
        raise UnknownInstruction(f"operands of {instr.where()}")
    d, a, b, c = (operand.items for operand in instr.args if isinstance(operand, Vec))
    results = [target(r, "u32") for r in d]
    lefts, rights, sums = ([source(program, r, "u32") for r in of] for of in (a, b, c))

    def values(g: Any, sources: list[Any]) -> Array:
        """[warp, row or column, lane of it, register, half] as numbers."""
        raw = np.ascontiguousarray(np.stack([s(g) for s in sources], -1))
        return decode(kind, raw.view(np.uint8)).reshape(-1, 8, 4, len(sources), 2)

    def run(g: Any, m: Any) -> None:
        if m is not True:
            raise CollectiveMismatch(f"{instr.op} under divergence: all lanes of a warp execute it together")
        left, right = values(g, lefts), values(g, rights)
        warps = len(left)
        # a's register i has row 8 (i % 2) more and its k 8 (i // 2); b's has k 8 i
        left = left.reshape(warps, 8, 4, 2, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(warps, 16, 16)
        right = right.transpose(0, 1, 3, 2, 4).reshape(warps, 8, 16)
        product = np.matmul(left, right.transpose(0, 2, 1), dtype=np.float32)
        # c's register 2 h + e has row 8 h more and column e
        product = product.reshape(warps, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(-1, 4)
        for i, (result, sum_) in enumerate(zip(results, sums, strict=True)):
            result(g)[...] = (product[:, i] + sum_(g).view(np.float32)).view(np.uint32)

    return run
