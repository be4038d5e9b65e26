"""Who does things in a cluster: warps, their units, copies, barriers; and what each knows of the others."""

from __future__ import annotations

import numpy as np

from composattn.emulator.barriers import Knowledge
from composattn.emulator.findings import Finding
from composattn.emulator.mode import Mode
from composattn.emulator.program import PtxProgram
from composattn.emulator.request import Launch

MAX_BARRIERS = 192  # mbarriers a cluster may initialise


class Agents:
    """The numbers of a cluster's agents, and their clocks."""

    def __init__(self, program: PtxProgram, launch: Launch, mode: Mode) -> None:
        self.program, self.launch, self.mode = program, launch, mode
        cx, cy, cz = launch.cluster
        self.ranks = list(range(cx * cy * cz))
        threads = int(np.prod(launch.block))
        self.warps_per_block = (threads + 31) // 32
        warps = self.warps_per_block * len(self.ranks)
        groups = (self.warps_per_block + 3) // 4 * len(self.ranks)
        self.grid_agent = 2 * warps + groups  # known by who waited for the kernels before, at clock 1
        self.tensor_agent = self.grid_agent + 1  # three a warp: its multiplies, its loads, its stores
        self.copy_agent = self.tensor_agent + 3 * warps  # one a warp: its cp.async
        self._next_agent = self.copy_agent + warps
        self.agents = self._next_agent + MAX_BARRIERS
        clocks = np.zeros((warps, Knowledge.ROWS, self.agents), np.int32)
        self.knowledge = [Knowledge(mine) for mine in clocks]
        self.known, self.fenced, self.far = clocks[:, 0], clocks[:, 1], clocks[:, 4]
        self.known[np.arange(warps), np.arange(warps)] = 1

    def new_barrier_agent(self) -> int:
        if self._next_agent >= self.agents:
            raise Finding(f"more than {MAX_BARRIERS} mbarriers in one cluster: the emulator keeps no clocks for more")
        self._next_agent += 1
        return self._next_agent - 1
