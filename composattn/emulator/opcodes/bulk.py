"""Bulk copies: tensor boxes and plain stretches, into shared memory (mbarrier) and out of it (bulk groups)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from composattn.emulator.barriers import Knowledge
from composattn.emulator.findings import BadDescriptor, Misaligned, MissingProxyFence, UnknownInstruction
from composattn.emulator.memory import covering
from composattn.emulator.opcodes.access import check_finished, own_offset, resolve_block
from composattn.emulator.opcodes.registry import Handler, address, effect, literal, pick, source, words_of
from composattn.emulator.ptx import Instr, Mem
from composattn.emulator.symbols import PARAM_WINDOW
from composattn.emulator.tensormap import TensorMap, swizzled_chunks
from composattn.emulator.waits import PendingCopy

Array = np.ndarray[Any, Any]
_HINTS = {"L2::cache_hint", "mbarrier::complete_tx::bytes", "bulk_group", "tile", "tensor", "bulk", "async", "cp",
          "reduce", "global", "shared::cta", "shared::cluster", "multicast::cluster", "1d", "2d", "3d", "4d", "5d",
          "add", "cta_group::1", "cta_group::2"}  # fmt: skip


@dataclass
class StoreOp:
    """A copy out of shared memory: first its bytes are read, later written."""

    read_bytes: Callable[[], Array]
    write_bytes: Callable[[Array], None]
    where: str
    data: Array | None = None
    written: bool = False

    def read(self) -> None:
        if self.data is None:
            self.data = self.read_bytes()

    def write(self) -> None:
        self.read()
        if not self.written and self.data is not None:
            self.written = True
            self.write_bytes(self.data)


def _once_a_warp(g: Any, m: Any, *operands: list[int]) -> list[tuple[int, ...]]:
    """(warp, operands) of the copies to make. Lanes of a warp with the same operands make one copy between them.

    PTX reads as if each lane made its own; the machine instruction takes uniform registers and is issued once per warp,
    and code that is generated without an elect around a store counts on it.
    """
    warps = g.lane_warp[g.active(m)].tolist()
    return list(dict.fromkeys(zip(warps, *operands, strict=True)))


def _map_of(g: Any, warp: int, addr: int) -> TensorMap:
    """The tensor map at an address, whose tensor the warp may use."""
    found = g.block.launch.map_at.get(addr - PARAM_WINDOW)
    if found is None:
        raise BadDescriptor(f"{addr:#x} is not the address of a tensor map of this launch")
    check_finished(g, warp, found.address, found.address + 1)
    return found


def _check_fenced(block: Any, words: slice, knowledge: Knowledge) -> None:
    """Raises unless the plain stores that last wrote `words` of a block have been fenced for the async proxy."""
    memory, unfenced = block.shared, block.unfenced(words, knowledge.fenced, knowledge.far)
    if unfenced.any():
        first = words.start + int(np.flatnonzero(unfenced)[0])
        raise MissingProxyFence(
            f"{int(unfenced.sum())} words from shared address {first * 4:#x} were written by plain stores of "
            f"{block.cluster.agent_name(int(memory.writer[first]))}, no fence.proxy.async before the copy"
        )


def _check_read(block: Any, words: slice, knowledge: Knowledge) -> None:
    """Raises unless plain loads that read `words` of a block have been fenced for the async proxy."""
    cluster = block.cluster
    for warp, clocks in block.shared.reads.items():
        if warp >= len(cluster.knowledge):  # a unit of the async proxy
            continue
        own = warp // cluster.warps_per_block == block.rank
        late = clocks[words] > (knowledge.fenced if own else knowledge.far)[warp]
        if late.any():
            first = words.start + int(np.flatnonzero(late)[0])
            raise MissingProxyFence(
                f"{int(late.sum())} words from shared address {first * 4:#x} were read by plain loads of "
                f"{cluster.agent_name(warp)}, no fence.proxy.async before the copy over them"
            )


# --- into shared memory ------------------------------------------------------------------------------------


def start_load(g: Any, warp: int, targets: tuple[list[Any], list[Any], int, int], count: int, span: int,
               fetch: Callable[[], Array], what: str) -> None:  # fmt: skip
    """Begins a copy of `count` bytes to each of `targets_of`."""
    blocks, owners, dst, bar_at = targets
    cluster = g.block.cluster
    knowledge = g.block.knowledge(warp)
    for block, owner in zip(blocks, owners, strict=True):
        block.shared.check(dst, dst + count)
        bar = owner.mbarrier(bar_at, knowledge)
        bar.check_visible(knowledge)
        words = covering(dst, count)
        block.shared.order_write(words, knowledge.all)
        _check_fenced(block, words, knowledge)
        if cluster.mode.fenced_reads:
            _check_read(block, words, knowledge)
        bar.issued += 1
        stamp = bar.issued
        block.shared.write(words, bar.agent, stamp, False)

        def complete(block: Any = block, bar: Any = bar, stamp: int = stamp) -> None:
            chunks = swizzled_chunks(dst, count // 16, span)
            block.shared.views[8].reshape(-1, 2)[chunks] = fetch().view(np.uint64).reshape(-1, 2)
            bar.gathering.all[bar.agent] = max(int(bar.gathering.all[bar.agent]), stamp)
            bar.complete(count)

        cluster.start(PendingCopy(complete, what))


def targets_of(g: Any, dst: int, bar_at: int, mask: int, paired: bool = False) -> tuple[list[Any], list[Any], int, int]:
    """(blocks, the blocks of their barriers, offset of the data, of the barrier); `mask` is -1 if it is no multicast.

    A `paired` copy may complete on the barrier of the block's peer: of a pair, the one that the address names.
    """
    block, local = resolve_block(g, np.array([dst]))
    bar_block, bar_local = resolve_block(g, np.array([bar_at]))
    if bar_block is not block and not (paired and bar_block.rank ^ block.rank == 1):
        raise UnknownInstruction("a copy to one block's shared memory that completes on another's barrier")
    every = g.block.cluster.blocks
    blocks = [block] if mask < 0 else [b for b in every if mask >> b.rank & 1]
    owners = [every[b.rank & ~1 | bar_block.rank & 1] for b in blocks] if paired else blocks
    return blocks, owners, int(local[0]), int(bar_local[0])


@effect(*(f"cp.async.bulk.tensor.{n}d.{s}.global" for n in range(1, 6) for s in ("shared::cta", "shared::cluster")))
def tensor_load(instr: Instr, program: Any) -> Handler:
    words_of(program, instr.op, _HINTS, instr)
    dst, box, bar = instr.args[0], instr.args[1], instr.args[2]
    if not isinstance(box, Mem):
        raise UnknownInstruction(f"tensor operand of {instr.where()}")
    to, map_at, bar_at = address(program, dst), address(program, box), address(program, bar)
    coords = [source(program, c, "s32") for c in box.coords]
    mask = source(program, instr.args[3], "u16") if "multicast::cluster" in instr.parts else None
    paired = "cta_group::2" in instr.parts

    def run(g: Any, m: Any) -> None:
        tos = to(g, m).tolist()
        at = [pick(c(g), m).tolist() for c in coords]
        masks = pick(mask(g), m).tolist() if mask is not None else [-1] * len(tos)
        for warp, dst_at, map_, bar_, multicast, *corner_ in _once_a_warp(
            g, m, tos, map_at(g, m).tolist(), bar_at(g, m).tolist(), masks, *at
        ):
            tensor, corner = _map_of(g, warp, map_), tuple(corner_)
            if len(corner) != len(tensor.sizes):
                raise BadDescriptor(f"{len(corner)} coordinates for a tensor map of {len(tensor.sizes)} dimensions")
            targets = targets_of(g, dst_at, bar_, multicast, paired)
            if dst_at % 128:
                raise Misaligned(f"shared address {dst_at:#x} of a tensor copy: 128 bytes are taken")
            memory = g.block.launch.memory
            what = f"tensor copy of box {tensor.box} at {corner} ({instr.where()})"
            start_load(g, warp, targets, tensor.nbytes, tensor.swizzle,
                       functools.partial(tensor.load, memory, corner), what)  # fmt: skip

    return run


@effect("cp.async.bulk.shared::cta.global", "cp.async.bulk.shared::cluster.global")
def plain_load(instr: Instr, program: Any) -> Handler:
    words_of(program, instr.op, _HINTS, instr)
    to, src = address(program, instr.args[0]), address(program, instr.args[1])
    size, bar_at = source(program, instr.args[2], "u32"), address(program, instr.args[3])
    mask = source(program, instr.args[4], "u16") if "multicast::cluster" in instr.parts else None

    def run(g: Any, m: Any) -> None:
        tos = to(g, m).tolist()
        masks = pick(mask(g), m).tolist() if mask is not None else [-1] * len(tos)
        for warp, dst, frm, n, bar, multicast in _once_a_warp(
            g, m, tos, src(g, m).tolist(), pick(size(g), m).tolist(), bar_at(g, m).tolist(), masks
        ):
            _check_plain(dst, frm, n)
            check_finished(g, warp, frm, frm + n)
            found = g.block.launch.memory.find(frm, n)
            fetch = functools.partial(_copy, found.data, frm - found.start, n)
            start_load(g, warp, targets_of(g, dst, bar, multicast), n, 0, fetch, f"bulk copy ({instr.where()})")

    return run


def _copy(data: Array, at: int, count: int) -> Array:
    return data[at : at + count].copy()


def _check_plain(shared: int, other: int, size: int) -> None:
    if shared % 16 or other % 16 or size % 16:
        raise Misaligned(f"bulk copy of {size} bytes, shared {shared:#x}, global {other:#x}: multiples of 16 only")


@effect("cp.async.bulk.shared::cluster.shared::cta")
def between_blocks(instr: Instr, program: Any) -> Handler:
    words_of(program, instr.op, _HINTS, instr)
    to, src = address(program, instr.args[0]), address(program, instr.args[1])
    size, bar_at = source(program, instr.args[2], "u32"), address(program, instr.args[3])

    def run(g: Any, m: Any) -> None:
        for warp, dst, frm, n, bar in _once_a_warp(
            g, m, to(g, m).tolist(), src(g, m).tolist(), pick(size(g), m).tolist(), bar_at(g, m).tolist()
        ):
            frm = own_offset(g, frm)
            _check_plain(dst, frm, n)
            targets = targets_of(g, dst, bar, -1)
            # whoever learns from the barrier that it is there knows that it was read here
            barrier = targets[1][0].mbarrier(targets[3], g.block.knowledge(warp))
            read_shared(g, warp, frm, n, (barrier.agent, barrier.issued + 1))
            fetch = functools.partial(_copy, g.block.shared.data, frm, n)
            start_load(g, warp, targets, n, 0, fetch, f"bulk copy ({instr.where()})")

    return run


# --- out of shared memory ----------------------------------------------------------------------------------


def read_shared(g: Any, warp: int, start: int, size: int, reader: tuple[int, int] | None = None) -> None:
    """Checks that the async proxy may read these bytes now, and notes that it will: as the warp's next bulk store.

    `reader`: another agent, and which of the things it does this is.
    """
    memory = g.block.shared
    memory.check(start, start + size)
    words = covering(start, size)
    knowledge = g.block.knowledge(warp)
    memory.order_read(words, knowledge.all)
    _check_fenced(g.block, words, knowledge)
    unit = g.block.bulk[warp]
    memory.stamp_read(words, *(reader or (unit.agent, unit.committed + 1)))


def _start_store(g: Any, warp: int, op: StoreOp) -> None:
    if not g.block.cluster.mode.late:
        op.write()
    g.block.bulk[warp].open.append(op)
    g.block.cluster.progress += 1


@effect(*(f"cp.async.bulk.tensor.{n}d.global.shared::cta" for n in range(1, 6)),
        *(f"cp.reduce.async.bulk.tensor.{n}d.global.shared::cta" for n in range(1, 6)))  # fmt: skip
def tensor_store(instr: Instr, program: Any) -> Handler:
    words_of(program, instr.op, _HINTS, instr)
    box, src = instr.args[0], instr.args[1]
    if not isinstance(box, Mem):
        raise UnknownInstruction(f"tensor operand of {instr.where()}")
    map_at, frm = address(program, box), address(program, src)
    coords = [source(program, c, "s32") for c in box.coords]
    reduce = "add" if "reduce" in instr.parts else ""

    def run(g: Any, m: Any) -> None:
        at = [pick(c(g), m).tolist() for c in coords]
        for warp, map_, start, *corner in _once_a_warp(g, m, map_at(g, m).tolist(), frm(g, m).tolist(), *at):
            tensor, start = _map_of(g, warp, map_), own_offset(g, start)
            if start % 128:
                raise Misaligned(f"shared address {start:#x} of a tensor copy: 128 bytes are taken")
            read_shared(g, warp, start, tensor.nbytes)
            _start_store(g, warp, _tensor_op(g, tensor, tuple(corner), start, reduce, instr))

    return run


def _tensor_op(g: Any, tensor: TensorMap, corner: tuple[int, ...], start: int, reduce: str, instr: Instr) -> StoreOp:
    memory, shared = g.block.launch.memory, g.block.shared

    def read() -> Array:
        chunks = swizzled_chunks(start, tensor.nbytes // 16, tensor.swizzle)
        return np.ascontiguousarray(shared.views[8].reshape(-1, 2)[chunks]).view(np.uint8).reshape(-1)

    return StoreOp(read, lambda data: tensor.store(memory, corner, data, reduce), instr.where())


@effect("cp.async.bulk.global.shared::cta", "cp.reduce.async.bulk.global.shared::cta")
def plain_store(instr: Instr, program: Any) -> Handler:
    kinds = {"f32": np.float32, "u32": np.uint32, "s32": np.int32, "u64": np.uint64}
    words_of(program, instr.op, {*_HINTS, *kinds}, instr)
    to, frm = address(program, instr.args[0]), address(program, instr.args[1])
    size = source(program, instr.args[2], "u32")
    dtype = (
        kinds[instr.parts[-1] if "L2::cache_hint" not in instr.parts else instr.parts[-2]]
        if "reduce" in instr.parts
        else None
    )

    def run(g: Any, m: Any) -> None:
        for warp, dst, src, n in _once_a_warp(g, m, to(g, m).tolist(), frm(g, m).tolist(), pick(size(g), m).tolist()):
            src = own_offset(g, src)
            _check_plain(src, dst, n)
            if n == 0:
                continue
            read_shared(g, warp, src, n)
            check_finished(g, warp, dst, dst + n)
            found, shared = g.block.launch.memory.find(dst, n), g.block.shared
            found.written = True
            at = dst - found.start

            def write(data: Array, found: Any = found, at: int = at) -> None:
                there = found.data[at : at + data.size]
                there[:] = data if dtype is None else (there.view(dtype) + data.view(dtype)).view(np.uint8)

            _start_store(g, warp, StoreOp(functools.partial(_copy, shared.data, src, n), write, instr.where()))

    return run


@effect("cp.async.bulk.commit_group")
def commit(instr: Instr, program: Any) -> Handler:
    def run(g: Any, m: Any) -> None:
        for w in g.active_warps(m):
            g.block.bulk[w].commit()

    return run


@effect("cp.async.bulk.wait_group")
def wait(instr: Instr, program: Any) -> Handler:
    """Late mode: this is where the groups that must be done get done; those that may stay under way do."""
    keep = literal(instr.args[0], instr)
    reading = "read" in instr.parts

    def run(g: Any, m: Any) -> None:
        for w in g.active_warps(m):
            unit = g.block.bulk[w]
            done = max(0, len(unit.groups) - keep)
            for group in unit.groups[:done]:
                for op in reversed(group):
                    op.read()
                    if not reading:
                        op.write()
            if not reading:
                del unit.groups[:done]
                retired = unit.committed - len(unit.groups)
            else:
                retired = unit.committed - (len(unit.groups) - done)
            unit.read = max(unit.read, retired)
            knowledge = g.block.knowledge(w)
            knowledge.all[unit.agent] = max(int(knowledge.all[unit.agent]), unit.read)

    return run
