"""wgmma: 64-row matrix multiplies of a warpgroup, their shared-memory descriptors, groups and waits.

Facts: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" (register fragments, matrix-descriptor format,
canonical layouts by major-ness and swizzle, commit and wait groups).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from composattn.emulator.findings import (
    BadDescriptor,
    CollectiveMismatch,
    MissingProxyFence,
    MissingWgmmaFence,
    UnknownInstruction,
)
from composattn.emulator.gang import Wait, together
from composattn.emulator.opcodes.floats import E4M3, E5M2, bf16_to_f32
from composattn.emulator.opcodes.registry import Handler, literal, source, sync
from composattn.emulator.ptx import Imm, Instr, Reg, Vec

Array = np.ndarray[Any, Any]
ELEMENT = {"bf16": 2, "f16": 2, "e4m3": 1, "e5m2": 1}
_SWIZZLE = {0: 0, 1: 128, 2: 64, 3: 32}


def decode(kind: str, raw: Array) -> Array:
    """Bytes (last axis) to float32 values."""
    if kind == "bf16":
        return bf16_to_f32(raw.view(np.uint16))
    if kind == "f16":
        return raw.view(np.float16).astype(np.float32)
    return (E4M3 if kind == "e4m3" else E5M2)[raw]


@dataclass(frozen=True)
class Descriptor:
    """The fields of a shared-memory matrix descriptor, in bytes."""

    start: int
    leading: int
    stride: int
    swizzle: int

    @staticmethod
    def of(bits: int) -> Descriptor:
        if bits >> 49 & 7:
            raise BadDescriptor(f"matrix descriptor {bits:#x} with base offset {bits >> 49 & 7}: not emulated")
        return Descriptor((bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4,
                          _SWIZZLE[bits >> 62 & 3])  # fmt: skip


@lru_cache(maxsize=4096)
def chunks_of(desc: Descriptor, rows: int, element: int, k_major: bool) -> Array:
    """16-byte chunks of an operand: [row, 2] if K is contiguous, else [k, rows / 8] (eight rows a chunk)."""
    span = desc.swizzle or 16
    if k_major:
        row, part = np.arange(rows)[:, None], np.arange(2)[None, :]
        column = part * (16 if desc.swizzle else desc.leading)
        offset = row % 8 * span + row // 8 * desc.stride + column
    else:
        if element != 2:
            raise BadDescriptor("8-bit operands of wgmma must have K contiguous")
        k, group = np.arange(16)[:, None], np.arange(rows // 8)[None, :]
        per = span // 16
        if desc.swizzle:
            offset = group % per * 16 + group // per * desc.leading + k % 8 * span + k // 8 * desc.stride
        else:
            offset = group * desc.stride + k % 8 * 16 + k // 8 * desc.leading
    chunk = (desc.start + offset) // 16
    if desc.swizzle:
        chunk = chunk ^ ((chunk >> 3) & (desc.swizzle // 16 - 1))
    return chunk


@lru_cache(maxsize=4096)
def words_of_chunks(desc: Descriptor, rows: int, element: int, k_major: bool) -> Array:
    chunk = chunks_of(desc, rows, element, k_major)
    return (chunk.reshape(-1)[:, None] * 4 + np.arange(4)).reshape(-1)


@dataclass
class Operand:
    """A matrix operand in shared memory."""

    desc: Descriptor
    rows: int
    kind: str
    k_major: bool

    def chunks(self) -> Array:
        return chunks_of(self.desc, self.rows, ELEMENT[self.kind], self.k_major)

    def words(self) -> Array:
        return words_of_chunks(self.desc, self.rows, ELEMENT[self.kind], self.k_major)


@dataclass
class Multiply:
    """One wgmma.mma_async under way. `left` is its A operand, or A's values where it came from registers."""

    rows: tuple[int, ...]  # register rows of the accumulator
    results: int  # the same, as bits
    inputs: int
    accumulate: bool
    left: Operand | Array
    right: Operand
    negate: bool
    instr: Instr


def gather(shared: Any, operands: list[Operand]) -> Array:
    """[rows, K of all operands] as float32."""
    first = operands[0]
    pairs = shared.views[8].reshape(-1, 2)
    axis = 1 if first.k_major else 0
    index = np.concatenate([o.chunks() for o in operands], axis) if len(operands) > 1 else first.chunks()
    raw = np.ascontiguousarray(pairs[index]).view(np.uint8).reshape(index.shape[0], -1)
    values = decode(first.kind, raw)
    return values if first.k_major else values.T


def execute(block: Any, low: int, ops: list[Multiply]) -> None:
    """Runs a group: multiplies that go on in the same accumulator become one product."""
    at = 0
    while at < len(ops):
        end = at + 1
        while end < len(ops) and ops[end].rows == ops[at].rows and ops[end].accumulate and _alike(ops[at], ops[end]):
            end += 1
        _chain(block, low, ops[at:end])
        at = end


def _alike(a: Multiply, b: Multiply) -> bool:
    same_left = isinstance(a.left, Operand) == isinstance(b.left, Operand)
    if isinstance(a.left, Operand) and isinstance(b.left, Operand):
        same_left = (a.left.kind, a.left.k_major) == (b.left.kind, b.left.k_major)
    return same_left and (a.right.kind, a.right.k_major, a.negate) == (b.right.kind, b.right.k_major, b.negate)


def _chain(block: Any, low: int, ops: list[Multiply]) -> None:
    shared = block.shared
    if isinstance(ops[0].left, Operand):
        left = gather(shared, [o.left for o in ops if isinstance(o.left, Operand)])
    else:
        left = np.concatenate([o.left for o in ops if not isinstance(o.left, Operand)], 1)
    right = gather(shared, [o.right for o in ops])
    product = _product(left, right)
    if ops[0].negate:
        product = -product
    rows = ops[0].rows
    bank = block.views(low, low + 4)["F32"]
    whole = slice(rows[0], rows[-1] + 1) if rows == tuple(range(rows[0], rows[-1] + 1)) else list(rows)
    n = product.shape[1]
    # Register 4j + 2h + e of lane l of warp w holds row 16w + 8h + l // 4, column 8j + 2(l % 4) + e.
    fragment = product.reshape(4, 2, 8, n // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(n // 2, 128)
    bank[whole] = bank[whole] + fragment if ops[0].accumulate else fragment


def _product(left: Array, right: Array) -> Array:
    """left @ right.T in slices of K that BLAS does in one thread: its threads cost more than these sizes are worth."""
    step = max(16, 4096 // right.shape[0] // 16 * 16)
    out = left[:, :step] @ right[:, :step].T
    for k in range(step, left.shape[1], step):
        out += left[:, k : k + step] @ right[:, k : k + step].T
    return out


def _register_operand(g: Any, rows: list[int], kind: str) -> Array:
    """A from registers, [64, 16 or 32]: register 2k + h holds row 16w + 8h + l // 4, k-th half of the columns."""
    raw = np.ascontiguousarray(g.U32[rows])
    element = ELEMENT[kind]
    parts = 4 // element
    values = decode(kind, raw.view(np.uint8)).reshape(2, 2, 4, 8, 4, parts)
    return values.transpose(2, 1, 3, 0, 4, 5).reshape(64, 8 * parts)


# --- the instructions ---------------------------------------------------------------------------------------


def _set_in_flight(g: Any, unit: Any) -> None:
    unit.refresh()
    g.in_flight = bool(unit.open or unit.groups)


_SHAPE = re.compile(r"m64n(\d+)k(\d+)$")


@sync("wgmma.mma_async.sync.aligned")
def multiply(instr: Instr, program: Any) -> Handler:
    parts = instr.parts[4:]
    shape = _SHAPE.match(parts[0])
    if shape is None or len(parts) != 4 or parts[1] != "f32" or parts[2] not in ELEMENT or parts[3] not in ELEMENT:
        raise UnknownInstruction(f"this form of wgmma is not emulated; {instr.where()}")
    n, kind_a, kind_b = int(shape[1]), parts[2], parts[3]
    acc, left, right, scale, *rest = instr.args
    if not isinstance(acc, Vec) or len(acc.items) != n // 2:
        raise UnknownInstruction(f"accumulator of {instr.where()}")
    rows = tuple(r.index for r in acc.items if isinstance(r, Reg))
    results = sum(1 << r for r in rows)
    flags = [literal(r, instr) for r in rest]
    from_registers = isinstance(left, Vec)
    trans = flags[2:] if ELEMENT[kind_a] == 2 else []
    trans_a = trans[0] if trans and not from_registers else 0
    trans_b = trans[-1] if trans else 0
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
        if g.unfenced & (results | inputs):
            raise MissingWgmmaFence("registers of this wgmma were used by others after the last wgmma.fence")
        block = g.block
        unit = block.units[g.low // 4]
        b = Operand(_descriptor(desc_b(g)), n, kind_b, not trans_b)
        a: Operand | Array
        if desc_a is None:
            a = _register_operand(g, a_rows, kind_a)
        else:
            a = Operand(_descriptor(desc_a(g)), 64, kind_a, not trans_a)
            _read_operand(g, unit, a)
        _read_operand(g, unit, b)
        accumulate = True
        if keep is not None:
            kept = keep(g)
            if (kept != kept[0]).any():
                raise CollectiveMismatch("scale-d differs between the lanes of a warpgroup")
            accumulate = bool(kept[0])
        unit.open.append(Multiply(rows, results, inputs, accumulate, a, b, negate, instr))
        unit.busy_results |= results
        unit.busy_inputs |= inputs
        g.in_flight = True
        return None

    return run


def _descriptor(row: Array) -> Descriptor:
    if (row != row[0]).any():
        raise CollectiveMismatch("a matrix descriptor differs between the lanes of a warpgroup")
    return Descriptor.of(int(row[0]))


def _read_operand(g: Any, unit: Any, operand: Operand) -> None:
    """The four warps must know of the writes; plain ones must have been fenced for the async proxy."""
    block = g.block
    memory = block.shared
    words = operand.words()
    memory.check(int(words.min()) * 4, int(words.max()) * 4 + 4)
    agents = slice(block.first_agent + g.low, block.first_agent + g.low + 4)
    memory.order_read(words, block.cluster.known[agents].min(0))
    plain = memory.plain[words]
    if plain.any():
        fenced = block.cluster.fenced[agents].min(0)
        late = plain & (memory.written[words] > fenced[memory.writer[words]])
        if late.any():
            first = int(words[late][0])
            raise MissingProxyFence(
                f"{int(late.sum())} words from shared address {first * 4:#x} were written by plain stores of "
                f"{block.cluster.agent_name(int(memory.writer[first]))} with no fence.proxy.async before this wgmma"
            )
    memory.stamp_read(words, unit.agent, unit.committed + 1)


@sync("wgmma.fence.sync.aligned")
def fence(instr: Instr, program: Any) -> Handler:
    def run(g: Any, m: Any) -> Wait | None:
        wait = together(g, m, instr)
        if wait is None:
            g.unfenced = 0
        return wait

    return run


@sync("wgmma.commit_group.sync.aligned")
def commit(instr: Instr, program: Any) -> Handler:
    def run(g: Any, m: Any) -> Wait | None:
        wait = together(g, m, instr)
        if wait is not None:
            return wait
        unit = g.block.units[g.low // 4]
        group, unit.open = unit.open, []
        unit.committed += 1
        unit.groups.append(group)
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
        _set_in_flight(g, unit)
        return None

    return run
