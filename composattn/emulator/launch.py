"""Runs a kernel over its grid: clusters one after the other, or in turns (`Order`)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from composattn.emulator.cluster import Cluster
from composattn.emulator.findings import Livelock
from composattn.emulator.mode import EAGER, Mode
from composattn.emulator.order import Order
from composattn.emulator.program import PtxProgram
from composattn.emulator.request import Launch

Array = np.ndarray[Any, Any]


@dataclass
class Result:
    """What a run says beside what it wrote: instructions by warp and node, and time."""

    program: PtxProgram
    visits: Array  # [warp of a block, node], summed over blocks
    blocks: int
    seconds: float

    @property
    def instructions(self) -> int:
        return int((self.visits * np.array([len(n.code) + (n.branch is not None) for n in self.program.nodes])).sum())


class Stream:
    """Launches in order. One that starts early finds unfinished what the one before it wrote, until it waits.

    That waits for the one before it alone: of those further back it knows only what that one has waited for.
    """

    def __init__(self) -> None:
        self.unfinished: list[tuple[int, int]] = []
        self.beyond: list[tuple[int, int]] = []

    def run(self, program: PtxProgram, launch: Launch, mode: Mode = EAGER) -> Result:
        if launch.early:
            launch.unfinished, launch.beyond = self.unfinished, self.beyond
        result = run(program, launch, mode)
        self.beyond = launch.beyond + ([] if launch.waited else launch.unfinished)
        self.unfinished = launch.memory.written()
        return result


def run(program: PtxProgram, launch: Launch, mode: Mode = EAGER, resident: int | None = None) -> Result:
    """Runs all blocks. Raises the first `Finding`.

    One that only spins on global memory makes room for the next, up to `resident` clusters at a time (default: as many
    as there are SMs).
    """
    started = time.perf_counter()
    launch.bind(program)
    gx, gy, gz = launch.grid
    cx, cy, cz = launch.cluster
    origins = launch.queue = [(x, y, z) for z in range(0, gz, cz) for y in range(0, gy, cy) for x in range(0, gx, cx)]
    room = resident or max(1, launch.sms // (cx * cy * cz))
    warps = (int(np.prod(launch.block)) + 31) // 32
    visits = np.zeros((warps, len(program.nodes)), np.int64)
    order = Order(mode, room, program)
    running: list[Cluster] = []
    with np.errstate(all="ignore"):
        while origins or running:
            while origins and order.starts_another(running):
                running.append(Cluster(program, launch, origins.pop(0), mode))
                order.started()
            cluster, steps = order.next(running)
            before = cluster.progress
            done = cluster.run(steps)
            order.note(cluster, done or cluster.progress != before)
            if done:
                running.remove(cluster)
                for g in cluster.finished:
                    visits[g.low : g.high] += np.array(g.visits)
            elif order.is_hopeless(running):
                at = [f"{g} at {program.place(g.stack[-1].node, g.at)}" for c in running for g in c.gangs]
                raise Livelock("all blocks spin and nothing changes:\n    " + "\n    ".join(at[:20]))
    return Result(program, visits, gx * gy * gz, time.perf_counter() - started)
