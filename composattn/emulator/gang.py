"""Warps that run in step: their registers, their stack of divergent paths, what they wait for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from composattn.emulator.block import ThreadBlock
from composattn.emulator.findings import MissingTensorWait, RegisterInFlight
from composattn.emulator.flow import EXIT
from composattn.emulator.ptx import Instr
from composattn.emulator.waits import Wait

Array = np.ndarray[Any, Any]
NOWHERE = -2  # the meeting point of a path that never diverged


@dataclass
class Path:
    """One entry of the divergence stack: where, with which lanes, until where."""

    node: int
    mask: Any  # True or a bool array
    meet: int


@dataclass
class Meeting:
    """Where the parts of a gang that a short branch has split come together again. `outer` is the whole gang's own."""

    node: int
    parts: int
    outer: Meeting | None
    come: list[Gang] = field(default_factory=list)


class Gang:
    """Warps [low, high) of a block. Lanes of all of them are one numpy row, so one step serves them all."""

    def __init__(self, block: ThreadBlock, low: int, high: int, stack: list[Path]) -> None:
        self.block, self.low, self.high = block, low, high
        self.warps = range(low, high)
        self.lanes = (high - low) * 32
        self.stack = stack
        self.wait: Wait | None = None
        self.gave_up = False
        self.ticket: Any = None
        self.done = False
        self.meeting: Meeting | None = None
        self.visits = [0] * len(block.program.nodes)
        self.at: Instr | None = None  # the last instruction with an effect
        self.lane_warp = np.repeat(np.arange(low, high), 32)
        self.in_flight = False
        self.unfenced = -1  # 32-bit registers used since the last wgmma.fence, as bits; before the first: all
        self.copies: dict[int, int] = {}  # registers copied to since, and from which, as bits; not in `unfenced` so far
        self.views = block.views(low, high)

    def __str__(self) -> str:
        block = self.block
        names = f"warp {self.low}" if len(self.warps) == 1 else f"warps {self.low}-{self.high - 1}"
        return f"block {block.index} {names}"

    def active(self, mask: Any) -> Array:
        """Numbers of the lanes that take part."""
        return np.arange(self.lanes) if mask is True else np.flatnonzero(mask)

    def active_warps(self, mask: Any) -> list[int]:
        if mask is True:
            return list(self.warps)
        per = mask.reshape(-1, 32).any(1)
        return [self.low + i for i in np.flatnonzero(per)]

    def agents(self, lanes: Array) -> Array:
        """Which agent each lane's plain accesses are stamped with."""
        return self.block.first_agent + self.lane_warp[lanes]

    # --- registers of what is not finished -----------------------------------------------------------------

    def touch(self, reads: int, writes: int, instr: Instr) -> None:
        where = f"{self}, at or after {instr.where()}"
        for units in self.block.tensor_units[self.low : self.high]:
            if units.busy & (reads | writes):
                raise MissingTensorWait("a register of a tcgen05.ld that no tcgen05.wait::ld covers is used", where)
        for group in self.block.units_of(self.low, self.high):
            if group.busy_results & (reads | writes) or group.busy_inputs & writes:
                raise RegisterInFlight("a register of a wgmma that was not waited for is used", where)

    def copy(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Notes (to, from) of plain copies to accumulators, which are uses unless nobody sees what was copied."""
        for target, origin in copies:
            if target in self.copies:
                self.unfenced |= target | self.copies[target]
            self.copies[target] = origin

    def used_beside(self, unseen: int) -> int:
        """Registers used since the last wgmma.fence, but for copies to `unseen` ones, which are written now."""
        self.copies = {target: origin for target, origin in self.copies.items() if not target & unseen}
        used = self.unfenced
        for target, origin in self.copies.items():
            used |= target | origin
        return used

    def look_in_flight(self) -> None:
        """Something has finished: whether registers are still in use is asked again."""
        block = self.block
        self.in_flight = any(u.open or u.groups for u in block.units_of(self.low, self.high)) or any(
            u.busy for u in block.tensor_units[self.low : self.high]
        )

    # --- splitting -----------------------------------------------------------------------------------------

    def part(self, low: int, high: int) -> Gang:
        """A gang on these paths that has the warps from `low` to `high` alone."""
        lanes = slice((low - self.low) * 32, (high - self.low) * 32)
        stack: list[Path] = []
        for path in self.stack:
            mask = path.mask if path.mask is True else path.mask[lanes]
            if mask is not True:
                if not mask.any():
                    continue
                if mask.all():
                    mask = True
            if mask is True and path.meet == NOWHERE:
                stack = []
            stack.append(Path(path.node, mask, path.meet))
        # A path that holds every lane has nobody to meet: what lies under it is where it goes anyway.
        if stack and stack[-1].mask is True:
            stack = [Path(stack[-1].node, True, NOWHERE)]
        out = Gang(self.block, low, high, stack)
        out.in_flight, out.unfenced, out.meeting = self.in_flight, self.unfenced, self.meeting
        out.copies = dict(self.copies)
        return out

    def remove(self, mask: Any) -> None:
        """Lanes of the top path have exited."""
        self.stack.pop()
        if mask is True:
            self.stack.clear()
            return
        left = []
        for path in self.stack:
            rest = ~mask if path.mask is True else path.mask & ~mask
            if rest.any():
                left.append(Path(path.node, rest, path.meet))
        self.stack = left


__all__ = ["EXIT", "NOWHERE", "Gang", "Meeting", "Path"]
