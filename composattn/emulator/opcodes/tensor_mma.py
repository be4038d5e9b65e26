"""tcgen05.mma and tcgen05.commit: matrix multiplies into tensor memory, and the mbarriers that say they are done.

Facts: PTX ISA, "TensorCore 5th Generation Family Instructions" (instruction descriptor, data path layouts, commit).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from composattn.emulator.barriers import Knowledge
from composattn.emulator.findings import BadDescriptor, CollectiveMismatch, PairMismatch, UnknownInstruction
from composattn.emulator.opcodes.access import resolve_block
from composattn.emulator.opcodes.operands import (
    Descriptor,
    PendingMultiply,
    SharedOperand,
    chains,
    decode,
    gather,
    product,
    read_operand,
)
from composattn.emulator.opcodes.registry import Handler, address, effect, literal, pick, source, words_of
from composattn.emulator.opcodes.synchronise import who
from composattn.emulator.opcodes.tensor_access import in_order
from composattn.emulator.ptx import Imm, Instr, Mem, Vec
from composattn.emulator.tensor_memory import LANES
from composattn.emulator.waits import PendingCopy

Array = np.ndarray[Any, Any]
_KINDS = {"kind::f16": {0: "f16", 1: "bf16"}, "kind::f8f6f4": {0: "e4m3", 1: "e5m2"}}
_KEPT = {f"collector::a::{how}" for how in ("discard", "lastuse", "fill", "use")}  # says what A's buffer keeps


_ROWS = {1: (64, 128), 2: (128, 256)}  # of a product, by how many blocks make it


FOLDED = 64  # rows of a block of a pair whose product takes all lanes


@dataclass(frozen=True)
class MmaShape:
    """What an instruction descriptor says."""

    m: int
    n: int
    left: str
    right: str
    left_k_major: bool
    right_k_major: bool
    negate: bool

    @staticmethod
    @functools.cache
    def of(bits: int, kind: str, blocks: int) -> MmaShape:
        formats = _KINDS[kind]
        m, n = (bits >> 24 & 31) << 4, (bits >> 17 & 63) << 3
        a, b = formats.get(bits >> 7 & 7), formats.get(bits >> 10 & 7)
        if a is None or b is None or bits & 0xF or bits >> 4 & 3 != 1 or bits >> 30:
            raise UnknownInstruction(f"instruction descriptor {bits:#x} of {kind}: dense products in fp32 are emulated")
        if m not in _ROWS[blocks] or not 8 <= n <= 256 or n % (8 if m == 64 else 16 * blocks):
            raise BadDescriptor(f"instruction descriptor {bits:#x}: {m} rows and {n} columns by {blocks} blocks")
        negate = (bits >> 13 & 1) != (bits >> 14 & 1)
        return MmaShape(m, n, a, b, not bits >> 15 & 1, not bits >> 16 & 1, negate)


@dataclass(frozen=True)
class TensorOperand:
    """An A operand in tensor memory: rows are lanes, K goes along columns of 32 bits."""

    lane: int
    column: int
    columns: int
    kind: str


@dataclass
class TensorMultiply(PendingMultiply):
    """One tcgen05.mma under way. `accumulator` is (first lane, first column, rows, columns), the rows of one block.

    Of a pair each block has half the rows of A and of the product, and half the columns' part of B. Where these are 64
    rows (`folded`) the right half of the product's columns lies in the upper 64 lanes: `accumulator` is as they lie.
    """

    thread: int  # a commit covers those of its own thread
    blocks: list[Any]

    @property
    def folded(self) -> bool:
        return isinstance(self.left, SharedOperand) and self.accumulator[2] != self.left.rows


def lanes_of(lane: int, rows: int) -> Any:
    """The lanes that hold the rows of a matrix: all 128, or the first 16 of each warp's."""
    if rows == LANES:
        return slice(0, LANES)
    row = np.arange(rows)
    return lane + row // 16 * 32 + row % 16


def _groups(block: Any, lane: int, column: int, rows: int, columns: int) -> list[Any]:
    """The cells of `rows` rows and `columns` columns."""
    tensor = block.tensor
    if rows == LANES:
        return [tensor.cells(0, LANES, column, columns)]
    return [tensor.cells(lane + 32 * i, 16, column, columns) for i in range(rows // 16)]


# --- running -----------------------------------------------------------------------------------------------


def run_until(block: Any, warp: int, group: list[TensorMultiply]) -> None:
    """Runs what a warp's matrix pipe has before it and then `group`."""
    units = block.tensor_units[warp]
    while any(g is group for g in units.groups):
        for chain in chains(units.groups.pop(0)):
            right = np.concatenate([gather(b.shared, [o.right for o in chain]) for b in chain[0].blocks])
            for each in chain[0].blocks:
                _chain(each, chain, right)


def _chain(block: Any, ops: list[TensorMultiply], right: Array) -> None:
    """A block's rows of a product."""
    tensor, first = block.tensor, ops[0]
    lane, column, rows, columns = first.accumulator
    if isinstance(first.left, SharedOperand):
        left = gather(block.shared, [o.left for o in ops])
    else:
        left = np.concatenate([_held(tensor.data, o.left, rows) for o in ops], 1)
    value = product(left, right)
    if first.folded:
        value = np.concatenate(np.split(value, 2, 1))
    if first.negate:
        value = -value
    where = (lanes_of(lane, rows), slice(column, column + columns))
    tensor.values[where] = tensor.values[where] + value if first.accumulate else value


def _held(data: Array, held: TensorOperand, rows: int) -> Array:
    raw = np.ascontiguousarray(data[lanes_of(held.lane, rows), held.column : held.column + held.columns])
    return decode(held.kind, raw.view(np.uint8))


# --- the instructions --------------------------------------------------------------------------------------


def _one_thread(g: Any, m: Any, instr: Instr) -> tuple[int, int]:
    """(warp, thread) of an instruction that one thread executes: more would each do it again."""
    lanes = g.active(m)
    if len(lanes) != 1:
        raise CollectiveMismatch(f"{instr.op} by {len(lanes)} threads of a warp: each starts it again")
    return int(g.lane_warp[lanes[0]]), int(lanes[0]) % 32


@effect(*(f"tcgen05.mma.cta_group::{n}.{kind}" for n in (1, 2) for kind in _KINDS))
def multiply(instr: Instr, program: Any) -> Handler:
    words_of(program, instr.op, {"tcgen05", "mma", "cta_group::1", "cta_group::2", *_KINDS, *_KEPT}, instr)
    kind, count = instr.parts[3], int(instr.parts[2][-1])
    into, left, right, descriptor, *rest = instr.args
    masks = []
    if isinstance(rest[0], Vec):
        masks = [source(program, i, "u32") for i in rest[0].items]
        rest = rest[1:]
    if len(rest) > 1:
        raise UnknownInstruction(f"a scaled input of {instr.where()}")
    keep = source(program, rest[0], "p") if not isinstance(rest[0], Imm) else None
    always = isinstance(rest[0], Imm) and literal(rest[0], instr) != 0
    to, desc_b, shape_of = address(program, into), source(program, right, "u64"), source(program, descriptor, "u32")
    in_tensor = isinstance(left, Mem)
    side_a: Any = address(program, left) if in_tensor else source(program, left, "u64")

    def run(g: Any, m: Any) -> None:
        warp, thread = _one_thread(g, m, instr)
        if any(int(pick(row(g), m)[0]) for row in masks):
            raise UnknownInstruction(f"lanes that a multiply leaves out; {instr.where()}")
        blocks = g.block.pair if count == 2 else [g.block]
        if len(blocks) != count or blocks[0] is not g.block:
            raise PairMismatch("a multiply of a pair is started by its first block, in a cluster of two or more")
        shape = MmaShape.of(int(pick(shape_of(g), m)[0]), kind, count)
        accumulate = bool(pick(keep(g), m)[0]) if keep is not None else always
        b = SharedOperand(
            Descriptor.of_tcgen05(int(pick(desc_b(g), m)[0])), shape.n // count, shape.right, shape.right_k_major
        )
        a: SharedOperand | TensorOperand
        folded = shape.m // count == FOLDED and count == 2
        if in_tensor:
            if folded:
                raise UnknownInstruction(f"64 rows of each block of a pair from tensor memory; {instr.where()}")
            at = int(side_a(g, m)[0])
            a = TensorOperand(at >> 16, at & 0xFFFF, 8, shape.left)
        else:
            bits = int(pick(side_a(g), m)[0])
            a = SharedOperand(Descriptor.of_tcgen05(bits), shape.m // count, shape.left, shape.left_k_major)
        at = int(to(g, m)[0])
        rows, columns = (LANES, shape.n // 2) if folded else (shape.m // count, shape.n)
        into = (at >> 16, at & 0xFFFF, rows, columns)
        op = TensorMultiply(into, accumulate, a, b, shape.negate, thread, blocks)
        _issue(g.block, warp, op)

    return run


def _issue(block: Any, warp: int, op: TensorMultiply) -> None:
    units = block.tensor_units[warp]
    for each in op.blocks:
        _uses(block, warp, op, each, units.agent, units.issued + 1)
    units.issued += 1
    units.open.append(op)


def _uses(block: Any, warp: int, op: TensorMultiply, each: Any, agent: int, clock: int) -> None:
    """What a multiply that a warp of `block` starts reads and writes in one of its blocks, held to what came before."""
    knowledge, tensor = block.knowledge(warp), each.tensor
    lane, column, rows, columns = op.accumulator
    results = _groups(each, lane, column, rows, columns)
    for cells in results:
        if op.accumulate:
            in_order(block, tensor.order_read, cells, warp, agent)
        in_order(block, tensor.order_write, cells, warp, agent)
    for side in (op.left, op.right):
        if isinstance(side, SharedOperand):
            read_operand(each, side, knowledge.all, (knowledge.fenced, knowledge.far), agent, clock)
            continue
        for cells in _groups(each, side.lane, side.column, rows, side.columns):
            in_order(block, tensor.order_read, cells, warp, agent)
            tensor.stamp_read(cells, agent, clock)
    for cells in results:
        tensor.stamp_write(cells, agent, clock)


_COMMIT = {"tcgen05", "commit", "cta_group::1", "cta_group::2", "mbarrier::arrive::one", "shared::cluster", "b64",
           "multicast::cluster"}  # fmt: skip


@effect("tcgen05.commit.cta_group::1.mbarrier::arrive::one", "tcgen05.commit.cta_group::2.mbarrier::arrive::one")
def commit(instr: Instr, program: Any) -> Handler:
    """The mbarrier, or that of each block of the mask, is arrived at when the thread's multiplies so far are done."""
    words_of(program, instr.op, _COMMIT, instr)
    at = address(program, instr.args[0])
    mask = source(program, instr.args[1], "u16") if "multicast::cluster" in instr.parts else None

    def run(g: Any, m: Any) -> None:
        warp, thread = _one_thread(g, m, instr)
        block, knowledge = g.block, g.block.knowledge(warp)
        units = block.tensor_units[warp]
        group = [o for o in units.open if o.thread == thread]
        units.open = [o for o in units.open if o.thread != thread]
        units.groups.append(group)
        owner, local = resolve_block(g, at(g, m))
        owners = [owner]
        if mask is not None:
            ranks = int(pick(mask(g), m)[0])
            owners = [b for b in block.cluster.blocks if ranks >> b.rank & 1]
        bars = [b.mbarrier(int(local[0]), knowledge) for b in owners]
        for bar in bars:
            bar.check_visible(knowledge)
        passed = Knowledge(knowledge.clocks.copy())
        passed.offers[:] = np.maximum(passed.offers, knowledge.tensor)
        if not units.open:
            passed.all[units.agent] = passed.offers[units.agent] = units.issued

        def complete() -> None:
            run_until(block, warp, group)
            for bar in bars:
                bar.arrive(1, passed, f"tcgen05.commit of {who(g, warp)}")

        block.cluster.start(PendingCopy(complete, f"completion of {instr.where()}"))
        block.tick(warp)
        block.cluster.progress += 1

    return run
