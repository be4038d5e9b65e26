"""A kernel made ready to run: nodes compiled to functions, the register file's constants, the shared layout."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from composattn.emulator import flow, ptx
from composattn.emulator.codegen import Writer, is_arithmetic
from composattn.emulator.findings import UnknownInstruction
from composattn.emulator.memory import SHARED_START
from composattn.emulator.opcodes.effects import find_effect, find_sync
from composattn.emulator.ptx import Imm
from composattn.emulator.registers import POISON_32, RegisterRows, Views

if TYPE_CHECKING:
    from composattn.emulator.block import ThreadBlock
    from composattn.emulator.gang import Gang

Array = np.ndarray[Any, Any]
PARAM_WINDOW = 0x6000_0000_0000
SHARED_WINDOW = 0x5000_0000_0000
REGISTERS = 1 << 16  # of an SM
KEPT = 6  # programs kept for another launch, a forward and its gradient; one takes 50 to 100 MB with its registers
_PROGRAMS: dict[str, PtxProgram] = {}


class PtxProgram:
    """What stays the same between launches of one PTX text."""

    def __init__(self, text: str) -> None:
        self.kernel = ptx.parse(text)
        self.rows = RegisterRows(self.kernel)
        self.nodes = flow.cut(self.kernel, lambda i: find_sync(i) is not None)
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

    def shared_size(self, dynamic: int) -> int:
        return self._shared_end + dynamic

    def place(self, n: int, g: Gang | None = None) -> str:
        node = self.nodes[n]
        if g is not None and g.at is not None and g.at in node.code:
            return g.at.where()
        return (node.code[0] if node.code else node.branch or self.kernel.code[0]).where()

    # --- the register file of a block ----------------------------------------------------------------------

    def take_file(self, block: ThreadBlock, lanes: int) -> RegisterFile:
        """A register file as a block finds it; give it back with `free`."""
        pool = self._files.setdefault(lanes, [])
        file = pool.pop() if pool else RegisterFile(self, lanes)
        file.reset(_specials(block, lanes), block.shared_base)
        return file

    def free(self, file: RegisterFile) -> None:
        self._files[file.lanes].append(file)

    def address(self, name: str) -> int:
        if name in self.param_offset:
            return PARAM_WINDOW + self.param_offset[name]
        if name in self.shared_offset:
            return self.shared_offset[name]
        raise UnknownInstruction(f"symbol {name} is neither a parameter nor a shared array")


class RegisterFile:
    """The registers of a block: banks of rows, and views of them for gangs.

    Registers start as a pattern that is NaN as a float, so that a value nobody wrote shows.
    """

    def __init__(self, program: PtxProgram, lanes: int) -> None:
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


def _specials(block: ThreadBlock, lanes: int) -> dict[str, Any]:
    launch = block.launch
    tid = np.arange(lanes)
    bx, by, _ = launch.block
    lane = tid % 32
    cx, cy, cz = launch.cluster
    out: dict[str, Any] = {
        "%tid.x": tid % bx, "%tid.y": tid // bx % by, "%tid.z": tid // (bx * by),
        "%laneid": lane, "%warpid": tid // 32, "%cluster_ctarank": block.rank, "%cluster_nctarank": cx * cy * cz,
        "%smid": 0, "%nsmid": launch.sms, "%gridid": 0, "%clock": 0, "%clock_hi": 0, "%clock64": 0,
        "%globaltimer": 0, "%globaltimer_lo": 0, "%dynamic_smem_size": launch.dynamic_shared,
        "%total_smem_size": block.program.shared_size(launch.dynamic_shared),
        "%lanemask_eq": 1 << lane, "%lanemask_lt": (1 << lane) - 1, "%lanemask_le": (2 << lane) - 1,
        "%lanemask_gt": (2**32 - 1) ^ ((2 << lane) - 1), "%lanemask_ge": (2**32 - 1) ^ ((1 << lane) - 1),
    }  # fmt: skip
    for i, axis in enumerate("xyz"):
        out[f"%ntid.{axis}"] = launch.block[i]
        out[f"%ctaid.{axis}"] = block.index[i]
        out[f"%nctaid.{axis}"] = launch.grid[i]
        out[f"%cluster_ctaid.{axis}"] = block.index[i] % launch.cluster[i]
        out[f"%cluster_nctaid.{axis}"] = launch.cluster[i]
        out[f"%clusterid.{axis}"] = block.index[i] // launch.cluster[i]
        out[f"%nclusterid.{axis}"] = launch.grid[i] // launch.cluster[i]
    return out


def load(text: str) -> PtxProgram:
    """The program of a PTX text, made once a text."""
    key = hashlib.sha256(text.encode()).hexdigest()
    program = _PROGRAMS.pop(key, None) or PtxProgram(text)
    _PROGRAMS[key] = program  # the last used is last
    while len(_PROGRAMS) > KEPT:
        del _PROGRAMS[next(iter(_PROGRAMS))]
    return program
