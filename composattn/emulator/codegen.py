"""Turns a node's arithmetic into one Python function over numpy rows; instructions with effects become calls."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from composattn.emulator.findings import UnknownInstruction
from composattn.emulator.opcodes.alu_row import BANK, DTYPES, Alu
from composattn.emulator.opcodes.fp8 import OPCODES  # fp8 completes the table of alu
from composattn.emulator.ptx import Discard, Instr, Mem, Operand, Pair, Reg, Sym, Vec
from composattn.emulator.registers import ALIASES, VIEWS, RegisterRows

Mask = Any  # True for all lanes, else a bool array


def and_mask(mask: Mask, pred: Any) -> Mask:
    """Lanes of `mask` where `pred` holds."""
    return pred if mask is True else mask & pred


def and_not(mask: Mask, pred: Any) -> Mask:
    """Lanes of `mask` where `pred` does not hold."""
    return ~pred if mask is True else mask & ~pred


_WIDE = {"16": {"i": "s16", "u": "u16"}, "32": {"i": "s32", "u": "u32"}, "64": {"i": "s64", "u": "u64"}}


class Writer:
    """Collects the source of one function and the objects that it names."""

    def __init__(self, rows: RegisterRows) -> None:
        self.rows = rows
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"copyto": np.copyto, "and_mask": and_mask, "and_not": and_not}
        self.views: set[str] = set()
        self.reads = 0  # bit i: row i of the 32-bit bank
        self.writes = 0
        self.copies: dict[int, int] = {}  # to accumulators of wgmma: from what, as bits
        self._guards = 0

    def name(self, prefix: str, value: Any) -> str:
        key = f"{prefix}_{len(self.names)}"
        self.names[key] = value
        return key

    def row(self, view: str, index: int) -> str:
        self.views.add(view)
        return f"{view}[{index}]"

    def source(self, type_: str, operand: Any) -> str:
        """An expression for an operand read as `type_`."""
        want = ALIASES.get(type_, type_)
        bank, index = self.rows.of(operand, BANK[type_])
        if bank == "32" and isinstance(operand, Reg):
            self.reads |= 1 << index
        if want in VIEWS and VIEWS[want][0] == bank:
            return self.row(want, index)
        if type_ in ("f32", "f64", "f16", "bf16", "p"):
            raise UnknownInstruction(f"a {bank}-bit register as {type_}")
        dtype = self.name("t", DTYPES[type_])
        return f"{self.row(_WIDE[bank]['u'], index)}.astype({dtype})"

    def target(self, type_: str, operand: Any) -> tuple[str, str]:
        """(destination row, conversion to apply to the result) for a result of `type_`."""
        bank, index = operand.bank, operand.index
        if bank == "32":
            self.writes |= 1 << index
        want = ALIASES.get(type_, type_)
        if want in VIEWS and VIEWS[want][0] == bank:
            return self.row(want, index), ""
        if type_ in ("f32", "f64", "f16", "bf16", "p"):
            raise UnknownInstruction(f"a result of {type_} in a {bank}-bit register")
        view = _WIDE[bank][np.dtype(DTYPES[type_]).kind]
        return self.row(view, index), f".astype({self.name('t', VIEWS[view][1])})"

    def guard(self, instr: Instr) -> str:
        """The name of the mask under which `instr` runs."""
        if instr.guard is None:
            return "m"
        self._guards += 1
        pred = self.row("p", instr.guard.index)
        self.lines.append(f"m{self._guards} = {'and_not' if instr.negate else 'and_mask'}(m, {pred})")
        return f"m{self._guards}"

    def alu(self, instr: Instr) -> None:
        mask = self.guard(instr)
        if instr.op.startswith("mov.") and self._move(instr, mask):
            return
        row = row_of(instr)
        if row is None:
            raise UnknownInstruction(f"no row for {instr.op}; {instr.where()}")
        if len(instr.args) != len(row.inputs) + 1:
            raise UnknownInstruction(f"{instr.op} takes {len(row.inputs) + 1} operands; {instr.where()}")
        target, before = instr.args[0], self.reads
        sources = [self.source(t, a) for t, a in zip(row.inputs, instr.args[1:], strict=True)]
        fn = self.name("f", row.fn)
        if instr.op.startswith("mov.") and self._copies(target, instr.args[1]):
            self.reads = before
        if isinstance(target, Discard):
            return
        if isinstance(target, Pair):
            self._two(row, fn, sources, target, mask)
            return
        dest, convert = self.target(row.result, target)
        if row.out and not convert:
            self.lines.append(f"{fn}({', '.join(sources)}, out={dest}, where={mask})")
        else:
            self.lines.append(f"copyto({dest}, {fn}({', '.join(sources)}){convert}, where={mask})")

    def _copies(self, target: Operand, source: Operand) -> bool:
        """Whether it is the only use of an accumulator in this run of arithmetic so far; notes what is copied there."""
        dest = _bit(target)
        if not dest & self.rows.accumulators or dest & (self.reads | self.writes):
            return False
        self.copies[dest] = _bit(source)
        return True

    def _two(self, row: Alu, fn: str, sources: list[str], target: Pair, mask: str) -> None:
        """setp p|q: q is the comparison's complement."""
        if row.result != "p" or len(row.inputs) != 2:
            raise UnknownInstruction("two results of an instruction other than a plain setp")
        self.lines.append(f"t_ = {fn}({', '.join(sources)})")
        for which, value in ((target.first, "t_"), (target.second, "~t_")):
            if isinstance(which, Reg):
                self.lines.append(f"copyto({self.target('p', which)[0]}, {value}, where={mask})")

    def _move(self, instr: Instr, mask: str) -> bool:
        """mov of a vector: registers of one width seen as halves of a register of twice the width."""
        dest, src = instr.args
        if isinstance(dest, Vec):
            wide, items, read = src, dest.items, False
        elif isinstance(src, Vec):
            wide, items, read = dest, src.items, True
        else:
            return False
        bank = instr.op.split(".")[1].lstrip("busf")
        part = str(int(bank) // len(items))
        if bank not in ("32", "64") or part not in ("16", "32"):
            raise UnknownInstruction(f"a move of {len(items)} parts of {bank} bits; {instr.where()}")
        wbank, index = self.rows.of(wide, bank)
        if wbank == "32":
            if read:
                self.writes |= 1 << index
            else:
                self.reads |= 1 << index
        for i, item in enumerate(items):
            if isinstance(item, Discard):
                continue
            piece = self.row(f"b{bank}_{part}_{i}", index)
            if read:
                self.lines.append(f"copyto({piece}, {self.source('b' + part, item)}, where={mask})")
            else:
                self.lines.append(f"copyto({self.target('b' + part, item)[0]}, {piece}, where={mask})")
        return True

    def effect(self, instr: Instr, handler: Callable[..., Any]) -> None:
        fn = self.name("e", handler)
        mask = self.guard(instr)
        at = self.name("i", instr)
        self.lines.append(f"g.at = {at}")
        reads, writes = _uses(instr)
        if reads | writes:
            self.lines.append(f"if g.in_flight: g.touch({self.name('r', reads)}, {self.name('w', writes)}, {at})")
        self.lines.append(f"{fn}(g, m)" if mask == "m" else f"if {mask}.any(): {fn}(g, {mask})")

    def touch(self) -> None:
        """Before the next run of arithmetic: check that it uses no register of an unfinished wgmma."""
        self.lines.append("")
        self._touch_at = len(self.lines) - 1
        self.reads = self.writes = 0
        self.copies = {}

    def end_touch(self, first: Instr) -> None:
        if self.reads | self.writes:
            copied = sum(self.copies)
            used = self.name("u", self.reads | self.writes & ~copied)
            reads = self.name("r", self.reads | functools.reduce(operator.or_, self.copies.values(), 0))
            writes, at = self.name("w", self.writes), self.name("i", first)
            noted = f"g.unfenced |= {used}"
            if copied:
                noted += f"; g.copy({self.name('c', tuple(self.copies.items()))})"
            self.lines[self._touch_at] = f"{noted}\n    if g.in_flight: g.touch({reads}, {writes}, {at})"

    def finish(self, name: str) -> Callable[[Any, Mask], None]:
        body = [line for line in self.lines if line] or ["pass"]
        head = [f"{v} = g.views['{v}']" for v in sorted(self.views)]
        text = f"def {name}(g, m):\n" + "".join(f"    {line}\n" for line in head + body)
        scope: dict[str, Any] = dict(self.names)
        exec(compile(text, f"<{name}>", "exec"), scope)
        fn: Callable[[Any, Mask], None] = scope[name]
        fn.__doc__ = text
        return fn


def row_of(instr: Instr) -> Alu | None:
    """The row of an opcode; one that takes two or three operands has a row for each."""
    return OPCODES.get(f"{instr.op}:{len(instr.args) - 1}") or OPCODES.get(instr.op)


def _bit(operand: Operand) -> int:
    """The bit of a 32-bit register, 0 for another operand."""
    return sum(1 << r for r in _rows(operand))


def _uses(instr: Instr) -> tuple[int, int]:
    """32-bit registers that an instruction with an effect reads and writes, as bits. Its result comes first."""
    first, *rest = instr.args or (Discard(),)
    return sum(1 << r for o in rest for r in _rows(o)), sum(1 << r for r in _rows(first))


def _rows(operand: Operand) -> set[int]:
    if isinstance(operand, Vec):
        return {r for o in operand.items for r in _rows(o)}
    if isinstance(operand, Pair):
        return _rows(operand.first) | _rows(operand.second)
    if isinstance(operand, Mem):
        return _rows(operand.base) | {r for o in operand.coords for r in _rows(o)}
    return {operand.index} if isinstance(operand, Reg) and operand.bank == "32" else set()


def is_arithmetic(instr: Instr) -> bool:
    """Whether `instr` is a pure function of registers (it has a row, or moves parts of registers)."""
    return instr.op in OPCODES or (instr.op.startswith("mov.") and instr.op != "mov.b128")


__all__ = ["Sym", "Writer", "is_arithmetic"]
