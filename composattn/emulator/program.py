"""A kernel made ready to run: nodes compiled to functions, the register file's constants, the shared layout."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from composattn.emulator import flow, ptx
from composattn.emulator.codegen import Writer, is_arithmetic
from composattn.emulator.findings import UnknownInstruction
from composattn.emulator.opcodes.effects import find_effect, find_sync
from composattn.emulator.ptx import Imm
from composattn.emulator.registers import POISON_32, Views
from composattn.emulator.symbols import Symbols

Array = np.ndarray[Any, Any]
REGISTERS = 1 << 16  # of an SM
KEPT = 6  # programs kept for another launch, a forward and its gradient; one takes 50 to 100 MB with its registers
_PROGRAMS: dict[str, PtxProgram] = {}


class PtxProgram(Symbols):
    """What stays the same between launches of one PTX text."""

    def __init__(self, text: str) -> None:
        super().__init__(ptx.parse(text))
        self.nodes = flow.cut(self.kernel, lambda i: find_sync(i) is not None)
        asked = [i.args[0].value for i in self.kernel.code if i.parts[0] == "setmaxnreg" and isinstance(i.args[0], Imm)]
        self._most_registers = max(asked, default=0)
        self._files: dict[int, list[RegisterFile]] = {}
        self.runs: list[Callable[..., Any] | None] = [self._compile(n) for n in self.nodes]

    def _compile(self, node: flow.Node) -> Callable[..., Any] | None:
        if node.sync:
            make = find_sync(node.code[0])
            assert make is not None
            if node.code[0].guard is not None:
                raise UnknownInstruction(f"a guard on an instruction that may block; {node.code[0].where()}")
            return make(node.code[0], self)
        if not node.code:
            return None
        writer = Writer(self.rows)
        first: ptx.Instr | None = None
        for instr in node.code:
            try:
                if is_arithmetic(instr):
                    if first is None:
                        writer.touch()
                        first = instr
                    writer.alu(instr)
                    continue
                if first is not None:
                    writer.end_touch(first)
                    first = None
                make = find_effect(instr)
                if make is None:
                    raise UnknownInstruction(f"no row for {instr.op}; {instr.where()}")
                writer.effect(instr, make(instr, self))
            except UnknownInstruction as e:
                if "PTX line" in str(e):
                    raise
                raise UnknownInstruction(f"{e}; {instr.where()}") from None
        if first is not None:
            writer.end_touch(first)
        return writer.finish(f"node_{node.index}")

    def launch_registers(self, warps: int) -> int:
        """Registers a thread of a block of so many warps at its launch, 0 if the kernel never asks for others.

        ptxas gives what the blocks that must fit together leave a thread, in steps of 8, and no more than the most that
        setmaxnreg asks for (cuobjdump -res-usage of our kernels: 128 for 512 threads, 168 for 384, 240 for 256).
        """
        return min(REGISTERS // self.kernel.resident // (32 * warps) // 8 * 8, self._most_registers)

    def place(self, n: int, at: ptx.Instr | None = None) -> str:
        """Where a gang stands; `at`: the last instruction with an effect that it executed."""
        node = self.nodes[n]
        if at is not None and at in node.code:
            return at.where()
        return (node.code[0] if node.code else node.branch or self.kernel.code[0]).where()

    # --- the register file of a block ----------------------------------------------------------------------

    def take_file(self, lanes: int, specials: dict[str, Any], shared_base: int) -> RegisterFile:
        """A register file as a block finds it; give it back with `free`."""
        pool = self._files.setdefault(lanes, [])
        file = pool.pop() if pool else RegisterFile(self, lanes)
        file.reset(specials, shared_base)
        return file

    def free(self, file: RegisterFile) -> None:
        self._files[file.lanes].append(file)


class RegisterFile:
    """The registers of a block: banks of rows, and views of them for gangs.

    Registers start as a pattern that is NaN as a float, so that a value nobody wrote shows.
    """

    def __init__(self, program: Symbols, lanes: int) -> None:
        self.rows, self.lanes = program.rows, lanes
        rows = program.rows
        count = rows.count
        self.banks: dict[str, Array] = {
            "p": np.zeros((count["p"], lanes), np.bool_),
            "16": np.zeros((count["16"], lanes), np.uint16),
            "32": np.zeros((count["32"], lanes), np.uint32),
            "64": np.zeros((count["64"], lanes), np.uint64),
            "128": np.zeros((count["128"], lanes, 2), np.uint64),
        }
        for (bank, value), row in rows.literals.items():
            self.banks[bank][row] = value
        for (bank, name, offset), row in rows.symbols.items():
            self.banks[bank][row] = program.address(name) + offset
        self._shared = {
            (bank, row): program.shared_offset[name] + offset
            for (bank, name, offset), row in rows.symbols.items()
            if name in program.shared_offset
        }
        self._views: dict[tuple[int, int], Views] = {}

    def reset(self, specials: dict[str, Any], shared_base: int) -> None:
        for bank, poison in (("p", False), ("16", 0x7FFF), ("32", POISON_32), ("64", 0x7FF8BADBADBADBAD)):
            self.banks[bank][: self.rows.kernel.banks[bank]] = poison
        for (bank, name), row in self.rows.specials.items():
            self.banks[bank][row] = specials[name]
        for (bank, row), offset in self._shared.items():
            self.banks[bank][row] = shared_base + offset

    def views(self, low: int, high: int) -> Views:
        if (low, high) not in self._views:
            self._views[low, high] = Views(self.banks, low, high)
        return self._views[low, high]


def load(text: str) -> PtxProgram:
    """The program of a PTX text, made once a text."""
    key = hashlib.sha256(text.encode()).hexdigest()
    program = _PROGRAMS.pop(key, None) or PtxProgram(text)
    _PROGRAMS[key] = program  # the last used is last
    while len(_PROGRAMS) > KEPT:
        del _PROGRAMS[next(iter(_PROGRAMS))]
    return program
