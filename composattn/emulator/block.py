"""One thread block while it runs: registers, shared memory, barriers, tensor cores, copies under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from composattn.emulator.agents import Agents
from composattn.emulator.barriers import Knowledge, MBarrier, NamedBarrier
from composattn.emulator.findings import BarrierMisuse
from composattn.emulator.memory import RANK, SharedMemory
from composattn.emulator.tensor_memory import EmulatedTensorMemory, TensorUnits

Array = np.ndarray[Any, Any]
NAMED_BARRIERS = 16  # of a block


@dataclass
class Groups:
    """What an agent has under way: operations not yet committed, and committed groups not yet done."""

    agent: int
    open: list[Any] = field(default_factory=list)
    groups: list[list[Any]] = field(default_factory=list)
    committed: int = 0

    def commit(self) -> list[Any]:
        """Makes a group of what is open, and gives it."""
        group, self.open = self.open, []
        self.groups.append(group)
        self.committed += 1
        return group


@dataclass
class MatrixUnit(Groups):
    """A warpgroup's wgmma: its multiplies, and the registers that they hold."""

    retired: int = 0
    busy_results: int = 0
    busy_inputs: int = 0

    def refresh(self) -> None:
        self.busy_results = self.busy_inputs = 0
        for op in [o for group in self.groups for o in group] + self.open:
            self.busy_results |= op.results
            self.busy_inputs |= op.inputs


@dataclass
class BulkStores(Groups):
    """A warp's bulk copies out of shared memory."""

    read: int = 0


class ThreadBlock:
    """State of one block of a cluster. `rank` is its place in the cluster, `index` its block index in the grid."""

    def __init__(self, cluster: Agents, rank: int, index: tuple[int, int, int]) -> None:
        self.cluster, self.rank, self.index = cluster, rank, index
        self.program, self.launch = cluster.program, cluster.launch
        threads = int(np.prod(self.launch.block))
        self.warps = (threads + 31) // 32
        self.first_agent = rank * cluster.warps_per_block
        self.shared_base = rank << RANK  # of its shared addresses
        self.shared = SharedMemory(self.program.shared_size(self.launch.dynamic_shared))
        self.mbarriers: dict[int, MBarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        warps = cluster.warps_per_block * len(cluster.ranks)
        groups = (self.warps + 3) // 4
        self.units = [MatrixUnit(warps + rank * groups + i) for i in range(groups)]
        base = warps + len(cluster.ranks) * groups
        self.bulk = [BulkStores(base + self.first_agent + w) for w in range(self.warps)]
        first = cluster.tensor_agent + 3 * self.first_agent
        self.tensor_units = [TensorUnits(first + 3 * w) for w in range(self.warps)]
        self.async_copies = [Groups(cluster.copy_agent + self.first_agent + w) for w in range(self.warps)]
        self.pair_steps: list[str] = []  # what it has come to that its peer must do as well
        self.rendezvous: dict[int, dict[int, tuple[Any, Any]]] = {}  # gangs of a warpgroup, and where they stand
        self.pair: list[ThreadBlock] = []  # the two blocks that multiply together, the even rank first
        self.cluster_tickets: dict[int, int] = {}
        given = self.program.launch_registers(self.warps)
        # of each warp, registers per thread, and whether setmaxnreg asked for them; of all warps together
        self.registers, self.asked, self.pool = [given] * self.warps, [False] * self.warps, 32 * given * self.warps
        lanes = self.warps * 32
        self.file = self.program.take_file(lanes, _specials(self, lanes), self.shared_base)
        self.views = self.file.views

    @cached_property
    def tensor(self) -> EmulatedTensorMemory:
        return EmulatedTensorMemory()

    @property
    def tensor_in_use(self) -> dict[int, int]:
        """Columns of tensor memory that are allocated: first -> how many."""
        return self.tensor.allocated if "tensor" in self.__dict__ else {}

    def units_of(self, low: int, high: int) -> list[MatrixUnit]:
        return self.units[low // 4 : (high + 3) // 4]

    def unfenced(self, words: Any, fenced: Array, far: Array) -> Any:
        """Which of these words were last written by plain stores that are none of those fenced for the async proxy."""
        memory = self.shared
        plain = memory.plain[words]
        if not plain.any():
            return plain
        writer = memory.writer[words]
        own = writer // self.cluster.warps_per_block == self.rank
        return plain & (memory.written[words] > np.where(own, fenced[writer], far[writer]))

    def knowledge(self, warp: int) -> Knowledge:
        return self.cluster.knowledge[self.first_agent + warp]

    def tick(self, warp: int) -> None:
        """What the warp does from now on is not covered by what it has published."""
        agent = self.first_agent + warp
        self.cluster.known[agent, agent] += 1

    def mbarrier(self, address: int, knowledge: Knowledge) -> MBarrier:
        bar = self.mbarriers.get(address)
        if bar is None:
            raise BarrierMisuse(f"shared address {address:#x} is used as an mbarrier but was not initialised as one")
        bar.check_known(knowledge)
        return bar

    def barrier(self, number: int) -> NamedBarrier:
        if number >= NAMED_BARRIERS:
            raise BarrierMisuse(f"barrier {number}: a block has {NAMED_BARRIERS}, from 0")
        if number not in self.named:
            self.named[number] = NamedBarrier(str(number), self.cluster.agents)
        return self.named[number]


def _specials(block: ThreadBlock, lanes: int) -> dict[str, Any]:
    launch = block.launch
    tid = np.arange(lanes)
    bx, by, _ = launch.block
    lane = tid % 32
    cx, cy, cz = launch.cluster
    out: dict[str, Any] = {
        "%tid.x": tid % bx, "%tid.y": tid // bx % by, "%tid.z": tid // (bx * by),
        "%laneid": lane, "%warpid": tid // 32, "%cluster_ctarank": block.rank, "%cluster_nctarank": cx * cy * cz,
        "%smid": 0, "%nsmid": launch.sms, "%gridid": 0, "%clock": 0, "%clock_hi": 0, "%clock64": 0,
        "%globaltimer": 0, "%globaltimer_lo": 0, "%dynamic_smem_size": launch.dynamic_shared,
        "%total_smem_size": block.program.shared_size(launch.dynamic_shared),
        "%lanemask_eq": 1 << lane, "%lanemask_lt": (1 << lane) - 1, "%lanemask_le": (2 << lane) - 1,
        "%lanemask_gt": (2**32 - 1) ^ ((2 << lane) - 1), "%lanemask_ge": (2**32 - 1) ^ ((1 << lane) - 1),
    }  # fmt: skip
    for i, axis in enumerate("xyz"):
        out[f"%ntid.{axis}"] = launch.block[i]
        out[f"%ctaid.{axis}"] = block.index[i]
        out[f"%nctaid.{axis}"] = launch.grid[i]
        out[f"%cluster_ctaid.{axis}"] = block.index[i] % launch.cluster[i]
        out[f"%cluster_nctaid.{axis}"] = launch.cluster[i]
        out[f"%clusterid.{axis}"] = block.index[i] // launch.cluster[i]
        out[f"%nclusterid.{axis}"] = launch.grid[i] // launch.cluster[i]
    return out
