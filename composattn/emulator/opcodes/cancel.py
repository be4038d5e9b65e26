"""Cluster launch control: a running cluster takes over one that was not started; 128-bit registers, which say which.

Facts: PTX ISA, "clusterlaunchcontrol.try_cancel" and "clusterlaunchcontrol.query_cancel". What a response looks like is
ours: its first word says if there is a cluster, the others where its first block lies in the grid.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from composattn.emulator.findings import Misaligned, UnknownInstruction
from composattn.emulator.opcodes.bulk import start_load, targets_of
from composattn.emulator.opcodes.registry import Handler, address, effect, pick, source, target, words_of
from composattn.emulator.ptx import Instr, Reg, Vec
from composattn.emulator.registers import POISON_32

Array = np.ndarray[Any, Any]
BYTES = 16
_WORDS = {"clusterlaunchcontrol", "try_cancel", "async", "shared::cta", "mbarrier::complete_tx::bytes",
          "multicast::cluster::all", "b128"}  # fmt: skip


@effect("clusterlaunchcontrol.try_cancel.async")
def try_cancel(instr: Instr, program: Any) -> Handler:
    """In random modes it fails at times, as if the cluster had been started meanwhile."""
    words_of(program, instr.op, _WORDS, instr)
    to, bar_at = address(program, instr.args[0]), address(program, instr.args[1])
    everywhere = "multicast::cluster::all" in instr.parts

    def run(g: Any, m: Any) -> None:
        cluster = g.block.cluster
        every = (1 << len(cluster.ranks)) - 1 if everywhere else -1
        lanes = g.lane_warp[g.active(m)].tolist()
        for warp, dst, bar in zip(lanes, to(g, m).tolist(), bar_at(g, m).tolist(), strict=True):
            if dst % BYTES:
                raise Misaligned(f"shared address {dst:#x} of a response of {BYTES} bytes")
            queue = cluster.launch.queue
            unlucky = cluster.mode.seed is not None and cluster.random.random() < 0.3
            found = (1, *queue.pop(0)) if queue and not unlucky else (0, POISON_32, POISON_32, POISON_32)
            fetch = functools.partial(np.array(found, np.uint32).view, np.uint8)
            start_load(g, warp, targets_of(g, dst, bar, every), BYTES, 0, fetch, f"response ({instr.where()})")

    return run


@effect("mov.b128")
def move(instr: Instr, program: Any) -> Handler:
    """A 128-bit register from two of 64 bits, or back."""
    dest, src = instr.args
    if isinstance(dest, Reg) and isinstance(src, Vec) and len(src.items) == 2:
        halves = [source(program, half, "u64") for half in src.items]

        def join(g: Any, m: Any) -> None:
            for i, half in enumerate(halves):
                _wide(g, dest)[g.active(m), i] = pick(half(g), m)

        return join
    if isinstance(dest, Vec) and isinstance(src, Reg) and len(dest.items) == 2:
        rows = [target(half, "u64") for half in dest.items]

        def part(g: Any, m: Any) -> None:
            for i, row in enumerate(rows):
                row(g)[g.active(m)] = _wide(g, src)[g.active(m), i]

        return part
    raise UnknownInstruction(f"this move of 128 bits; {instr.where()}")


def _wide(g: Any, register: Reg) -> Array:
    """[lanes, 2 halves] of a 128-bit register."""
    whole: Array = g.block.file.banks["128"][register.index]
    return whole[32 * g.low : 32 * g.high]


def _word(register: Any, number: int, instr: Instr) -> Any:
    if not isinstance(register, Reg) or register.bank != "128":
        raise UnknownInstruction(f"a response in {register}; {instr.where()}")
    return lambda g, m: np.ascontiguousarray(_wide(g, register)[g.active(m)]).view(np.uint32)[:, number]


@effect("clusterlaunchcontrol.query_cancel.is_canceled.pred.b128")
def is_cancelled(instr: Instr, program: Any) -> Handler:
    word, out = _word(instr.args[1], 0, instr), target(instr.args[0], "p")

    def run(g: Any, m: Any) -> None:
        out(g)[g.active(m)] = word(g, m) == 1

    return run


@effect(*(f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{axis}.b32.b128" for axis in "xyz"))
def first_block(instr: Instr, program: Any) -> Handler:
    axis = "xyz".index(instr.parts[2][-1])
    word, out = _word(instr.args[1], 1 + axis, instr), target(instr.args[0], "u32")

    def run(g: Any, m: Any) -> None:
        out(g)[g.active(m)] = word(g, m)

    return run


@effect("clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128")
def first_block_whole(instr: Instr, program: Any) -> Handler:
    vec = instr.args[0]
    items = vec.items[:3] if isinstance(vec, Vec) else ()
    parts = [(_word(instr.args[1], 1 + i, instr), target(r, "u32")) for i, r in enumerate(items) if isinstance(r, Reg)]

    def run(g: Any, m: Any) -> None:
        for word, out in parts:
            out(g)[g.active(m)] = word(g, m)

    return run
