"""Runs a kernel over its grid: parameters, memory, clusters one after the other, or in turns (`Order`)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from composattn.emulator.cluster import EAGER, Cluster, Mode
from composattn.emulator.findings import LaunchRefused, Livelock
from composattn.emulator.memory import GlobalMemory
from composattn.emulator.order import Order
from composattn.emulator.program import PtxProgram
from composattn.emulator.tensormap import TensorMap

Array = np.ndarray[Any, Any]
MOST_BLOCKS = 2**31 - 1, 65535, 65535  # CUDA C++ Programming Guide, technical specifications per compute capability
MOST_THREADS = 1024, 1024, 64
MOST_SHARED = 227 * 1024  # of compute capability 9.0, 10.0 and 10.3


@dataclass
class Launch:
    """One kernel launch as the host asked for it. `params` are the raw bytes, one entry a kernel parameter."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    params: list[bytes]
    cluster: tuple[int, int, int] = (1, 1, 1)
    dynamic_shared: int = 0
    maps: dict[int, TensorMap] = field(default_factory=dict)  # parameter number -> tensor map
    memory: GlobalMemory = field(default_factory=GlobalMemory)
    sms: int = 132
    shared_memory: int = MOST_SHARED  # bytes that a block can get
    early: bool = False  # a programmatic dependent launch: may start before the kernel before it is over
    unfinished: list[tuple[int, int]] = field(default_factory=list)  # (start, end) of what that one writes
    beyond: list[tuple[int, int]] = field(default_factory=list)  # of what those before it write, if it waits for none
    queue: list[tuple[int, int, int]] = field(default_factory=list)  # first blocks of clusters not started yet
    waited: bool = False  # whether a warp has executed griddepcontrol.wait
    param_bytes: Array = field(default_factory=lambda: np.zeros(0, np.uint8))
    map_at: dict[int, TensorMap] = field(default_factory=dict)

    def bind(self, program: PtxProgram) -> None:
        """Lays the parameters out as the kernel declares them. Raises `LaunchRefused` for what no device launches."""
        self._check(sum(array.size for array in program.kernel.shared))
        declared = program.kernel.params
        if len(declared) != len(self.params):
            raise ValueError(f"the kernel takes {len(declared)} parameters, {len(self.params)} were given")
        self.param_bytes = np.zeros(program.param_size, np.uint8)
        for i, (p, raw) in enumerate(zip(declared, self.params, strict=True)):
            at = program.param_offset[p.name]
            if i in self.maps:
                self.map_at[at] = self.maps[i]
                continue
            if len(raw) != p.size:
                raise ValueError(f"parameter {i} takes {p.size} bytes, {len(raw)} were given")
            self.param_bytes[at : at + p.size] = np.frombuffer(raw, np.uint8)

    def _check(self, static_shared: int) -> None:
        for name, sizes, most in (("blocks", self.grid, MOST_BLOCKS), ("threads", self.block, MOST_THREADS)):
            if any(size > limit for size, limit in zip(sizes, most, strict=True)):
                raise LaunchRefused(f"{sizes} {name} are asked for, each dimension takes at most {most}")
        shared = self.dynamic_shared + static_shared
        if shared > self.shared_memory:
            raise LaunchRefused(f"{shared} bytes of shared memory are asked for, a block gets {self.shared_memory}")


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
                at = [f"{g} at {program.place(g.stack[-1].node, g)}" for c in running for g in c.gangs]
                raise Livelock("all blocks spin and nothing changes:\n    " + "\n    ".join(at[:20]))
    return Result(program, visits, gx * gy * gz, time.perf_counter() - started)
