"""Where the parameters, shared arrays and registers of a kernel lie."""

from __future__ import annotations

from composattn.emulator.findings import UnknownInstruction
from composattn.emulator.memory import SHARED_START
from composattn.emulator.ptx import PtxKernel
from composattn.emulator.registers import RegisterRows

SHARED_WINDOW, PARAM_WINDOW = 0x5000_0000_0000, 0x6000_0000_0000


class Symbols:
    """The names of a kernel, with their addresses."""

    def __init__(self, kernel: PtxKernel) -> None:
        self.kernel = kernel
        self.rows = RegisterRows(self.kernel)
        self.param_offset: dict[str, int] = {}
        at = 0
        for p in self.kernel.params:
            at = (at + p.align - 1) // p.align * p.align
            self.param_offset[p.name] = at
            at += p.size
        self.param_size = at
        self.shared_offset: dict[str, int] = {}
        at = SHARED_START
        for s in sorted(self.kernel.shared, key=lambda s: s.size == 0):  # dynamic memory comes last
            at = (at + s.align - 1) // s.align * s.align
            self.shared_offset[s.name] = at
            at += s.size
        self._shared_end = at

    def shared_size(self, dynamic: int) -> int:
        return self._shared_end + dynamic

    def address(self, name: str) -> int:
        if name in self.param_offset:
            return PARAM_WINDOW + self.param_offset[name]
        if name in self.shared_offset:
            return self.shared_offset[name]
        raise UnknownInstruction(f"symbol {name} is neither a parameter nor a shared array")
