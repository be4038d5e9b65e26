"""tcgen05 but for its multiplies: allocation, loads and stores of tensor memory, waits and fences.

Facts: PTX ISA, "TensorCore 5th Generation Family Instructions" (data movement shapes, allocation, memory consistency).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from composattn.emulator.findings import (
    CollectiveMismatch,
    MissingTensorFence,
    MissingTensorWait,
    PairMismatch,
    TensorAllocation,
    TensorLanes,
    UnknownInstruction,
)
from composattn.emulator.ledger import Unordered
from composattn.emulator.opcodes.access import shared_store
from composattn.emulator.opcodes.registry import Handler, address, effect, literal, pick, source, sync, words_of
from composattn.emulator.ptx import Discard, Instr, Mem, Reg, Vec
from composattn.emulator.tensor_memory import COLUMNS, GROUP, EmulatedTensorMemory
from composattn.emulator.waits import Wait

Array = np.ndarray[Any, Any]


def by_warp(g: Any, m: Any, *operands: Array) -> Iterator[tuple[int, ...]]:
    """(warp, operands) of an instruction that each warp executes as one: with all its lanes and uniform operands."""
    lanes = g.lanes if m is True else int(np.count_nonzero(m))
    warps = g.active_warps(m)
    if lanes != 32 * len(warps):
        raise CollectiveMismatch("an aligned instruction without all lanes of its warp")
    columns = []
    for row in operands:
        rows = row.reshape(-1, 32)
        if (rows != rows[:, :1]).any():
            raise CollectiveMismatch("an operand that must be the same in all lanes of a warp differs")
        columns.append(rows[:, 0].tolist())
    return zip(warps, *columns, strict=True)


# --- order -------------------------------------------------------------------------------------------------


def in_order(block: Any, check: Callable[[Any, Array], None], cells: Any, warp: int, own: int | None = None) -> None:
    """Holds a use of tensor memory by a warp's tcgen05 to what came before; names what is missing between them.

    `block` is the warp's; `check` is order_read or order_write; `own` the unit that works for the warp in order.
    """
    knowledge = block.knowledge(warp)
    knows = knowledge.tensor
    if own is not None:
        knows = knows.copy()
        knows[own] = np.iinfo(np.int32).max
    try:
        check(cells, knows)
    except Unordered as e:
        _explain(block, e, bool(knowledge.all[e.agent] >= e.clock))
        raise


def _explain(block: Any, e: Unordered, synchronised: bool) -> None:
    """Raises what is missing if it is one instruction."""
    cluster, place = block.cluster, EmulatedTensorMemory.place(e.cell)
    name = cluster.agent_name(e.agent)
    warp, unit = divmod(e.agent - cluster.tensor_agent, 3)
    kind = ("mma", "ld", "st")[unit]
    if kind != "mma" and int(cluster.knowledge[warp].tensor[e.agent]) < e.clock:
        raise MissingTensorWait(f"{place}, last {e.what} by {name}, which no tcgen05.wait::{kind} has covered yet")
    if synchronised:
        raise MissingTensorFence(
            f"{place}, last {e.what} by {name}: the threads synchronise, but with no tcgen05.fence::after_thread_sync "
            f"before this{'' if kind == 'mma' else ', or no tcgen05.fence::before_thread_sync behind that'}"
        )


# --- allocation --------------------------------------------------------------------------------------------


_CTA_GROUPS = {"cta_group::1", "cta_group::2"}


def _check_count(columns: int) -> None:
    if columns < 32 or columns > COLUMNS or columns & (columns - 1):
        raise TensorAllocation(f"{columns} columns: a power of two from 32 to {COLUMNS} is taken")


def _wait_for_room(tensor: EmulatedTensorMemory, columns: int) -> Wait:
    return Wait(
        lambda: tensor.room(columns) is not None,
        lambda: f"{columns} columns of tensor memory; allocated are {tensor.allocated}",
    )


def _with_peer(g: Any, step: str) -> Wait | None:
    """None when the block's peer has come to the same step; each block takes its own part of it."""
    block = g.block
    pair = block.pair
    if len(pair) < 2:
        raise PairMismatch(f"{step} of a pair in a cluster of one block")
    if g.ticket is None:
        block.pair_steps.append(step)
        g.ticket = len(block.pair_steps) - 1
        block.cluster.progress += 1
    at, peer = g.ticket, pair[1 - block.rank % 2]
    if len(peer.pair_steps) <= at:
        return Wait(lambda: len(peer.pair_steps) > at, lambda: f"{step} by the other block of the pair")
    if peer.pair_steps[at] != step:
        raise PairMismatch(f"{step} where the other block of the pair has {peer.pair_steps[at]}")
    g.ticket = None
    return None


@sync("tcgen05.alloc.cta_group::1.sync.aligned", "tcgen05.alloc.cta_group::2.sync.aligned")
def allocate(instr: Instr, program: Any) -> Handler:
    """Waits until the columns are free, and writes the address of the first to shared memory."""
    words_of(program, instr.op, {"tcgen05", "alloc", *_CTA_GROUPS, "sync", "aligned", "shared::cta", "b32"}, instr)
    at, count = address(program, instr.args[0]), source(program, instr.args[1], "u32")
    paired = "cta_group::2" in instr.parts

    def run(g: Any, m: Any) -> Wait | None:
        tensor = g.block.tensor
        for warp, where, columns in by_warp(g, m, at(g, m), pick(count(g), m)):
            _check_count(columns)
            if not tensor.permit:
                raise TensorAllocation("an allocation after tcgen05.relinquish_alloc_permit")
            first = tensor.room(columns)
            if first is None:
                return _wait_for_room(tensor, columns)
            wait = _with_peer(g, f"an allocation of {columns} columns") if paired else None
            if wait is not None:
                return wait
            tensor.allocate(first, columns)
            lane = np.array([32 * (warp - g.low)])
            shared_store(g, lane, np.array([where]), 4, np.array([[first]], np.uint32))
        g.block.cluster.progress += 1
        return None

    return run


@sync("tcgen05.dealloc.cta_group::1.sync.aligned", "tcgen05.dealloc.cta_group::2.sync.aligned")
def free(instr: Instr, program: Any) -> Handler:
    words_of(program, instr.op, {"tcgen05", "dealloc", *_CTA_GROUPS, "sync", "aligned", "b32"}, instr)
    at, count = source(program, instr.args[0], "u32"), source(program, instr.args[1], "u32")
    paired = "cta_group::2" in instr.parts

    def run(g: Any, m: Any) -> Wait | None:
        for warp, first, columns in by_warp(g, m, pick(at(g), m), pick(count(g), m)):
            wait = _with_peer(g, f"a release of {columns} columns") if paired else None
            if wait is not None:
                return wait
            try:
                g.block.tensor.free(first, columns, g.block.knowledge(warp).all)
            except Unordered as e:
                _explain(g.block, e, False)
                raise
        g.block.cluster.progress += 1
        return None

    return run


@effect("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned",
        "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned")  # fmt: skip
def relinquish(instr: Instr, program: Any) -> Handler:
    def run(g: Any, m: Any) -> None:
        g.block.tensor.permit = False

    return run


# --- loads and stores --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AccessShape:
    """A data movement shape: register r of a warp's lane t holds lane rows[r, t], column columns[r, t] of the box.

    With `packed` it holds the low halves of columns 2c and 2c + 1.
    """

    lanes: int
    width: int  # columns
    rows: Array
    columns: Array
    packed: bool

    @property
    def whole(self) -> bool:
        """A lane of the warp has a lane of tensor memory, its registers are neighbouring columns."""
        return self.lanes == 32 and not self.packed


@functools.cache
def _form(shape: str, repeat: int, packed: bool, split: int) -> AccessShape:
    t = np.arange(32)
    if shape == "32x32b":
        row, column, step = [t], [0 * t], 1
    elif shape == "16x32bx2":
        row, column, step = [t % 16], [t // 16 * split], 1
    elif shape == "16x64b":
        row, column, step = [t // 4 + t % 2 * 8], [t // 2 % 2], 2
    elif shape == "16x128b":
        row, column, step = [t // 4, t // 4 + 8], [t % 4] * 2, 4
    else:
        row = [t // 4, t // 4, t // 4 + 8, t // 4 + 8]
        column, step = [t % 4 * 2, t % 4 * 2 + 1] * 2, 8
    rows = np.concatenate([np.stack(row)] * repeat)
    columns = np.concatenate([np.stack(column) + i * step for i in range(repeat)])
    width = int(columns.max()) + 1
    return AccessShape(32 if shape == "32x32b" else 16, width * (2 if packed else 1), rows, columns, packed)


_SHAPES = {"32x32b": 1, "16x32bx2": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}


_REPEATS = {f"x{1 << n}": 1 << n for n in range(8)}
_PACKED = {"pack::16b", "unpack::16b"}
_MOVES = {"tcgen05", "ld", "st", "red", "sync", "aligned", "b32", "f32", "max", "min", "NaN", "abs"}


def _shape_of(instr: Instr, program: Any, items: tuple[Any, ...], split: int) -> AccessShape:
    parts = set(instr.parts)
    words_of(program, instr.op, {*_MOVES, *_SHAPES, *_REPEATS, *_PACKED}, instr)
    (shape,), (repeat,) = parts & _SHAPES.keys(), parts & _REPEATS.keys()
    if len(items) != _REPEATS[repeat] * _SHAPES[shape] or len(items) > 128:
        raise UnknownInstruction(f"{len(items)} registers for {instr.op}; {instr.where()}")
    return _form(shape, _REPEATS[repeat], bool(parts & _PACKED), split)


def _operands(instr: Instr, mem: Any, vec: Any) -> tuple[Mem, tuple[Any, ...], int]:
    if not isinstance(mem, Mem) or not isinstance(vec, Vec):
        raise UnknownInstruction(f"operands of {instr.where()}")
    extra = [a for a in instr.args if a is not mem and a is not vec and not isinstance(a, Reg)]
    return mem, vec.items, literal(extra[0], instr) if extra else 0


def _place(g: Any, warp: int, at: int, form: AccessShape) -> tuple[int, int, Any]:
    """(lane, column, cells) of what a warp moves; the lanes must be its own."""
    lane, column = at >> 16, at & 0xFFFF
    mine = 32 * (warp % 4)
    if not mine <= lane or lane + form.lanes > mine + 32 or lane % GROUP:
        raise TensorLanes(
            f"warp {warp} moves lanes {lane}-{lane + form.lanes - 1} of tensor memory: its own are {mine}-{mine + 31}"
        )
    return lane, column, g.block.tensor.cells(lane, form.lanes, column, form.width)


def _start(g: Any, warp: int, kind: str, move: Callable[[], None]) -> None:
    units = g.block.tensor_units[warp]
    units.moved[kind] += 1
    if g.block.cluster.mode.late:
        units.moving[kind].append(move)
    else:
        move()
    g.block.cluster.progress += 1


@effect("tcgen05.ld.sync.aligned", "tcgen05.ld.red.sync.aligned")
def load(instr: Instr, program: Any) -> Handler:
    mem, items, split = _operands(instr, next(a for a in instr.args if isinstance(a, Mem)), instr.args[0])
    form, at = _shape_of(instr, program, items, split), address(program, mem)
    kept = [i for i, r in enumerate(items) if not isinstance(r, Discard)]
    rows = _stretch([items[i].index for i in kept])
    fold = _fold(instr) if "red" in instr.parts else None
    best = program.rows.of(instr.args[1], "32")[1] if fold is not None else 0
    used = sum(1 << items[i].index for i in kept) | (1 << best if fold is not None else 0)

    def run(g: Any, m: Any) -> None:
        block, tensor, bank = g.block, g.block.tensor, g.block.file.banks["32"]
        for warp, where in by_warp(g, m, at(g, m)):
            lane, column, cells = _place(g, warp, where, form)
            units = block.tensor_units[warp]
            in_order(block, tensor.order_read, cells, warp)
            tensor.stamp_read(cells, units.agent_of("ld"), units.moved["ld"] + 1)
            units.busy |= used
            lanes = slice(32 * warp, 32 * warp + 32)

            def deliver(lane: int = lane, column: int = column, lanes: slice = lanes) -> None:
                values = _read(tensor.data, lane, column, form)
                bank[rows, lanes] = values if len(kept) == len(items) else values[kept]
                if fold is not None:
                    bank[best, lanes] = fold(values)

            _start(g, warp, "ld", deliver)
        g.in_flight = True

    return run


def _fold(instr: Instr) -> Callable[[Array], Array]:
    """The largest or smallest of a lane's values."""
    names = {p for p in instr.parts if p in ("max", "min", "NaN")}
    ufunc: Any = (np.maximum if "NaN" in names else np.fmax) if "max" in names else (
        np.minimum if "NaN" in names else np.fmin)  # fmt: skip
    absolute = "abs" in instr.parts

    def run(values: Array) -> Array:
        numbers = np.ascontiguousarray(values).view(np.float32)
        return np.asarray(ufunc.reduce(np.abs(numbers) if absolute else numbers, 0)).view(np.uint32)

    return run


def _stretch(rows: list[int]) -> Any:
    """Rows of a bank as a slice where they follow each other: numpy is faster with it."""
    return slice(rows[0], rows[0] + len(rows)) if rows == list(range(rows[0], rows[0] + len(rows))) else rows


def _read(data: Array, lane: int, column: int, form: AccessShape) -> Array:
    if form.whole:
        return data[lane : lane + 32, column : column + form.width].T
    if not form.packed:
        return data[lane + form.rows, column + form.columns]
    low, high = (data[lane + form.rows, column + 2 * form.columns + i] & np.uint32(0xFFFF) for i in (0, 1))
    return low | high << np.uint32(16)


def _write(data: Array, lane: int, column: int, form: AccessShape, values: Array) -> None:
    if form.whole:
        data[lane : lane + 32, column : column + form.width] = values.T
    elif not form.packed:
        data[lane + form.rows, column + form.columns] = values
    else:
        for i in (0, 1):
            data[lane + form.rows, column + 2 * form.columns + i] = values >> np.uint32(16 * i) & np.uint32(0xFFFF)


@effect("tcgen05.st.sync.aligned")
def store(instr: Instr, program: Any) -> Handler:
    mem, items, split = _operands(instr, instr.args[0], instr.args[-1])
    form, at = _shape_of(instr, program, items, split), address(program, mem)
    rows = _stretch([program.rows.of(i, "32")[1] for i in items])

    def run(g: Any, m: Any) -> None:
        block, tensor, bank = g.block, g.block.tensor, g.block.file.banks["32"]
        for warp, where in by_warp(g, m, at(g, m)):
            lane, column, cells = _place(g, warp, where, form)
            units = block.tensor_units[warp]
            in_order(block, tensor.order_write, cells, warp)
            tensor.stamp_write(cells, units.agent_of("st"), units.moved["st"] + 1)
            values = bank[rows, 32 * warp : 32 * warp + 32].copy()
            _start(g, warp, "st", functools.partial(_write, tensor.data, lane, column, form, values))

    return run


@effect("tcgen05.wait::ld.sync.aligned", "tcgen05.wait::st.sync.aligned")
def wait(instr: Instr, program: Any) -> Handler:
    kind = instr.parts[1][-2:]

    def run(g: Any, m: Any) -> None:
        for (warp,) in by_warp(g, m):
            units, knowledge = g.block.tensor_units[warp], g.block.knowledge(warp)
            for move in reversed(units.moving[kind]):
                move()
            units.moving[kind].clear()
            agent, done = units.agent_of(kind), units.moved[kind]
            knowledge.all[agent] = knowledge.tensor[agent] = done
            if kind == "ld":
                units.busy = 0
        g.look_in_flight()

    return run


@effect("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def fence(instr: Instr, program: Any) -> Handler:
    before = "before" in instr.parts[1]

    def run(g: Any, m: Any) -> None:
        for w in g.active_warps(m):
            knowledge = g.block.knowledge(w)
            knowledge.before_sync() if before else knowledge.after_sync()

    return run
