"""wgmma: 64-row matrix multiplies of a warpgroup, with A from shared memory or registers, groups and waits.

Facts: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" (register fragments, commit and wait groups).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from composattn.emulator.findings import CollectiveMismatch, MissingWgmmaFence, UnknownInstruction
from composattn.emulator.opcodes.operands import (
    ELEMENT,
    Descriptor,
    PendingMultiply,
    SharedOperand,
    chains,
    cut_sums,
    decode,
    gather,
    product,
    read_operand,
)
from composattn.emulator.opcodes.registry import Handler, literal, source, sync
from composattn.emulator.ptx import Imm, Instr, Reg, Vec
from composattn.emulator.waits import Wait, together

Array = np.ndarray[Any, Any]


@dataclass
class WarpgroupMultiply(PendingMultiply):
    """One wgmma.mma_async under way. `accumulator` are register rows, `left` may be A's values from registers."""

    results: int  # the accumulator's registers, as bits
    inputs: int
    instr: Instr


def execute(block: Any, low: int, ops: list[WarpgroupMultiply]) -> None:
    """Runs a group."""
    for chain in chains(ops):
        _chain(block, low, chain)


def _chain(block: Any, low: int, ops: list[WarpgroupMultiply]) -> None:
    shared, lefts = block.shared, [o.left for o in ops]
    left = gather(shared, lefts) if isinstance(lefts[0], SharedOperand) else np.concatenate(lefts, 1)
    right = gather(shared, [o.right for o in ops])
    if ops[0].negate:
        left = -left
    rows = ops[0].accumulator
    bank = block.views(low, low + 4)["F32"]
    whole = slice(rows[0], rows[-1] + 1) if rows == tuple(range(rows[0], rows[-1] + 1)) else list(rows)
    n = right.shape[0]
    # Register 4j + 2h + e of lane l of warp w holds row 16w + 8h + l // 4, column 8j + 2(l % 4) + e.
    if ELEMENT[ops[0].right.kind] == 1:
        sums = np.zeros((64, n), np.float32)
        if ops[0].accumulate:
            sums = bank[whole].reshape(n // 8, 2, 2, 4, 8, 4).transpose(3, 1, 4, 0, 5, 2).reshape(64, n)
        value, accumulate = cut_sums(sums, left, right), False
    else:
        value, accumulate = product(left, right), ops[0].accumulate
    fragment = value.reshape(4, 2, 8, n // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(n // 2, 128)
    bank[whole] = bank[whole] + fragment if accumulate else fragment


def _register_operand(g: Any, rows: list[int], kind: str) -> Array:
    """A from registers, [64, 16 or 32]: register 2k + h holds row 16w + 8h + l // 4, k-th half of the columns."""
    raw = np.ascontiguousarray(g.views["U32"][rows])
    element = ELEMENT[kind]
    parts = 4 // element
    values = decode(kind, raw.view(np.uint8)).reshape(2, 2, 4, 8, 4, parts)
    return values.transpose(2, 1, 3, 0, 4, 5).reshape(64, 8 * parts)


# --- the instructions ---------------------------------------------------------------------------------------


_SHAPE = re.compile(r"m64n(\d+)k(\d+)$")


def _form(instr: Instr) -> tuple[int, str, str]:
    """(columns, elements of a, elements of b)."""
    parts = instr.parts[4:]
    shape = _SHAPE.match(parts[0])
    if shape is None or len(parts) != 4 or parts[1] != "f32" or parts[2] not in ELEMENT or parts[3] not in ELEMENT:
        raise UnknownInstruction(f"this form of wgmma is not emulated; {instr.where()}")
    return int(shape[1]), parts[2], parts[3]


def _transposed(flags: list[int], kind: str, from_registers: bool) -> tuple[int, int]:
    """Whether a and b are summed over their rows, which operands of 16 bits alone may be."""
    if ELEMENT[kind] != 2 or not flags:
        return 0, 0
    return 0 if from_registers else flags[0], flags[-1]


@sync("wgmma.mma_async.sync.aligned")
def multiply(instr: Instr, program: Any) -> Handler:
    n, kind_a, kind_b = _form(instr)
    acc, left, right, scale, *rest = instr.args
    if not isinstance(acc, Vec) or len(acc.items) != n // 2:
        raise UnknownInstruction(f"accumulator of {instr.where()}")
    rows = tuple(r.index for r in acc.items if isinstance(r, Reg))
    results = sum(1 << r for r in rows)
    flags = [literal(r, instr) for r in rest]
    from_registers = isinstance(left, Vec)
    trans_a, trans_b = _transposed(flags[2:], kind_a, from_registers)
    negate = (flags[0] == -1) != (flags[1] == -1)
    a_rows = [r.index for r in left.items if isinstance(r, Reg)] if isinstance(left, Vec) else []
    inputs = sum(1 << r for r in a_rows)
    desc_a = None if from_registers else source(program, left, "u64")
    desc_b = source(program, right, "u64")
    keep = None if isinstance(scale, Imm) and scale.value else source(program, scale, "p")

    def run(g: Any, m: Any) -> Wait | None:
        wait = together(g, m, instr)
        if wait is not None:
            return wait
        accumulate = True
        if keep is not None:
            kept = keep(g)
            if (kept != kept[0]).any():
                raise CollectiveMismatch("scale-d differs between the lanes of a warpgroup")
            accumulate = bool(kept[0])
        # what was copied to sums that begin anew nobody reads: PTX of dead values, which ptxas leaves out
        if g.used_beside(0 if accumulate else results) & (results | inputs):
            raise MissingWgmmaFence("registers of this wgmma were used by others after the last wgmma.fence")
        block = g.block
        unit = block.units[g.low // 4]
        b = SharedOperand(_descriptor(desc_b(g)), n, kind_b, not trans_b)
        a: SharedOperand | Array
        if desc_a is None:
            a = _register_operand(g, a_rows, kind_a)
        else:
            a = SharedOperand(_descriptor(desc_a(g)), 64, kind_a, not trans_a)
            _read(g, unit, a)
        _read(g, unit, b)
        unit.open.append(WarpgroupMultiply(rows, accumulate, a, b, negate, results, inputs, instr))
        unit.busy_results |= results
        unit.busy_inputs |= inputs
        g.in_flight = True
        return None

    return run


def _descriptor(row: Array) -> Descriptor:
    if (row != row[0]).any():
        raise CollectiveMismatch("a matrix descriptor differs between the lanes of a warpgroup")
    return Descriptor.of(int(row[0]))


def _read(g: Any, unit: Any, operand: SharedOperand) -> None:
    """The four warps of the warpgroup must all know of what is read."""
    block = g.block
    agents = slice(block.first_agent + g.low, block.first_agent + g.low + 4)
    known, *fenced = (of[agents].min(0) for of in (block.cluster.known, block.cluster.fenced, block.cluster.far))
    read_operand(block, operand, known, tuple(fenced), unit.agent, unit.committed + 1)


@sync("wgmma.fence.sync.aligned")
def fence(instr: Instr, program: Any) -> Handler:
    def run(g: Any, m: Any) -> Wait | None:
        wait = together(g, m, instr)
        if wait is None:
            g.unfenced = 0
            g.copies.clear()
        return wait

    return run


@sync("wgmma.commit_group.sync.aligned")
def commit(instr: Instr, program: Any) -> Handler:
    def run(g: Any, m: Any) -> Wait | None:
        wait = together(g, m, instr)
        if wait is not None:
            return wait
        unit = g.block.units[g.low // 4]
        group = unit.commit()
        if not g.block.cluster.mode.late:
            execute(g.block, g.low, group)
        return None

    return run


@sync("wgmma.wait_group.sync.aligned")
def wait(instr: Instr, program: Any) -> Handler:
    keep = literal(instr.args[0], instr)

    def run(g: Any, m: Any) -> Wait | None:
        stop = together(g, m, instr)
        if stop is not None:
            return stop
        block = g.block
        unit = block.units[g.low // 4]
        while len(unit.groups) > keep:
            group = unit.groups.pop(0)
            if block.cluster.mode.late:
                execute(block, g.low, group)
        unit.retired = unit.committed - len(unit.groups)
        for w in g.warps:
            knowledge = block.knowledge(w)
            knowledge.all[unit.agent] = max(int(knowledge.all[unit.agent]), unit.retired)
        unit.refresh()
        g.look_in_flight()
        return None

    return run
