"""Tables of the instructions that are more than arithmetic: by their leading words, a function that makes a handler.

A maker takes (instruction, program) once and returns a handler that is called with (gang, mask) at run time. Handlers
of SYNCS stand alone in a node and return a Wait where they can't go on; they are called again when it is ready.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from composattn.emulator.findings import UnknownInstruction
from composattn.emulator.ptx import Imm, Instr, Mem, Operand, Reg, Sym
from composattn.emulator.symbols import Symbols

Array = np.ndarray[Any, Any]
Handler = Callable[[Any, Any], Any]
Maker = Callable[[Instr, Any], Handler]
EFFECTS: dict[str, Maker] = {}
SYNCS: dict[str, Maker] = {}


def effect(*names: str) -> Callable[[Maker], Maker]:
    def add(make: Maker) -> Maker:
        EFFECTS.update(dict.fromkeys(names, make))
        return make

    return add


def sync(*names: str) -> Callable[[Maker], Maker]:
    def add(make: Maker) -> Maker:
        SYNCS.update(dict.fromkeys(names, make))
        return make

    return add


def find(table: dict[str, Maker], op: str) -> Maker | None:
    """The maker of the longest leading part of `op` that the table has."""
    return next((table[leading] for leading in _leading(op) if leading in table), None)


@functools.cache
def _leading(op: str) -> tuple[str, ...]:
    """The leading parts of an opcode, the longest first."""
    parts = op.split(".")
    return tuple(".".join(parts[:n]) for n in range(len(parts), 0, -1))


# --- operands of handlers ----------------------------------------------------------------------------------


def pick(row: Array, mask: Any) -> Array:
    """The active lanes of a row."""
    return row if mask is True else row[mask]


def source(program: Symbols, operand: Operand, view: str) -> Callable[[Any], Array]:
    """A function that gives an operand's row in a gang."""
    bank = "p" if view == "p" else view[1:]
    got, index = program.rows.of(operand, bank)
    if got != bank:
        if got == "64" and bank == "32":
            return lambda g: g.views["u64"][index].astype(np.uint32)
        if got == "32" and bank == "64":
            return lambda g: g.views["u32"][index].astype(np.uint64)
        raise UnknownInstruction(f"a {got}-bit register where {view} is expected")
    return lambda g: g.views[view][index]


def target(operand: Operand, view: str) -> Callable[[Any], Array]:
    """A function that gives the row a result goes to."""
    if not isinstance(operand, Reg):
        raise UnknownInstruction(f"{operand} can't take a result")
    index = operand.index
    return lambda g: g.views[view][index]


def literal(operand: Operand, instr: Instr) -> int:
    if not isinstance(operand, Imm):
        raise UnknownInstruction(f"an operand that must be a literal is {operand}; {instr.where()}")
    return operand.value


def address(program: Symbols, operand: Operand) -> Callable[[Any, Any], Array]:
    """A function that gives the addresses of a memory operand, for the active lanes, as int64."""
    if not isinstance(operand, Mem):
        raise UnknownInstruction(f"{operand} is not a memory operand")
    base, offset = operand.base, operand.offset
    if isinstance(base, Sym):
        at, shared = program.address(base.name) + offset, base.name in program.shared_offset

        def symbol(g: Any, m: Any) -> Array:
            where = at + g.block.shared_base if shared else at
            return np.full(g.lanes if m is True else int(np.count_nonzero(m)), where, np.int64)

        return symbol
    if isinstance(base, Imm):
        value = base.value + offset
        return lambda g, m: np.full(g.lanes if m is True else int(np.count_nonzero(m)), value, np.int64)
    view, index = ("u64" if base.bank == "64" else "u32"), base.index

    def run(g: Any, m: Any) -> Array:
        row = g.views[view][index]
        return (row if m is True else row[m]).astype(np.int64) + offset

    return run


def words_of(program: Symbols, op: str, known: set[str], instr: Instr) -> None:
    """Raises unless all words of an opcode are known ones: a form that is not emulated must not pass for another."""
    unknown = [w for w in op.split(".") if w not in known]
    if unknown:
        raise UnknownInstruction(f"{instr.op}: the emulator does not know .{', .'.join(unknown)}; {instr.where()}")
