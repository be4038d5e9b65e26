"""Gives every operand a row of the register file: registers, literals and special registers alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from composattn.emulator.findings import UnknownInstruction
from composattn.emulator.ptx import Imm, Operand, PtxKernel, Reg, Special, Sym, Vec

# View of each bank as each type: name of the type -> (bank, numpy type).
VIEWS: dict[str, tuple[str, Any]] = {
    "u16": ("16", np.uint16), "s16": ("16", np.int16), "f16": ("16", np.float16),
    "u32": ("32", np.uint32), "s32": ("32", np.int32), "f32": ("32", np.float32),
    "u64": ("64", np.uint64), "s64": ("64", np.int64), "f64": ("64", np.float64),
    "p": ("p", np.bool_),
}  # fmt: skip
ALIASES = {"b16": "u16", "bf16": "u16", "b32": "u32", "b64": "u64"}
POISON_32 = 0x7FBADBAD  # what a 32-bit register starts with: NaN as a float, so that a value nobody wrote shows
_BITS = {"p": 1, "16": 16, "32": 32, "64": 64}


class Views(dict[str, Any]):
    """The registers of warps [low, high) by a name of how they are read, each made when first asked for.

    `u32` are the rows of a bank as a type, `U32` all of them as one array, `b64_32_1` the rows' second 32 of 64 bits.
    """

    def __init__(self, banks: dict[str, Any], low: int, high: int) -> None:
        super().__init__()
        self._banks, self._lanes = banks, slice(low * 32, high * 32)

    def __missing__(self, name: str) -> Any:
        wide, *narrow = name.split("_")
        if narrow:
            bits, part = map(int, narrow)
            whole = self._banks[wide[1:]]
            pieces = whole.view(f"u{bits // 8}").reshape(*whole.shape, -1)
            self[name] = list(pieces[:, self._lanes, part])
        else:
            bank, dtype = VIEWS[name.lower()]
            typed = self._banks[bank].view(dtype)[:, self._lanes]
            self[name] = list(typed) if name.islower() else typed
        return self[name]


SPECIALS = {
    "%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z",
    "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid", "%warpid", "%cluster_ctarank", "%cluster_nctarank",
    "%cluster_ctaid.x", "%cluster_ctaid.y", "%cluster_ctaid.z", "%cluster_nctaid.x", "%cluster_nctaid.y",
    "%cluster_nctaid.z", "%clusterid.x", "%clusterid.y", "%clusterid.z", "%nclusterid.x", "%nclusterid.y",
    "%nclusterid.z", "%smid", "%nsmid", "%gridid", "%dynamic_smem_size", "%total_smem_size", "%lanemask_eq",
    "%lanemask_lt", "%lanemask_le", "%lanemask_gt", "%lanemask_ge", "%clock", "%clock_hi", "%clock64", "%globaltimer",
    "%globaltimer_lo",
}  # fmt: skip


@dataclass
class RegisterRows:
    """Row numbers by bank, the literals and special registers that take rows of their own."""

    kernel: PtxKernel
    count: dict[str, int] = field(default_factory=dict)
    literals: dict[tuple[str, int], int] = field(default_factory=dict)
    specials: dict[tuple[str, str], int] = field(default_factory=dict)
    symbols: dict[tuple[str, str, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.count = dict(self.kernel.banks)

    @cached_property
    def accumulators(self) -> int:
        """32-bit registers that a wgmma of the kernel sums in, as bits."""
        products = [i.args[0] for i in self.kernel.code if i.op.startswith("wgmma.mma_async.")]
        results = {r.index for p in products if isinstance(p, Vec) for r in p.items if isinstance(r, Reg)}
        return sum(1 << r for r in results)

    def _new(self, bank: str) -> int:
        row = self.count[bank]
        self.count[bank] = row + 1
        return row

    def of(self, operand: Operand, bank: str) -> tuple[str, int]:
        """(bank, row) of an operand; literals and the like get a row of `bank`."""
        if isinstance(operand, Reg):
            return operand.bank, operand.index
        if isinstance(operand, Imm):
            if operand.width and operand.width != _BITS[bank]:
                raise UnknownInstruction(f"a {operand.width}-bit float literal where {bank} bits are expected")
            value = int(operand.value != 0) if bank == "p" else operand.value & ((1 << _BITS[bank]) - 1)
            key = (bank, value)
            if key not in self.literals:
                self.literals[key] = self._new(bank)
            return bank, self.literals[key]
        if isinstance(operand, Special):
            if operand.name not in SPECIALS:
                raise UnknownInstruction(f"special register {operand.name} is not emulated")
            if (bank, operand.name) not in self.specials:
                self.specials[bank, operand.name] = self._new(bank)
            return bank, self.specials[bank, operand.name]
        if isinstance(operand, Sym):
            where = (bank, operand.name, operand.offset)
            if where not in self.symbols:
                self.symbols[where] = self._new(bank)
            return bank, self.symbols[where]
        raise UnknownInstruction(f"operand {operand} can't be a register")
