"""cp.async: copies of up to 16 bytes a lane into shared memory, in groups that the warp that started them waits for.

Facts: PTX ISA, "Data Movement and Conversion Instructions: cp.async". Copies are an agent of their own beside the warp:
what they write is known to nobody until the warp has waited for their group, and to others behind a barrier after that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from composattn.emulator.findings import CollectiveMismatch, Misaligned, UnknownInstruction
from composattn.emulator.memory import misaligned, span
from composattn.emulator.opcodes.access import check_finished, resolve_block
from composattn.emulator.opcodes.registry import Handler, address, effect, literal, pick, source, words_of
from composattn.emulator.ptx import Instr

Array = np.ndarray[Any, Any]
_WORDS = {"cp", "async", "cg", "ca", "shared", "shared::cta", "global", "L2::64B", "L2::128B", "L2::256B"}


def _places(words: str) -> tuple[str, ...]:
    return tuple(f"cp.async.{cache}.{space}.global" for cache in ("ca", "cg") for space in words.split())


@effect(*_places("shared shared::cta"))
def copy(instr: Instr, program: Any) -> Handler:
    """A lane reads so many bytes as it says, of a literal number; the others are zeros."""
    words_of(program, instr.op, _WORDS, instr)
    to, frm = address(program, instr.args[0]), address(program, instr.args[1])
    size = literal(instr.args[2], instr)
    read = source(program, instr.args[3], "u32") if len(instr.args) > 3 else None
    if size not in (4, 8, 16) or ("cg" in instr.parts and size != 16):
        raise UnknownInstruction(f"a copy of {size} bytes; {instr.where()}")

    def run(g: Any, m: Any) -> None:
        targets, sources = to(g, m), frm(g, m)
        counts = np.full(len(targets), size) if read is None else pick(read(g), m).astype(np.int64)
        block, targets = resolve_block(g, targets)
        if block is not g.block or (counts > size).any():
            raise UnknownInstruction(f"another block's memory, or more than {size} bytes; {instr.where()}")
        for what, addresses in (("shared", targets), ("global", sources[counts > 0])):
            bad = misaligned(addresses, size) if len(addresses) else None
            if bad is not None:
                raise Misaligned(f"{what} address {bad:#x} of a copy of {size} bytes")
        warps = g.lane_warp[g.active(m)]
        for w in dict.fromkeys(warps.tolist()):
            its = warps == w
            _start(g, w, targets[its], sources[its], counts[its], size)

    return run


def _start(g: Any, warp: int, targets: Array, sources: Array, counts: Array, size: int) -> None:
    block, shared, unit = g.block, g.block.shared, g.block.async_copies[warp]
    shared.check(int(targets.min()), int(targets.max()) + size)
    words = (targets // 4)[:, None] + np.arange(size // 4)
    shared.order_write(words, block.knowledge(warp).all)
    shared.write(words, unit.agent, unit.committed + 1, True)
    memory, reads = block.launch.memory, counts > 0
    if reads.any():
        low, high = span(sources[reads])
        check_finished(g, warp, low, high + size)
        for end in (low, high):
            memory.find(end, size)  # raises now, not where it is waited for

    def complete() -> None:
        data = np.zeros((len(targets), size), np.uint8)
        for count in np.unique(counts[reads]).tolist():
            lanes = counts == count
            data[lanes, :count] = memory.load(sources[lanes].astype(np.uint64), 1, count)
        shared.data[targets[:, None] + np.arange(size)] = data

    if not block.cluster.mode.late:
        complete()
    unit.open.append(complete if block.cluster.mode.late else _nothing)
    block.cluster.progress += 1


def _nothing() -> None:
    """What is left to do of a copy that was done at once."""


@effect("cp.async.commit_group")
def commit(instr: Instr, program: Any) -> Handler:
    def run(g: Any, m: Any) -> None:
        _whole_warps(g, m, instr)
        for w in g.active_warps(m):
            g.block.async_copies[w].commit()

    return run


@effect("cp.async.wait_group", "cp.async.wait_all")
def wait(instr: Instr, program: Any) -> Handler:
    """Late mode: here the groups get done that must be, the last copy of each first."""
    everything = "wait_all" in instr.parts
    keep = 0 if everything else literal(instr.args[0], instr)

    def run(g: Any, m: Any) -> None:
        _whole_warps(g, m, instr)
        for w in g.active_warps(m):
            unit = g.block.async_copies[w]
            if everything and unit.open:
                unit.commit()
            while len(unit.groups) > keep:
                for complete in reversed(unit.groups.pop(0)):
                    complete()
            known = g.block.knowledge(w).all
            known[unit.agent] = max(int(known[unit.agent]), unit.committed - len(unit.groups))

    return run


def _whole_warps(g: Any, m: Any, instr: Instr) -> None:
    """Groups are a lane's own; the emulator counts those of a warp, so all of its lanes have to make the same ones."""
    if m is not True and np.count_nonzero(m) != 32 * len(g.active_warps(m)):
        raise CollectiveMismatch(f"{instr.op} under divergence: lanes of a warp would have other groups")
